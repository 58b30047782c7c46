"""Configs of Kolibri 1 and of families that came with it, as they are published, and what of them is refused."""

import sys
from pathlib import Path

import pytest

from effllm.runtime.config import parse_config
from effllm.runtime.families import kolibri1

sys.path.insert(0, str(Path(__file__).parent))
from config_samples import refused

WINDOW = "sliding_attention"
KOLIBRI = {
    "architectures": ["Kolibri1ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": None, "dtype": "bfloat16",
    "eos_token_id": 127_906, "head_dim": 128, "head_dtype": "float32", "hidden_act": "silu", "hidden_size": 2560, "layer_types": [
        *[WINDOW] * 4, "full_attention"] * 10, "max_position_embeddings": 262_144, "model_type": "kolibri1", "moe_intermediate_size": 512,
    "norm_topk_prob": False, "num_attention_heads": 48, "num_experts": 384, "num_experts_per_tok": 6, "num_hidden_layers": 50,
    "num_key_value_heads": 4, "pad_token_id": 127_901, "quantization_config": {
        "activation_scheme": "dynamic", "quant_method": "fp8", "weight_block_size": [128, 128]}, "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0, "shared_expert_intermediate_size": 512, "sliding_window": 513, "tie_word_embeddings": False, "use_cache": True,
    "use_sliding_window": True, "vocab_size": 128_000}


def test_kolibri_1() -> None:
    made = parse_config(KOLIBRI, strict=True)
    assert made.windows == (513, 513, 513, 513, None) * 10 and [rope is None for rope in made.ropes] == [False] * 4 + [True] + (
        [False] * 4 + [True]) * 9
    own = made.mixture
    assert (own.experts, own.per_token, own.width, made.intermediate_size) == (384, 6, 512, 512)
    assert own.of_logits and own.corrected and own.routing.of_logits and not own.renormalise and own.layers == frozenset(range(50))


def test_kolibri_1_is_what_transformers_takes_where_a_config_is_silent() -> None:
    silent = parse_config({"model_type": "kolibri1", "architectures": KOLIBRI["architectures"]}, strict=True)
    stated = parse_config({**KOLIBRI, "eos_token_id": None, "dtype": "float32"}, strict=True)
    assert silent == stated


def test_names_of_the_published_kolibri_1_are_known() -> None:
    rules = kolibri1.layer_tensors(parse_config(KOLIBRI), 3)
    assert {role: rules[role].also for role in ("correction", "o_norm", "down_norm")} == {
        "correction": ("model.layers.3.moe.router.expert_bias",), "o_norm": ("model.layers.3.post_attn_norm.weight",),
        "down_norm": ("model.layers.3.post_ffn_norm.weight",)}


@pytest.mark.parametrize(("key", "value"), [
    ("attention_bias", True), ("use_sliding_window", False), ("sliding_window", 0), ("layer_types", ["chunked_attention"] * 50),
    ("num_experts_per_tok", 385), ("mlp_bias", True), ("shared_expert_intermediate_size", 0)])
def test_what_kolibri_1_may_not_have_is_named(key: str, value: object) -> None:
    refused({**KOLIBRI, key: value}, key)
