"""Published configs of Kolibri 1 and other families, and what is refused."""


import pytest
from config_samples import refused

from effllm.runtime.config import parse_config
from effllm.runtime.families import kolibri1, mimo_v2_flash

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

MIMO = {
    "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True, "architectures": ["MiMoV2FlashForCausalLM"],
    "attention_bias": False, "attention_chunk_size": 128, "attention_dropout": 0.0, "attention_value_scale": 0.707, "auto_map": {
        "AutoConfig": "configuration_mimo_v2_flash.MiMoV2FlashConfig", "AutoModel": "modeling_mimo_v2_flash.MiMoV2FlashModel"},
    "eos_token_id": 151_645, "head_dim": 192, "hidden_act": "silu", "hidden_size": 4096, "hybrid_layer_pattern": [
        int(layer > 0 and (layer + 1) % 6 > 0) for layer in range(48)], "initializer_range": 0.02, "intermediate_size": 16_384,
    "layernorm_epsilon": 1e-5, "max_position_embeddings": 262_144, "model_type": "mimo_v2_flash", "moe_intermediate_size": 2048,
    "moe_layer_freq": [0] + [1] * 47, "n_group": 1, "n_routed_experts": 256, "n_shared_experts": None, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "partial_rotary_factor": 0.334,
    "rope_theta": 5_000_000, "routed_scaling_factor": None, "scoring_func": "sigmoid", "sliding_window": 128, "sliding_window_size": 128,
    "swa_head_dim": 192, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_rope_theta": 10_000, "swa_v_head_dim": 128,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "use_cache": True, "v_head_dim": 128, "vocab_size": 152_576}


def test_kolibri_1() -> None:
    made = parse_config(KOLIBRI, strict=True)
    assert made.windows == (513, 513, 513, 513, None) * 10 and [rope is None for rope in made.ropes] == [False] * 4 + [True] + (
        [False] * 4 + [True]) * 9
    own = made.moe
    assert (own.num_experts, own.experts_per_token, own.expert_dim, made.intermediate_size) == (384, 6, 512, 512)
    assert own.correction_on_logits and own.correction_bias and own.routing.correction_on_logits and not own.renormalise
    assert own.layers == frozenset(range(50))


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


def test_mimo_v2_flash() -> None:
    made = parse_config(MIMO, strict=True)
    full = [layer for layer, window in enumerate(made.windows) if window is None]
    assert full == [0, 5, 11, 17, 23, 29, 35, 41, 47] and made.windows[1] == 129
    assert [made.kv_heads_of(layer) for layer in (0, 1)] == [(4, 192),
                                                             (8, 192)] and made.v_head_dim == 128 and made.multiplier("v") == 0.707
    assert [(rope.theta, int(192 * rope.partial_rotary_factor)) for rope in made.ropes[:2]] == [(5e6, 64), (1e4, 64)]
    assert made.moe.layers == frozenset(range(1, 48)) and (made.moe.routed_scale, made.moe.shared_expert_dim) == (1.0, None)
    rules = mimo_v2_flash.layer_tensors(made, 1)
    assert (rules["v"].shape, rules["o"].shape, rules["sinks"].shape) == ((1024, 4096), (4096, 8192), (64,))
    assert "sinks" not in mimo_v2_flash.layer_tensors(made, 0)


def test_mimo_v2_flash_is_what_transformers_takes_where_a_config_is_silent() -> None:
    silent = parse_config({"model_type": "mimo_v2_flash", "architectures": MIMO["architectures"]}, strict=True)
    assert silent == parse_config({**MIMO, "bos_token_id": 1, "eos_token_id": None, "max_position_embeddings": 131_072}, strict=True)


@pytest.mark.parametrize(("key", "value"), [
    ("v_head_dim", 256), ("add_full_attention_sink_bias", True), ("n_shared_experts", 1), ("scoring_func", "softmax"), ("n_group", 3),
    ("hybrid_layer_pattern", [0, 2] * 24), ("swa_head_dim", 128), ("swa_num_key_value_heads", 4), ("topk_method", "greedy"),
    ("auto_map", {"AutoModel": "modeling_other.Other"}), ("rope_parameters", {"rope_theta": 1e4})])
def test_what_mimo_v2_flash_may_not_have_is_named(key: str, value: object) -> None:
    refused({**MIMO, key: value}, key)
