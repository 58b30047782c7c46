"""Gemma 3, Mistral 3, Pixtral and LightOnOCR: rows and tokens are those of transformers."""

import numpy as np
import pytest
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from vision_models import FIRST, PICTURES, SHAPES, TOWER, assert_encodes_as, fast_tokenizer, open_encoder, save_random_model

from effllm import UsageError
from effllm.runtime.config_reader import ConfigError
from effllm.runtime.images import ROW_PLACEHOLDER, EncodingJob

SQUARE = {"height": 32, "width": 32}
IMAGE_WORDS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma")
    tower = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
    model = save_random_model("gemma3", folder, {"model_type": "gemma3_text"}, tower,
                              ["<image_soft_token>", "<start_of_image>", "<end_of_image>"], mm_tokens_per_image=4, image_token_index=FIRST,
                              boi_token_index=FIRST + 1, eoi_token_index=FIRST + 2)
    processor = Gemma3ImageProcessorPil(size=SQUARE)
    processor.save_pretrained(folder)
    return folder, model, processor


@pytest.fixture(scope="module", params=["mistral3", "llava"])
def pixtral(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pixtral")
    merges = request.param == "mistral3"
    more = {"spatial_merge_size": 2} if merges else {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    model = save_random_model(request.param, folder, {"model_type": "mistral"}, {**TOWER, "model_type": "pixtral", "image_size": 96},
                              IMAGE_WORDS,
                              image_token_index=FIRST, **more)
    unit = 16 if merges else 8
    processor = PixtralImageProcessorPil(size={"longest_edge": 96}, patch_size={"height": unit, "width": unit})
    processor.save_pretrained(folder)
    return folder, model, processor


@pytest.mark.parametrize("name", SHAPES)
def test_gemma(gemma, name):
    folder, model, processor = gemma
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    assert np.array_equal(sight.values(picture).transpose(2, 0, 1), ready["pixel_values"][0])
    seen = assert_encodes_as(sight, picture, model, {"pixel_values": ready["pixel_values"]})
    words = fast_tokenizer(folder)
    words.boi_token, words.boi_token_id, words.eoi_token = "<start_of_image>", FIRST + 1, "<end_of_image>"
    words.image_token, words.image_token_id = "<image_soft_token>", FIRST
    told = Gemma3Processor(processor, words, image_seq_length=4)(images=[picture], text="<start_of_image>")["input_ids"][0]
    assert [ROW_PLACEHOLDER if token == FIRST else token for token in told] == list(seen.tokens)
    assert seen.bidirectional


@pytest.mark.parametrize("name", [name for name in PICTURES if name != "tiny"])  # of one row transformers' Mistral 3 makes none
def test_pixtral(pixtral, name):
    folder, model, processor = pixtral
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    assert np.array_equal(sight.values(picture).transpose(2, 0, 1), ready["pixel_values"][0])
    seen = assert_encodes_as(sight, picture, model, ready)
    unit = 16 if model.config.model_type == "mistral3" else 8
    rows, columns = (side // unit for side in ready["image_sizes"][0])
    text = "[IMG_BREAK]".join(["[IMG]" * columns] * rows) + "[IMG_END]"  # as PixtralProcessor writes, which asks for torchvision
    told = fast_tokenizer(folder).encode(text, add_special_tokens=False)
    assert [ROW_PLACEHOLDER if token == FIRST else token for token in told] == list(seen.tokens)


def test_pixtral_takes_the_smallest_image(pixtral):
    sight = open_encoder(pixtral[0])
    seen = sight.encode(PICTURES["tiny"], EncodingJob())
    assert seen.tokens == (ROW_PLACEHOLDER, FIRST + 2) == sight.tokens(1, 1) and np.isfinite(seen.rows).all() and seen.rows.any()


@pytest.fixture(scope="module", params=[8, 16])
def lighton(request, tmp_path_factory):
    """Of preprocessors whose patches are the tower's own, with which an image may end amid a square, and of whole squares."""
    folder = tmp_path_factory.mktemp("lighton")
    model = save_random_model("lighton_ocr", folder, {"model_type": "qwen3"}, {**TOWER, "model_type": "pixtral", "image_size": 96},
                              ["<|image_pad|>"],
                              image_token_id=FIRST)
    unit = {"height": request.param, "width": request.param}
    processor = PixtralImageProcessorPil(size={"longest_edge": 96}, patch_size=unit)
    processor.save_pretrained(folder)
    return folder, model, processor


@pytest.mark.parametrize("name", SHAPES)
def test_lighton(lighton, name):
    folder, model, processor = lighton
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    high, wide = (int(side) // 16 for side in ready["image_sizes"][0])
    if not high * wide:
        with pytest.raises(UsageError, match="7 × 5 is too small"):
            sight.token_count(*picture.shape[:2])
        return
    assert np.array_equal(sight.values(picture).transpose(2, 0, 1), ready["pixel_values"][0])
    assert_encodes_as(sight, picture, model, ready)
    assert sight.tokens(*picture.shape[:2]) == (ROW_PLACEHOLDER,) * (high * wide)


def test_a_vocabulary_without_the_words_beside_images(gemma, tmp_path):
    for each in gemma[0].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace("<end_of_image>", "<an end>"))
    with pytest.raises(ConfigError, match="lacks <end_of_image>"):
        open_encoder(tmp_path).token_count(5, 5)
