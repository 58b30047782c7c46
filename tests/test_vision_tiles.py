"""LLaVA-NeXT, LLaVA-OneVision, InternVL, Qianfan-OCR and Aya Vision: the tiling of an image, the rows that remain, and tokens are those of
transformers."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from more_family_cases import MORE_CASES
from remapped_checkpoints import as_qianfan
from safetensors.torch import load_file, save_file
from saved_models import written
from transformers.models.aya_vision.processing_aya_vision import AyaVisionProcessor
from transformers.models.cohere2_vision.processing_cohere2_vision import Cohere2VisionProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from vision_cases import CASES
from vision_models import (
    FIRST,
    PICTURES,
    SHAPES,
    TOWER,
    Cohere2Processor,
    assert_encodes_as,
    change_config,
    fast_tokenizer,
    open_encoder,
    open_quantized_encoder,
    save_random_model,
    save_vision_model,
)

from effllm.runtime.config import read_config
from effllm.runtime.config_reader import ConfigError
from effllm.runtime.engine import open_engine
from effllm.runtime.images import ROW_PLACEHOLDER
from effllm.runtime.images.preprocessor import IMAGENET_MEAN, IMAGENET_STD
from effllm.runtime.prepare import EngineOptions

SQUARE = {"height": 32, "width": 32}
PINPOINTS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96], [64, 96], [96, 96]]


@pytest.fixture(scope="module")
def following(tmp_path_factory):
    folder = tmp_path_factory.mktemp("next")
    model = save_random_model("llava_next", folder, {"model_type": "llama"}, {**TOWER, "model_type": "clip_vision_model"}, ["<image>"],
                              image_token_index=FIRST, image_grid_pinpoints=PINPOINTS)
    processor = LlavaNextImageProcessorPil(size={"shortest_edge": 32}, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS)
    processor.save_pretrained(folder)
    return folder, model, processor


@pytest.fixture(scope="module", params=["anyres_max_9", "anyres_max_2"])
def onevision(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("onevision")
    tower = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
    model = save_random_model("llava_onevision", folder, {"model_type": "qwen2"}, tower, ["<image>"],
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
    model = save_random_model("internvl", folder, {"model_type": "qwen2"}, {**TOWER, **TOWERS[request.param]},
                              ["<IMG_CONTEXT>", "<img>", "</img>"],
                              image_token_id=FIRST)
    processor = GotOcr2ImageProcessorPil(size=SQUARE, max_patches=6, crop_to_patches=True)
    processor.save_pretrained(folder)
    return folder, model, processor


@pytest.mark.parametrize("name", SHAPES)
def test_next(following, name):
    folder, model, processor = following
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    assert np.array_equal(np.stack(sight.values(picture)[0]).transpose(0, 3, 1, 2), ready["pixel_values"][0])
    seen = assert_encodes_as(sight, picture, model, ready)
    told = LlavaNextProcessor(processor, fast_tokenizer(folder), patch_size=8, num_additional_image_tokens=1,
                              vision_feature_select_strategy="default")
    assert told(images=picture, text="<image>")["input_ids"][0].count(FIRST) == len(seen.tokens)


@pytest.mark.parametrize("name", SHAPES)
def test_onevision(onevision, name):
    folder, model, processor = onevision
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    assert np.array_equal(np.stack(sight.values(picture)[0]).transpose(0, 3, 1, 2), ready["pixel_values"][0])
    seen = assert_encodes_as(sight, picture, model, {key: ready[key] for key in ("pixel_values", "image_sizes")})
    told = object.__new__(LlavaOnevisionProcessor)  # without the part for videos, which it is not made without
    told.num_image_tokens, told.vision_aspect_ratio, told.image_processor = 16, model.config.vision_aspect_ratio, processor
    told.vision_feature_select_strategy, told.image_token = "full", "#"
    assert len(told.replace_image_token(ready, 0)) == len(seen.tokens)


@pytest.mark.parametrize("name", SHAPES)
def test_internvl(internvl, name):
    folder, model, processor = internvl
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    assert np.array_equal(np.stack(sight.values(picture)).transpose(0, 3, 1, 2), ready["pixel_values"])
    seen = assert_encodes_as(sight, picture, model, {"pixel_values": ready["pixel_values"]})
    marks = SimpleNamespace(start_image_token="<img>", end_image_token="</img>", image_token="<IMG_CONTEXT>", image_seq_length=4)
    ids = fast_tokenizer(folder).encode(InternVLProcessor.replace_image_token(marks, ready, 0), add_special_tokens=False)
    assert [ROW_PLACEHOLDER if token == FIRST else token for token in ids] == list(seen.tokens)


def assert_same_logits(model, folder):
    ids = list(range(3, 40))
    *_, engine = open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=64))
    ours = np.concatenate([rows.copy() for _, rows in engine.score(ids)])
    engine.close()
    with torch.inference_mode():
        theirs = model(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(ours - theirs).max() < 1e-3 * np.abs(theirs).max()


@pytest.mark.parametrize("template", ("{{ messages[0].content }}", None), ids=("knows of no pictures", "writes them"))
def test_internvl_as_its_makers_publish_it(template, tmp_path):
    """The text model under another name, numbers of tiles in config.json, and a preprocessor's file that says something else."""
    folder = tmp_path / "whole"
    folder.mkdir()
    text, vision, words, more, _ = CASES["qianfan_ocr"]
    processor = GotOcr2ImageProcessorPil(size=SQUARE, max_patches=4, crop_to_patches=True, image_mean=IMAGENET_MEAN, image_std=IMAGENET_STD)
    model = save_vision_model(folder, "qianfan_ocr", (text, vision, words, more, processor))
    as_qianfan(folder)
    raw = json.loads((folder / "config.json").read_text())
    own = {key: raw["vision_config"][key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["InternVLChatModel"], "auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"},
        "downsample_ratio": 0.5, "dynamic_image_size": True, "force_image_size": 32, "llm_config": raw["text_config"],
        "max_dynamic_patch": processor.max_patches, "min_dynamic_patch": 1, "model_type": "internvl_chat",
        "ps_version": "v2", "select_layer": -1, "template": "internvl2_5", "use_thumbnail": True, "tie_word_embeddings": False,
        "vision_config": {
            **own, "model_type": "intern_vit_6b", "image_size": 32, "patch_size": 8, "qk_normalization": False, "qkv_bias": True,
            "norm_type": "layer_norm"}}))
    written = template or "{{ '<IMG_CONTEXT>' if messages[0].content is not string }}"
    change_config(folder, "tokenizer_config.json", chat_template=written)
    (folder / "preprocessor_config.json").write_text(json.dumps({"feature_extractor_type": "CLIPFeatureExtractor", "crop_size": 32}))
    config = read_config(folder, strict=True)
    assert config.family == "qwen3" and not config.tie_word_embeddings
    sight = open_encoder(folder)
    assert sight.placeholder_text == ("<image>\n" if template else "<IMG_CONTEXT>\n")
    for name in ("photo", "tall", "tiny"):
        ready = processor(PICTURES[name], input_data_format="channels_last", return_tensors="np")
        seen = assert_encodes_as(sight, PICTURES[name], model, {"pixel_values": ready["pixel_values"]})
        assert seen.tokens == (FIRST + 1, *(ROW_PLACEHOLDER,) * (4 * int(ready["num_patches"][0])), FIRST + 2)
    assert_same_logits(model, folder)
    open_quantized_encoder(tmp_path)
    for name, value in (("ps_version", "v1"), ("use_thumbnail", False)):
        change_config(folder, "config.json", **{name: value})
        with pytest.raises(ConfigError, match=name):
            open_encoder(folder)
        change_config(folder, "config.json", **{name: "v2" if name == "ps_version" else True})


