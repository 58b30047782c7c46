"""MiniCPM-V 4.6: slices, rows with and without merged windows, the text between, and the image number are transformers'."""

from types import SimpleNamespace

import numpy as np
import pytest
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
from vision_cases import CASES
from vision_models import (
    FIRST,
    PICTURES,
    SHAPES,
    MiniCpmOcrProcessor,
    assert_encodes_as,
    change_config,
    fast_tokenizer,
    open_encoder,
    save_vision_model,
)

from effllm.runtime.config import read_config
from effllm.runtime.config_reader import ConfigError
from effllm.runtime.images import ROW_PLACEHOLDER
from effllm.runtime.images.media import open_media
from effllm.runtime.templates.prompt_builder import PromptBuilder
from effllm.runtime.tokenizer import Tokenizer

READY = {"sliced": {}, "whole": {"slice_mode": False, "use_image_id": False}, "4x": {"downsample_mode": "4x", "max_slice_nums": 9}}


@pytest.fixture(scope="module", params=READY)
def sliced(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sliced")
    text, tower, words, more, _ = CASES["minicpmv4_6"]
    processor = MiniCPMV4_6ImageProcessorPil(**{"scale_resolution": 64, "patch_size": 8, "max_slice_nums": 5, **READY[request.param]})
    mode = {"downsample_mode": "4x"} if request.param == "4x" else {}
    return folder, save_vision_model(folder, "minicpmv4_6", (text, tower, words, {**more, **mode}, processor)), processor


@pytest.mark.parametrize("name", SHAPES)
def test_rows_and_words(sliced, name):
    folder, model, processor = sliced
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    ours = [np.concatenate(part.reshape(len(part) // 8, 8, -1, 3), axis=1).transpose(2, 0, 1) for part in sight.values(picture)]
    assert np.array_equal(np.concatenate(ours, axis=-1), ready["pixel_values"][0])
    seen = assert_encodes_as(sight, picture, model, {key: ready[key] for key in ("pixel_values", "target_sizes")})
    marks = SimpleNamespace(image_start_token="<image>", image_end_token="</image>", image_token="<|image_pad|>", slice_mode=sight.slices,
                            slice_start_token="<slice>", slice_end_token="</slice>")
    told = MiniCPMV4_6Processor.replace_image_token(marks, ready, 0, image_token_divisor=16 if sight.merges else 4)
    ids = fast_tokenizer(folder).encode(told, add_special_tokens=False)
    assert [ROW_PLACEHOLDER if token == FIRST else token for token in ids] == list(seen.tokens)
    assert sight.with_numbers == (seen.prefix_tokens is not None)


def test_images_are_numbered_through_a_conversation(sliced):
    folder, _, processor = sliced
    config = read_config(folder)
    media, words = open_media(folder, config), Tokenizer.load(folder, config)
    prompts = PromptBuilder(words, media=media)
    photo, tall = (media.add(PICTURES[name]) for name in ("photo", "tall"))
    begin = f"One {photo.marker} and {tall.marker} two"
    counted = prompts.count(begin)
    list(media.encode([photo, tall]))
    ids = prompts.tokenize(begin)
    assert counted == len(ids)
    prompts.cached = (begin, ids)
    end = words.decode([min(words.stop_ids)], skip_special_tokens=False)
    on = prompts.tokenize(f"{begin}{end} and once more {photo.marker} .")
    text = words.decode([token for token in on if token < 1 << 40], skip_special_tokens=False)
    assert on[: len(ids)] == ids
    numbers = [int(part.partition("</image_id>")[0]) for part in text.split("<image_id>")[1:]]
    assert numbers == ([] if not processor.use_image_id else [0, 1, 2])


def test_what_is_not_known_is_refused(sliced):
    folder = sliced[0]
    before = {name: (folder / name).read_text() for name in ("config.json", "preprocessor_config.json")}
    for name, changes, said in (("config.json", {"merger_times": 2}, "merger_times"), ("config.json", {"insert_layer_id": 7}, "insert"),
                                ("preprocessor_config.json", {"patch_size": 14}, "patch_size"),
                                ("preprocessor_config.json", {"do_resize": False}, "do_resize")):
        if said == "insert" and not open_encoder(folder).merges:
            continue
        change_config(folder, name, **changes)
        try:
            with pytest.raises(ConfigError, match=said):
                sight = open_encoder(folder)
                with sight.source.weights() as weights:
                    sight.load(weights)
        finally:
            (folder / name).write_text(before[name])


@pytest.mark.parametrize("upsize", [pytest.param("always", marks=pytest.mark.slow), "never"])
def test_pages_of_minicpm_ocr(tmp_path, upsize):
    """Rows of half of its patches' rows and columns, and small pages as small as they are where it is asked for."""
    text, tower, words, more, _ = CASES["minicpm_ocr"]
    processor = MiniCpmOcrProcessor(upsize, scale_resolution=64, patch_size=8, max_slice_nums=5)
    model = save_vision_model(tmp_path, "minicpm_ocr", (text, tower, words, more, processor))
    sight, sizes = open_encoder(tmp_path), {}
    for name in ("photo", "tiny", "gray"):
        ready = processor(PICTURES[name], input_data_format="channels_last", return_tensors="np")
        ours = [np.concatenate(part.reshape(len(part) // 8, 8, -1, 3), axis=1).transpose(2, 0, 1) for part in sight.values(PICTURES[name])]
        assert np.array_equal(np.concatenate(ours, axis=-1), ready["pixel_values"][0])
        seen = assert_encodes_as(sight, PICTURES[name], model, {key: ready[key] for key in ("pixel_values", "target_sizes")})
        sizes[name] = len(seen.rows)
        assert seen.prefix_tokens is not None and 4 * len(seen.rows) == ready["target_sizes"].prod(-1).sum()
    assert (sizes["tiny"] == 1) == (upsize == "never") and sizes["photo"] > 5 * 12


def test_pages_whose_letters_are_measured_are_refused(tmp_path):
    text, tower, words, more, _ = CASES["minicpm_ocr"]
    save_vision_model(tmp_path, "minicpm_ocr",
                      (text, tower, words, more, MiniCpmOcrProcessor("adaptive", scale_resolution=64, patch_size=8)))
    with pytest.raises(ConfigError, match="small_image_upsize is 'adaptive', expected \"always\" or \"never\""):
        open_encoder(tmp_path)
