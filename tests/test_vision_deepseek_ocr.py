"""DeepSeek-OCR 2 and Unlimited OCR: tiles and whole pages, the tower at two sizes, the patch encoder, and prompts are transformers'."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import DeepseekOcr2ImageProcessorPil
from transformers.models.deepseek_ocr2.processing_deepseek_ocr2 import DeepseekOcr2Processor
from transformers.models.unlimited_ocr.processing_unlimited_ocr import UnlimitedOcrProcessor
from vision_cases import CASES
from vision_models import PICTURES, SHAPES, assert_encodes_as, change_config, open_encoder, open_quantized_encoder, save_vision_model

from effllm.offload.checkpoint import CheckpointError
from effllm.runtime.config import read_config
from effllm.runtime.config_reader import ConfigError
from effllm.runtime.images import ROW_PLACEHOLDER, EncodingJob
from effllm.runtime.images.media import open_media
from effllm.runtime.images.media_markers import media_marker
from effllm.runtime.images.preprocessor import BICUBIC, resized
from effllm.runtime.images.tower_weights import canonical_name, is_of_tower
from effllm.runtime.source import open_store
from effllm.runtime.templates.prompt_builder import PromptBuilder
from effllm.runtime.tokenizer import Tokenizer

TEXT = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")  # how names of the text model begin


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    text, tower, words, more, _ = CASES["deepseek_ocr2"]
    processor = DeepseekOcr2ImageProcessorPil(size={"height": 128, "width": 128}, tile_size=96)
    model = save_vision_model(folder, "deepseek_ocr2", (text, tower, words, more, processor))
    change_config(folder, "tokenizer_config.json", chat_template=None)
    return folder, model, processor


@pytest.mark.parametrize("name", SHAPES)
def test_values_and_tokens(pages, name):
    folder, _, processor = pages
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    values = [part.transpose(2, 0, 1) for part in sight.values(picture)]
    assert np.array_equal(values[-1], ready["pixel_values"][0]) and len(values) - 1 == ready["num_local_patches"][0]
    assert all(np.array_equal(own, theirs) for own, theirs in zip(values[:-1], ready.get("pixel_values_local", ()), strict=True))
    counted = SimpleNamespace(image_processor=processor, patch_size=sight.patch, downsample_ratio=4, image_token="i")
    told = DeepseekOcr2Processor.replace_image_token(counted, ready, 0)
    assert sight.tokens(*picture.shape[:2]) == (ROW_PLACEHOLDER,) * len(told)


@pytest.mark.slow  # the logits in test_vision_end_to_end.py are of such rows
@pytest.mark.parametrize("name", ["wide", "tiny"])
def test_rows(pages, name):
    """Of tiles, whose side is not the one that the tower was made for, and of a page alone."""
    folder, model, processor = pages
    ready = processor(PICTURES[name], input_data_format="channels_last", return_tensors="np")
    assert_encodes_as(open_encoder(folder), PICTURES[name], model, ready)


def test_tensors_as_transformers_calls_them_itself(pages, tmp_path):
    """Published folders have the names that the model's own code gave; others may have those of its class, experts in one tensor among
    them."""
    folder, model, _ = pages
    for each in folder.iterdir():
        (tmp_path / each.name).symlink_to(each)
    (tmp_path / "model.safetensors").unlink()
    save_file({name: tensor.numpy() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors")
    published = load_file(folder / "model.safetensors")
    assert any("sam_model.blocks." in name for name in published) and not any("sam_model" in name for name in model.state_dict())
    assert {canonical_name(name) for name in published if is_of_tower(name, "deepseek_ocr2")} == {
        canonical_name(name) for name in model.state_dict() if is_of_tower(name, "deepseek_ocr2")}
    assert all(is_of_tower(name, "deepseek_ocr2") != name.startswith(TEXT) for name in published)
    seen, wanted = (open_encoder(each).encode(PICTURES["tiny"], EncodingJob()).rows for each in (tmp_path, folder))
    assert np.array_equal(seen, wanted)
    with open_store(tmp_path) as ours, open_store(folder) as theirs:
        text = {name for name in theirs.tensors if name.startswith(TEXT)}
        assert len(text) > 30 and all(np.array_equal(ours.read(ours.tensors[name]), theirs.read(theirs.tensors[name])) for name in text)


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_prompt_is_the_one_that_it_was_trained_on(pages, count):
    folder, *_ = pages
    config = read_config(folder)
    media = open_media(folder, config)
    words = Tokenizer.load(folder, config)
    prompts, shown = PromptBuilder(words, media=media), [media.add(PICTURES[name]) for name in ("tiny", "gray")[:count]]
    list(media.encode(shown))
    asked = "".join(media_marker(each.digest) for each in shown) + "Free OCR."
    text = prompts.render([{"role": "user", "content": asked}], None)
    begin = words.special_tokens.get("bos_token", "")
    assert text == begin + "".join(f"{media_marker(each.digest)}\n" for each in shown) + "Free OCR."
    assert sum(token >= 1 << 40 for token in prompts.tokenize(text)) == sum(len(each.encoded.rows) for each in shown)


@pytest.fixture(scope="module")
def unlimited(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unlimited")
    model = save_vision_model(folder, "unlimited_ocr", CASES["unlimited_ocr"])
    change_config(folder, "tokenizer_config.json", chat_template=None)
    return folder, model, CASES["unlimited_ocr"][-1]


@pytest.mark.parametrize("name", SHAPES)
def test_pages_of_unlimited_ocr(unlimited, name):
    """Values, rows and tokens: lines of tiles that are joined, and places between those that CLIP learned."""
    folder, model, processor = unlimited
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    parts, _ = sight.values(picture)
    values = [part.transpose(2, 0, 1) for part in parts]
    assert np.array_equal(values[-1], ready["pixel_values"][0])
    assert all(np.array_equal(own, theirs) for own, theirs in zip(values[:-1], ready.get("pixel_values_local", ()), strict=True))
    counted = SimpleNamespace(image_processor=processor, patch_size=sight.patch, downsample_ratio=4, image_token="i")
    told = UnlimitedOcrProcessor.replace_image_token(counted, ready, 0)
    seen = assert_encodes_as(sight, picture, model, ready)
    assert seen.tokens == (ROW_PLACEHOLDER,) * len(told)


def test_unlimited_ocr_may_squeeze_whole_pages(unlimited, tmp_path):
    """Where a preprocessor cuts no tiles, into a square up to a bound, and beyond it onto gray."""
    for each in unlimited[0].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    change_config(tmp_path, "preprocessor_config.json", crop_to_patches=False, maximum_pad_value=63)
    padded = open_encoder(tmp_path).values(PICTURES["wide"])
    change_config(tmp_path, "preprocessor_config.json", maximum_pad_value=64)
    sight = open_encoder(tmp_path)
    squeezed = sight.values(PICTURES["wide"])
    assert padded[1] == squeezed[1] == (0, 0) and len(padded[0]) == len(squeezed[0]) == 1
    gray = open_encoder(unlimited[0]).values(PICTURES["wide"])[0][-1]
    assert np.array_equal(padded[0][0], gray) and padded[0][0].shape == squeezed[0][0].shape
    assert np.array_equal(squeezed[0][0], sight.scale(resized(PICTURES["wide"], 64, 64, 3))) and not np.array_equal(squeezed[0][0], gray)
    assert len(sight.encode(PICTURES["wide"], EncodingJob()).rows) == 4 * 5 + 1


def test_tensors_of_unlimited_ocr_as_transformers_calls_them_itself(unlimited, tmp_path):
    """Queries, keys and values of CLIP's layers lie in one matrix where they are published."""
    folder, model, _ = unlimited
    for each in folder.iterdir():
        (tmp_path / each.name).symlink_to(each)
    (tmp_path / "model.safetensors").unlink()
    save_file({name: tensor.numpy() for name, tensor in model.state_dict().items()}, tmp_path / "model.safetensors")
    published = load_file(folder / "model.safetensors")
    assert any("qkv_proj" in name for name in published) and not any("qkv_proj" in name for name in model.state_dict())
    for names in (published, model.state_dict()):
        text = (*TEXT, *(name.replace("model.", "model.language_model.", 1) for name in TEXT))
        assert all(is_of_tower(name, "unlimited_ocr") != name.startswith(text) for name in names)
    seen, wanted = (open_encoder(each).encode(PICTURES["tiny"], EncodingJob()).rows for each in (tmp_path, folder))
    assert np.array_equal(seen, wanted)


