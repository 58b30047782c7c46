"""config.json of families with recurrent layers: what is read, and what is refused by name."""


import pytest
from config_samples import LLAMA, refused

from effllm.kernels.kda_shape import KdaShape
from effllm.kernels.mamba1_shape import Mamba1Shape
from effllm.runtime.config import parse_config

ATTENDING = [4, 8, 12, 16, 20, 24, 27]  # layers of Kimi Linear, counted from 1
LINEAR = {"full_attn_layers": ATTENDING, "head_dim": 128, "kda_layers": [layer for layer in range(1, 28) if layer not in ATTENDING],
          "num_heads": 32, "short_conv_kernel_size": 4}
# As they are published.
PUBLISHED = {
    "jamba": {  # Mini 1.5
        "architectures": ["JambaForCausalLM"], "attention_dropout": 0.0, "attn_layer_offset": 4, "attn_layer_period": 8, "bos_token_id": 1,
        "eos_token_id": [2, 518], "expert_layer_offset": 1, "expert_layer_period": 2, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16,
        "mamba_dt_rank": 256, "mamba_expand": 2, "mamba_proj_bias": False, "max_position_embeddings": 262144, "num_attention_heads": 32,
        "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_logits_to_keep": 1,
        "output_router_logits": False, "pad_token_id": 0, "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.40.2", "use_cache": True,
        "use_mamba_kernels": True, "vocab_size": 65536},
    "mamba": {  # 130m-hf
        "architectures": ["MambaForCausalLM"], "bos_token_id": 0, "conv_kernel": 4, "d_inner": 1536, "d_model": 768, "eos_token_id": 0,
        "expand": 2, "fused_add_norm": True, "hidden_act": "silu", "hidden_size": 768, "initializer_range": 0.1, "intermediate_size": 1536,
        "layer_norm_epsilon": 1e-05, "n_layer": 24, "num_hidden_layers": 24, "pad_token_id": 0, "pad_vocab_size_multiple": 8,
        "rescale_prenorm_residual": False, "residual_in_fp32": True, "rms_norm": True, "ssm_cfg": {}, "state_size": 16, "time_step_floor":
        0.0001, "time_step_init_scheme": "random", "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": 48, "time_step_scale":
        1.0, "torch_dtype": "float32", "use_bias": False, "use_cache": True, "use_conv_bias": True, "vocab_size": 50280},
    "falcon_mamba": {
        "architectures": ["FalconMambaForCausalLM"], "bos_token_id": 0, "conv_kernel": 4, "eos_token_id": 11, "expand": 16, "hidden_act":
        "silu", "hidden_size": 4096, "initializer_range": 0.1, "intermediate_size": 8192, "layer_norm_epsilon": 1e-05, "mixer_rms_eps":
        1e-06, "num_hidden_layers": 64, "pad_token_id": 11, "rescale_prenorm_residual": False, "residual_in_fp32": True, "state_size": 16,
        "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_max": 0.1, "time_step_min":
        0.001, "time_step_rank": 256, "time_step_scale": 1.0, "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True,
        "use_conv_bias": True, "use_mambapy": False, "vocab_size": 65024},
    "kimi_linear": {
        "architectures": ["KimiLinearForCausalLM"], "auto_map": {
            "AutoConfig": "configuration_kimi.KimiLinearConfig", "AutoModel": "modeling_kimi.KimiLinearModel",
            "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"},
        "bos_token_id": 163584, "dtype": "bfloat16", "eos_token_id": 163586, "first_k_dense_replace": 1, "head_dim": 72, "hidden_act":
        "silu", "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216, "kv_lora_rank": 512,
        "linear_attn_config": LINEAR, "mla_use_nope": True, "model_max_length": 1048576, "moe_intermediate_size": 1024, "moe_layer_freq": 1,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid", "num_attention_heads": 32, "num_expert_group": 1, "num_experts": 256,
        "num_experts_per_token": 8, "num_hidden_layers": 27, "num_key_value_heads": 32, "num_nextn_predict_layers": 0,
        "num_shared_experts": 1, "pad_token_id": 163839, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": False,
        "topk_group": 1, "use_cache": True, "use_grouped_topk": True, "v_head_dim": 128, "vocab_size": 163840}}


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_configs_are_known_to_the_last_key(family: str) -> None:
    """Strict: an unknown key would be an error."""
    config = parse_config({"model_type": family, **PUBLISHED[family]}, strict=True)
    assert config.family == family and config.warnings == ()