def test_internvl_on_internlm2(tmp_path):
    """Whose head has another name too; and what its config says by the defaults of an old transformers."""
    model = written(MORE_CASES["internlm2"], tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({f"language_model.{name}": tensor for name, tensor in load_file(path).items()}, path)
    inner = {**json.loads((tmp_path / "config.json").read_text()), "bad_words_ids": None, "is_decoder": False, "num_beam_groups": 1,
             "suppress_tokens": None, "moe_config": None, "use_deepep": False}
    (tmp_path / "config.json").write_text(json.dumps({
        "architectures": ["InternVLChatModel"], "llm_config": inner, "model_type": "internvl_chat", "vision_config": {}}))
    assert read_config(tmp_path, strict=True).family == "internlm2"
    assert_same_logits(model, tmp_path)


@pytest.mark.parametrize("tower", ({}, {"use_mean_pooling": False, "layer_scale_init_value": 0.5}), ids=("usual", "normed at the end"))
def test_qianfan(tower, tmp_path):
    text, vision, words, more, processor = CASES["qianfan_ocr"]
    model = save_vision_model(tmp_path, "qianfan_ocr", (text, vision, words, more, processor), **tower)
    as_qianfan(tmp_path)
    for name in ("photo", "tall", "tiny"):
        sight, ready = open_encoder(tmp_path), processor(PICTURES[name], input_data_format="channels_last", return_tensors="np")
        seen = assert_encodes_as(sight, PICTURES[name], model, {"pixel_values": ready["pixel_values"]})
        assert seen.tokens == (FIRST + 1, *(ROW_PLACEHOLDER,) * (4 * int(ready["num_patches"][0])), FIRST + 2)
    (tmp_path / "processor_config.json").write_text('{"image_placeholder_token": "<page>"}')
    assert (sight.placeholder, open_encoder(tmp_path).placeholder) == ("<image>", "<page>")
    change_config(tmp_path, "config.json", vision_config={**json.loads((tmp_path / "config.json").read_text())["vision_config"],
                                                          "use_qk_norm": True})
    with pytest.raises(ConfigError, match="use_qk_norm is True, expected false"):
        open_encoder(tmp_path)


AYA = ["<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE_GLOBAL", *(f"TILE_{number}" for number in range(1, 7))]


@pytest.fixture(scope="module")
def aya(tmp_path_factory):
    folder = tmp_path_factory.mktemp("aya")
    tower = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
    model = save_random_model("aya_vision", folder, {"model_type": "cohere2"}, tower, AYA, image_token_index=FIRST,
                              alignment_intermediate_size=56)
    processor = GotOcr2ImageProcessorPil(size=SQUARE, max_patches=6, crop_to_patches=True)
    processor.save_pretrained(folder)
    return folder, model, processor


@pytest.mark.parametrize("name", SHAPES)
def test_aya(aya, name):
    folder, model, processor = aya
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    assert np.array_equal(np.stack(sight.values(picture)).transpose(0, 3, 1, 2), ready["pixel_values"])
    seen = assert_encodes_as(sight, picture, model, {"pixel_values": ready["pixel_values"]})
    told = AyaVisionProcessor(processor, fast_tokenizer(folder), patch_size=8, img_size=32, downsample_factor=2)
    ids = fast_tokenizer(folder).encode(told.replace_image_token(ready, 0), add_special_tokens=False)
    assert [ROW_PLACEHOLDER if token == FIRST else token for token in ids] == list(seen.tokens)


COHERE = ["<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"]


@pytest.fixture(scope="module", params=[1, 4, 6])
def cohere(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("cohere")
    tower = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
    model = save_random_model("cohere2_vision", folder, {"model_type": "cohere2"}, tower, COHERE, image_token_id=FIRST,
                              alignment_intermediate_size=56)
    processor = Cohere2Processor(size=SQUARE, max_patches=request.param, crop_to_patches=True)
    processor.save_pretrained(folder)
    return folder, model, processor


@pytest.mark.parametrize("name", SHAPES)
def test_cohere(cohere, name):
    folder, model, processor = cohere
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    assert np.array_equal(np.stack(sight.values(picture)).transpose(0, 3, 1, 2), ready["pixel_values"])
    seen = assert_encodes_as(sight, picture, model, {"pixel_values": ready["pixel_values"]})
    marks = SimpleNamespace(patch_size=2, image_token=COHERE[0], boi_token=COHERE[1], eoi_token=COHERE[2], img_line_break_token=COHERE[3])
    ids = fast_tokenizer(folder).encode(Cohere2VisionProcessor.replace_image_token(marks, ready, 0), add_special_tokens=False)
    assert [ROW_PLACEHOLDER if token == FIRST else token for token in ids] == list(seen.tokens)


def test_resolutions_that_are_no_tiles(following, tmp_path):
    for each in following[0].iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    for pinpoints in ([[32, 40]], [[32]], "32", [[32, 32 * 1000]]):
        change_config(tmp_path, "preprocessor_config.json", image_grid_pinpoints=pinpoints)
        with pytest.raises(ConfigError, match="image_grid_pinpoints"):
            open_encoder(tmp_path)