def test_a_prompt_of_unlimited_ocr(unlimited):
    folder, *_ = unlimited
    config = read_config(folder)
    media, words = open_media(folder, config), Tokenizer.load(folder, config)
    shown = [media.add(PICTURES[name]) for name in ("tiny", "gray")]
    asked = "".join(media_marker(each.digest) for each in shown) + "Multi page parsing."
    text = PromptBuilder(words, media=media).render([{"role": "user", "content": asked}], None)
    assert text == words.special_tokens.get("bos_token", "") + asked


def published(folder, source, name, text, **changes):
    """What `source` holds, under the config of a folder as DeepSeek published it."""
    for each in source.iterdir():
        (folder / each.name).write_bytes(each.read_bytes())
    raw = json.loads((folder / "config.json").read_text())
    inner = {key: value for key, value in raw["text_config"].items() if key not in ("model_type", "layer_types", "sliding_window")}
    vision = {key: value for key, value in raw["vision_config"].items() if key in ("sam_config", "encoder_config")}
    (folder / "config.json").write_text(json.dumps({
        "architectures": [name], "model_type": "deepseek_vl_v2", "language_config": {**inner, **text}, "vision_config": {
            "model_type": "vision", "model_name": "deeplip_b_l", **vision}}))
    change_config(folder, "preprocessor_config.json", **changes)


