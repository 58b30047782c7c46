"""config.json of further families: read as transformers reads it, and what is refused by name."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from config_samples import LLAMA, SMALL, refused
from transformers import Ministral3Config, Mistral3Config, MistralConfig, Olmo3Config, Qwen3_5Config, Qwen3_5TextConfig
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from effllm.runtime import families
from effllm.runtime.config import parse_config
from effllm.runtime.moe_config import MoEConfig
from effllm.runtime.rope import rope_table

# What the published checkpoints state, shortened by the sizes that every config has: nothing in it is unknown.
PUBLISHED = {
    "bitnet": {"architectures": ["BitNetForCausalLM"], "auto_map": {
        "AutoConfig": "configuration_bitnet.BitNetConfig", "AutoModelForCausalLM": "modeling_bitnet.BitNetForCausalLM"},
        "bos_token_id": 1, "hidden_act": "relu2", "initializer_range": 0.02, "max_position_embeddings": 4096, "quantization_config": {
            "quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}, "rope_theta": 500000.0},
    "arcee": {"architectures": ["ArceeForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "relu2",
              "max_position_embeddings": 65536, "mlp_bias": False, "rope_scaling": {
                  "beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0, "original_max_position_embeddings": 4096,
                  "rope_type": "yarn", "type": "yarn"}, "rope_theta": 10000.0},
    "ernie4_5": {"architectures": ["Ernie4_5_ForCausalLM"], "auto_map": {
        "AutoConfig": "configuration_ernie4_5.Ernie4_5_Config", "AutoModel": "modeling_ernie4_5.Ernie4_5_Model",
        "AutoModelForCausalLM": "modeling_ernie4_5.Ernie4_5_ForCausalLM"}, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128,
        "hidden_act": "silu", "max_position_embeddings": 131072, "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 500000,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_bias": False, "use_cache": False},
    "exaone4": {"architectures": ["Exaone4ForCausalLM"], "head_dim": 128, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
                "max_position_embeddings": 131072, "rope_scaling": {
                    "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
                    "rope_type": "llama3"}, "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": "LLLG"},
    "gemma": {"architectures": ["GemmaForCausalLM"], "attention_bias": False, "head_dim": 256, "hidden_act": "gelu",
              "max_position_embeddings": 8192, "rope_scaling": None, "rope_theta": 10000.0, "torch_dtype": "bfloat16"},
    "glm": {"architectures": ["GlmForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": [
        151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 131072, "pad_token_id": 151329,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "vocab_size": 151552},
    "glm4": {"architectures": ["Glm4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": [
        151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 32768, "pad_token_id": 151329,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "vocab_size": 151552},
    "granitemoehybrid": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attention_multiplier": 0.0078125, "bos_token_id": 100257, "embedding_multiplier": 12, "eos_token_id": 7, "hidden_act": "silu",
        "init_method": "mup", "initializer_range": 0.1,
        "intermediate_size": 512, "layer_types": ["mamba", "mamba", "attention", "mamba"], "logits_scaling": 6,
        "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2,
        "mamba_n_groups": 1, "mamba_n_heads": 3, "mamba_proj_bias": False, "max_position_embeddings": 131072,
        "normalization_function": "rmsnorm", "num_experts_per_tok": 6, "num_local_experts": 64, "output_router_logits": False,
        "position_embedding_type": "nope", "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000,
        "router_aux_loss_coef": 0.0001, "shared_intermediate_size": 1024, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "vocab_size": 100352},
    "lfm2": {"architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 96, "block_ff_dim": 1536,
             "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-05,
             "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True, "bos_token_id": 1, "conv_L_cache": 3,
             "conv_bias": False, "conv_dim": 96, "conv_dim_out": 96, "conv_use_xavier_init": True, "eos_token_id": 7,
             "full_attn_idxs": [2], "initializer_range": 0.02, "max_position_embeddings": 128000, "norm_eps": 1e-05, "num_heads": 6,
             "pad_token_id": 0, "rope_theta": 1000000.0, "tie_embedding": True, "torch_dtype": "bfloat16", "use_cache": True,
             "use_pos_enc": True},
    "lfm2_moe": {"architectures": ["Lfm2MoeForCausalLM"], "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": False, "dtype": "bfloat16",
                 "eos_token_id": 7, "layer_types": ["conv", "conv", "full_attention", "conv"], "max_position_embeddings": 128000,
                 "moe_intermediate_size": 1792, "norm_eps": 1e-05, "norm_topk_prob": True, "num_dense_layers": 2, "num_experts": 32,
                 "num_experts_per_tok": 4, "pad_token_id": 0, "rope_theta": 1000000.0, "routed_scaling_factor": 1.0,
                 "tie_embedding": True, "use_cache": True, "use_expert_bias": True, "use_pos_enc": True},
    "ministral3": {"architectures": ["Ministral3ForCausalLM"], "attention_dropout": 0.0, "head_dim": 128, "max_position_embeddings": 262144,
                   "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                                       "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
                                       "rope_type": "yarn", "type": "yarn"}, "sliding_window": None, "tie_word_embeddings": True},
    "falcon_h1": {
        "architectures": ["FalconH1ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 0.9375, "attn_layer_indices": None, "bos_token_id": 1, "embedding_multiplier": 5.656854249492381,
        "eos_token_id": 11, "head_dim": 64, "key_multiplier": 0.390625, "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128,
        "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_expand": 2,
        "mamba_n_groups": 1, "mamba_n_heads": 24, "mamba_norm_before_gate": False, "mamba_proj_bias": False, "mamba_rms_norm": False,
        "mamba_use_mlp": True, "max_position_embeddings": 16384, "mlp_bias": False, "mlp_expansion_factor": 8, "mlp_multipliers": [
            0.8838834764831844, 0.5859375], "num_logits_to_keep": 1, "pad_token_id": 0, "projectors_bias": False, "rms_norm_eps": 1e-5,
        "rope_scaling": None, "rope_theta": 100_000_000_000.0, "sliding_window": None, "ssm_in_multiplier": 1.25, "ssm_multipliers": [
            0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738], "ssm_out_multiplier": 0.23570226039551587,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True},
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "auto_map": {
            "AutoConfig": "configuration_nemotron_h.NemotronHConfig", "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"},
        "bos_token_id": 1, "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 12, "expand": 2, "head_dim": 128, "hidden_dropout": 0.0,
        "hybrid_override_pattern": "MM*-", "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 80,
        "mamba_hidden_act": "silu", "mamba_num_heads": 128, "mamba_proj_bias": False, "max_position_embeddings": 131072, "mlp_bias": False,
        "mlp_hidden_act": "relu2", "n_groups": 8, "num_logits_to_keep": 1, "pad_token_id": 0, "rescale_prenorm_residual": True,
        "residual_in_fp32": False, "rms_norm_eps": 1e-05, "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False,
        "time_step_floor": 0.0001, "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001,
        "time_step_rank": 256, "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True, "use_conv_bias": True,
        "use_mamba_kernels": True},
    "olmo3": {"attention_bias": False, "eos_token_id": 257, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
              "max_position_embeddings": 65536, "rope_scaling": {
                  "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
                  "original_max_position_embeddings": 8192, "rope_type": "yarn"}, "rope_theta": 500000, "sliding_window": 4096},
    "qwen3_5_text": {"attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "bfloat16",
                     "full_attention_interval": 4, "head_dim": 256, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
                     "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
                     "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
                     "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "output_gate_type": "swish",
                     "partial_rotary_factor": 0.25, "rope_parameters": {
                         "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                         "rope_theta": 10000000, "rope_type": "default"}},
    "seed_oss": {"architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.1, "attention_out_bias": False,
                 "bos_token_id": 0, "head_dim": 128, "max_position_embeddings": 524288, "mlp_bias": False, "pad_token_id": 1,
                 "residual_dropout": 0.1, "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "torch_dtype": "bfloat16"},
    "starcoder2": {"architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1, "bos_token_id": 0, "embedding_dropout": 0.1,
                   "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 16384, "mlp_type": "default", "norm_epsilon": 1e-05,
                   "norm_type": "layer_norm", "residual_dropout": 0.1, "rope_theta": 999999.4420358813, "sliding_window": 4096,
                   "use_bias": True},
}
NEMOTRON_3 = {  # what it says otherwise
    "eos_token_id": 2, "hidden_size": 2688, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856, "mamba_head_dim": 64, "mamba_num_heads": 64, "mamba_ssm_cache_dtype": "float32", "max_position_embeddings":
    262_144, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_routed_experts": 128,
    "n_shared_experts": 1, "norm_eps": 1e-5, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts_per_tok": 6,
    "num_hidden_layers": 52, "num_key_value_heads": 2, "partial_rotary_factor": 1.0, "rope_theta": 10_000, "routed_scaling_factor": 2.5,
    "topk_group": 1, "vocab_size": 131_072}


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_configs_are_known_to_the_last_key(family: str) -> None:
    """Strict: an unknown key would be an error."""
    config = parse_config({**LLAMA, "eos_token_id": 7, "model_type": family, **PUBLISHED[family]}, strict=True)
    assert config.family == family and config.warnings == ()


@pytest.mark.parametrize(("family", "key", "value"), [
    ("bitnet", "sliding_window", 40), ("bitnet", "mlp_bias", True), ("bitnet", "auto_map", {"AutoModel": "modeling_other.Other"}),
    ("arcee", "sliding_window", 40), ("arcee", "layer_types", ["sliding_attention"] * 4),
    ("ernie4_5", "auto_map", {"AutoModelForCausalLM": "modeling_ernie4_5_vl.Ernie4_5_VLMoeForConditionalGeneration"}),
    ("ernie4_5", "partial_rotary_factor", 0.5), ("ernie4_5", "sliding_window", 40), ("ernie4_5", "mlp_bias", True),
    ("exaone4", "attention_bias", True), ("exaone4", "sliding_window_pattern", "LLxG"), ("exaone4", "mlp_bias", True),
    ("gemma", "hidden_activation", "gelu"), ("gemma", "use_bidirectional_attention", True), ("gemma", "sliding_window", 40),
    ("gemma", "query_pre_attn_scalar", 256), ("gemma", "mlp_bias", True), ("gemma", "final_logit_softcapping", 30.0),
    ("glm", "sliding_window", 40), ("glm", "layer_types", ["sliding_attention"] * 4), ("glm4", "mlp_bias", True),
    ("glm4", "auto_map", {"AutoModel": "modeling_chatglm.ChatGLMModel"}),
    ("granitemoehybrid", "layer_types", ["mamba"] * 4), ("granitemoehybrid", "layer_types", ["conv"] * 4),
    ("granitemoehybrid", "mamba_proj_bias", True),
    ("lfm2", "conv_bias", True), ("lfm2", "layer_types", ["mamba"] * 4), ("lfm2", "layer_types", ["conv"] * 4), ("lfm2", "conv_dim", 64),
    ("lfm2", "use_pos_enc", False), ("lfm2", "block_ffn_dim_multiplier", 1e9), ("lfm2", "hidden_act", "gelu"),
    ("lfm2", "block_use_swiglu", False), ("lfm2_moe", "full_attn_idxs", [1]), ("lfm2_moe", "num_experts_per_tok", 33),
    ("lfm2_moe", "block_auto_adjust_ff_dim", True),
    ("ministral3", "layer_types", ["sliding_attention"] * 4), ("ministral3", "attention_bias", True),
    ("olmo3", "clip_qkv", 8.0), ("olmo3", "use_sliding_window", False), ("olmo3", "mlp_bias", True),
    ("qwen3_5_text", "attn_output_gate", False), ("qwen3_5_text", "hidden_act", "gelu"), ("qwen3_5_text", "layer_types", ["conv"] * 4),
    ("qwen3_5_text", "linear_num_value_heads", 24), ("qwen3_5_text", "sliding_window", 40), ("qwen3_5_text", "num_experts", 8),
    ("qwen3_5_text", "output_gate_type", "sigmoid"),
    ("olmo3", "partial_rotary_factor", 0.5), ("seed_oss", "sliding_window", 40), ("seed_oss", "layer_types", ["sliding_attention"] * 4),
    ("starcoder2", "norm_type", "rms_norm"), ("starcoder2", "mlp_type", "gated"), ("starcoder2", "layer_types", ["sliding_attention"] * 4)])
def test_what_a_family_cannot_do_is_named(family: str, key: str, value: object) -> None:
    refused({**LLAMA, "model_type": family, key: value}, key)


@pytest.mark.parametrize(("key", "value"), [
    ("hybrid_override_pattern", None), ("hybrid_override_pattern", "MEE*"), ("hybrid_override_pattern", "M-M-"),
    ("hybrid_override_pattern", "-M*M"), ("hybrid_override_pattern", "M*--"), ("hybrid_override_pattern", "MMx*"),
    ("hybrid_override_pattern", "M*-"), ("layers_block_type", ["mamba", "ssm", "attention", "mlp"]), ("layers_block_type", "M*"),
    ("attention_head_dim", 64), ("n_groups", 7), ("mamba_hidden_act", "gelu"), ("use_bias", True), ("time_step_limit", [0.001, 0.1]),
    ("auto_map", {"AutoModel": "modeling_other.Other"})])
def test_what_nemotron_h_cannot_do_is_named(key: str, value: object) -> None:
    refused({**LLAMA, "model_type": "nemotron_h", **PUBLISHED["nemotron_h"], key: value}, key)


def test_layers_of_nemotron_h_are_halves() -> None:
    base = {**LLAMA, "model_type": "nemotron_h", **PUBLISHED["nemotron_h"]}
    earlier = {key: value for key, value in base.items() if key != "head_dim"} | {"attention_head_dim": 128}
    assert parse_config(earlier, strict=True) == parse_config(base), "Nemotron H 8B says it by another name"
    config = parse_config({**base, "num_hidden_layers": 9, "hybrid_override_pattern": "M-MM*-*M-"}, strict=True)
    assert config.num_hidden_layers == 6 and config.recurrent_layers == (0, 1, 2, 5) and config.layers_without_mlp == (1, 2, 4)
    kinds = ["mamba", "mlp", "mamba", "mamba", "attention", "mlp", "attention", "mamba", "mlp"]
    assert parse_config({**base, "num_hidden_layers": 9, "hybrid_override_pattern": None, "layers_block_type": kinds}) == config


@pytest.mark.parametrize(("key", "value"), [
    ("mlp_multipliers", [1.0]), ("mlp_multipliers", [0.0, 1.0]), ("ssm_multipliers", "1"), ("ssm_multipliers", [1, 2, 3, 4, float("inf")]),
    ("key_multiplier", -1.0), ("lm_head_multiplier", 0), ("mamba_d_ssm", 1000), ("mamba_n_groups", 7), ("mamba_norm_before_gate", True),
    ("time_step_limit", [0.1, 0.2]), ("projectors_bias", True), ("attn_layer_indices", [1]), ("hidden_act", "gelu"),
    ("mamba_use_mlp", False)])
def test_what_falcon_h1_cannot_do_is_named(key: str, value: object) -> None:
    base = {**LLAMA, "model_type": "falcon_h1", **PUBLISHED["falcon_h1"], "mamba_rms_norm": key == "mamba_norm_before_gate"}
    refused({**base, key: value}, key)


def test_multipliers_of_falcon_h1() -> None:
    """Where they went; those of 1 are nowhere."""
    base = {**LLAMA, "model_type": "falcon_h1", **PUBLISHED["falcon_h1"]}
    config = parse_config(base, strict=True)
    assert config.attn_scale == pytest.approx(0.390625 / 8) and config.logits_scaling == pytest.approx(25.6)
    assert dict(config.multipliers) == pytest.approx({
        "o": 0.9375, "state_out": 0.23570226, "post_norm": 0.88388348, "down": 0.5859375 / 0.88388348, "state_gate": 1.25 * 0.35355339,
        "state_in.values": 0.3125, "state_in.b": 1.25 * 0.35355339, "state_in.c": 0.625, "state_rate": 1.25 * 0.35355339})
    plain = parse_config({key: value for key, value in base.items() if "multiplier" not in key}, strict=True)
    assert plain.multipliers == () and plain.attn_scale is None and plain.attention_layers == plain.recurrent_layers == (0, 1, 2, 3)
    assert not plain.recurrent.normed and plain.recurrent.values == 1536


def test_mixtures_of_nemotron_h() -> None:
    """As Nemotron 3 Nano is published."""
    base = {**LLAMA, "model_type": "nemotron_h", **PUBLISHED["nemotron_h"], **NEMOTRON_3}
    config = parse_config(base, strict=True)
    assert config.warnings == () and config.num_hidden_layers == 29 and len(config.recurrent_layers) == 23 and config.hidden_act == "relu2"
    assert config.moe == MoEConfig(128, 6, 1856, True, frozenset(set(range(29)) - set(config.layers_without_mlp)), sigmoid=True,
                                   routed_scale=2.5,
                                 correction_bias=True, shared_expert_dim=3712, gated=False) and len(config.layers_without_mlp) == 6
    both = parse_config({**base, "num_hidden_layers": 4, "hybrid_override_pattern": "*EM-"}, strict=True)
    assert both.moe.layers == {0} and both.recurrent_layers == (1,) and both.layers_without_mlp == ()
    ahead = {**base, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
    assert parse_config(ahead, strict=True) == config, "as Nemotron 3.5 Lightning"
    larger = parse_config({**ahead, "hidden_size": 4096, "moe_latent_size": 1024, "moe_intermediate_size": 2688}, strict=True)
    assert (larger.moe.latent_dim, larger.moe.parallel_to_mlp) == (1024, True), "as Nemotron 3 Super"
    for key, value in (("moe_latent_size", 2689), ("n_shared_experts", 2), ("n_group", 3), ("num_local_experts", 4)):
        refused({**base, key: value}, key)
    dense = {**base, "hybrid_override_pattern": "MM*-", "num_hidden_layers": 4}
    assert parse_config({**dense, "moe_latent_size": 7, "n_shared_experts": 3}).moe is None, "nobody visits them"


def test_dense_ones_of_granite_4_visit_no_experts() -> None:
    """As the published ones say it: 350M, 1B and micro, with h in their name and without."""
    base = {**LLAMA, "model_type": "granitemoehybrid", **PUBLISHED["granitemoehybrid"], "num_local_experts": 0}
    config = parse_config({**base, "num_experts_per_tok": 0}, strict=True)
    assert config.moe is None and config == parse_config(base, strict=True)
    refused({**base, "num_experts_per_tok": -1}, "num_experts_per_tok")
    refused({**base, "num_local_experts": 64, "num_experts_per_tok": 0}, "num_experts_per_tok")


@pytest.mark.parametrize(("key", "value"), [
    ("time_step_limit", [0.001, 0.1]), ("mamba_n_heads", 5), ("mamba_n_groups", 2), ("mamba_d_head", 33), ("mamba_d_conv", 65),
    ("hidden_act", "gelu")])
def test_widths_of_state_spaces_agree(key: str, value: object) -> None:
    refused({**LLAMA, "model_type": "granitemoehybrid", **PUBLISHED["granitemoehybrid"], "vocab_size": 300, key: value}, key)


def test_olmo3_stretches_the_positions_of_layers_without_a_window_alone() -> None:
    base = {**LLAMA, "model_type": "olmo3", "sliding_window": 32}
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    older = parse_config({**base, "rope_theta": 500_000, "rope_scaling": yarn}, strict=True)
    newer = {"full_attention": {**yarn, "rope_theta": 5e5}, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}
    assert older == parse_config({**base, "rope_parameters": newer}, strict=True)
    assert [rope.kind for rope in older.ropes] == ["default"] * 3 + ["yarn"] and older.windows == (32, 32, 32, None)
    assert older.context_length == 2048 and {rope.theta for rope in older.ropes} == {5e5}
    theirs = json.loads(Olmo3Config(**SMALL, sliding_window=32, rope_scaling=yarn).to_json_string())
    assert parse_config(theirs, strict=True).ropes == older.ropes
    other = {**newer, "sliding_attention": {"rope_theta": 7e3}}
    assert [rope.theta for rope in parse_config({**base, "rope_theta": 1e6, "rope_parameters": other}).ropes] == [7e3] * 3 + [5e5]
    # Versions of transformers do not agree on these: one base or two, and for what layers a section without types is.
    refused({**base, "rope_theta": 1e6}, "rope_theta", "layers with a window")
    flat = parse_config({**base, "rope_parameters": {**yarn, "rope_theta": 5e5}}, strict=True)
    assert flat.ropes == older.ropes and [("only layers without a window are scaled" in said) for said in flat.warnings] == [True]
    plain = parse_config({**base, "rope_parameters": {"rope_type": "default", "rope_theta": 7e3}}, strict=True)
    assert {(rope.kind, rope.theta) for rope in plain.ropes} == {("default", 7e3)} and not plain.warnings
    refused({**LLAMA, "model_type": "gemma3_text", "sliding_window": 32, "rope_parameters": {**yarn, "rope_theta": 5e5}}, "rope_parameters")
    assert parse_config({**base, "rope_theta": 1e6, "layer_types": ["full_attention"] * 4}).rope.theta == 1e6
    refused({**base, "sliding_window": None}, "no sliding window")


def test_queries_of_ministral3_grow_with_their_position() -> None:
    base = {**LLAMA, "model_type": "ministral3"}
    section = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.2}
    config = parse_config({**base, "rope_parameters": {**section, "max_position_embeddings": 256}}, strict=True)
    assert config.rope.params["llama_4_scaling_beta"] == 0.2 and config.windows == (None,) * 4
    table = rope_table(config.rope, 128, 2048, 2048)
    positions = np.array([0, 63, 64, 127, 128, 1000])
    grown = get_llama_4_attn_scale(torch.from_numpy(positions)[None], 0.2, 64)[0, 0, :, 0].numpy()
    np.testing.assert_allclose(table.queries.scale(positions)[:, 0], grown * table.attention_scaling, rtol=1e-6)
    assert table.scale(positions) == np.float32(table.attention_scaling) and table.queries.inv_freq is table.inv_freq
    # beside no section of its own; a base outside the section is not asked then, as in transformers
    plain = parse_config({**base, "rope_theta": 1e4}, strict=True)
    theirs = Ministral3Config(**SMALL, rope_theta=1e4)
    assert plain.ropes == parse_config(json.loads(theirs.to_json_string()), strict=True).ropes
    assert plain.rope.theta == theirs.rope_parameters["rope_theta"] == 1e6
    older = {**base, "rope_theta": 5e4, "rope_scaling": {key: value for key, value in section.items() if key != "rope_theta"}}
    assert parse_config(older, strict=True).ropes == config.ropes
    still = parse_config({**base, "rope_parameters": {**section, "llama_4_scaling_beta": 0}}, strict=True)
    assert rope_table(still.rope, 128, 2048, 2048).queries is None
    for wrong in ({}, {**section, "llama_4_scaling_beta": None}, {**section, "llama_4_scaling_beta": -0.1}):
        refused({**base, "rope_parameters": wrong}, "llama_4_scaling_beta" if wrong else "original_max_position_embeddings")
    refused({**base, "rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}, "original_max_position_embeddings")
    llama = parse_config({**LLAMA, "rope_parameters": section})
    assert "llama_4_scaling_beta" in llama.warnings[0] and "llama_4_scaling_beta" not in llama.rope.params


@pytest.mark.parametrize(("family", "writer"), [("mistral", MistralConfig), ("ministral3", Ministral3Config)])
def test_a_mistral_that_takes_images_is_read_as_the_text_part_that_it_names(family: str, writer: type) -> None:
    text = writer(**SMALL)
    written = json.loads(Mistral3Config(text_config=text.to_dict()).to_json_string())
    config = parse_config({**written, "architectures": ["Mistral3ForConditionalGeneration"]}, strict=True)
    alone = parse_config(json.loads(text.to_json_string()))
    assert replace(config, warnings=(), tie_word_embeddings=False) == alone and config.family == family
    assert config.warnings == (f"'mistral3' takes images too: effllm reads its text part, {family}",)
    unnamed = {**written, "text_config": {**SMALL, "sliding_window": None}}
    assert parse_config(unnamed, strict=True).family == "mistral"
    refused({**written, "text_config": {**SMALL, "model_type": "gemma3_text"}}, "gemma3_text", "mistral or ministral3")


def test_biases_of_seed_oss() -> None:
    def biased(**changes: object) -> set[str]:
        config = parse_config({**LLAMA, "model_type": "seed_oss", **changes})
        return {role for role in families.get("seed_oss").layer_tensors(config, 0) if role.endswith("_bias")}

    assert biased() == {"q_bias", "k_bias", "v_bias"} and biased(attention_bias=False) == set()
    assert biased(attention_bias=False, attention_out_bias=True, mlp_bias=True) == {"o_bias", "gate_bias", "up_bias", "down_bias"}


def test_ernie_turns_neighbours_and_has_biases_everywhere_or_nowhere() -> None:
    base = {**LLAMA, "model_type": "ernie4_5"}
    config = parse_config(base, strict=True)
    assert {(rope.interleaved, rope.theta) for rope in config.ropes} == {(True, 5e5)} and config.tie_word_embeddings
    assert not parse_config({**LLAMA, "rope_theta": 5e5}).rope.interleaved
    assert rope_table(config.rope, 128, 2048, 2048).interleaved
    roles = families.get("ernie4_5").layer_tensors(parse_config({**base, "use_bias": True}), 0)
    assert {role for role in roles if role.endswith("_bias")} == {f"{role}_bias" for role in ("q", "k", "v", "o", "gate", "up", "down")}


@pytest.mark.parametrize("family", ["glm", "glm4"])
def test_half_of_a_head_turns_in_glm_unless_something_else_is_said(family: str) -> None:
    base = {**LLAMA, "model_type": family, "head_dim": 16}

    def share(**changes: object) -> float:
        rope = parse_config({**base, **changes}, strict=True).rope
        assert rope.interleaved
        return rope.partial_rotary_factor

    section = {"rope_type": "linear", "factor": 2.0}
    assert share() == share(rope_scaling=section) == share(rope_parameters={"rope_theta": 5e4}) == 0.5
    assert share(partial_rotary_factor=0.25) == share(rope_scaling=section, partial_rotary_factor=0.25) == 0.25
    assert share(partial_rotary_factor=0.25, rope_parameters={**section, "partial_rotary_factor": 1.0}) == 1.0
    refused({**base, "partial_rotary_factor": 0.1}, "0.1 of a head dimension of 16")


def test_gemma_means_the_approximation_of_gelu_by_either_name() -> None:
    base = {**LLAMA, "model_type": "gemma", "head_dim": 16}
    for more in ({}, {"hidden_act": "gelu"}, {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}):
        assert parse_config({**base, **more}, strict=True).hidden_act == "gelu_tanh"
    assert parse_config({**base, "hidden_act": "silu"}).hidden_act == "silu"
    config = parse_config({**base, "hidden_size": 3072, "dtype": "bfloat16"})
    assert (config.embedding_multiplier, config.norm_kind, config.attn_scale) == (55.5, "rms+1", None)


def test_starcoder2_has_one_window_an_epsilon_of_its_own_name_and_biases_of_norms() -> None:
    base = {**LLAMA, "model_type": "starcoder2"}
    config = parse_config({**base, "sliding_window": 32, "norm_epsilon": 0.25, "rms_norm_eps": 0.5}, strict=True)
    assert (config.windows, config.norm_eps, config.norm_kind, config.hidden_act) == ((32,) * 4, 0.25, "layer", "gelu_tanh")
    assert parse_config(base).windows == (None,) * 4
    family = families.get("starcoder2")
    biased = {role for role in family.layer_tensors(config, 0) if role.endswith("_bias")}
    bare = parse_config({**base, "use_bias": False})
    assert biased - {role for role in family.layer_tensors(bare, 0)} == {"q_bias", "k_bias", "v_bias", "o_bias", "up_bias", "down_bias"}
    assert {"input_norm_bias", "post_norm_bias"} <= family.layer_tensors(bare, 0).keys() and "norm_bias" in family.outer_tensors(bare)


def test_layers_of_exaone4_turn_where_they_have_a_window() -> None:
    def layers(**changes: object) -> list[tuple[bool, int | None]]:
        config = parse_config({**LLAMA, "model_type": "exaone4", **changes}, strict=True)
        return [(rope is not None, window) for rope, window in zip(config.ropes, config.windows, strict=True)]

    near, far = (True, 32), (False, None)
    assert layers(sliding_window=32) == [near, near, near, far] and layers(sliding_window=32, sliding_window_pattern=2) == [near, far] * 2
    kinds = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
    assert layers(sliding_window=32, sliding_window_pattern="GLGG", layer_types=kinds) == [far, near, far, far]
    full = ["full_attention"] * 4
    assert layers(sliding_window=None, layer_types=full) == [(True, None)] * 4 and layers(sliding_window=32, layer_types=full) == [far] * 4
    assert layers(sliding_window=32, sliding_window_pattern="LLG") == [near, near, far, near]
    assert layers(sliding_window=None) == layers(sliding_window=None, sliding_window_pattern=None) == [(True, None)] * 4
    refused({**LLAMA, "model_type": "exaone4", "sliding_window": None, "layer_types": kinds}, "no sliding window")


def test_the_mlp_of_arcee_has_no_gate() -> None:
    config = parse_config({**LLAMA, "model_type": "arcee", "mlp_bias": True}, strict=True)
    assert config.hidden_act == "relu2"
    roles = families.get("arcee").layer_tensors(config, 0).keys()
    assert {"up", "up_bias", "down", "down_bias"} <= roles and not {"gate", "gate_bias"} & roles


def test_qwen3_5_is_read_as_its_text_part() -> None:
    text = Qwen3_5TextConfig(**SMALL)
    written = json.loads(Qwen3_5Config(text_config=text.to_dict()).to_json_string())
    config = parse_config({**written, "architectures": ["Qwen3_5ForConditionalGeneration"]}, strict=True)
    assert replace(config, warnings=()) == parse_config(json.loads(text.to_json_string()), strict=True)
    assert config.warnings == ("'qwen3_5' takes images too: effllm reads its text part, qwen3_5_text",)
    assert config.attention_layers == (3,) and config.recurrent_layers == (0, 1, 2) and not config.tie_word_embeddings
    assert config.rope.partial_rotary_factor == 0.25 and [rope is None for rope in config.ropes] == [True, True, True, False]
    unsaid = {key: value for key, value in written.items() if key != "tie_word_embeddings"}
    assert not parse_config(unsaid, strict=True).tie_word_embeddings, "as in transformers, the outer object decides"
    assert parse_config({**written, "tie_word_embeddings": True}, strict=True).tie_word_embeddings


def test_which_layers_of_qwen3_5_have_keys_and_values() -> None:
    base = {**LLAMA, "model_type": "qwen3_5_text"}
    assert parse_config(base).attention_layers == (3,)
    assert parse_config({**base, "full_attention_interval": 2}).attention_layers == (1, 3)
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    assert parse_config({**base, "layer_types": kinds, "full_attention_interval": 2}).attention_layers == (0, 3)
    refused({**base, "layer_types": ["linear_attention"] * 4}, "only linear attention")
    refused({**base, "full_attention_interval": 5}, "only linear attention")