def test_what_kimi_linear_says_in_either_dialect() -> None:
    config = parse_config({"model_type": "kimi_linear", **PUBLISHED["kimi_linear"]})
    assert config.recurrent == KdaShape.of(32, 128, 4) and config.context_length == 1 << 20 and config.rope is None
    assert config.attention_layers == tuple(layer - 1 for layer in ATTENDING)
    own = config.moe
    assert (own.num_experts, own.experts_per_token, own.expert_dim, own.shared_expert_dim, own.routed_scale) == (256, 8, 1024, 1024, 2.446)
    assert own.layers == frozenset(range(1, 27)) and own.renormalise and own.sigmoid and own.correction_bias
    assert config.mla.key == 576 and config.attn_scale == pytest.approx(192**-0.5)
    other = {key: value for key, value in PUBLISHED["kimi_linear"].items() if key not in ("linear_attn_config", "first_k_dense_replace")}
    kinds = ["full_attention" if layer in ATTENDING else "linear_attention" for layer in range(1, 28)]
    for name, called in (("max_position_embeddings", "model_max_length"), ("n_group", "num_expert_group"),
                         ("n_shared_experts", "num_shared_experts"), ("norm_topk_prob", "moe_renormalize"),
                         ("num_experts_per_tok", "num_experts_per_token"), ("num_local_experts", "num_experts")):
        other[name] = other.pop(called)
    assert parse_config({"model_type": "kimi_linear", **other, "layer_types": kinds, "linear_num_heads": 32, "linear_head_dim": 128,
                         "linear_conv_kernel_dim": 4, "mlp_layer_types": ["dense"] + ["sparse"] * 26}) == config


def test_what_jamba_says() -> None:
    config = parse_config({"model_type": "jamba", **PUBLISHED["jamba"]})
    assert config.recurrent == Mamba1Shape(8192, 16, 256, 4, normed=True) and config.attention_layers == (4, 12, 20, 28)
    assert config.moe.layers == frozenset(range(1, 32, 2)) and not config.moe.renormalise and config.moe.expert_dim == 14336
    assert config.rope is None and config.eos_token_ids == (2, 518)
    alone = parse_config({"model_type": "jamba", **PUBLISHED["jamba"], "num_experts": 1, "mamba_dt_rank": "auto", "hidden_size": 4160})
    assert alone.moe is None and alone.recurrent.rank == 260
    refused({"model_type": "jamba", **PUBLISHED["jamba"], "num_hidden_layers": 4}, "attn_layer_offset")


def test_what_state_spaces_alone_say() -> None:
    config = parse_config({"model_type": "mamba", **PUBLISHED["mamba"]})
    assert config.recurrent == Mamba1Shape(1536, 16, 48, 4) and config.attention_layers == () and config.tie_word_embeddings
    assert config.layers_without_mlp == config.recurrent_layers == tuple(range(24)) and config.context_length == 1 << 20
    falcon = parse_config({"model_type": "falcon_mamba", **PUBLISHED["falcon_mamba"]})
    assert falcon.recurrent == Mamba1Shape(8192, 16, 256, 4,
                                           normed=True) and falcon.recurrent_norm_eps == 1e-6 and not falcon.tie_word_embeddings
    bare = parse_config({"model_type": "mamba", "hidden_size": 500})
    assert bare.recurrent == Mamba1Shape(1000, 16, 32, 4) and bare.vocab_size == 50280


@pytest.mark.parametrize(("family", "key", "value"), [
    ("mamba", "use_bias", True), ("mamba", "hidden_act", "gelu"), ("mamba", "rms_norm", False), ("mamba", "time_step_rank", -1),
    ("mamba", "state_size", 0), ("falcon_mamba", "mixer_rms_eps", 0),
    ("jamba", "attn_layer_offset", 8), ("jamba", "expert_layer_offset", 2), ("jamba", "hidden_act", "gelu"),
    ("jamba", "mamba_proj_bias", True), ("jamba", "sliding_window", 40), ("jamba", "mamba_dt_rank", "some"),
    ("jamba", "num_experts_per_tok", 17), ("jamba", "mamba_d_state", 0),
    ("kimi_linear", "mla_use_nope", False), ("kimi_linear", "mla_use_output_gate", True), ("kimi_linear", "hidden_act", "gelu"),
    ("kimi_linear", "moe_router_activation_func", "softmax"), ("kimi_linear", "num_nextn_predict_layers", 1),
    ("kimi_linear", "linear_attn_config", {**LINEAR, "gate_lower_bound": -5.0}),
    ("kimi_linear", "linear_attn_config", {**LINEAR, "kda_layers": [1, 2, 3]}),
    ("kimi_linear", "linear_attn_config", {**LINEAR, "full_attn_layers": [28]}),
    ("kimi_linear", "layer_types", ["linear_attention"] * 27), ("kimi_linear", "layer_types", ["sliding_attention"] * 27),
    ("kimi_linear", "mlp_layer_types", ["moe"] * 27), ("kimi_linear", "num_key_value_heads", 8), ("kimi_linear", "topk_group", 2),
    ("kimi_linear", "routed_expert_hidden_size", 1024), ("kimi_linear", "auto_map", {"AutoModel": "modeling_other.Other"})])
def test_what_a_family_cannot_do_is_named(family: str, key: str, value: object) -> None:
    parted = key == "linear_attn_config" and "gate_lower_bound" not in value
    refused({**LLAMA, "model_type": family, **PUBLISHED[family], key: value}, "full_attn_layers" if parted else key)