@pytest.mark.parametrize("name", ["wide", "tiny"])
def test_deepseek_ocr_sees_as_unlimited_ocr(unlimited, tmp_path, name):
    folder, model, processor = unlimited
    published(tmp_path, folder, "DeepseekOCRForCausalLM", {}, image_processor_type=None)
    ready = processor(PICTURES[name], input_data_format="channels_last", return_tensors="np")
    assert_encodes_as(open_encoder(tmp_path), PICTURES[name], model, ready)
    words = Tokenizer.load(tmp_path, read_config(tmp_path))
    shown = open_media(tmp_path, read_config(tmp_path)).add(PICTURES["tiny"])
    text = PromptBuilder(words, media=open_media(tmp_path, read_config(tmp_path))).render(
        [{"role": "user", "content": f"{media_marker(shown.digest)}Free OCR."}], None)
    assert text == f"{words.special_tokens.get('bos_token', '')}{media_marker(shown.digest)}\nFree OCR."


def test_deepseek_ocr_2_as_it_was_published(pages, tmp_path):
    folder, model, processor = pages
    published(tmp_path, folder, "DeepseekOCR2ForCausalLM", {})
    ready = processor(PICTURES["tiny"], input_data_format="channels_last", return_tensors="np")
    assert_encodes_as(open_encoder(tmp_path), PICTURES["tiny"], model, ready)


@pytest.mark.parametrize(("name", "which", "tile", "most"), [
    ("DeepseekOCRForCausalLM", "unlimited", 640, 9), ("DeepseekOCR2ForCausalLM", "pages", 768, 6)])
