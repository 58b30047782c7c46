"""LLaVA-NeXT, LLaVA-OneVision, InternVL, Qianfan-OCR and Aya Vision: which tiles a picture is cut into, what is left of their rows, and
tokens are those of transformers."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from retold_models import as_qianfan
from sight_cases import CASES
from sight_models import FIRST, PICTURES, SHAPES, TOWER, Cohere2Ready, config_changed, held_against, made, opened, seeing, words_of
from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
from transformers.models.cohere2_vision.processing_cohere2_vision import Cohere2VisionProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from effllm.runtime.config_reader import ConfigError
from effllm.runtime.images import PLACE

SQUARE = {"height": 32, "width": 32}
PINPOINTS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96], [64, 96], [96, 96]]


@pytest.fixture(scope="module")
def following(tmp_path_factory):
    folder = tmp_path_factory.mktemp("next")
    model = made("llava_next", folder, {"model_type": "llama"}, {**TOWER, "model_type": "clip_vision_model"}, ["<image>"],
                 image_token_index=FIRST, image_grid_pinpoints=PINPOINTS)
    processor = LlavaNextImageProcessorPil(size={"shortest_edge": 32}, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS)
    processor.save_pretrained(folder)
    return folder, model, processor


@pytest.fixture(scope="module", params=["anyres_max_9", "anyres_max_2"])
def onevision(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("onevision")
    tower = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
    model = made("llava_onevision", folder, {"model_type": "qwen2"}, tower, ["<image>"],
                 image_token_index=FIRST, image_grid_pinpoints=PINPOINTS, vision_aspect_ratio=request.param)
    processor = LlavaOnevisionImageProcessorPil(size=SQUARE, image_grid_pinpoints=PINPOINTS)
    processor.save_pretrained(folder)
    return folder, model, processor


TOWERS = {"InternVL": {"image_size": [32, 32], "patch_size": [8, 8]},
          "norms of heads and roots": {"image_size": [32, 32], "patch_size": [8, 8], "use_qk_norm": True, "norm_type": "rms_norm",
                                       "attention_bias": True, "use_mean_pooling": False, "layer_scale_init_value": 0.5}}


@pytest.fixture(scope="module", params=TOWERS)
def internvl(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("internvl")
    model = made("internvl", folder, {"model_type": "qwen2"}, {**TOWER, **TOWERS[request.param]}, ["<IMG_CONTEXT>", "<img>", "</img>"],
                 image_token_id=FIRST)
    processor = GotOcr2ImageProcessorPil(size=SQUARE, max_patches=6, crop_to_patches=True)
    processor.save_pretrained(folder)
    return folder, model, processor


@pytest.mark.parametrize("name", SHAPES)
def test_next(following, name):
    folder, model, processor = following
    sight, picture = opened(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    assert np.array_equal(np.stack(sight.values(picture)[0]).transpose(0, 3, 1, 2), ready["pixel_values"][0])
    seen = held_against(sight, picture, model, ready)
    told = LlavaNextProcessor(processor, words_of(folder), patch_size=8, num_additional_image_tokens=1,
                              vision_feature_select_strategy="default")
    assert told(images=picture, text="<image>")["input_ids"][0].count(FIRST) == len(seen.tokens)


@pytest.mark.parametrize("name", SHAPES)
def test_onevision(onevision, name):
    folder, model, processor = onevision
    sight, picture = opened(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    assert np.array_equal(np.stack(sight.values(picture)[0]).transpose(0, 3, 1, 2), ready["pixel_values"][0])
    seen = held_against(sight, picture, model, {key: ready[key] for key in ("pixel_values", "image_sizes")})
    told = object.__new__(LlavaOnevisionProcessor)  # without the part for films, which it is not made without
    told.num_image_tokens, told.vision_aspect_ratio, told.image_processor = 16, model.config.vision_aspect_ratio, processor
    told.vision_feature_select_strategy, told.image_token = "full", "#"
    assert len(told.replace_image_token(ready, 0)) == len(seen.tokens)


@pytest.mark.parametrize("name", SHAPES)
def test_internvl(internvl, name):
    folder, model, processor = internvl
    sight, picture = opened(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    assert np.array_equal(np.stack(sight.values(picture)).transpose(0, 3, 1, 2), ready["pixel_values"])
    seen = held_against(sight, picture, model, {"pixel_values": ready["pixel_values"]})
    marks = SimpleNamespace(start_image_token="<img>", end_image_token="</img>", image_token="<IMG_CONTEXT>", image_seq_length=4)
    ids = words_of(folder).encode(InternVLProcessor.replace_image_token(marks, ready, 0), add_special_tokens=False)
    assert [PLACE if token == FIRST else token for token in ids] == list(seen.tokens)


@pytest.mark.parametrize("tower", ({}, {"use_mean_pooling": False, "layer_scale_init_value": 0.5}), ids=("usual", "normed at the end"))
def test_qianfan(tower, tmp_path):
    text, vision, words, more, processor = CASES["qianfan_ocr"]
    model = seeing(tmp_path, "qianfan_ocr", (text, vision, words, more, processor), **tower)
    as_qianfan(tmp_path)
    for name in ("photo", "tall", "tiny"):
        sight, ready = opened(tmp_path), processor(PICTURES[name], input_data_format="channels_last", return_tensors="np")
        seen = held_against(sight, PICTURES[name], model, {"pixel_values": ready["pixel_values"]})
        assert seen.tokens == (FIRST + 1, *(PLACE,) * (4 * int(ready["num_patches"][0])), FIRST + 2)
    (tmp_path / "processor_config.json").write_text('{"image_placeholder_token": "<page>"}')
    assert (sight.placeholder, opened(tmp_path).placeholder) == ("<image>", "<page>")
    config_changed(tmp_path, "config.json", vision_config={**json.loads((tmp_path / "config.json").read_text())["vision_config"],
                                                           "use_qk_norm": True})
    with pytest.raises(ConfigError, match="use_qk_norm is True, expected false"):
        opened(tmp_path)


AYA = ["<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE_GLOBAL", *(f"TILE_{number}" for number in range(1, 7))]


@pytest.fixture(scope="module")
def aya(tmp_path_factory):
    folder = tmp_path_factory.mktemp("aya")
    tower = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
    model = made("aya_vision", folder, {"model_type": "cohere2"}, tower, AYA, image_token_index=FIRST, alignment_intermediate_size=56)
    processor = GotOcr2ImageProcessorPil(size=SQUARE, max_patches=6, crop_to_patches=True)
    processor.save_pretrained(folder)
    return folder, model, processor


@pytest.mark.parametrize("name", SHAPES)
def test_aya(aya, name):
    folder, model, processor = aya
    sight, picture = opened(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    assert np.array_equal(np.stack(sight.values(picture)).transpose(0, 3, 1, 2), ready["pixel_values"])
    seen = held_against(sight, picture, model, {"pixel_values": ready["pixel_values"]})
    told = AyaVisionProcessor(processor, words_of(folder), patch_size=8, img_size=32, downsample_factor=2)
    ids = words_of(folder).encode(told.replace_image_token(ready, 0), add_special_tokens=False)
    assert [PLACE if token == FIRST else token for token in ids] == list(seen.tokens)


COHERE = ["<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"]


@pytest.fixture(scope="module", params=[1, 4, 6])
def cohere(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cohere")
    tower = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
    model = made("cohere2_vision", folder, {"model_type": "cohere2"}, tower, COHERE, image_token_id=FIRST, alignment_intermediate_size=56)
    processor = Cohere2Ready(size=SQUARE, max_patches=request.param, crop_to_patches=True)
    processor.save_pretrained(folder)
    return folder, model, processor


@pytest.mark.parametrize("name", SHAPES)
def test_cohere(cohere, name):
    folder, model, processor = cohere
    sight, picture = opened(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    assert np.array_equal(np.stack(sight.values(picture)).transpose(0, 3, 1, 2), ready["pixel_values"])
    seen = held_against(sight, picture, model, {"pixel_values": ready["pixel_values"]})
    marks = SimpleNamespace(patch_size=2, image_token=COHERE[0], boi_token=COHERE[1], eoi_token=COHERE[2], img_line_break_token=COHERE[3])
    ids = words_of(folder).encode(Cohere2VisionProcessor.replace_image_token(marks, ready, 0), add_special_tokens=False)
    assert [PLACE if token == FIRST else token for token in ids] == list(seen.tokens)


def test_resolutions_that_are_no_tiles(following, tmp_path):
    for each in following[0].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    for pinpoints in ([[32, 40]], [[32]], "32", [[32, 32 * 1000]]):
        config_changed(tmp_path, "preprocessor_config.json", image_grid_pinpoints=pinpoints)
        with pytest.raises(ConfigError, match="image_grid_pinpoints"):
            opened(tmp_path)
