"""Published configs of Laguna, Flint and Mamba 2, and what is refused."""


import pytest
from config_samples import refused

from effllm.runtime.config import parse_config

LAYERS = 40
WINDOW = "sliding_attention"
# Laguna XS.2's, but for what no program reads.
XS = {
    "architectures": ["LagunaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "auto_map": {
        "AutoConfig": "configuration_laguna.LagunaConfig", "AutoModelForCausalLM": "modeling_laguna.LagunaForCausalLM"}, "bos_token_id": 2,
    "decoder_sparse_step": 1, "dtype": "bfloat16", "eos_token_id": [2, 24], "gating": True, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 8192, "layer_types": ["full_attention", WINDOW, WINDOW, WINDOW] * 10,
    "max_position_embeddings": 131_072, "mlp_layer_types": ["dense"] + ["sparse"] * 39, "model_type": "laguna",
    "moe_apply_router_weight_on_input": False, "moe_intermediate_size": 512, "moe_routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "num_attention_heads": 48, "num_attention_heads_per_layer": [48, 64, 64, 64] * 10, "num_experts": 256, "num_experts_per_tok": 8,
    "num_hidden_layers": LAYERS, "num_key_value_heads": 8, "qkv_bias": False, "rms_norm_eps": 1e-6, "rope_parameters": {
        "full_attention": {"attention_factor": 1.0, "beta_fast": 64.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings":
                           4096, "partial_rotary_factor": 0.5, "rope_theta": 500_000.0, "rope_type": "yarn"},
        WINDOW: {"partial_rotary_factor": 1.0, "rope_theta": 10_000.0, "rope_type": "default"}, "original_max_position_embeddings": 4096},
    "shared_expert_intermediate_size": 512, "sliding_window": 512, "tie_word_embeddings": False, "vocab_size": 100_352}
CODESTRAL = {
    "architectures": ["Mamba2ForCausalLM"], "bos_token_id": 0, "chunk_size": 256, "conv_kernel": 4, "eos_token_id": 0, "expand": 2,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.1, "intermediate_size": 8192,
    "layer_norm_epsilon": 1e-5, "model_type": "mamba2", "n_groups": 8, "norm_before_gate": True, "num_heads": 128,
    "num_hidden_layers": 64, "rescale_prenorm_residual": False, "residual_in_fp32": True, "rms_norm": True, "state_size": 128,
    "tie_word_embeddings": False, "time_step_floor": 1e-4, "time_step_init_scheme": "random", "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 256, "time_step_scale": 1.0, "use_bias": False, "use_cache": True,
    "use_conv_bias": True, "vocab_size": 32_768}
FLINT = {"architectures": ["FlintForCausalLM"], "model_type": "flint", "tie_word_embeddings": False}


def test_laguna() -> None:
    made = parse_config(XS, strict=True)
    assert [made.query_heads_of(layer) for layer in range(5)] == [48, 64, 64, 64, 48] and made.num_attention_heads == 48
    assert [window is None for window in made.windows] == [True, False, False, False] * 10 and made.windows[1] == 512
    wide, near = made.ropes[:2]
    assert (wide.theta, wide.kind, wide.partial_rotary_factor) == (500_000.0, "yarn", 0.5)
    assert (near.theta, near.kind, near.partial_rotary_factor) == (10_000.0, "default", 1.0)
    assert made.output_gate and made.output_gate_softplus and made.output_gate_per_head
    assert not parse_config({**XS, "gating": "per-element"}).output_gate_per_head
    assert made.moe.layers == frozenset(range(1, LAYERS)) and (made.moe.routed_scale, made.moe.shared_expert_dim) == (2.5, 512)
    assert made.eos_token_ids == (2, 24)


def test_laguna_with_as_many_heads_in_each_layer() -> None:
    assert parse_config({**XS, "num_attention_heads_per_layer": [48] * LAYERS}, strict=True).layer_query_heads == ()


@pytest.mark.parametrize(("key", "value"), [
    ("gating", False), ("gating", "per-token"), ("gating_types", ["per-element"] * LAYERS), ("num_attention_heads_per_layer", [48] * 39),
    ("num_attention_heads_per_layer", [48, 60, 64, 64] * 10), ("num_attention_heads_per_layer", [48, 64.0, 64, 64] * 10),
    ("num_attention_heads_per_layer", 48), ("mlp_only_layers", [0, 1]), ("moe_router_logit_softcapping", 30.0), ("norm_topk_prob", False),
    ("moe_apply_router_weight_on_input", True), ("swa_attention_sink_enabled", True), ("mlp_bias", True), ("num_experts_per_tok", 300),
    ("auto_map", {"AutoModel": "modeling_other.Other"}), ("layer_types", [WINDOW] * 39), ("mlp_layer_types", ["shared"] * LAYERS)])
def test_what_laguna_may_not_have_is_named(key: str, value: object) -> None:
    refused({**XS, key: value}, key)


def test_mamba2() -> None:
    made = parse_config(CODESTRAL, strict=True)
    assert (made.recurrent.heads, made.recurrent.values, made.recurrent.groups, made.recurrent.depth, made.recurrent.taps) == (
        128, 8192, 8, 128, 4)
    assert made.recurrent_layers == made.layers_without_mlp == tuple(range(64)) and made.attention_layers == ()
    assert made.eos_token_ids == (0,)


@pytest.mark.parametrize(("key", "value"), [
    ("rms_norm", False), ("use_bias", True), ("num_heads", 100), ("n_groups", 3), ("time_step_limit", [0.1, 0.2]), ("hidden_act", "gelu"),
    ("conv_kernel", 0), ("expand", 3)])
def test_what_mamba2_may_not_have_is_named(key: str, value: object) -> None:
    refused({**CODESTRAL, key: value}, key)


def test_flint_is_what_transformers_takes_where_a_config_is_silent() -> None:
    made = parse_config(FLINT, strict=True)
    full = [layer for layer, window in enumerate(made.windows) if window is None]
    assert full[:5] == [0, 1, 5, 9, 13] and full[-1] == 48 and made.windows[2] == 513
    assert all((rope is None) == (window is None) for rope, window in zip(made.ropes, made.windows))
    assert made.moe.layers == frozenset(range(2, 49)) and not made.moe.correction_bias and made.moe.shared_expert_dim == 1024


@pytest.mark.parametrize(("key", "value"), [
    ("mlp_only_layers", [49]), ("decoder_sparse_step", 0), ("layer_types", ["linear_attention"] * 49), ("mlp_bias", True),
    ("num_experts_per_tok", 0), ("sliding_window", 0)])
def test_what_flint_may_not_have_is_named(key: str, value: object) -> None:
    refused({**FLINT, key: value}, key)