def test_published_folders_state_page_preprocessing_in_code(request, tmp_path, name, which, tile, most):
    """No file does: the numbers are those of that code."""
    published(tmp_path, request.getfixturevalue(which)[0], name, {})
    (tmp_path / "preprocessor_config.json").unlink()
    change_config(tmp_path, "config.json", vision_config={"model_type": "vision", "image_size": 1024, "width": {}})
    sight = open_encoder(tmp_path)
    assert (sight.whole, sight.tile, sight.least, sight.most, sight.resample) == (1024, tile, 2, most, BICUBIC)
    assert np.allclose(sight.scale(np.array([[[0, 127, 255]]], np.uint8)), [[[-1, 127 / 127.5 - 1, 1]]], rtol=1e-5)
    stated = [sight.encoder.raw.get(key) for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "rope_theta")]
    assert stated == ([896, 24, 2, 1e6] if which == "pages" else [None] * 4)


def test_what_unlimited_ocr_may_not_have_is_refused(unlimited):
    folder, model, _ = unlimited
    before, vision = (folder / "config.json").read_text(), model.config.vision_config.to_dict()
    change_config(folder, "config.json", vision_config={**vision, "encoder_config": {**vision["encoder_config"], "hidden_size": 20}})
    try:
        with pytest.raises(ConfigError, match="hidden_size is 20, expected the 24 of downsample_channels"):
            open_encoder(folder).encode(PICTURES["tiny"], EncodingJob())
    finally:
        (folder / "config.json").write_text(before)


@pytest.mark.parametrize(("name", "changes", "said"), [
    ("preprocessor_config.json", {"tile_size": 80}, "tile_size is 80, expected 96 or 128"),
    ("preprocessor_config.json", {"size": {"height": 112, "width": 112}}, "expected 96 or 128"),
    ("preprocessor_config.json", {"size": {"height": 128, "width": 96}}, "as high as it is wide"),
    ("preprocessor_config.json", {"tile_size": 97}, "tile_size"),
    ("preprocessor_config.json", {"crop_to_patches": False}, "crop_to_patches"),
    ("preprocessor_config.json", {"background_color": [1, 2, 256]}, "background_color"),
    ("sam_config", {"downsample_channels": [16]}, "downsample_channels"),
    ("encoder_config", {"hidden_size": 20}, "hidden_size is 20, expected the 24 of downsample_channels"),
    ("encoder_config", {"num_key_value_heads": 3}, "num_attention_heads"),
    ("encoder_config", {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}, "a layer has a window"),
    ("encoder_config", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters")])
def test_what_is_not_known_is_refused(pages, name, changes, said):
    folder = pages[0]
    outer = "config.json" if name.endswith("_config") else name
    before = (folder / outer).read_text()
    vision = pages[1].config.vision_config.to_dict()
    change_config(folder, outer, **({"vision_config": {**vision, name: {**vision[name], **changes}}} if outer != name else changes))
    try:
        with pytest.raises(ConfigError, match=said):
            sight = open_encoder(folder)
            with sight.source.weights() as weights:
                sight.load(weights)
    finally:
        (folder / outer).write_text(before)


def test_a_tensor_that_is_missing_is_named(pages, tmp_path):
    folder, *_ = pages
    for each in folder.iterdir():
        (tmp_path / each.name).symlink_to(each)
    (tmp_path / "model.safetensors").unlink()
    tensors = load_file(folder / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if "view_seperator" not in name}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="view_separator"):
        open_encoder(tmp_path).encode(PICTURES["tiny"], EncodingJob())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek_ocr2", "unlimited_ocr"])
def test_quantized_folders_see_the_same(kind, tmp_path):
    """By the names of published tensors; the vision tower keeps all of its own."""
    text, tower, words, more, processor = CASES[kind]
    wide = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "head_dim": 32}
    save_vision_model(tmp_path / "whole", kind, ({**text, **wide}, tower, words, more, processor))
    open_quantized_encoder(tmp_path, "tiny")
