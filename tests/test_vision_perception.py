"""Perception LM: tiles, pixel values and rows are those of transformers, whose tower is timm's, with and without a class token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from perception_torch import ARGS
from vision_cases import CASES
from vision_models import PICTURES, SHAPES, PerceptionProcessor, assert_encodes_as, change_config, open_encoder, save_vision_model

from effllm import EffllmError
from effllm.runtime.config import parse_config
from effllm.runtime.images import EncodingJob

TEXT, TOWER, WORDS, MORE, _ = CASES["perception_lm"]
TOWERS = {"a row in front": {}, "none, a norm behind, places of another size": {
    "architecture": "vit_pe_core_gigantic_patch14_448", "model_args": {
        **{key: value for key, value in ARGS.items() if key != "init_values"}, "ref_feat_shape": [6, 6],
        "use_post_transformer_norm": True}}}


@pytest.fixture(scope="module", params=TOWERS)
def perception(request, tmp_path_factory):
    folder, other = tmp_path_factory.mktemp("perception"), TOWERS[request.param]
    more = {**MORE, "vision_use_cls_token": not other}
    ready = PerceptionProcessor()
    return folder, save_vision_model(folder, "perception_lm", (TEXT, {**TOWER, **other}, WORDS, more, ready)), ready


@pytest.mark.parametrize("name", SHAPES)
def test_rows_are_those_of_transformers(perception, name):
    folder, model, ready = perception
    sight, picture = open_encoder(folder), PICTURES[name]
    made = ready(picture)
    values = np.stack(sight.values(picture)).transpose(0, 3, 1, 2)
    assert values.shape == made["pixel_values"][0].shape and np.abs(values - made["pixel_values"][0].numpy()).max() < 1e-6
    seen = assert_encodes_as(sight, picture, model, made)
    assert len(seen.tokens) == len(values) * 4


@pytest.fixture(scope="module", params=[2, 5, 36])
def tiling(request, tmp_path_factory):
    folder, ready = tmp_path_factory.mktemp("tiles"), PerceptionProcessor(max_num_tiles=request.param)
    save_vision_model(folder, "perception_lm", (TEXT, TOWER, WORDS, MORE, ready))
    return open_encoder(folder), ready


@given(st.integers(1, 1500), st.integers(1, 1500))
def test_the_tiles_are_those_of_transformers(tiling, height, width):
    sight, ready = tiling
    assert sight.grid(height, width)[::-1] == ready.grid(height, width)


def test_an_image_alone_where_the_preprocessor_says_so(perception):
    folder, _, ready = perception
    change_config(folder, "preprocessor_config.json", vision_input_type="vanilla")
    try:
        sight = open_encoder(folder)
        rows = sight.encode(PICTURES["wide"], EncodingJob()).rows
        assert len(sight.values(PICTURES["wide"])) == 1 and len(rows) == sight.token_count(30, 171) == 4
    finally:
        ready.save_pretrained(folder)


@pytest.mark.parametrize(("file", "changes", "message"), [
    ("preprocessor_config.json", {"tile_size": 48}, "tile_size is 48, expected the 32 × 32"),
    ("config.json", {"projector_pooling_ratio": 3}, "projector_pooling_ratio is 3, expected a part of the 4 patches"),
    ("config.json", {"vision_config": {**TOWER, "architecture": "vit_pe_spatial_base_patch16_512"}}, "'vit_pe_spatial_base_patch16_512'"),
    ("config.json", {"vision_config": {**TOWER, "model_args": {**ARGS, "swiglu_mlp": True}}}, "swiglu_mlp is not known"),
    ("config.json", {"vision_use_cls_token": None, "vision_config": {**TOWER, "architecture": "vit_pe_core_gigantic_patch14_448"}},
     "expected false, as of this tower")])
def test_what_is_not_read_is_refused_by_name(file, changes, message, tmp_path):
    save_vision_model(tmp_path, "perception_lm", CASES["perception_lm"])
    change_config(tmp_path, file, **changes)
    with pytest.raises(EffllmError) as caught:
        open_encoder(tmp_path)
    assert message in caught.value.message, caught.value.message


def test_a_published_config_is_known_to_the_last_key():
    text = {"bos_token_id": 128_000, "eos_token_id": [128_001, 128_009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
            "intermediate_size": 8192, "max_position_embeddings": 11_520, "mlp_bias": False, "model_type": "llama",
            "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_scaling": {
                "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
                "rope_type": "llama3"}, "rope_theta": 500_000.0, "tie_word_embeddings": True, "vocab_size": 128_256}
    config = parse_config({"architectures": ["PerceptionLMForConditionalGeneration"], "image_token_id": 128_002, "model_type":
                           "perception_lm", "projector_pooling_ratio": 2, "text_config": text, "video_token_id": 128_003,
                           "vision_config": {"model_type": "timm_wrapper"}, "vision_use_cls_token": True}, strict=True)
    assert config.family == "llama" and config.tie_word_embeddings and config.warnings == (
        "'perception_lm' takes images too: effllm reads its text part, llama",)
