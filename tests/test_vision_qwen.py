"""Qwen 2 VL, 2.5 VL, 3 VL and 3.5, GLM 4.1V to 4.6V, Glmga, GLM-OCR, PaddleOCR-VL and LFM3-VL: patches, rows, embeddings for early
layers, and tokens are those of transformers."""

import json

import numpy as np
import pytest
import torch
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glmga.image_processing_pil_glmga import GlmgaImageProcessorPil, smart_resize
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from vision_models import PICTURES, SHAPES, assert_encodes_as, open_encoder, save_random_model

from effllm import UsageError

TOWER = {"depth": 3, "hidden_size": 48, "intermediate_size": 72, "num_heads": 3, "out_hidden_size": 48, "initializer_range": 0.2}
WINDOWS = {**TOWER, "patch_size": 7, "window_size": 28, "fullatt_block_indexes": [1]}
PLACES = {**TOWER, "patch_size": 8, "num_position_embeddings": 36}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]}}
GLM = {**TOWER, "patch_size": 8, "image_size": 48, "rms_norm_eps": 1e-5}
CASES = {
    "qwen2_vl": ("qwen2_vl", {"depth": 3, "embed_dim": 48, "hidden_size": 48, "num_heads": 3, "mlp_ratio": 2, "patch_size": 7},
                 {"model_type": "qwen2_vl_text", **ROPE}),
    "glm4v": ("glm4v", GLM, {"model_type": "glm4v_text", **ROPE}),
    "glmga": ("glmga", {**GLM, "model_type": "glm4v_vision"}, {"model_type": "glm4v_text", **ROPE}),
    "glm4v_moe": ("glm4v_moe", {**GLM, "attention_bias": True}, {"model_type": "glm4v_moe_text", **ROPE, "n_routed_experts": 4,
                                                                  "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "glm_ocr": ("glm_ocr", {**TOWER, "patch_size": 8, "rms_norm_eps": 1e-5}, {"model_type": "glm_ocr_text", **ROPE}),
    "qwen2_5_vl": ("qwen2_5_vl", WINDOWS, {"model_type": "qwen2_5_vl_text", **ROPE}),
    "qwen3_vl": ("qwen3_vl", {**PLACES, "deepstack_visual_indexes": [0, 2]}, {"model_type": "qwen3_vl_text", **ROPE}),
    "paddleocr_vl": ("paddleocr_vl", {**TOWER, "num_hidden_layers": 3, "num_attention_heads": 3, "patch_size": 8, "image_size": 48},
                     {"model_type": "paddleocr_vl_text", **ROPE}),
    "lfm3_vl": ("lfm3_vl", {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4, "num_attention_heads": 4,
                            "num_key_value_heads": 2, "patch_size": 8, "initializer_range": 0.2},
                {"model_type": "lfm3", "num_hidden_layers": 4, "pad_token_id": 0, "eos_token_id": 4}),
    "qwen3_5": ("qwen3_5", PLACES, {"model_type": "qwen3_5_text", "head_dim": 24, "layer_types": ["full_attention"] * 2,
                                    "rope_parameters": {**ROPE["rope_parameters"], "partial_rotary_factor": 1.0}}),
}


@pytest.fixture(scope="module", params=CASES)
def qwen(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen")
    family, vision, text = CASES[request.param]
    model = save_random_model(family, folder, text, vision, ["<|image_pad|>", "<|image|>"], image_token_id=4096)
    kinds = {"glm": Glm4vImageProcessorPil, "pad": PaddleOCRVLImageProcessorPil}
    kind = GlmgaImageProcessorPil if family == "glmga" else kinds.get(family[:3], Qwen2VLImageProcessorPil)
    processor = kind(patch_size=vision["patch_size"], size={"shortest_edge": 60 * 60, "longest_edge": 100 * 100})
    processor.save_pretrained(folder)
    return folder, model, processor


def test_sizes_of_glmga_are_multiples_of_several_merged_patches(tmp_path):
    family, vision, text = CASES["glmga"]
    save_random_model(family, tmp_path, text, vision, ["<|image_pad|>", "<|image|>"], image_token_id=4096)
    least, most, sizes = 60 * 60, 100 * 100, [(70, 50), (20, 90), (150, 130), (9, 33), (80, 80)]
    GlmgaImageProcessorPil(patch_size=8, size={"shortest_edge": least, "longest_edge": most}).save_pretrained(tmp_path)
    grids = []
    for factor in (1, 2):
        path = tmp_path / "preprocessor_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "patch_expand_factor": factor}))
        expected = [tuple(side // 8 for side in smart_resize(2, *size, 2, 8 * 2 * factor, least, most)) for size in sizes]
        sight = open_encoder(tmp_path)
        assert [sight.grid(*size) for size in sizes] == expected
        grids.append(expected)
    assert grids[0] != grids[1]


@pytest.mark.parametrize("name", SHAPES)
def test_rows_are_those_of_transformers(qwen, name):
    folder, model, processor = qwen
    sight, picture = open_encoder(folder), PICTURES[name]
    ready = processor(picture, input_data_format="channels_last", return_tensors="np")
    values, (ours, places) = ready["pixel_values"], sight.values(picture)
    frames = values.reshape(len(values), 3, 2 if values.ndim == 2 else 1, -1)
    values = frames[:, :, 0].reshape(len(values), -1)
    if ready["pixel_values"].ndim > 2:  # PaddleOCR-VL's patches follow one another row by row
        values = values[places @ [ready["image_grid_thw"][0, 2], 1]]
    assert np.array_equal(ours, values)
    seen = assert_encodes_as(sight, picture, model, ready)
    rows, columns = ready["image_grid_thw"][0, 1:] // 2
    assert seen.grid == (None if model.config.model_type == "lfm3_vl" else (rows, columns)) and len(seen.tokens) == rows * columns
    with torch.inference_mode():
        found = model.model.get_image_features(**{key: torch.as_tensor(value) for key, value in ready.items()})
    deep = getattr(found, "deepstack_features", None)
    assert (seen.deepstack_rows is None) == (not deep)
    if deep:
        wanted = np.stack([each[0].numpy() for each in deep])
        assert np.abs(seen.deepstack_rows - wanted).max() < 2e-5 * np.abs(wanted).max()


def test_an_image_with_an_extreme_aspect_ratio_is_refused(qwen):
    with pytest.raises(UsageError, match="1 × 300 is too elongated"):
        open_encoder(qwen[0]).token_count(300, 1)
