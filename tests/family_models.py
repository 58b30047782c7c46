"""Tiny random models of every family, created with transformers, for tests: transformers is the oracle for what a checkpoint computes."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch
from family_sizes import (
    CAPS,
    CONTEXT,
    DELTA,
    ERNIE_EXPERTS,
    FALCON,
    FEW_EXPERTS,
    GEMMA_4,
    GEMMA_EXPERTS,
    GLM_EXPERTS,
    GPT_OSS,
    GRANITE,
    GRANITE_4,
    GROWING,
    K_EXPERTS,
    KEYS_AS_VALUES,
    LATENT,
    MAMBA,
    NEMOTRON,
    NEMOTRON_EXPERTS,
    RAMP,
    SHARPENED,
    TWO_ROPES,
    Case,
    rope,
)
from more_family_cases import MORE_CASES
from saved_models import written as written
from transformers import PreTrainedModel

from effllm.runtime.engine import Engine, EngineOptions, open_engine

TOLERANCE = 1e-4  # of the largest logit
CASES = {
    "llama, odd vocabulary": Case("llama", {"vocab_size": 301}),
    "llama, biases": Case("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32, "num_key_value_heads": 4, "hidden_act":
                                    "gelu"}),
    "llama, tied, one KV head": Case("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"}),
    "llama, shards, older dialect": Case("llama", rope("linear", factor=4.0), shard="60KB", older=True),
    "llama, bfloat16": Case("llama", {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64}, dtype="bfloat16"),
    "llama, float16": Case("llama", {"tie_word_embeddings": True}, dtype="float16"),
    "llama, linear": Case("llama", rope("linear", factor=2.0)),
    "llama, dynamic": Case("llama", {**rope("dynamic", factor=2.0), "max_position_embeddings": CONTEXT // 2}),
    "llama, llama3": Case("llama", rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                        original_max_position_embeddings=64)),
    "llama, yarn": Case("llama", rope("yarn", factor=8.0, original_max_position_embeddings=64)),
    "llama, longrope": Case("llama", rope("longrope", short_factor=RAMP, long_factor=[4 * x for x in RAMP],
                                          original_max_position_embeddings=64)),
    "mistral, window": Case("mistral", {"sliding_window": 40, "num_key_value_heads": 1}),
    "mistral, window over pages": Case("mistral", {"sliding_window": 150}),
    "mistral, no window": Case("mistral", {"sliding_window": None}),
    "mistral, images": Case("mistral", {"sliding_window": 40}, images=True),
    "ministral3": Case("ministral3", {"head_dim": 32, "rope_parameters": GROWING}),
    "ministral3, images, bfloat16": Case("ministral3", {"head_dim": 16, "rope_parameters": {**GROWING, "factor": 2.0}, "sliding_window":
                                                        150}, dtype="bfloat16", images=True),
    "qwen2": Case("qwen2", {"tie_word_embeddings": True, "vocab_size": 301}),
    "qwen2, windows above": Case("qwen2", {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1}),
    "qwen3": Case("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3, mixed layers": Case("qwen3", {"head_dim": 16, "attention_bias": True, "use_sliding_window": True, "sliding_window": 70,
                                          "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "qwen3_5_text": Case("qwen3_5_text", {**DELTA, "attention_bias": True, "vocab_size": 301}, shard="100KB"),
    "qwen3_5_text, other layers": Case("qwen3_5_text", {
        **DELTA, "num_hidden_layers": 5, "layer_types": ["full_attention", *["linear_attention"] * 3, "full_attention"], "head_dim": 16,
        "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 2, "linear_value_head_dim": 40,
        "tie_word_embeddings": True, **rope("default", partial_rotary_factor=0.5)}, dtype="float16"),
    # With weights as wide as the others' transformers itself is 2e-4 of the largest logit from what float64 makes of the model.
    "qwen3_5_moe_text": Case("qwen3_5_moe_text", {**DELTA, **FEW_EXPERTS, "shared_expert_intermediate_size": 56,
                                                  "initializer_range": 0.12}),
    "qwen3_5_moe, images, bfloat16": Case("qwen3_5_moe_text", {**DELTA, **FEW_EXPERTS, "shared_expert_intermediate_size": 104},
                                          dtype="bfloat16", images=True),
    "qwen3_5, images, bfloat16": Case("qwen3_5_text", DELTA, dtype="bfloat16", images=True),
    "lfm2": Case("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "vocab_size": 301, "block_multiple_of": 16}),
    "lfm2, other taps, bfloat16": Case("lfm2", {
        "num_hidden_layers": 4, "full_attn_idxs": [0, 3], "conv_L_cache": 5, "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": False, "num_key_value_heads": 1}, dtype="bfloat16"),
    "lfm2_moe": Case("lfm2_moe", {**FEW_EXPERTS, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2, "num_dense_layers":
                                  1, "routed_scaling_factor": 1.5}),
    "lfm2_moe, nothing corrected, bfloat16": Case("lfm2_moe", {
        **FEW_EXPERTS, "layer_types": ["full_attention", "conv", "conv"], "num_dense_layers": 0, "use_expert_bias": False,
        "norm_topk_prob": False}, dtype="bfloat16"),
    "phi3": Case("phi3", {"sliding_window": 50, "hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}, dtype="bfloat16"),
    "phi3, longrope over half a head": Case("phi3", {**rope("longrope", short_factor=RAMP[:4], long_factor=[4 * x for x in RAMP[:4]],
                                                            partial_rotary_factor=0.5), "original_max_position_embeddings": 64}),
    "apertus": Case("apertus", {"head_dim": 32, "vocab_size": 301}),
    "apertus, biases, tied, bfloat16": Case("apertus", {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1,
                                                        **rope("default")}, dtype="bfloat16"),
    "arcee": Case("arcee", {"head_dim": 32, "vocab_size": 301, **rope("yarn", factor=8.0, original_max_position_embeddings=64)}),
    "arcee, biases, float16": Case("arcee", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, dtype="float16"),
    "bitnet": Case("bitnet", {"vocab_size": 301}),
    "bitnet, biases, tied, bfloat16": Case("bitnet", {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1},
                                           dtype="bfloat16"),
    "ernie4_5": Case("ernie4_5", {"head_dim": 32, "vocab_size": 301}),
    "ernie4_5, biases, yarn, bfloat16": Case("ernie4_5", {"head_dim": 16, "use_bias": True, "tie_word_embeddings": False,
                                                          **rope("yarn", factor=8.0, original_max_position_embeddings=64)},
                                             dtype="bfloat16"),
    "exaone4": Case("exaone4", {"head_dim": 32, "sliding_window": 40, "layer_types": TWO_ROPES["layer_types"]}),
    "exaone4, every second, bfloat16": Case("exaone4", {"sliding_window": 150, "sliding_window_pattern": 2, **rope("linear", factor=4.0)},
                                            dtype="bfloat16"),
    "exaone4, no windows": Case("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True}),
    "gemma": Case("gemma", {"head_dim": 12, "attention_bias": True, "hidden_act": "gelu", "num_key_value_heads": 1}),
    "gemma, bfloat16": Case("gemma", {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 90,
                                      "tie_word_embeddings": False}, dtype="bfloat16"),
    "gemma2": Case("gemma2", {**CAPS, "head_dim": 12, "attention_bias": True, "sliding_window": 40, "query_pre_attn_scalar": 20}),
    "gemma2, bfloat16": Case("gemma2", {**CAPS, "head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 90,
                                        "sliding_window": 150}, dtype="bfloat16"),
    "gemma3_text": Case("gemma3_text", {**TWO_ROPES, "head_dim": 32, "final_logit_softcapping": 3.0, "tie_word_embeddings": False}),
    "gemma3": Case("gemma3_text", {**TWO_ROPES, "head_dim": 16, "attention_bias": True}, images=True),
    "gemma4_text": Case("gemma4_text", GEMMA_4),
    "gemma4_text, windows over pages, bfloat16": Case("gemma4_text", {
        **GEMMA_4, "sliding_window": 150, "num_kv_shared_layers": 3, "use_double_wide_mlp": False, "vocab_size_per_layer_input": 310,
        "hidden_size_per_layer_input": 12}, dtype="bfloat16"),
    "gemma4_text, keys as values": Case("gemma4_text", {**GEMMA_4, **KEYS_AS_VALUES, "attention_bias": True}),
    "gemma4_text, mixture": Case("gemma4_text", {**GEMMA_4, **KEYS_AS_VALUES, **GEMMA_EXPERTS}),
    "gemma4, images, bfloat16": Case("gemma4_text", {**GEMMA_4, **KEYS_AS_VALUES, **GEMMA_EXPERTS, "hidden_size_per_layer_input": 16,
                                                     "pad_token_id": 0}, dtype="bfloat16", images=True),
    "gemma4_unified": Case("gemma4_unified_text", {**{key: value for key, value in GEMMA_4.items() if "per_layer_input" not in key},
                                                   "attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0,
                                                   "use_double_wide_mlp": False, "initializer_range": 0.12, "pad_token_id": 0},
                           images=True),
    "glm": Case("glm", {"head_dim": 32, "vocab_size": 301}),
    "glm, whole heads, no biases, float16": Case("glm", {"head_dim": 16, "attention_bias": False, "tie_word_embeddings": True,
                                                         **rope("default", partial_rotary_factor=1.0)}, dtype="float16"),
    "glm4": Case("glm4", {"head_dim": 32, "num_key_value_heads": 1}, shard="60KB"),
    "glm4, yarn, older dialect, bfloat16": Case("glm4", {"head_dim": 64, "attention_bias": False, **rope(
        "yarn", factor=8.0, original_max_position_embeddings=64, partial_rotary_factor=0.25)}, dtype="bfloat16", older=True),
    "olmo2": Case("olmo2", {"attention_bias": True, "vocab_size": 301}, shard="60KB"),
    "olmo3": Case("olmo3", {"attention_bias": True, "sliding_window": 40, "layer_types": TWO_ROPES["layer_types"], "rope_parameters": {
        "full_attention": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 50_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}}),
    "olmo3, usual layers, bfloat16": Case("olmo3", {"num_hidden_layers": 4, "sliding_window": 150}, dtype="bfloat16"),
    "seed_oss": Case("seed_oss", {"head_dim": 32, "vocab_size": 301, **rope("yarn", factor=8.0, original_max_position_embeddings=64)}),
    "seed_oss, other biases, float16": Case("seed_oss", {"head_dim": 16, "attention_bias": False, "attention_out_bias": True, "mlp_bias":
                                                         True, "tie_word_embeddings": True}, dtype="float16"),
    "smollm3": Case("smollm3", {"no_rope_layers": [1, 0, 1], "attention_bias": True, "mlp_bias": True}),
    "smollm3, windows": Case("smollm3", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 45}),
    "starcoder2": Case("starcoder2", {"head_dim": 32, "vocab_size": 301, "sliding_window": 40}),
    "starcoder2, no biases, bfloat16": Case("starcoder2", {"use_bias": False, "tie_word_embeddings": False, "hidden_act": "gelu"},
                                            dtype="bfloat16"),
    "nemotron": Case("nemotron", {"head_dim": 32, "vocab_size": 301}),
    "nemotron, biases, bfloat16": Case("nemotron", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
                                                    "num_key_value_heads": 1, **rope("default", partial_rotary_factor=0.25)},
                                       dtype="bfloat16"),
    "stablelm": Case("stablelm", {"use_qkv_bias": True, "vocab_size": 301, "layer_norm_eps": 1e-3}),
    "stablelm, tied, float16": Case("stablelm", {"tie_word_embeddings": True, **rope("linear", factor=4.0, partial_rotary_factor=0.5)},
                                    dtype="float16"),
    "granite": Case("granite", {"attention_multiplier": 0.3, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
                                "logits_scaling": 7.0, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "granitemoe": Case("granitemoe", {**GRANITE, "num_local_experts": 7, "num_experts_per_tok": 3}),
    "granitemoe, bfloat16": Case("granitemoe", {**GRANITE, "num_local_experts": 3, "num_experts_per_tok": 1, "tie_word_embeddings": True},
                                 dtype="bfloat16"),
    "granitemoeshared": Case("granitemoeshared", {**GRANITE, "num_local_experts": 7, "num_experts_per_tok": 3,
                                                  "shared_intermediate_size": 104}),
    "granitemoeshared, bfloat16": Case("granitemoeshared", {**GRANITE, "num_local_experts": 3, "num_experts_per_tok": 1,
                                                            "shared_intermediate_size": 40, "tie_word_embeddings": True}, dtype="bfloat16"),
    "granitemoehybrid": Case("granitemoehybrid", {**GRANITE, **GRANITE_4}),
    "granitemoehybrid, state spaces": Case("granitemoehybrid", {
        **GRANITE, **GRANITE_4, **MAMBA, "num_hidden_layers": 4, "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "vocab_size": 301}),
    "granitemoehybrid, experts, bfloat16": Case("granitemoehybrid", {
        **GRANITE, **GRANITE_4, **MAMBA, "num_local_experts": 6, "num_experts_per_tok": 2, "layer_types": ["mamba", "mamba", "attention"],
        "mamba_conv_bias": False, "position_embedding_type": None, "tie_word_embeddings": False}, dtype="bfloat16"),
    "granitemoehybrid, no positions, bfloat16": Case("granitemoehybrid", {**GRANITE, **GRANITE_4, "position_embedding_type": None},
                                                     dtype="bfloat16"),
    "nemotron_nas": Case("nemotron_nas", {"num_hidden_layers": 6, "head_dim": 32, "block_configs": [
        {"attention": {"no_op": not heads, "n_heads_in_group": heads}, "ffn": {"no_op": not width, "intermediate_size": width}}
        for heads, width in ((2, 56), (None, 88), (4, None), (None, None), (4, 40), (None, 88))], **rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)}),
    "nemotron_h": Case("nemotron_h", {
        **NEMOTRON, "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp", "mamba", "mlp", "mamba"], "vocab_size": 301}),
    "nemotron_h, no bias, bfloat16": Case("nemotron_h", {
        **NEMOTRON, "layers_block_type": ["attention", "mamba", "mlp"], "use_conv_bias": False, "tie_word_embeddings": True, "n_groups": 1},
        dtype="bfloat16"),
    "nemotron_h, experts": Case("nemotron_h", {
        **NEMOTRON, **NEMOTRON_EXPERTS, "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe", "mamba", "mlp", "mamba"]}),
    "nemotron_h, experts of fewer numbers": Case("nemotron_h", {
        **NEMOTRON, **NEMOTRON_EXPERTS, "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe"], "moe_latent_size": 24}),
    "nemotron_h, groups of experts, bfloat16": Case("nemotron_h", {
        **NEMOTRON, **NEMOTRON_EXPERTS, "layers_block_type": ["mamba", "moe", "attention", "moe"], "n_group": 4, "topk_group": 2,
        "norm_topk_prob": False, "routed_scaling_factor": 1.0}, dtype="bfloat16"),
    "falcon_h1": Case("falcon_h1", {**FALCON, "vocab_size": 301}),
    "falcon_h1, norms, tied, bfloat16": Case("falcon_h1", {
        **FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 3, "mamba_conv_bias": False, "mamba_d_conv": 3,
        "tie_word_embeddings": True, "num_key_value_heads": 1}, dtype="bfloat16"),
    "falcon_h1, no multipliers": Case("falcon_h1", {key: value for key, value in FALCON.items() if "multiplier" not in key}),
    "ernie4_5_moe": Case("ernie4_5_moe", {**ERNIE_EXPERTS, "use_bias": False}),
    "ernie4_5_moe, some layers dense, bfloat16": Case("ernie4_5_moe", {
        **ERNIE_EXPERTS, "num_hidden_layers": 5, "moe_layer_start_index": 2, "moe_layer_end_index": 3, "moe_num_shared_experts": 1,
        "moe_num_experts": 5, "tie_word_embeddings": False}, dtype="bfloat16"),
    "ernie4_5_moe, nothing shared, every second": Case("ernie4_5_moe", {
        **ERNIE_EXPERTS, "num_hidden_layers": 4, "moe_layer_start_index": 0, "moe_layer_interval": 2, "moe_num_shared_experts": 0}),
    "opt": Case("opt", {"ffn_dim": 88, "init_std": 0.2}),
    "opt, no biases": Case("opt", {"hidden_size": 160, "num_attention_heads": 2, "ffn_dim": 88, "init_std": 0.2, "enable_bias": False,
                                   "activation_function": "gelu", "tie_word_embeddings": False}, dtype="float16"),
    "mixtral": Case("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "hidden_act": "gelu"}),
    "mixtral, window, bfloat16": Case("mixtral", {"num_local_experts": 4, "sliding_window": 40, "tie_word_embeddings": True},
                                      dtype="bfloat16"),
    "qwen3_moe": Case("qwen3_moe", {**FEW_EXPERTS, "head_dim": 32, "norm_topk_prob": True, "tie_word_embeddings": True}),
    "qwen3_moe, some layers dense": Case("qwen3_moe", {**FEW_EXPERTS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers":
                                                       [3], "attention_bias": True, "use_sliding_window": True, "sliding_window": 70}),
    "qwen3_moe, bfloat16": Case("qwen3_moe", {**FEW_EXPERTS, "norm_topk_prob": True}, dtype="bfloat16"),
    "qwen2_moe": Case("qwen2_moe", {**FEW_EXPERTS, "shared_expert_intermediate_size": 56}),
    "qwen2_moe, some layers dense, bfloat16": Case("qwen2_moe", {
        **FEW_EXPERTS, "shared_expert_intermediate_size": 104, "norm_topk_prob": True, "qkv_bias": False, "mlp_only_layers": [1],
        "tie_word_embeddings": True}, dtype="bfloat16"),
    "glm4_moe": Case("glm4_moe", {**GLM_EXPERTS, "attention_bias": True, "use_qk_norm": True, "head_dim": 32}),
    "glm4_moe, no sum of 1, bfloat16": Case("glm4_moe", {**GLM_EXPERTS, "norm_topk_prob": False, "n_shared_experts": 1,
                                                         "tie_word_embeddings": True}, dtype="bfloat16"),
    "deepseek_v2": Case("deepseek_v2", {**LATENT, **SHARPENED, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy"}),
    "deepseek_v2, queries at once, bfloat16": Case("deepseek_v2", {
        **LATENT, "q_lora_rank": None, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        "tie_word_embeddings": True}, dtype="bfloat16"),
    "deepseek_v3": Case("deepseek_v3", {**LATENT, **SHARPENED, "n_group": 4, "topk_group": 2, "attention_bias": True}),
    "deepseek_v3, one group, halves, shards, float16": Case("deepseek_v3", {
        **LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_interleave": False, "num_attention_heads": 2,
        "num_key_value_heads": 2, "kv_lora_rank": 134, "norm_topk_prob": False}, dtype="float16", shard="60KB"),
    "glm4_moe_lite": Case("glm4_moe_lite", {**LATENT, "rms_norm_eps": 1e-2, "num_attention_heads": 20, "num_key_value_heads": 20}),
    "glm4_moe_lite, older dialect, bfloat16": Case("glm4_moe_lite", {
        **LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"], "attention_bias": True, "tie_word_embeddings": True,
        **rope("yarn", factor=8.0, original_max_position_embeddings=64)}, dtype="bfloat16", older=True),
    "dots1": Case("dots1", {**GLM_EXPERTS, "head_dim": 32, "norm_topk_prob": True, "sliding_window": 40, "max_window_layers": 1}),
    "dots1, no windows, bfloat16": Case("dots1", {**GLM_EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 0,
                                                      "sliding_window": None, "attention_bias": True}, dtype="bfloat16"),
    "minimax_m2": Case("minimax_m2", {"num_local_experts": 12, "num_experts_per_tok": 3, "intermediate_size": 40, "head_dim": 32,
                                      "rotary_dim": 16}),
    "minimax_m2, older dialect, bfloat16": Case("minimax_m2", {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40,
                                                               "head_dim": 16, **rope("default", partial_rotary_factor=0.5)},
                                                dtype="bfloat16", older=True),
    "exaone_moe": Case("exaone_moe", {**K_EXPERTS, "head_dim": 32, "sliding_window": 40, "layer_types": TWO_ROPES["layer_types"],
                                      "n_group": 4, "topk_group": 2}),
    "exaone_moe, every second, bfloat16": Case("exaone_moe", {**K_EXPERTS, "sliding_window": 150, "sliding_window_pattern": 2,
                                                              "norm_topk_prob": False, "num_shared_experts": 1,
                                                              "first_k_dense_replace": 2},
                                               dtype="bfloat16"),
    "hunyuan_v1_dense": Case("hunyuan_v1_dense", {"head_dim": 32, "vocab_size": 301}),
    "hunyuan_v1_dense, alpha, bfloat16": Case("hunyuan_v1_dense", {
        "head_dim": 16, "tie_word_embeddings": True, "attention_bias": True, "num_key_value_heads": 1,
        **rope("dynamic", alpha=1000.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=1.0)}, dtype="bfloat16"),
    "hunyuan_v1_dense, dynamic, older dialect": Case("hunyuan_v1_dense", {
        "head_dim": 16, **rope("dynamic", factor=2.0), "max_position_embeddings": CONTEXT // 2}, older=True),
    "hunyuan_v1_moe": Case("hunyuan_v1_moe", {"head_dim": 32, "num_experts": 12, "moe_topk": 3, "intermediate_size": 40}),
    "hunyuan_v1_moe, alpha, bfloat16": Case("hunyuan_v1_moe", {
        "head_dim": 16, "num_experts": 5, "moe_topk": 1, "tie_word_embeddings": True, "attention_bias": True,
        **rope("dynamic", alpha=1000.0, factor=1.0)}, dtype="bfloat16"),
    "cohere": Case("cohere", {"vocab_size": 301, "logit_scale": 0.3}),
    "cohere, biases, a head, float16": Case("cohere", {"attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 4,
                                                       "hidden_act": "gelu"}, dtype="float16"),
    "cohere, norms of every head": Case("cohere", {"use_qk_norm": True, "layer_norm_eps": 1e-3}),
    "cohere, norms of every head, bfloat16": Case("cohere", {"use_qk_norm": True, "num_key_value_heads": 1, "attention_bias": True},
                                                  dtype="bfloat16"),
    "cohere2": Case("cohere2", {"num_hidden_layers": 4, "sliding_window": 40, "logit_scale": 0.25, "layer_norm_eps": 1e-3}),
    "cohere2, other layers, bfloat16": Case("cohere2", {"sliding_window": 150, "attention_bias": True, "layer_types": [
        "full_attention", "sliding_attention", "full_attention"], **rope("linear", factor=4.0)}, dtype="bfloat16"),
    "gpt_oss": Case("gpt_oss", {**GPT_OSS, "sliding_window": 40}),
    "gpt_oss, bfloat16": Case("gpt_oss", {**GPT_OSS, "sliding_window": 150, "tie_word_embeddings": True, "num_experts_per_tok": 4,
                                          "rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 8.0, "truncate": True,
                                                              "original_max_position_embeddings": 64}}, dtype="bfloat16"),
    "olmoe": Case("olmoe", {"num_experts": 9, "num_experts_per_tok": 4, "vocab_size": 301, "eos_token_id": None}),
    "olmoe, one expert, float16": Case("olmoe", {"num_experts": 3, "num_experts_per_tok": 1, "attention_bias": True, "norm_topk_prob": True,
                                                 "num_key_value_heads": 4, "eos_token_id": None}, dtype="float16"),
    **MORE_CASES,
}


# Model -> (its tensors when it was copied, each with how often it was written to; the copies by type).
COPIES: WeakKeyDictionary[PreTrainedModel, tuple[list[tuple[torch.Tensor, int]], dict[torch.dtype, PreTrainedModel]]] = WeakKeyDictionary()


def state(model: PreTrainedModel) -> list[tuple[torch.Tensor, int]]:
    return [(tensor, 0 if tensor.is_inference() else tensor._version) for tensor in (*model.parameters(), *model.buffers())]


def same(current: list[tuple[torch.Tensor, int]], previous: list[tuple[torch.Tensor, int]]) -> bool:
    return len(current) == len(previous) and all(a is b and written == version for (a, written), (b, version) in zip(current, previous))


def oracle(model: PreTrainedModel, ids: list[int], dtype: torch.dtype = torch.float64) -> np.ndarray:
    """The model's logits in float64, [T, V]: in float32 transformers itself is off by up to 1e-4 of the largest logit.

    The float64 copy is cached for the next text, since making it takes as long as running one: until the model has other tensors (our
    angles), or the text changed those of the copy (frequencies that depend on length).
    """
    snapshot, copies = COPIES.get(model, ([], {}))
    if not same(current := state(model), snapshot):
        COPIES[model] = current, (copies := {})
    exact = copies.pop(dtype, None) or deepcopy(model).to(dtype)
    for module in exact.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"  # the other implementations do not support float64
    exact_state = state(exact)
    with torch.inference_mode():
        logits = exact(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    if same(state(exact), exact_state):
        copies[dtype] = exact
    return logits


def text(model: PreTrainedModel, length: int) -> list[int]:
    return np.random.default_rng(length).integers(0, model.config.get_text_config().vocab_size, length).tolist()


def rotary_of(model: PreTrainedModel) -> torch.nn.Module | None:
    """The rotary positions of a model, or of the text model in it."""
    base, names = model, ("language_model", "text_model", "model", "gpt_neox")
    while (inner := next((part for part in map(base._modules.get, names) if part is not None), None)) is not None:
        base = inner
    return getattr(base, "rotary_emb", None)


def share_angles(engine: Engine, model: PreTrainedModel) -> None:
    """Make the oracle use our RoPE frequencies, after checking that they equal its own.

    Powers of theta differ in their last bits between NumPy and torch, depending on the processor's vector units, and so do angles in the
    hundreds: with random weights this amounts to up to 2e-4 of the largest logit.
    """
    rotary, tables = rotary_of(model), {id(table): table for table in engine.model.ropes if table is not None}
    if rotary is not None and hasattr(rotary, "inv_freq") and len(tables) == 1:
        our_frequencies, = (abs(table.inv_freq) for table in tables.values())  # negative where the model rotates in the opposite direction
        if model.config.model_type == "ernie4_5_vl_moe":  # its frequencies are ordered by axis: rows, then columns
            num_spatial = sum(rotary.mrope_section[:2])
            our_frequencies = our_frequencies[[*range(0, num_spatial, 2), *range(1, num_spatial, 2),
                                               *range(num_spatial, len(our_frequencies))]]
        log_scale = getattr(rotary, "alpha", torch.zeros(1)).detach()
        assert np.allclose((rotary.inv_freq * log_scale.exp()).numpy(), our_frequencies, rtol=1e-6, atol=0)
        log_scale.zero_()
        rotary.inv_freq = torch.from_numpy(our_frequencies.copy())


def assert_close(result: np.ndarray, expected: np.ndarray, in_float32: Callable[[], np.ndarray] | None = None) -> None:
    """Assert that logits are within TOLERANCE of the largest one.

    in_float32: transformers' logits in float32. Random weights may amplify rounding beyond the tolerance; at such tokens twice their
    error is allowed.
    """
    assert result.shape == expected.shape
    scale, errors = np.abs(expected).max(), np.abs(result - expected).max(1)
    bound = np.full(len(errors), TOLERANCE * scale)
    if in_float32 is not None and (errors > bound).any():
        bound = np.maximum(bound, 2 * np.abs(in_float32() - expected).max(1))
    worst = np.argmax(errors - bound)
    assert errors[worst] <= bound[worst], f"token {worst} differs by {errors[worst]:.2e}, {errors[worst] / scale:.2e} of the largest logit"


def our_logits(folder: Path, ids: list[int], reference_model: PreTrainedModel | None = None) -> np.ndarray:
    """Our logits for `ids`. `reference_model` is given our RoPE frequencies, if it is not None."""
    *_, engine = open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=256, strict=True, exact=True))
    try:
        if reference_model is not None:
            share_angles(engine, reference_model)
        return np.concatenate([logits.copy() for _, logits in engine.score(ids)])
    finally:
        engine.close()


def assert_logits_match(folder: Path, model: PreTrainedModel, ids: list[int]) -> None:
    ours = our_logits(folder, ids, model)
    assert_close(ours, oracle(model, ids))
