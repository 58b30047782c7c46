"""Small random models of every family that can be exported to GGUF, and operations on the files."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from family_models import (
    ERNIE_EXPERTS,
    FALCON,
    GEMMA_4,
    GEMMA_EXPERTS,
    GLM_EXPERTS,
    GRANITE,
    GRANITE_4,
    GROWING,
    K_EXPERTS,
    KEYS_AS_VALUES,
    LATENT,
    NEMOTRON,
    NEMOTRON_EXPERTS,
    Case,
    rope,
)
from family_sizes import KIMI, OF_BLOCKS, ONE_GROUP, SAME_SCALES
from more_family_cases import INDEXED, LING, MIMO_2, MINIMAX_3
from saved_models import saved
from saved_tokenizers import with_words_of_fable
from unusual_family_cases import GLM_5_NEXT, HY_4
from variant_family_cases import DBRX

from effllm.runtime.engine import Engine, open_engine
from effllm.runtime.gguf.export import Exported, export_gguf
from effllm.runtime.prepare import EngineOptions

SIZES = {"vocab_size": 4096, "intermediate_size": 96, "eos_token_id": None}
GEMMA = {"head_dim": 32, "sliding_window": 24, "query_pre_attn_scalar": 32}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
# Three heads of values for each of keys, of one width.
LINEAR = {"num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 32,
          "linear_value_head_dim": 32}
SU = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.4 * i for i in range(8)],
      "original_max_position_embeddings": 64}
GEMMA_4_FILE = {"sliding_window": 24, "vocab_size_per_layer_input": 4096, "hidden_size_per_layer_input": 64, "initializer_range": 0.12}
# Twice as wide as the model, as llama.cpp has it.
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 16}
FALCON_FILE = {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}
# Multipliers by which 16-bit weights are multiplied exactly.
POWERS = {"attention_in_multiplier": 0.5, "attention_out_multiplier": 4.0, "embedding_multiplier": 8.0, "key_multiplier": 2.0,
          "lm_head_multiplier": 0.25, "mlp_multipliers": [0.5, 0.25], "ssm_in_multiplier": 2.0, "ssm_out_multiplier": 0.125,
          "ssm_multipliers": [0.25, 0.5, 1.0, 2.0, 0.125]}
HEADS = {"mamba_num_heads": 6, "mamba_head_dim": 32, "ssm_state_size": 16}  # of state spaces
# As wide as the one size is in its parts.
OF_MINICPM = {"num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
              "initializer_range": 0.1}
OF_STEP = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 5, "head_dim": 32,
           "sliding_window": 24, "share_expert_dim": 64, "mlp_layer_types": ["dense", *["sparse"] * 4], "layer_types": [
               "full_attention", *["sliding_attention"] * 3, "full_attention"], "num_sliding_attention_heads": 6,
           "moe_router_scaling_factor": 2.5, "pad_token_id": 1, "initializer_range": 0.12, "rope_parameters": {
               "full_attention": {"rope_type": "default", "rope_theta": 50_000.0, "partial_rotary_factor": 0.5},
               "sliding_attention": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0}}}
# As llama.cpp has it: gates that are sigmoids, words numbered by the usual seed.
OF_QWEN_4 = {**LINEAR, **EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "hc_lowrank": 32, "hc_count": 2,
             "eos_token_id": [7, 9], "ple_layer_ids": [2], "ple_embed_dim": 64, "heads_per_ngram": 2, "ngram_vocab_size_base": 100,
             "split_ngram_parts": 3, "make_ngram_vocab_size_divisible_by": 16, "indexer_n_heads": 4, "indexer_kv_heads": 1,
             "indexer_head_dim": 32, "indexer_budget": 512, "indexer_compress_ratio": 4, "initializer_range": 0.12,
             "output_gate_type": "sigmoid", **rope("default", partial_rotary_factor=0.25)}
# As wide as blocks are, and with as many heads of either kind.
OF_DECAYS = {"num_key_value_heads": 4, "num_attention_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
             "qk_rope_head_dim": 32, "moe_intermediate_size": 64, "initializer_range": 0.12}
OF_GLM_5 = {**GLM_5_NEXT, **OF_DECAYS, **ONE_GROUP, "qk_rope_head_dim": 0, "q_lora_rank": 64, "linear_head_dim": 32, "linear_num_heads": 4,
            "index_topk": 128, "index_kpool": 4, "hc_mult": 4}
OF_INDEX = {**INDEXED, "index_head_dim": 64}  # as wide as llama.cpp turns index keys before it scores them
OF_SPACES = {"num_heads": 4, "head_dim": 32, "n_groups": 2, "state_size": 32, "expand": 2}  # of Mamba 2
MODELS = {
    "llama": Case("llama", {"tie_word_embeddings": True}),
    "gpt2": Case("gpt2", {"hidden_size": 128}),
    "gpt2, other widths, own head": Case("gpt2", {"n_inner": 96, "tie_word_embeddings": False, "n_positions": 256}),
    "gpt_neox": Case("gpt_neox", {"num_key_value_heads": 4, "hidden_size": 128}),
    "gpt_neox, one behind the other": Case("gpt_neox", {"use_parallel_residual": False, "hidden_size": 128, "num_key_value_heads": 4,
                                                        **rope("default", partial_rotary_factor=1.0)}),
    "internlm2": Case("internlm2"),
    "internlm3": Case("internlm3", {"head_dim": 32}),
    "iquestcoder": Case("iquestcoder", {"head_dim": 32}),
    "mistral": Case("mistral", {"sliding_window": None, "head_dim": 32}),
    "ministral3": Case("ministral3", {"head_dim": 32, "rope_parameters": GROWING}),
    "qwen2": Case("qwen2"),
    "qwen3": Case("qwen3", {"head_dim": 32}),
    "phi": Case("phi", {"num_key_value_heads": 4, "hidden_size": 128}),
    "phi, tied": Case("phi", {"tie_word_embeddings": True, "hidden_size": 128, **rope("default", partial_rotary_factor=0.25)}),
    "phi3": Case("phi3"),
    "phi3, longrope": Case("phi3", rope("longrope", **SU)),
    "phi3, half a head": Case("phi3", {"hidden_size": 128, "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}),
    "afmoe": Case("afmoe", {**EXPERTS, "moe_intermediate_size": 32, "num_hidden_layers": 5, "head_dim": 32, "sliding_window": 24,
                            "num_shared_experts": 2, "mup_enabled": True, "route_scale": 2.5, "num_dense_layers": 1,
                            "initializer_range": 0.12}),
    "step3p5": Case("step3p5", {**OF_STEP, "swiglu_limits": [0, 0, 0.4, 0.7, 0], "swiglu_limits_shared": [0, 0.5, 0.3, 0, 0]},
                    inside="step3p7"),
    "step3p5, llama3, no bounds": Case("step3p5", {**OF_STEP, "rope_parameters": {**OF_STEP["rope_parameters"], "full_attention": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 50_000.0,
        "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5}}}, inside="step3p7"),
    "muse_glimmer_text": Case("muse_glimmer_text", {"num_hidden_layers": 5, "head_dim": 32, "sliding_window": 24, "qk_scale_factor": 2.5,
                                                    "output_multiplier": 0.5}, inside="muse_glimmer"),
    "kolibri1": Case("kolibri1", {**EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "num_hidden_layers": 5,
                                  "head_dim": 32, "sliding_window": 24, "initializer_range": 0.12}),
    "kolibri1, shares add up, other layers, tied": Case("kolibri1", {
        **EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "head_dim": 32, "sliding_window": 24,
        "norm_topk_prob": True, "tie_word_embeddings": True, "initializer_range": 0.12, "layer_types": [
            "full_attention", "sliding_attention", "sliding_attention"]}),
    "laguna": Case("laguna", {
        **EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "num_hidden_layers": 5, "head_dim": 32,
        "sliding_window": 24, "num_attention_heads_per_layer": [4, 6, 6, 6, 4], "moe_routed_scaling_factor": 2.5, "layer_types": [
            "full_attention", *["sliding_attention"] * 3, "full_attention"], "initializer_range": 0.12, "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 50_000.0, "factor": 8.0, "original_max_position_embeddings": 64,
                               "attention_factor": 1.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0}}}),
    "laguna, no windows, gates of channels, tied": Case("laguna", {
        **EXPERTS, "moe_intermediate_size": 32, "head_dim": 32, "gating": "per-element", "mlp_layer_types": ["dense", "dense", "sparse"],
        "tie_word_embeddings": True, "layer_types": ["full_attention"] * 3, "initializer_range": 0.12, "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 50_000.0, "partial_rotary_factor": 0.5}}}),
    "apertus": Case("apertus", {"head_dim": 32}),
    "apertus, tied": Case("apertus", {"tie_word_embeddings": True, **rope("default")}),
    "bitnet": Case("bitnet", {"tie_word_embeddings": True}),
    "bitnet, silu": Case("bitnet", {"tie_word_embeddings": True, "hidden_act": "silu", "num_key_value_heads": 1}),
    "arcee": Case("arcee", {"head_dim": 32}),
    "arcee, llama3": Case("arcee", {"tie_word_embeddings": True, **rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)}),
    "ernie4_5": Case("ernie4_5", {"head_dim": 32, **rope("yarn", factor=8.0, original_max_position_embeddings=64)}),
    "exaone": Case("exaone", {"head_dim": 16, "tie_word_embeddings": True}),
    "exaone, llama3": Case("exaone", {"head_dim": 16, **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                                             original_max_position_embeddings=64)}),
    "mimo": Case("mimo"),
    "minicpm3": Case("minicpm3", {**OF_MINICPM, "tie_word_embeddings": False}),
    "minicpm3, longrope": Case("minicpm3", {**OF_MINICPM, **rope("longrope", **SU)}),
    "minicpm": Case("minicpm", {"attention_multiplier": 0.25, "embedding_multiplier": 12.0, "residual_multiplier": 0.4, "logits_scaling":
                                4.0, "tie_word_embeddings": True}),
    "minicpm, longrope": Case("minicpm", {"attention_multiplier": 0.25, "embedding_multiplier": 3.0, "residual_multiplier": 0.7,
                                          "logits_scaling": 2.0, **rope("longrope", **SU)}),
    "bailing_moe_v2": Case("bailing_moe_v2", {
        **GLM_EXPERTS, "moe_intermediate_size": 32, "head_dim": 16, "use_qk_norm": True, "n_group": 4, "topk_group": 2, **rope(
            "default", partial_rotary_factor=0.5)}),
    "bailing_moe_v2, one group, tied": Case("bailing_moe_v2", {
        **GLM_EXPERTS, "moe_intermediate_size": 32, "head_dim": 16, "use_qk_norm": True, "n_shared_experts": 1, "tie_word_embeddings": True,
        **rope("default", partial_rotary_factor=0.5)}),
    "sarvam_moe": Case("sarvam_moe", {**GLM_EXPERTS, "moe_intermediate_size": 32, "head_dim": 16}),
    "exaone4": Case("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "exaone4, windows": Case("exaone4", {"num_hidden_layers": 64, "sliding_window": 24, "initializer_range": 0.1}),
    "cohere": Case("cohere", {"logit_scale": 0.125}),
    "cohere, norms of every head": Case("cohere", {"logit_scale": 0.125, "use_qk_norm": True, "num_hidden_layers": 64,
                                                   "initializer_range": 0.1}),
    "cohere2": Case("cohere2", {"num_hidden_layers": 5, "sliding_window": 24, "logit_scale": 0.25}),
    "cohere2_moe": Case("cohere2_moe", {
        **EXPERTS, "intermediate_size": 32, "prefix_dense_intermediate_size": 96, "num_hidden_layers": 5, "head_dim": 32, "sliding_window":
        24, "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"], "mlp_layer_types": ["dense"] + ["sparse"] * 4,
        "num_shared_experts": 1, "expert_selection_fn": "sigmoid", "logit_scale": 0.25, "rms_norm_eps": 1e-5}),
    "cohere2_moe, softmax, layer norms, nothing shared, own head": Case("cohere2_moe", {
        **EXPERTS, "intermediate_size": 32, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 24, "tie_word_embeddings": False}),
    "hy_v3": Case("hy_v3", {**EXPERTS, "moe_intermediate_size": 32, "num_shared_experts": 2, "head_dim": 32}),
    "hy_v3, tied": Case("hy_v3", {**EXPERTS, "moe_intermediate_size": 32, "num_shared_experts": 1, "head_dim": 32, "mlp_layer_types": [
        "sparse"] * 3, "tie_word_embeddings": True, "router_scaling_factor": 1.5}),
    "exaone_moe": Case("exaone_moe", {**K_EXPERTS, "moe_intermediate_size": 32, "num_hidden_layers": 5, "sliding_window": 24}),
    "hunyuan_v1_dense": Case("hunyuan_v1_dense", {"head_dim": 32, "tie_word_embeddings": True, **rope("dynamic", alpha=9.0, factor=1.0)}),
    "hunyuan_v1_moe": Case("hunyuan_v1_moe", {"head_dim": 32, "num_experts": 6, "moe_topk": 2, **rope("dynamic", alpha=9.0, factor=1.0)}),
    "minimax_m2": Case("minimax_m2", {**EXPERTS, "intermediate_size": 32, "head_dim": 32, "rotary_dim": 16}),
    "gemma": Case("gemma", {"head_dim": 32}),
    "gemma2": Case("gemma2", {**GEMMA, "num_hidden_layers": 4, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 15.0}),
    "gemma3_text": Case("gemma3_text", {**GEMMA, "num_hidden_layers": 7, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}}),
    "gemma4_text": Case("gemma4_text", {**GEMMA_4, **GEMMA_4_FILE}),
    "gemma4_text, keys as values": Case("gemma4_text", {**GEMMA_4, **KEYS_AS_VALUES, "sliding_window": 24}),
    "gemma4_text, mixture": Case("gemma4_text", {**GEMMA_4, **KEYS_AS_VALUES, **GEMMA_EXPERTS, "sliding_window": 24,
                                                 "moe_intermediate_size": 32}),
    "glm": Case("glm", {"head_dim": 16}),
    "glm, whole heads, no biases": Case("glm", {"head_dim": 16, "attention_bias": False, "tie_word_embeddings": True, **rope(
        "default", partial_rotary_factor=1.0)}),
    "glm4": Case("glm4", {"head_dim": 32, "num_key_value_heads": 1}),
    "glm4, yarn": Case("glm4", {"head_dim": 32, **rope("yarn", factor=8.0, original_max_position_embeddings=64,
                                                       partial_rotary_factor=0.5)}),
    "olmo": Case("olmo", {"clip_qkv": 0.75, "num_key_value_heads": 4}),
    "olmo, tied": Case("olmo", {"tie_word_embeddings": True}),
    "olmo2": Case("olmo2"),
    "olmo2, tied": Case("olmo2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "olmo3": Case("olmo3", {"num_hidden_layers": 5, "sliding_window": 24, "rope_parameters": {
        "full_attention": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 20_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0}}}),
    "seed_oss": Case("seed_oss", {"head_dim": 32}),
    "seed_oss, no biases": Case("seed_oss", {"head_dim": 32, "attention_bias": False, "tie_word_embeddings": True}),
    "smollm3": Case("smollm3", {"num_hidden_layers": 5}),
    "nemotron": Case("nemotron", {"tie_word_embeddings": True}),
    "nemotron, linear": Case("nemotron", rope("linear", factor=4.0, partial_rotary_factor=0.5)),
    "nemotron_nas": Case("nemotron_nas", {"num_hidden_layers": 5, "head_dim": 16, "block_configs": [
        {"attention": {"no_op": not heads, "n_heads_in_group": heads}, "ffn": {"no_op": not width, "intermediate_size": width}}
        for heads, width in ((2, 64), (None, 96), (None, None), (4, 32), (None, 96))], "intermediate_size": 96, **rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)}),
    "stablelm": Case("stablelm", {"use_qkv_bias": True, "num_key_value_heads": 4, "hidden_size": 128}),
    "stablelm, tied": Case("stablelm", {"tie_word_embeddings": True, "hidden_size": 128, **rope("default", partial_rotary_factor=0.5)}),
    "stablelm, side by side": Case("stablelm", {"use_parallel_residual": True, "qk_layernorm": True, "hidden_size": 128}),
    "starcoder2": Case("starcoder2", {"sliding_window": None}),
    "granite": Case("granite", {"attention_multiplier": 0.3, "embedding_multiplier": 12.0, "residual_multiplier": 0.22,
                                "logits_scaling": 7.0, "tie_word_embeddings": True}),
    "granitemoe": Case("granitemoe", {**GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "tie_word_embeddings": True}),
    "granitemoeshared": Case("granitemoeshared", {**GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2,
                                                  "shared_intermediate_size": 64}),
    "granite_swa": Case("granite_swa", {**GRANITE, "num_hidden_layers": 4, "sliding_window": 24, "layer_rope_theta": [0, 1e4, 1e4, 1e4],
                                        "tie_word_embeddings": True}),
    "granite_swa, other layers, own head": Case("granite_swa", {
        **GRANITE, "sliding_window": 40, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": False, "attention_bias": False}),
    "granitemoe_swa": Case("granitemoe_swa", {**GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24,
                                              "num_hidden_layers": 4, "tie_word_embeddings": True}),
    "granitemoe_swa, a shared expert": Case("granitemoe_swa", {
        **GRANITE, "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 64, "sliding_window": 24,
        "layer_rope_theta": [1e4, 0, 1e4]}),
    "granitemoehybrid": Case("granitemoehybrid", {**GRANITE, **GRANITE_4, "shared_intermediate_size": 96, "mamba_n_heads": 4}),
    "ernie4_5_moe": Case("ernie4_5_moe", {**ERNIE_EXPERTS, "moe_intermediate_size": 32}),
    "mixtral": Case("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3_moe": Case("qwen3_moe", {**EXPERTS, "moe_intermediate_size": 32, "head_dim": 32, "norm_topk_prob": True}),
    "olmoe": Case("olmoe", {**EXPERTS, "num_key_value_heads": 4}),
    "qwen2_moe": Case("qwen2_moe", {**EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96}),
    "qwen3_5_text": Case("qwen3_5_text", {**LINEAR, "tie_word_embeddings": True}),
    "qwen3_5_text, yarn": Case("qwen3_5_text", {**LINEAR, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"],
        **rope("yarn", factor=8.0, original_max_position_embeddings=64, partial_rotary_factor=0.5)}),
    "qwen3_5_moe_text": Case("qwen3_5_moe_text", {**LINEAR, **EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96}),
    "qwen3_next": Case("qwen3_next", {**LINEAR, **EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96,
                                      "initializer_range": 0.15}),
    "granitemoehybrid, state spaces": Case("granitemoehybrid", {
        **GRANITE, **GRANITE_4, **MAMBA, "shared_intermediate_size": 96, "layer_types": ["mamba", "attention", "mamba"]}),
    "granitemoehybrid, experts": Case("granitemoehybrid", {
        **GRANITE, **GRANITE_4, **MAMBA, "num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 64,
        "layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": None}),
    "falcon": Case("falcon", {"hidden_size": 128}),
    "falcon, two norms, groups, own head": Case("falcon", {"hidden_size": 128, "new_decoder_architecture": True, "num_kv_heads": 2,
                                                           "tie_word_embeddings": False}),
    "falcon_h1": Case("falcon_h1", {**FALCON, **FALCON_FILE, **POWERS}),
    "falcon_h1, norms, tied": Case("falcon_h1", {**FALCON, **FALCON_FILE, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
                                                 "mamba_n_groups": 2, "tie_word_embeddings": True}),
    "nemotron_h": Case("nemotron_h", {**NEMOTRON, **HEADS, "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp", "mamba"]}),
    "nemotron_h, experts": Case("nemotron_h", {
        **NEMOTRON, **HEADS, **NEMOTRON_EXPERTS, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64,
        "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe", "attention", "moe", "mamba"]}),
    "nemotron_h, experts of fewer numbers": Case("nemotron_h", {
        **NEMOTRON, **HEADS, **NEMOTRON_EXPERTS, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64,
        "moe_latent_size": 32, "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"]}),
    "jamba": Case("jamba", {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 5,
                            "num_experts_per_tok": 2, "mamba_d_state": 16, "mamba_dt_rank": 32}),
    "jamba, no experts, tied": Case("jamba", {"num_hidden_layers": 3, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 1,
                                              "mamba_d_state": 16, "mamba_dt_rank": 32, "tie_word_embeddings": True}),
    "mamba": Case("mamba", {"intermediate_size": 128, "num_hidden_layers": 4, "state_size": 16, "time_step_rank": 32}),
    "mamba2": Case("mamba2", {**OF_SPACES, "hidden_size": 64, "num_hidden_layers": 4, "tie_word_embeddings": False}),
    "mamba2, tied": Case("mamba2", {**OF_SPACES, "n_groups": 1, "num_hidden_layers": 2, "tie_word_embeddings": True}),
    "falcon_mamba": Case("falcon_mamba", {"intermediate_size": 128, "state_size": 16, "time_step_rank": 32,
                                          "tie_word_embeddings": False}),
    "rwkv7": Case("rwkv7", {"head_dim": 64, "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 96, "decay_low_rank_dim": 32,
                            "a_low_rank_dim": 32, "v_low_rank_dim": 32, "gate_low_rank_dim": 32}),
    "qwen4_exp_text": Case("qwen4_exp_text", {**OF_QWEN_4, "vocab_size": 4096}),
    "lfm2": Case("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32}),
    "lfm2, own head": Case("lfm2", {"layer_types": ["full_attention", "conv", "full_attention"], "block_auto_adjust_ff_dim": False,
                                    "tie_word_embeddings": False, "conv_L_cache": 4}),
    "lfm2_moe": Case("lfm2_moe", {**EXPERTS, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1,
                                  "moe_intermediate_size": 32}),
    "glm4_moe": Case("glm4_moe", {**GLM_EXPERTS, "moe_intermediate_size": 32, "head_dim": 32, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe, whole heads": Case("glm4_moe", {**GLM_EXPERTS, "moe_intermediate_size": 32, "partial_rotary_factor": 1.0}),
    "granitemoehybrid, no positions": Case("granitemoehybrid", {**GRANITE, **GRANITE_4, "shared_intermediate_size": 96,
                                                                "position_embedding_type": None}),
    # llama.cpp 0.3.36 takes queries to be made at once where there are 27 layers, as V2-Lite and Moonlight have.
    "deepseek_v2": Case("deepseek_v2", {**LATENT, **OF_BLOCKS, **ONE_GROUP, "q_lora_rank": None, **SAME_SCALES, "num_hidden_layers": 27,
                                        "initializer_range": 0.1}),
    "deepseek_v2, queries by way": Case("deepseek_v2", {**LATENT, **OF_BLOCKS, **ONE_GROUP}),
    "deepseek_v3": Case("deepseek_v3", {**LATENT, **OF_BLOCKS, "n_group": 4, "topk_group": 2, "initializer_range": 0.15, **SAME_SCALES}),
    "mellum": Case("mellum", {**EXPERTS, "moe_intermediate_size": 64, "head_dim": 32, "sliding_window": 24, "num_hidden_layers": 5,
                              "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"], "rope_parameters": {
                                  "full_attention": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
                                                     "rope_theta": 20_000.0},
                                  "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0}}}),
    "mellum, no windows, tied": Case("mellum", {**EXPERTS, "moe_intermediate_size": 32, "head_dim": 32, "tie_word_embeddings": True,
                                                "layer_types": ["full_attention"] * 3}),
    "mistral4": Case("mistral4", {**LATENT, **OF_BLOCKS, **ONE_GROUP, "first_k_dense_replace": 1, "initializer_range": 0.15,
                                  "rope_parameters": {**GROWING, "partial_rotary_factor": 1 / 3}}, inside="mistral3"),
    "mistral4, at once, tied": Case("mistral4", {
        **LATENT, **OF_BLOCKS, **ONE_GROUP, "q_lora_rank": None, "num_hidden_layers": 27, "initializer_range": 0.1, "tie_word_embeddings":
        True, "first_k_dense_replace": 0, "rope_parameters": {**GROWING, "partial_rotary_factor": 1 / 3}}, inside="mistral3"),
    "deepseek_v3, one group": Case("deepseek_v3", {**LATENT, **OF_BLOCKS, **ONE_GROUP, "norm_topk_prob": False}),
    "deepseek_v32": Case("deepseek_v32", {**LATENT, **OF_BLOCKS, **OF_INDEX, "n_group": 4, "topk_group": 2, "initializer_range": 0.15,
                                          **rope("yarn", factor=8.0, original_max_position_embeddings=64, mscale=1.0,
                                                 mscale_all_dim=1.0)}),
    "glm_moe_dsa": Case("glm_moe_dsa", {**LATENT, **OF_BLOCKS, **OF_INDEX, **ONE_GROUP, "initializer_range": 0.12, "indexer_types": [
        "full", "shared", "full"], **rope("default")}),
    "hy_v4": Case("hy_v4", {**HY_4, **OF_BLOCKS, **ONE_GROUP, "rope_interleave": True, "index_head_dim": 64,
                             "mlp_layer_types": ["dense", "sparse", "sparse"], "indexer_types": ["full", "shared", "full"]}),
    "mimo_v2_flash": Case("mimo_v2_flash", {**MIMO_2, "v_head_dim": 16, "moe_intermediate_size": 32, "sliding_window": 24}),
    "mimo_v2_flash, values as they are, a dense layer": Case("mimo_v2_flash", {
        **MIMO_2, "v_head_dim": 32, "moe_intermediate_size": 32, "sliding_window": 24, "attention_value_scale": 1.0, "mlp_layer_types": [
            "dense", "sparse", "dense"]}),
    "minimax_m3_vl_text": Case("minimax_m3_vl_text", {**MINIMAX_3, "intermediate_size": 32, "shared_intermediate_size": 32,
                                                      "dense_intermediate_size": 96}),
    "bloom": Case("bloom"),
    "bloom, heads of no power of two, own head": Case("bloom", {"n_head": 6, "hidden_size": 192, "tie_word_embeddings": False}),
    "mpt": Case("mpt", {"attn_config": {"clip_qkv": 0.7}}),
    "dbrx": Case("dbrx", {**DBRX, "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 6, "moe_top_k": 2}}),
    "gpt_bigcode": Case("gpt_bigcode", {"hidden_size": 128, "n_inner": 96}),
    "jais2": Case("jais2", {"num_key_value_heads": 4}),
    "jais2, tied, groups": Case("jais2", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "gpt_oss": Case("gpt_oss", {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 64, "sliding_window": 24, "num_hidden_layers":
                                4, "intermediate_size": 64, "initializer_range": 0.15}),
    "glm5_next_text": Case("glm5_next_text", {**OF_GLM_5, "linear_lower_bound": -5.0}, inside="glm5_next"),
    "glm5_next_text, no bound, a choice that is shared, tied": Case("glm5_next_text", {
        **OF_GLM_5, "linear_lower_bound": None, "tie_word_embeddings": True, "layer_types": [
            "linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
        "indexer_types": ["full", "full", "shared", "full"], "mlp_layer_types": ["dense", *["sparse"] * 3]}, inside="glm5_next"),
    "kimi_linear": Case("kimi_linear", {**KIMI, **OF_DECAYS, **ONE_GROUP, "linear_head_dim": 32, "linear_num_heads": 4}),
    "kimi_linear, tied": Case("kimi_linear", {**KIMI, **OF_DECAYS, **ONE_GROUP, "linear_head_dim": 64, "linear_num_heads": 4,
                                              "tie_word_embeddings": True}),
    "bailing_hybrid": Case("bailing_hybrid", {**LING, **OF_DECAYS, "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 4}),
    "glm4_moe_lite": Case("glm4_moe_lite", {**LATENT, **OF_BLOCKS, "tie_word_embeddings": True}),
    "glm4_moe, no norms": Case("glm4_moe", {**GLM_EXPERTS, "moe_intermediate_size": 32, "n_shared_experts": 1, "norm_topk_prob": False}),
    "solar_open": Case("solar_open", {**{key: value for key, value in GLM_EXPERTS.items() if key != "first_k_dense_replace"},
                                      "moe_intermediate_size": 32, "head_dim": 32, "attention_bias": True}),
    "llama4_text": Case("llama4_text", {"num_hidden_layers": 5, "num_local_experts": 6, "intermediate_size": 32, "head_dim": 32,
                                        "initializer_range": 0.15}),
    "llama4_text, dense layers": Case("llama4_text", {
        "num_hidden_layers": 4, "num_local_experts": 5, "intermediate_size": 32, "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 96, "initializer_range": 0.15, **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=1.0,
                                          original_max_position_embeddings=64)}),
    "dots1": Case("dots1", {**GLM_EXPERTS, "num_key_value_heads": 4, "moe_intermediate_size": 32, "head_dim": 32, "sliding_window": None,
                            "norm_topk_prob": True}),
}


def model(name: str, folder: Path, **changes: object) -> Path:
    """A random model with 16-bit weights and a tokenizer."""
    case = MODELS[name]
    saved(replace(case, changes={**SIZES, **case.changes, **changes}, dtype="float16"), folder)
    return with_words_of_fable(folder)


def exported(source: Path, out: Path, kind: str = "F16") -> Path:
    *_, made = export_gguf(source, out, kind, "a name")
    assert isinstance(made, Exported) and made.nbytes == out.stat().st_size
    return out


def opened(path: Path) -> Engine:
    *_, engine = open_engine(path, EngineOptions(device="cpu", kv="32bit", ctx=128, threads=1))
    return engine


def scores(path: Path, ids: list[int]) -> np.ndarray:
    engine = opened(path)
    try:
        return np.concatenate([rows.copy() for _, rows in engine.score(ids)])
    finally:
        engine.close()
