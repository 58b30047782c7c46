"""Muse Glimmer's published config, what is refused, and what a file says of its heads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from config_samples import refused
from conversions import options, run
from export_models import model, scores

from effllm.runtime.config import parse_config, read_config
from effllm.runtime.gguf.export import export_gguf

KINDS = [*["sliding_attention"] * 3, "full_attention"] * 13
TEXT = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 200_000, "dtype": "bfloat16", "eos_token_id": 200_001,
    "final_logit_softcapping": 20.0, "head_dim": 128, "hidden_activation": "silu", "hidden_size": 6656, "initializer_range": 0.02,
    "intermediate_size": 19_968, "layer_rope_theta": [0 if kind == "full_attention" else 500_000.0 for kind in KINDS], "layer_types": KINDS,
    "max_position_embeddings": 131_072, "model_type": "muse_glimmer_text", "num_attention_heads": 32, "num_hidden_layers": 52,
    "num_key_value_heads": 2, "output_multiplier": 0.19611613513818404, "pad_token_id": None, "post_norm_eps": 1e-8,
    "qk_scale_factor": 3.87, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"},
    "sliding_window": 2048, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 202_048}
MUSE = {"architectures": ["MuseGlimmerForConditionalGeneration"], "model_type": "muse_glimmer", "dtype": "bfloat16",
        "image_token_id": 200_092, "out_hidden_size": 6144, "projector_hidden_act": "gelu", "projector_hidden_size": 4096,
        "text_config": TEXT, "vision_config": {},
        "video_token_id": 200_091}


def test_muse_glimmer() -> None:
    made = parse_config(MUSE, strict=True)
    assert made.windows == (2048, 2048, 2048, None) * 13 and [rope is None for rope in made.ropes] == [False, False, False, True] * 13
    assert made.attn_scale == pytest.approx(3.87 / 128**0.5) and made.logits_scaling == pytest.approx(26**0.5) and made.rope.theta == 5e5
    assert (made.norm_kind, made.final_norm_kind, made.norm_eps, made.post_norm_eps) == ("rms+1", "rms", 1e-5, 1e-8)
    assert made.qk_norm_unweighted and made.qk_norm_without_rope and not made.qk_norm and made.output_gate and not made.tie_word_embeddings


def test_muse_glimmer_is_what_transformers_takes_where_a_config_is_silent() -> None:
    silent = parse_config({**MUSE, "dtype": None, "text_config": {"model_type": "muse_glimmer_text"}})
    stated = parse_config({**MUSE, "dtype": None, "text_config": {**TEXT, "dtype": "float32", "rope_parameters": {
        "rope_theta": 10_000.0, "rope_type": "default"}, "layer_rope_theta": None}})
    assert replace(silent, logits_scaling=0.0) == replace(stated, logits_scaling=0.0)
    assert silent.logits_scaling == pytest.approx(stated.logits_scaling)


@pytest.mark.parametrize(("key", "value"), [
    ("layer_rope_theta", [10_000.0] * 52), ("layer_rope_theta", [0] * 3), ("use_bidirectional_attention", True), ("mlp_bias", True),
    ("layer_types", ["chunked_attention"] * 52), ("sliding_window", 0), ("output_multiplier", 0)])
def test_what_muse_glimmer_may_not_have_is_named(key: str, value: object) -> None:
    refused({**MUSE, "text_config": {**TEXT, key: value}}, key)


def test_a_folder_made_of_a_file_is_the_model_of_the_file(tmp_path: Path) -> None:
    """In a file heads are normed with weights, and so in what is made of it."""
    source = model("muse_glimmer_text", tmp_path / "source")
    list(export_gguf(source, tmp_path / "m.gguf", "F16", "m"))
    run(tmp_path / "m.gguf", tmp_path / "8bit", options("8bit"))
    assert json.loads((tmp_path / "8bit" / "config.json").read_text())["qk_norm_stored"] is True
    made, whole = read_config(tmp_path / "8bit", strict=True), read_config(source)
    assert made.qk_norm and not made.qk_norm_unweighted and made.attn_scale * 2.5 == pytest.approx(whole.attn_scale)
    ids = list(range(5, 80))
    expected, rounded = scores(source, ids), scores(tmp_path / "8bit", ids)
    assert abs(rounded - expected).mean() < 0.03 * abs(expected).max()
