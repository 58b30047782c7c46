"""config.json of Llama 4, Mistral 4, Phi MoE, Qwen 3 Next and others: read as transformers reads it, and what is refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from config_samples import LLAMA, SMALL, refused
from family_models import CASES
from saved_models import saved
from transformers import Llama4TextConfig, Qwen2_5_VLConfig, Qwen3VLConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from effllm import UsageError
from effllm.runtime import families
from effllm.runtime.config import parse_config
from effllm.runtime.moe_config import MoEConfig
from effllm.runtime.prepare import EngineOptions, prepare
from effllm.runtime.rope import rope_table, rope_tables
from effllm.runtime.stores.composite import DEFAULT_SIZES, SIZE_KEYS, text_model_config

# What the published checkpoints state, shortened by the sizes that every config has: nothing in it is unknown.
PUBLISHED = {
    "qwen3_next": {"architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643,
                   "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
                   "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
                   "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [], "moe_intermediate_size": 512,
                   "norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10, "output_router_logits": False,
                   "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
                   "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
                   "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936},
    "deepseek_v32": {"architectures": ["DeepseekV32ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
                     "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "index_head_dim": 128, "index_n_heads": 64,
                     "index_topk": 4096, "initializer_range": 0.02, "kv_lora_rank": 512, "max_position_embeddings": 4096,
                     "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
                     "norm_topk_prob": True, "num_experts_per_tok": 8, "num_key_value_heads": 6, "num_nextn_predict_layers": 1,
                     "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
                     "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4,
                     "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128},
    "glm_moe_dsa": {"architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16",
                    "ep_size": 1, "first_k_dense_replace": 3, "head_dim": 64, "hidden_act": "silu", "index_head_dim": 128,
                    "index_n_heads": 32, "index_topk": 2048, "indexer_rope_interleave": True, "kv_lora_rank": 512,
                    "max_position_embeddings": 2048, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1,
                    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8,
                    "num_key_value_heads": 6, "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 2048, "qk_head_dim": 256,
                    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_interleave": True, "rope_parameters": {
                        "rope_theta": 1000000, "rope_type": "default"}, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
                    "topk_group": 1, "topk_method": "noaux_tc", "use_cache": True, "v_head_dim": 256},
    "bamba": {"architectures": ["BambaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "attn_layer_indices": [2],
              "attn_rotary_emb": 64, "bos_token_id": 1, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu", "mamba_chunk_size": 256,
              "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1,
              "mamba_n_heads": 3, "mamba_proj_bias": False, "max_position_embeddings": 4096, "mlp_bias": False, "num_logits_to_keep": 1,
              "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
              "torch_dtype": "bfloat16", "use_cache": True},
    "hyperclovax": {"architectures": ["HyperCLOVAXForCausalLM"], "activation_function": None, "attention_bias": False,
                    "attention_dropout": 0.0, "attention_multiplier": 0.0078125, "attn_pdrop": 0.0, "auto_map": {
                        "AutoConfig": "configuration_hyperclovax.HyperCLOVAXConfig", "AutoModelForCausalLM":
                        "modeling_hyperclovax.HyperCLOVAXForCausalLM"}, "embd_pdrop": 0.0, "embedding_multiplier": 10.0,
                    "end_token_id": 7, "head_dim": 128, "hidden_act": "silu", "logits_scaling": 0.125, "max_position_embeddings": 131072,
                    "mlp_bias": False, "pretraining_tp": 1, "resid_pdrop": 0.0, "residual_multiplier": 1.0, "rms_norm_eps": 1e-05,
                    "rope_scaling": None, "rope_theta": 100000000, "summary_first_dropout": 0.0, "use_post_norm": True},
    "iquestcoder": {"architectures": ["IQuestCoderForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "auto_map": {
        "AutoConfig": "configuration_iquestcoder.IQuestCoderConfig", "AutoModelForCausalLM":
        "modeling_iquestcoder.IQuestCoderForCausalLM"}, "clip_qkv": None, "head_dim": 128, "hidden_act": "silu", "max_position_embeddings":
        131072, "mlp_bias": False, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0, "sliding_window": None,
        "use_sliding_window": False},
    "jais2": {"architectures": ["Jais2ForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "head_dim": 128, "hidden_act":
              "relu2", "layer_norm_eps": 1e-05, "max_position_embeddings": 8192, "mlp_bias": True, "rope_scaling": None, "rope_theta":
              500000.0, "tie_word_embeddings": False},
    "youtu": {"architectures": ["YoutuForCausalLM"], "attention_bias": False, "auto_map": {
        "AutoConfig": "configuration_youtu.YoutuConfig", "AutoModelForCausalLM": "modeling_youtu.YoutuForCausalLM"},
        "embedding_initializer_range": 0.03, "hidden_act": "silu", "kv_lora_rank": 512, "max_position_embeddings": 131072,
        "num_key_value_heads": 6, "q_lora_rank": 1536, "qk_head_dim": 192, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06, "rope_interleave": True, "rope_theta": 1600000, "tie_word_embeddings": True, "v_head_dim": 128},
    "afmoe": {"architectures": ["AfmoeForCausalLM"], "attention_dropout": 0.0, "auto_map": {
        "AutoConfig": "configuration_afmoe.AfmoeConfig", "AutoModel": "modeling_afmoe.AfmoeModel", "AutoModelForCausalLM":
        "modeling_afmoe.AfmoeForCausalLM"}, "dtype": "bfloat16", "global_attn_every_n_layers": 4, "head_dim": 128, "hidden_act": "silu",
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "load_balance_coeff": 0.001, "max_position_embeddings": 131072,
        "moe_intermediate_size": 1024, "mup_enabled": True, "n_group": 1, "num_dense_layers": 2, "num_expert_groups": 1, "num_experts": 128,
        "num_experts_per_tok": 8, "num_limited_groups": 1, "num_shared_experts": 1, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 10000, "route_norm": True, "route_scale": 2.826, "score_func": "sigmoid", "sliding_window": 2048,
        "tie_word_embeddings": False, "topk_group": 1, "use_cache": True, "use_grouped_mm": True},
    "gpt_neox": {"architectures": ["GPTNeoXForCausalLM"], "attention_probs_dropout_prob": 0, "bos_token_id": 0, "eos_token_id": 0,
                 "hidden_act": "gelu", "hidden_dropout_prob": 0, "initializer_range": 0.02, "layer_norm_eps": 1e-05,
                 "max_position_embeddings": 2048, "num_key_value_heads": None, "rotary_emb_base": 10000, "rotary_pct": 0.25,
                 "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True, "use_parallel_residual": True},
    "phi": {"_name_or_path": "microsoft/phi-2", "architectures": ["PhiForCausalLM"], "attention_dropout": 0.0, "auto_map": {
        "AutoConfig": "configuration_phi.PhiConfig", "AutoModelForCausalLM": "modeling_phi.PhiForCausalLM"}, "embd_pdrop": 0.0,
        "hidden_act": "gelu_new", "initializer_range": 0.02, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
        "num_key_value_heads": 6, "partial_rotary_factor": 0.5, "qk_layernorm": False, "resid_pdrop": 0.1, "rope_scaling": None,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True},
    "olmo": {"architectures": ["OlmoForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None, "hidden_act":
             "silu", "initializer_range": 0.02, "max_position_embeddings": 2048, "num_key_value_heads": 6, "pad_token_id": 1,
             "pretraining_tp": 1, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32",
             "use_cache": True},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "auto_map": {
        "AutoConfig": "configuration_phimoe.PhiMoEConfig", "AutoModelForCausalLM": "modeling_phimoe.PhiMoEForCausalLM"},
        "hidden_act": "silu", "hidden_dropout": 0.0, "initializer_range": 0.02, "input_jitter_noise": 0.01, "lm_head_bias": True,
        "max_position_embeddings": 131072, "num_experts_per_tok": 2, "num_local_experts": 16, "original_max_position_embeddings": 4096,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_scaling": {
            "long_factor": [2.0] * 8, "long_mscale": 1.243163121016122, "original_max_position_embeddings": 4096, "short_factor": [1.0] * 8,
            "short_mscale": 1.243163121016122, "type": "longrope"}, "rope_theta": 10000.0, "router_aux_loss_coef": 0.0,
        "router_jitter_noise": 0.01, "sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True},
    "llama4_text": {  # MobileLLM R1, which lists more layers than it has
        "architectures": ["Llama4ForCausalLM"], "attention_bias": False, "attention_chunk_size": 32768, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "attn_scale": 0.1, "attn_temperature_tuning": False, "bos_token_id": 1, "final_logit_softcapping":
        None, "floor_scale": 8192, "for_llm_compressor": False, "head_dim": 64, "hidden_activation": "silu", "initializer_range": 0.02,
        "interleave_moe_layer_step": 0, "intermediate_size_mlp": 4096, "max_position_embeddings": 32768, "moe_layers": [],
        "no_rope_layers": [1] * 22, "num_experts_per_tok": 0, "num_local_experts": 0, "output_router_logits": False,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-05, "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 8000000.0,
        "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "sliding_window": 512, "tie_word_embeddings": True, "use_qk_norm": True},
    "internlm2": {"architectures": ["InternLM2ForCausalLM"], "attn_implementation": "eager", "auto_map": {
        "AutoConfig": "configuration_internlm2.InternLM2Config", "AutoModel": "modeling_internlm2.InternLM2ForCausalLM",
        "AutoModelForCausalLM": "modeling_internlm2.InternLM2ForCausalLM"}, "bias": False, "bos_token_id": 1, "hidden_act": "silu",
        "initializer_range": 0.02, "max_position_embeddings": 32768, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 2.0, "type": "dynamic"}, "rope_theta": 1000000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "use_cache": True},
    "internlm3": {"architectures": ["InternLM3ForCausalLM"], "attention_dropout": 0.0, "auto_map": {
        "AutoConfig": "configuration_internlm3.InternLM3Config", "AutoModel": "modeling_internlm3.InternLM3Model",
        "AutoModelForCausalLM": "modeling_internlm3.InternLM3ForCausalLM"}, "bias": False, "bos_token_id": 1, "head_dim": 128, "hidden_act":
        "silu", "initializer_range": 0.02, "max_position_embeddings": 32768, "pad_token_id": 2, "qkv_bias": False, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}, "rope_theta": 50000000, "tie_word_embeddings": False, "torch_dtype":
        "bfloat16", "use_cache": True},
    "olmo_hybrid": {"architectures": ["OlmoHybridForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16",
                    "hidden_act": "silu", "initializer_range": 0.02, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
                    "linear_a_log_max": 16.0, "linear_a_log_min": 0.0, "linear_allow_neg_eigval": True, "linear_conv_kernel_dim": 4,
                    "linear_dt_init_floor": 0.0001, "linear_dt_max": 0.1, "linear_dt_min": 0.001, "linear_key_head_dim": 96,
                    "linear_num_key_heads": 30, "linear_num_value_heads": 30, "linear_value_head_dim": 192, "max_position_embeddings":
                    65536, "num_key_value_heads": 6, "pad_token_id": 7, "rms_norm_eps": 1e-06, "rope_parameters": None,
                    "tie_word_embeddings": False, "use_cache": True},
    "mellum": {"architectures": ["MellumForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "head_dim": 128, "hidden_act":
               "silu", "layer_types": ["sliding_attention"] * 3 + ["full_attention"], "max_position_embeddings": 131072,
               "mlp_layer_types": ["sparse"] * 4, "moe_intermediate_size": 896, "norm_topk_prob": True, "num_experts": 64,
               "num_experts_per_tok": 8, "num_mtp_layers": 1, "mtp_layer_types": ["sliding_attention"], "output_router_logits": False,
               "rms_norm_eps": 1e-06, "rope_parameters": {
                   "full_attention": {"rope_theta": 500000.0, "rope_type": "default"},
                   "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}}, "router_aux_loss_coef": 0.001,
               "sliding_window": 1024, "tie_word_embeddings": False},
    "mistral4": {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1, "first_k_dense_replace": 0, "head_dim": 128,
                 "hidden_act": "silu", "kv_lora_rank": 256, "max_position_embeddings": 1048576, "moe_intermediate_size": 2048, "n_group": 1,
                 "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 4, "num_key_value_heads": 6,
                 "q_lora_rank": 1024, "qk_head_dim": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
                 "rope_interleave": True, "rope_parameters": {
                     "beta_fast": 32.0, "beta_slow": 1.0, "factor": 128.0, "llama_4_scaling_beta": 0.1, "max_position_embeddings": 1048576,
                     "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 8192, "partial_rotary_factor": 0.5,
                     "rope_theta": 10000.0, "rope_type": "yarn", "type": "yarn"}, "routed_scaling_factor": 1.0, "tie_word_embeddings":
                 False, "topk_group": 1, "v_head_dim": 128},
    "solar_open": {"architectures": ["SolarOpenForCausalLM"], "attention_bias": False, "auto_map": {
        "AutoConfig": "configuration_solar_open.SolarOpenConfig", "AutoModelForCausalLM": "modeling_solar_open.SolarOpenForCausalLM"},
        "first_k_dense_replace": 0, "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 131072, "moe_intermediate_size": 1280,
        "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "rms_norm_eps":
        1e-05, "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536}, "rope_theta": 1000000,
        "routed_scaling_factor": 1.0, "topk_group": 1, "torch_dtype": "bfloat16"},
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_configs_are_known_to_the_last_key(family: str) -> None:
    """Strict: an unknown key would be an error."""
    config = parse_config({**LLAMA, "eos_token_id": 7, "model_type": family, **PUBLISHED[family]}, strict=True)
    assert config.family == family and config.warnings == ()


@pytest.mark.parametrize(("family", "key", "value"), [
    ("qwen3_next", "mlp_only_layers", [1]), ("qwen3_next", "decoder_sparse_step", 2), ("qwen3_next", "norm_topk_prob", False),
    ("qwen3_next", "use_sliding_window", True), ("qwen3_next", "hidden_act", "gelu"),
    ("deepseek_v32", "layer_types", ["full_attention"] * 4), ("deepseek_v32", "mlp_layer_types", ["dense", "sparse", "mlp", "dense"]),
    ("deepseek_v32", "rope_interleave", False), ("deepseek_v32", "index_topk", 0), ("glm_moe_dsa", "topk_method", "greedy"),
    ("bamba", "attn_layer_indices", []), ("bamba", "attn_layer_indices", [4]), ("bamba", "attn_rotary_emb", 32),
    ("bamba", "partial_rotary_factor", 1.0), ("bamba", "mamba_proj_bias", True), ("bamba", "layer_types", ["linear_attention"] * 4),
    ("bamba", "time_step_limit", [0.001, 0.1]), ("bamba", "mamba_n_heads", 5), ("bamba", "hidden_act", "gelu"),
    ("hyperclovax", "use_post_norm", False), ("hyperclovax", "auto_map", {"AutoModel": "modeling_llama.Llama"}),
    ("iquestcoder", "clip_qkv", 8.0), ("iquestcoder", "use_sliding_window", True), ("jais2", "sliding_window", 40),
    ("youtu", "n_routed_experts", 8), ("youtu", "num_key_value_heads", 2), ("mistral4", "n_group", 2),
    ("afmoe", "route_norm", False), ("afmoe", "score_func", "softmax"), ("afmoe", "n_group", 2), ("afmoe", "num_dense_layers", 5),
    ("afmoe", "auto_map", {"AutoModel": "modeling_llama.Llama"}), ("afmoe", "layer_types", ["chunked_attention"] * 4),
    ("gpt_neox", "sliding_window", 512), ("gpt_neox", "head_dim", 32),
    ("phi", "qk_layernorm", True), ("phi", "auto_map", {"AutoModel": "modeling_mixformer.MixFormer"}), ("phi", "sliding_window", 9),
    ("olmo", "clip_qkv", 0), ("olmo", "sliding_window", 40), ("olmo", "mlp_bias", True),
    ("phimoe", "num_experts_per_tok", 3), ("phimoe", "auto_map", {"AutoModel": "modeling_mixtral.Mixtral"}), ("phimoe", "mlp_bias", True),
    ("internlm2", "auto_map", {"AutoModel": "modeling_internlm.InternLM"}), ("internlm2", "sliding_window", 40),
    ("internlm3", "auto_map", {"AutoModel": "modeling_internlm2.InternLM2"}), ("internlm3", "layer_types", ["chunked_attention"] * 4),
    ("olmo_hybrid", "layer_types", ["linear_attention"] * 4), ("olmo_hybrid", "layer_types", ["full_attention"] * 3 + ["conv"]),
    ("olmo_hybrid", "hidden_act", "gelu"), ("olmo_hybrid", "linear_num_value_heads", 31), ("olmo_hybrid", "sliding_window", 9),
    ("mellum", "mlp_layer_types", ["dense", "moe", "sparse", "sparse"]), ("mellum", "layer_types", ["chunked_attention"] * 4),
    ("mellum", "decoder_sparse_step", 2), ("mistral4", "layer_types", ["sliding_attention"] * 4), ("mistral4", "rope_parameters", {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "partial_rotary_factor": 0.25}),
    ("mistral4", "num_local_experts", 7), ("solar_open", "first_k_dense_replace", 1), ("solar_open", "partial_rotary_factor", 0.5),
    ("solar_open", "auto_map", {"AutoModel": "modeling_other.Other"})])
def test_what_a_family_cannot_do_is_named(family: str, key: str, value: object) -> None:
    refused({**LLAMA, "model_type": family, **PUBLISHED.get(family, {}), key: value}, key)


def test_what_phi_moe_multiplies_turns_by_is_one_number() -> None:
    base = {**LLAMA, "model_type": "phimoe", **PUBLISHED["phimoe"]}
    assert {rope.params["attention_factor"] for rope in parse_config(base).ropes} == {1.243163121016122}
    refused({**base, "rope_scaling": {**base["rope_scaling"], "long_mscale": 1.3}}, "long_mscale")


def test_qwen3_next_has_a_layer_to_draft_by_whatever_its_config_says() -> None:
    base = {**LLAMA, "model_type": "qwen3_next"}
    config = parse_config(base)
    assert config.mtp_layers == 1
    assert config.moe == MoEConfig(512, 10, 512, True, frozenset(range(4)), shared_expert_dim=512, shared_expert_gate=True)
    assert config.attention_layers == (3,) and config.rope.partial_rotary_factor == 0.25
    assert parse_config({**base, "mtp_num_hidden_layers": 0}).mtp_layers == 0


# Of models that take images, as published: flat, or with a text model.
VL_2_5 = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": 7, "eos_token_id": 8,
          "vision_start_token_id": 151652, "vision_end_token_id": 151653, "vision_token_id": 151654, "image_token_id": 151655,
          "video_token_id": 151656, "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 128000,
          "max_window_layers": 28, "model_type": "qwen2_5_vl", "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
          "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vision_config": {
              "depth": 32, "model_type": "qwen2_5_vl"}, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, **SMALL}
SEEING = {
    "qwen3_vl": {"architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655, "text_config": {
        **SMALL, "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 7, "dtype": "bfloat16", "eos_token_id": 8, "head_dim":
        128, "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 262144, "model_type": "qwen3_vl_text",
        "rms_norm_eps": 1e-06, "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000, "use_cache": True}, "tie_word_embeddings": False, "video_token_id": 151656, "vision_config": {},
        "vision_end_token_id": 151653, "vision_start_token_id": 151652},
    "smolvlm": {"architectures": ["SmolVLMForConditionalGeneration"], "image_token_id": 49190, "pad_token_id": 2, "scale_factor": 3,
                "text_config": {**SMALL, "_flash_attn_2_enabled": True, "_name_or_path": "x", "architectures": ["VLlama3ForCausalLM"],
                                "head_dim": 16, "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama",
                                "neftune_noise_alpha": 0.0, "pad_token_id": 2, "perceiver_config": {"qk_layer_norms_perceiver": False},
                                "pixel_shuffle_factor": 4, "qk_layer_norms": False, "rms_norm_eps": 1e-05, "rope_interleaved": False,
                                "rope_theta": 100000, "torch_dtype": "bfloat16", "use_resampler": False},
                "tie_word_embeddings": False, "torch_dtype": "float32", "use_cache": False, "use_reentrant_checkpointing": False,
                "vision_config": {}},
    "glm4v_moe": {"architectures": ["Glm4vMoeForConditionalGeneration"], "image_start_token_id": 151339, "image_end_token_id": 151340,
                  "video_start_token_id": 151341, "video_end_token_id": 151342, "image_token_id": 151363, "video_token_id": 151364,
                  "tie_word_embeddings": False, "vision_config": {}, "text_config": {
                      **SMALL, "pad_token_id": 7, "attention_bias": True, "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu",
                      "partial_rotary_factor": 0.5, "initializer_range": 0.02, "moe_intermediate_size": 1408, "max_position_embeddings":
                      65536, "model_type": "glm4v_moe_text", "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
                      "norm_topk_prob": True, "num_experts_per_tok": 8, "first_k_dense_replace": 1, "rms_norm_eps": 1e-05,
                      "routed_scaling_factor": 1.0, "topk_group": 1, "rope_theta": 10000.0, "use_cache": True, "use_qk_norm": False,
                      "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]}}},
    "llama4": {"architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081,
               "image_token_index": 200092, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vision_config": {}, "text_config": {
                   **SMALL, "attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0, "attn_scale": 0.1,
                   "attn_temperature_tuning": 4, "bos_token_id": 1, "cache_implementation": "hybrid", "eos_token_id": [2, 3],
                   "floor_scale": 8192, "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu", "interleave_moe_layer_step": 1,
                   "intermediate_size_mlp": 16384, "max_position_embeddings": 8000, "model_type": "llama4_text", "no_rope_layers": [],
                   "num_experts_per_tok": 1, "num_local_experts": 16, "output_router_logits": False, "rms_norm_eps": 1e-05,
                   "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings":
                                    8192, "rope_type": "llama3"}, "rope_theta": 500000.0, "router_aux_loss_coef": 0.001,
                   "router_jitter_noise": 0.0, "use_cache": True, "use_qk_norm": True}},
    "mllama": {"architectures": ["MllamaForConditionalGeneration"], "image_token_index": 128256, "torch_dtype": "bfloat16", "vision_config":
               {"model_type": "mllama_vision_model"}, "text_config": {
                   **SMALL, "model_type": "mllama_text_model", "bos_token_id": 1, "cross_attention_layers": [1, 3], "dropout": 0,
                   "eos_token_id": [2, 3], "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 131072,
                   "pad_token_id": 4, "rms_norm_eps": 1e-05, "rope_scaling": {
                       "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
                       "rope_type": "llama3"}, "rope_theta": 500000.0, "tie_word_embeddings": False, "use_cache": True}},
    "glm_ocr": {"architectures": ["GlmOcrForConditionalGeneration"], "image_token_id": 59280, "image_start_token_id": 59256,
                "vision_config": {"model_type": "glm_ocr_vision"}, "text_config": {
                    **SMALL, "model_type": "glm_ocr_text", "attention_bias": False, "num_nextn_predict_layers": 1, "head_dim": 128,
                    "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "partial_rotary_factor": 1.0,
                                        "rope_theta": 10000}}},
    "paddleocr_vl": {"architectures": ["PaddleOCRVLForConditionalGeneration"], "compression_ratio": 1.0, "head_dim": 128, "auto_map": {
        "AutoConfig": "configuration_paddleocr_vl.PaddleOCRVLConfig"}, "ignored_index": -100, "image_token_id": 100295, "use_bias": False,
        "rope_scaling": {"mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"}, "rope_theta": 500000,
        "rope_is_neox_style": True, "use_3d_rope": True, "weight_share_add_bias": True, "vision_config": {}, **SMALL},
    "lfm2_vl": {"architectures": ["Lfm2VlForConditionalGeneration"], "do_image_splitting": True, "downsample_factor": 2,
                "encoder_patch_size": 16, "image_token_index": 396, "max_image_tokens": 256, "max_num_patches": 1024,
                "max_pixels_tolerance": 2.0, "max_tiles": 10, "min_image_tokens": 64, "min_tiles": 2, "projector_bias": True,
                "projector_hidden_act": "gelu", "projector_hidden_size": 2560, "tile_size": 512, "use_image_special_tokens": True,
                "use_thumbnail": True, "vision_config": {}, "vision_feature_layer": -1, "text_config": {
                    **SMALL, "model_type": "lfm2", "layer_types": ["conv", "conv", "full_attention", "conv"], "norm_eps": 1e-5,
                    "block_multiple_of": 256, "conv_L_cache": 3, "conv_bias": False, "rope_theta": 1e6, "tie_embedding": True}}}


@pytest.mark.parametrize("kind", SEEING)
def test_published_models_that_take_images_are_known_to_the_last_key(kind: str) -> None:
    config = parse_config({"model_type": kind, **SEEING[kind]}, strict=True)
    text = parse_config(text_model_config({"model_type": kind, **SEEING[kind]}), strict=kind != "smolvlm")
    assert config.warnings[0].startswith(f"'{kind}' takes images too: effllm reads its text part, {config.family}")
    assert replace(config, warnings=()) == replace(text, warnings=())


def test_a_text_part_may_stand_in_the_outer_object() -> None:
    config = parse_config(VL_2_5, strict=True)
    assert (config.family, config.rope.kind, config.rope.theta, config.windows) == ("qwen2", "default", 1e6, (None,) * 4)
    copied = json.loads(json.dumps(VL_2_5))  # which writes into what it is given
    theirs = Qwen2_5_VLConfig(**{key: value for key, value in copied.items() if key not in ("model_type", "architectures")})
    newer = parse_config(json.loads(theirs.to_json_string()), strict=True)
    assert replace(newer, warnings=(), dtype="bfloat16") == replace(config, warnings=())
    assert text_model_config(VL_2_5)["rope_scaling"] == {"rope_type": "default", "mrope_section": [16, 24, 24]}
    assert "flux" in refused({**VL_2_5, "flux": 1}, "flux", strict=True).message
    refused({**VL_2_5, "model_type": "qwen3_vl"}, "num_hidden_layers is missing")


@pytest.mark.parametrize(("outer", "inner", "tied"), [(None, None, False), (True, None, True), (None, True, True), (False, True, True),
                                                      (False, False, False), (None, False, False)])
def test_a_head_is_the_embedding_where_either_object_says_so(outer: bool | None, inner: bool | None, tied: bool) -> None:
    part = {**SEEING["qwen3_vl"]["text_config"], **({} if inner is None else {"tie_word_embeddings": inner})}
    raw = {"model_type": "qwen3_vl", "text_config": part, **({} if outer is None else {"tie_word_embeddings": outer})}
    assert parse_config(raw).tie_word_embeddings == tied


@pytest.mark.parametrize("text", [
    {"_name_or_path": "x", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "model_type": "llama",
     "rms_norm_eps": 1e-05, "torch_dtype": "float16", "vocab_size": 32064},  # LLaVA 1.5
    {"head_dim": 128, "hidden_size": 5120, "intermediate_size": 14336, "is_composition": True, "max_position_embeddings": 1024000,
     "model_type": "mistral", "num_hidden_layers": 40, "rms_norm_eps": 1e-05, "rope_theta": 1e9, "sliding_window": None,
     "vocab_size": 131072},  # Pixtral
    *[{"model_type": text} for text in sorted(DEFAULT_SIZES) if text != "exaone4_5_text"]])
def test_sizes_that_a_text_part_leaves_out_are_those_of_its_class(text: dict[str, object]) -> None:
    kind = next(kind for kind in ("llava", *families.COMPOSITE) if text["model_type"] in families.COMPOSITE[kind])
    theirs = CONFIG_MAPPING[text["model_type"]](**{key: value for key, value in text.items() if key != "model_type"})
    config = parse_config({"model_type": kind, "vision_config": {}, "text_config": text, "tie_word_embeddings": False,
                           **{key: text[key] for key in ("vocab_size",) if key in text}}, strict=True)
    keys = [key for key in SIZE_KEYS if key != "intermediate_size" or config.moe is None]
    assert [getattr(config, key) for key in keys] == [getattr(theirs, key) for key in keys]
    assert config.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    if kind == "llava":  # an older form, without such a part
        refused({"model_type": kind, "vision_config": {}}, "is missing")


def test_defaults_of_text_parts_are_those_of_transformers() -> None:
    """Of keys absent from `text_config`, where the family by itself has other defaults."""
    for kind, writer in (("qwen2_5_vl", Qwen2_5_VLConfig), ("qwen3_vl", Qwen3VLConfig)):
        theirs = writer(text_config={**SMALL, "num_key_value_heads": 6})
        full = parse_config(json.loads(theirs.to_json_string()))
        bare = parse_config({"model_type": kind, "text_config": {**SMALL, "num_key_value_heads": 6}})
        assert replace(bare, warnings=(), dtype=full.dtype) == replace(full, warnings=())


@pytest.mark.parametrize("force", [False, True])
def test_a_context_beyond_what_is_seen_at_once_is_refused_by_the_number(tmp_path: Path, force: bool) -> None:
    saved(replace(CASES["llama4_text"], changes={**CASES["llama4_text"].changes, "attention_chunk_size": 100}), tmp_path)
    with pytest.raises(UsageError, match="a context of 101 is more than the 100 tokens") as caught:
        prepare(tmp_path, EngineOptions(device="cpu", ctx=101, force=force))
    assert "at most 100" in caught.value.hint
    assert prepare(tmp_path, EngineOptions(device="cpu")).placement.ctx <= 100


@pytest.mark.parametrize(("changes", "most", "key"), [
    ({}, 8191, "floor_scale"), ({"attn_temperature_tuning": False}, 8192, "attention_chunk_size"),
    ({"attention_chunk_size": 100}, 100, "attention_chunk_size"), ({"attention_chunk_size": None, "floor_scale": 501}, 500, "floor_scale"),
    ({"attention_chunk_size": None, "attn_temperature_tuning": False}, None, "")])
def test_llama_4_runs_as_far_as_every_token_sees_all_before_it(changes: dict[str, object], most: int | None, key: str) -> None:
    base = {**SEEING["llama4"]["text_config"], "max_position_embeddings": 262144, **changes}
    config = parse_config(base, strict=True)
    assert config.max_supported_tokens == most and config.context_length == (most or 262144)
    assert [key in said and str(most) in said for said in config.warnings] == [True] * (most is not None)


def test_layers_of_llama_4() -> None:
    base = {**SEEING["llama4"]["text_config"]}
    config = parse_config(base, strict=True)
    assert [rope is not None for rope in config.ropes] == [True, True, True,
                                                           False] and config.qk_norm_unweighted and config.layer_intermediate_sizes == ()
    assert config.moe == MoEConfig(16, 1, 88, False, frozenset(range(4)), sigmoid=True, weights_scale_inputs=True, shared_expert_dim=88)
    other = parse_config({**base, "no_rope_layers": [1, 0, 1, 1], "interleave_moe_layer_step": 2, "use_qk_norm": False})
    assert [rope is not None for rope in other.ropes] == [True, False, True, True] and not other.qk_norm_unweighted
    assert other.moe.layers == {1, 3} and other.layer_intermediate_sizes == (16384, 88, 16384, 88)
    refused({**base, "layer_types": ["sliding_attention"] * 4}, "layer_types")
    refused({**base, "num_local_experts": 0, "moe_layers": [1]}, "num_local_experts", "moe_layers")
    for said in ({"moe_layers": []}, {"interleave_moe_layer_step": 0}, {"num_local_experts": 0, "num_experts_per_tok": 0}):
        dense = parse_config({**base, **said}, strict=True)
        assert dense.moe is None and dense.layer_intermediate_sizes == (16384,) * 4, said
    table = rope_table(config.rope, 128, 8000, 8000)
    theirs = ROPE_INIT_FUNCTIONS["llama3"](Llama4TextConfig(head_dim=128, rope_parameters={**base["rope_scaling"], "rope_theta": 5e5}),
                                           torch.device("cpu"))[0].numpy()
    np.testing.assert_allclose(table.inv_freq, theirs, rtol=1e-6)


def test_positions_of_mistral4_are_those_of_its_published_models_where_it_states_none() -> None:
    stated = {**LLAMA, "model_type": "mistral4", **PUBLISHED["mistral4"]}
    bare = {key: value for key, value in stated.items() if key != "rope_parameters"}
    assert parse_config(stated, strict=True).ropes == parse_config(bare, strict=True).ropes
    still = parse_config({**stated, "rope_parameters": {**stated["rope_parameters"], "llama_4_scaling_beta": 0}})
    assert rope_tables(still, 8192)[0].queries is None
    table = rope_tables(parse_config(stated), 20_000)[0]
    assert table.rotary_dim == 64 and table.queries.rotary_dim == 256 + 64 and not table.queries.inv_freq.any()
    assert table.queries.scale(np.array([0, 8191, 8192]))[:, 0] == pytest.approx([1.0, 1.0, 1.0 + 0.1 * np.log(2.0)])


def test_scores_and_logits_of_hyperclovax() -> None:
    base = {**LLAMA, "model_type": "hyperclovax", **PUBLISHED["hyperclovax"]}
    config = parse_config(base)
    assert (config.attn_scale, config.logits_scaling, config.embedding_multiplier) == (0.0078125, 8.0, 10.0), "logits are multiplied"
    assert parse_config({**base, "attention_multiplier": None}).attn_scale is None
