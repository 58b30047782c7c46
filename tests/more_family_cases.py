"""Tiny random models of further families (hybrid, sparse attention, vision-language), as `family_models.CASES`."""

import rwkv7_oracle  # noqa: F401
from family_sizes import (
    CONTEXT,
    DELTA,
    FEW_EXPERTS,
    GEMMA_3N,
    GLM_EXPERTS,
    GROWING,
    JAMBA,
    KIMI,
    LATENT,
    MAMBA,
    ONE_GROUP,
    SHARPENED,
    SPACES,
    TWO_ROPES,
    Case,
    rope,
)
from unusual_family_cases import NEWEST
from variant_family_cases import RELATED

# Sizes of what sees, of models in which a text model lies; the rest is as small as the others'.
SIGHT = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
SIGHTS = {"hyperclovax_vision_v2": {"model_type": "qwen2_5_vl_vision", "depth": 1, "hidden_size": 32, "intermediate_size": 16, "num_heads":
                                    2, "patch_size": 8, "out_hidden_size": 64},
          "qwen2_vl": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 8},
          "qwen2_5_vl": {"depth": 1, "hidden_size": 32, "intermediate_size": 16, "num_heads": 2, "patch_size": 8, "out_hidden_size": 64},
          "exaone4_5": {"depth": 1, "hidden_size": 32, "intermediate_size": 16, "num_heads": 2, "num_key_value_heads": 1, "patch_size": 8,
                        "out_hidden_size": 64},
          **dict.fromkeys(("cohere_compass", "qwen3_vl", "qwen3_vl_moe"), {
              "depth": 1, "hidden_size": 32, "intermediate_size": 16, "num_heads": 2, "patch_size": 8, "out_hidden_size": 64,
              "deepstack_visual_indexes": [0], "num_position_embeddings": 16}),
          **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen4_exp"), {
              "depth": 1, "hidden_size": 32, "intermediate_size": 16, "num_heads": 2, "patch_size": 8, "out_hidden_size": 64,
              "num_position_embeddings": 16}),
          **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "glmga"), {
              "depth": 1, "hidden_size": 32, "intermediate_size": 16, "num_heads": 2, "patch_size": 8, "out_hidden_size": 64,
              "image_size": 32}),
          "apertus1p5": {"codebook_size": 16, "embed_dim": 8, "latent_channels": 8, "base_channels": 32, "num_res_blocks": 1,
                         "channel_multiplier": [1, 1], "attn_resolutions": [], "resolution": 32},
          "hy_v4_vl": {**SIGHT, "out_hidden_size": 64},
          "ernie4_5_vl_moe": {"depth": 1, "hidden_size": 32, "intermediate_size": 16, "num_heads": 2, "patch_size": 8},
          "deepseek_ocr2": {"sam_config": {"hidden_size": 16, "mlp_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                                           "image_size": 32, "patch_size": 8, "output_channels": 8, "downsample_channels": [8, 32]},
                            "encoder_config": {key: value for key, value in SIGHT.items() if key not in ("image_size", "patch_size")}},
          "unlimited_ocr": {"sam_config": {"hidden_size": 16, "mlp_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                                           "image_size": 32, "patch_size": 8, "output_channels": 8, "downsample_channels": [8, 32]},
                            "encoder_config": SIGHT},
          "glm5_next": {"depth": 1, "hidden_size": 32, "intermediate_size": 16, "num_heads": 2, "patch_size": 8, "out_hidden_size": 64,
                        "image_size": 32, "projection_intermediate_size": 32},
          "minimax_m3_vl": {**SIGHT, "patch_size": 14, "image_size": 28}, "mistral_large4": {**SIGHT, "model_type": "pixtral"},
          "kimi_k25": {**{key: value for key, value in SIGHT.items() if key != "image_size"}, "pos_emb_height": 4, "pos_emb_width": 4},
          "llama4": {**SIGHT, "intermediate_size": 128, "pixel_shuffle_ratio": 0.5, "projector_input_dim": 64, "projector_output_dim": 64,
                     "vision_output_dim": 64},
          "mllama": {**{key: value for key, value in SIGHT.items() if key != "num_attention_heads"}, "attention_heads": 2,
                     "num_global_layers": 1, "vision_output_dim": 64, "intermediate_layers_indices": [0]},
          "molmo2": {**SIGHT, "num_key_value_heads": 2, "head_dim": 16, "image_size": [32, 32]},
          "internvl": {**SIGHT, "image_size": [32, 32], "patch_size": [8, 8]},
          "muse_glimmer": {**{key: value for key, value in SIGHT.items() if key != "image_size"}, "pos_emb_height": 4, "pos_emb_width": 4},
          "nemotron_h_omni": {**SIGHT, "video_temporal_patch_size": 2},
          "step3p7": {**SIGHT, "patch_size": 14, "image_size": 28}}
BESIDE = {"apertus1p5": {"image_token_offset": 260, "audio_token_offset": 276, "audio_config": {
              "model_type": "wavtokenizer_encoder", "codebook_size": 16}},
          "molmo2": {"adapter_config": {"vision_feature_layer": [-1, 0], "hidden_size": 32, "num_attention_heads": 2,
                                         "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 16, "text_hidden_size": 64}},
          "nemotron_h_omni": {"vision_hidden_size": 32, "projector_hidden_size": 16, "audio_config": None},
          "muse_glimmer": {"out_hidden_size": 128, "projector_hidden_size": 32}}  # what a config says beside its parts


def placed(*sections: int, **values: object) -> dict[str, object]:
    """Three-part rotary positions (M-RoPE) with these channel shares."""
    return rope("default", mrope_section=list(sections), **values)


# So few choose that none is likely to find two tokens as good as each other; what is chosen of many is held to in `test_sparse_indexer.py`.
INDEXED = {"index_topk": 300, "index_head_dim": 32, "index_n_heads": 8}
MINIMAX_3 = {"head_dim": 32, "intermediate_size": 40, "dense_intermediate_size": 88, "shared_intermediate_size": 56, "num_local_experts": 6,
             "num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 32, "index_block_size": 32, "index_topk_blocks": 9,
             "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse", "sparse"],
             "routed_scaling_factor": 1.7, **rope("default", partial_rotary_factor=0.5), "rotary_dim": 16}
WINDOWED, CHOOSES, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
DEEPSEEK_4 = {"num_key_value_heads": 1, "moe_intermediate_size": 40, "num_hidden_layers": 4, "head_dim": 32, "q_lora_rank": 48,
              "n_routed_experts": 12, "num_experts_per_tok": 3, "o_groups": 2, "o_lora_rank": 24, "index_n_heads": 8, "index_head_dim": 16,
              "index_topk": 128, "sliding_window": 40, "partial_rotary_factor": 0.25, "compress_rates": {CHOOSES: 4, HEAVY: 32},
              "layer_types": [WINDOWED, CHOOSES, HEAVY, CHOOSES], "mlp_layer_types": ["hash_moe", "moe", "moe", "hash_moe"]}
# Heads enough that hardly a block is worth nothing to a token: of several such the oracle takes any. A text has two ends.
QWEN_4 = {**DELTA, **FEW_EXPERTS, "num_experts": 6, "shared_expert_intermediate_size": 56, "hc_lowrank": 24, "eos_token_id": [7, 9],
          "ple_layer_ids": [2], "ple_embed_dim": 48, "heads_per_ngram": 3, "ngram_vocab_size_base": 100, "split_ngram_parts": 3,
          "make_ngram_vocab_size_divisible_by": 16, "indexer_n_heads": 12, "indexer_kv_heads": 1, "indexer_head_dim": 16,
          "indexer_budget": 100, "indexer_compress_ratio": 4, "initializer_range": 0.12, **rope("default", partial_rotary_factor=0.25)}
LLAMA_4 = {"head_dim": 32, "intermediate_size": 40, "attention_chunk_size": CONTEXT, "floor_scale": CONTEXT + 1,
           "no_rope_layer_interval": 2}
GROWING_PARTS = {**GROWING, "partial_rotary_factor": 16 / 36}
AFMOE = {**FEW_EXPERTS, "num_hidden_layers": 4, "head_dim": 32, "sliding_window": 40, "num_shared_experts": 2, "mup_enabled": True,
         "route_scale": 2.5, "num_dense_layers": 1, "initializer_range": 0.12}
SWASH = {"attention_multiplier": 0.3, "embedding_multiplier": 12.0, "residual_multiplier": 0.4, "logits_scaling": 7.0,
         "num_hidden_layers": 4}
LING = {"num_hidden_layers": 6, "layer_group_size": 3, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 24, "kv_lora_rank":
        48, "qk_nope_head_dim": 20, "qk_rope_head_dim": 16, "v_head_dim": 28, "num_local_experts": 12, "num_experts_per_tok": 3,
        "moe_intermediate_size": 40, "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "kda_lower_bound":
        -3.0, "bos_token_id": 1, "eos_token_id": 7}
KOLIBRI = {**FEW_EXPERTS, "num_hidden_layers": 5, "head_dim": 32, "sliding_window": 40, "shared_expert_intermediate_size": 56,
           "initializer_range": 0.12}
MIMO_2 = {"num_hidden_layers": 3, "head_dim": 32, "v_head_dim": 20, "sliding_window": 40, "n_routed_experts": 12, "num_experts_per_tok": 3,
          "moe_intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": [
              "full_attention", "sliding_attention", "sliding_attention"], "initializer_range": 0.12}
# Heads of 32 over twice the width; a model that lends two blocks by turns.
ZAMBA = {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid", "hybrid",
                                                       "linear_attention"], "num_mem_blocks": 2, "use_shared_attention_adapter": True,
         "use_mem_rope": True, "adapter_rank": 12, "num_key_value_heads": 4, "n_mamba_heads": 6, "mamba_expand": 3, "mamba_ngroups": 2,
         "mamba_d_state": 24, "time_step_min": 1e-12, "eos_token_id": 7, "bos_token_id": 1, "initializer_range": 0.15}
# Epsilons so large that each norm's shows.
MUSE = {"num_hidden_layers": 4, "head_dim": 32, "sliding_window": 40, "qk_scale_factor": 2.5, "output_multiplier": 0.3, "rms_norm_eps":
        1e-2, "post_norm_eps": 5e-3, "final_logit_softcapping": 5.0, "bos_token_id": 1, "eos_token_id": 7}
STEP = {"n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_hidden_layers": 5, "head_dim": 32,
        "sliding_window": 40, "share_expert_dim": 56, "mlp_layer_types": ["dense", *["sparse"] * 4], "layer_types": [
            "full_attention", *["sliding_attention"] * 3, "full_attention"], "num_sliding_attention_heads": 6, "moe_router_scaling_factor":
        2.5, "swiglu_limits": [0, None, 0.4, 0.7, 0], "swiglu_limits_shared": [0, 0.5, 0.3, 0.0, 0], "pad_token_id": 1, "eos_token_id": 7,
        "initializer_range": 0.12, "rope_parameters": {
            "full_attention": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta":
                               50_000.0, "original_max_position_embeddings": 64, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0}}}
SPACES_2 = {"num_heads": 6, "head_dim": 32, "n_groups": 2, "state_size": 24, "expand": 3, "num_hidden_layers": 4, "eos_token_id": 7}
LAGUNA = {**FEW_EXPERTS, "head_dim": 32, "sliding_window": 40, "shared_expert_intermediate_size": 56, "moe_routed_scaling_factor": 2.5,
          "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "num_attention_heads_per_layer": [4, 6, 6],
          "rope_parameters": {
              "full_attention": {"rope_type": "yarn", "rope_theta": 50_000.0, "factor": 8.0, "original_max_position_embeddings": 64,
                                 "attention_factor": 1.0, "beta_fast": 64.0, "partial_rotary_factor": 0.5},
              "sliding_attention": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0}}}
MORE_CASES = {
    **RELATED, **NEWEST,
    "bailing_hybrid": Case("bailing_hybrid", {**LING, "vocab_size": 301, "rms_norm_eps": 1e-3, "initializer_range": 0.15}, shard="100KB"),
    "bailing_hybrid, no bound, other layers, bfloat16": Case("bailing_hybrid", {
        **LING, **ONE_GROUP, "num_hidden_layers": 4, "layer_types": ["full_attention", "linear_attention", "full_attention",
                                                                     "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "short_conv_kernel_size": 2, "head_dim": 40, "kda_safe_gate": False,
        "norm_topk_prob": False}, dtype="bfloat16"),
    "flint": Case("flint", {**FEW_EXPERTS, "shared_expert_intermediate_size": 56, "head_dim": 32, "sliding_window": 40, "vocab_size": 301,
                            "num_hidden_layers": 5, "mlp_only_layers": [0]}),
    "flint, other layers, biases, tied, bfloat16": Case("flint", {
        **FEW_EXPERTS, "shared_expert_intermediate_size": 40, "head_dim": 16, "sliding_window": 150, "norm_topk_prob": False,
        "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1, "mlp_only_layers": [1], "layer_types": [
            "sliding_attention", "full_attention", "sliding_attention"]}, dtype="bfloat16"),
    "kolibri1": Case("kolibri1", {**KOLIBRI, "vocab_size": 301}, shard="100KB"),
    "kolibri1, shares add up, other layers, tied, bfloat16": Case("kolibri1", {
        **KOLIBRI, "sliding_window": 150, "norm_topk_prob": True, "num_key_value_heads": 1, "tie_word_embeddings": True, "layer_types": [
            "full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]}, dtype="bfloat16"),
    "laguna": Case("laguna", {**LAGUNA, "vocab_size": 301}),
    "muse_glimmer": Case("muse_glimmer_text", {**MUSE, "vocab_size": 301}, shard="100KB", inside="muse_glimmer"),
    "muse_glimmer, other layers, biases, bfloat16": Case("muse_glimmer_text", {
        **MUSE, "num_hidden_layers": 3, "sliding_window": 150, "attention_bias": True, "num_key_value_heads": 1, "layer_types": [
            "full_attention", "sliding_attention", "full_attention"], "layer_rope_theta": [10_000.0, 0, 10_000.0]},
        dtype="bfloat16", inside="muse_glimmer"),
    "step3p7": Case("step3p5", {**STEP, "vocab_size": 301}, shard="100KB", inside="step3p7"),
    "step3p7, no bounds, one table, other layers, bfloat16": Case("step3p5", {
        **STEP, "num_hidden_layers": 3, "sliding_window": 150, "swiglu_limits": None, "swiglu_limits_shared": None,
        "num_key_value_heads": 1, "mlp_layer_types": ["sparse", "dense", "sparse"], "layer_types": [
            "sliding_attention", "full_attention", "sliding_attention"],
        "num_sliding_attention_heads": 4, "query_pre_attn_scalar": 20, "tie_word_embeddings": True, "rope_parameters": {kind: {
            "rope_type": "default", "rope_theta": 500.0} for kind in ("full_attention", "sliding_attention")}},
        dtype="bfloat16", inside="step3p7"),
    "axk1": Case("axk1", {**LATENT, "n_group": 4, "topk_group": 2, "vocab_size": 301, "rms_norm_eps": 1e-2}, shard="100KB"),
    "axk1, halves, other layers, tied, bfloat16": Case("axk1", {
        **LATENT, "n_group": 1, "topk_group": 1, "rope_interleave": False, "mlp_layer_types": ["sparse", "dense", "sparse"],
        "n_shared_experts": 1, "tie_word_embeddings": True, "norm_topk_prob": False}, dtype="bfloat16"),
    "bloom": Case("bloom", {"vocab_size": 301}, shard="100KB"),
    "bloom, heads of no power of two, bfloat16": Case("bloom", {"n_head": 6, "hidden_size": 96, "layer_norm_epsilon": 1e-3},
                                                      dtype="bfloat16"),
    "mimo_v2_flash": Case("mimo_v2_flash", {**MIMO_2, "vocab_size": 301}, shard="100KB"),
    "mimo_v2_flash, values as they are, other layers, groups, bfloat16": Case("mimo_v2_flash", {
        **MIMO_2, "sliding_window": 150, "attention_bias": True, "attention_value_scale": 1.0, "n_group": 4, "topk_group": 2, "v_head_dim":
        16, "mlp_layer_types": ["sparse", "dense", "sparse"], "routed_scaling_factor": 1.75, "num_key_value_heads": 1, "layer_types": [
            "sliding_attention", "full_attention", "sliding_attention"]}, dtype="bfloat16"),
    "mpt": Case("mpt", {"vocab_size": 301, "eos_token_id": 7, "bos_token_id": 7}, shard="100KB"),
    "mpt, heads of no power of two, cut, scaled, bfloat16": Case("mpt", {
        "n_heads": 6, "hidden_size": 96, "layer_norm_epsilon": 1e-3, "eos_token_id": 7, "bos_token_id": 7, "attn_config": {
            "clip_qkv": 0.7, "softmax_scale": 0.3}}, dtype="bfloat16"),
    "zamba2": Case("zamba2", {**ZAMBA, "vocab_size": 301, "rms_norm_eps": 1e-3}, shard="100KB"),
    "zamba2, one block, no positions, groups, bfloat16": Case("zamba2", {
        **ZAMBA, "num_mem_blocks": 1, "use_shared_attention_adapter": False, "use_mem_rope": False, "num_key_value_heads": 2,
        "mamba_ngroups": 1, "hidden_act": "silu"}, dtype="bfloat16"),
    "laguna, gates of channels, other layers, bfloat16": Case("laguna", {
        **LAGUNA, "gating": "per-element", "sliding_window": 150, "mlp_layer_types": ["sparse", "dense", "sparse"], "num_key_value_heads":
        1, "num_attention_heads_per_layer": [6, 4, 2], "attention_bias": True, "tie_word_embeddings": True, "layer_types": [
            "sliding_attention", "full_attention", "sliding_attention"]}, dtype="bfloat16"),
    "granite_swa": Case("granite_swa", {**SWASH, "sliding_window": 40, "layer_rope_theta": [0, 300.0, 300.0, 50_000.0], "vocab_size": 301}),
    "granite_swa, one base, biases, bfloat16": Case("granite_swa", {
        **SWASH, "sliding_window": 150, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1,
        "layer_types": ["sliding_attention", "full_attention"] * 2, **rope("linear", factor=4.0)}, dtype="bfloat16"),
    "granitemoe_swa": Case("granitemoe_swa", {**SWASH, "num_local_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 40,
                                              "shared_intermediate_size": 104, "sliding_window": 40}),
    "granitemoe_swa, nothing shared, bfloat16": Case("granitemoe_swa", {
        **SWASH, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40, "attention_bias": True, "sliding_window": 40,
        "tie_word_embeddings": True, "layer_rope_theta": [300.0, 0, 300.0, 0]}, dtype="bfloat16"),
    "lfm3": Case("lfm3", {"num_hidden_layers": 5, "head_dim": 16, "sliding_window": 40, "vocab_size": 301, "initializer_range": 0.15,
                          "eos_token_id": 7, "bos_token_id": 1}, shard="100KB"),
    "lfm3, no gates, plain branches, own head, bfloat16": Case("lfm3", {
        "layer_types": ["full_attention", "conv", "sliding_attention"], "head_dim": 32, "num_key_value_heads": 1, "conv_L_cache": 3,
        "sliding_window": 150, "use_attention_gate": False, "use_sandwich_norm": False, "attention_bias": True, "tie_word_embeddings":
        False, "eos_token_id": 7, "bos_token_id": 1}, dtype="bfloat16"),
    "cwm": Case("cwm", {"head_dim": 32, "vocab_size": 301, "sliding_window": 40, **rope(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)}),
    "cwm, other layers, bfloat16": Case("cwm", {
        "head_dim": 16, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1, "sliding_window": 150, "layer_types": [
            "full_attention", "sliding_attention", "full_attention"]}, dtype="bfloat16"),
    "vaultgemma": Case("vaultgemma", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "head_dim": 12, "sliding_window": 40,
                                      "query_pre_attn_scalar": 20, "attention_bias": True}),
    "vaultgemma, no caps, bfloat16": Case("vaultgemma", {
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 32, "sliding_window": 150, "num_key_value_heads": 1,
        "tie_word_embeddings": False}, dtype="bfloat16"),
    "helium": Case("helium", {"head_dim": 16, "vocab_size": 301, "num_key_value_heads": 4}, shard="60KB"),
    "helium, biases, yarn, bfloat16": Case("helium", {
        "head_dim": 16, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1,
        **rope("yarn", factor=8.0, original_max_position_embeddings=64)}, dtype="bfloat16"),
    "qwen3_next": Case("qwen3_next", {**DELTA, **FEW_EXPERTS, "shared_expert_intermediate_size": 56, "initializer_range": 0.12}),
    "qwen3_next, other layers, bfloat16": Case("qwen3_next", {
        **DELTA, **FEW_EXPERTS, "shared_expert_intermediate_size": 104, "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 3, "linear_num_value_heads": 9, "attention_bias": True, "initializer_range": 0.12,
        **rope("default", partial_rotary_factor=0.5)}, dtype="bfloat16", older=True),
    "deepseek_v32": Case("deepseek_v32", {**LATENT, **SHARPENED, **INDEXED, "n_group": 4, "topk_group": 2}),
    "deepseek_v32, all seen, bfloat16": Case("deepseek_v32", {**LATENT, **INDEXED, "n_group": 4, "topk_group": 2, "index_topk": CONTEXT},
                                             dtype="bfloat16"),
    "deepseek_v4": Case("deepseek_v4", {  # weights wide enough that gates are clamped now and then
        **DEEPSEEK_4, "vocab_size": 301, "rms_norm_eps": 1e-3, "initializer_range": 0.5}, shard="100KB"),
    "deepseek_v4, two streams, stretched, other layers, bfloat16": Case("deepseek_v4", {
        **DEEPSEEK_4, "hc_mult": 2, "hc_sinkhorn_iters": 3, "hc_eps": 1e-3, "num_attention_heads": 20, "o_groups": 4, "sliding_window": 150,
        "compress_rates": {CHOOSES: 8, HEAVY: 16}, "layer_types": [HEAVY, CHOOSES, HEAVY, WINDOWED], "mlp_layer_types": ["moe"] * 4,
        "n_shared_experts": 1, "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5, "tie_word_embeddings": True,
        **rope("yarn", factor=8.0, original_max_position_embeddings=64)}, dtype="bfloat16"),
    "qwen4_exp_text": Case("qwen4_exp_text", {**QWEN_4, "vocab_size": 301}, shard="300KB"),
    "qwen4_exp, two tables, sigmoids, other layers, bfloat16": Case("qwen4_exp_text", {
        **QWEN_4, "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"], "ple_layer_ids": [3, 1],
        "hc_count": 2, "ngram_size": 4, "heads_per_ngram": 2, "ple_conv_kernel_size": 3, "split_ngram_parts": 5, "seed": 77,
        "output_gate_type": "sigmoid", "norm_topk_prob": False, "attention_bias": True, "indexer_compress_ratio": 2,
        "tie_word_embeddings": True, **rope("default", partial_rotary_factor=0.5, mrope_section=[2, 1, 1])}, dtype="bfloat16",
        inside="qwen4_exp"),
    "glm_moe_dsa": Case("glm_moe_dsa", {**LATENT, **INDEXED, **ONE_GROUP, "indexer_types": ["full", "shared", "full"], **rope("default")}),
    "glm_moe_dsa, every second, bfloat16": Case("glm_moe_dsa", {
        **LATENT, **INDEXED, **ONE_GROUP, "index_topk_freq": 2, "index_skip_topk_offset": 1, "num_hidden_layers": 4,
        **rope("default")}, dtype="bfloat16"),
    "minimax_m3_vl_text": Case("minimax_m3_vl_text", MINIMAX_3),
    "minimax_m3_vl, other layers, bfloat16": Case("minimax_m3_vl_text", {
        **MINIMAX_3, "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["sparse", "dense",
        "sparse"], "index_block_size": 64, "index_topk_blocks": 4, "index_local_blocks": 2, "index_head_dim": 48, "num_key_value_heads": 1,
        "index_n_heads": 1, **rope("default", partial_rotary_factor=1.0), "rotary_dim": 32}, dtype="bfloat16", inside="minimax_m3_vl"),
    "solar_open": Case("solar_open", {**{key: value for key, value in GLM_EXPERTS.items() if key != "first_k_dense_replace"},
                                      "head_dim": 32, **rope("yarn", factor=8.0, original_max_position_embeddings=64)}),
    "exaone4_5, bfloat16": Case("exaone4", {"head_dim": 32, "sliding_window": 40, "layer_types": [
        "sliding_attention", "full_attention", "sliding_attention"]}, dtype="bfloat16", inside="exaone4_5"),
    "llama4_text": Case("llama4_text", {**LLAMA_4, "num_local_experts": 6}),
    "llama4_text, two of a token, dense layers, bfloat16": Case("llama4_text", {
        **LLAMA_4, "num_local_experts": 5, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 72,
        "num_hidden_layers": 4, "no_rope_layers": [1, 1, 0, 1], "use_qk_norm": False, "attention_bias": True, "tie_word_embeddings": True,
        **rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=1.0, original_max_position_embeddings=64)}, dtype="bfloat16"),
    "llama4_text, no experts": Case("llama4_text", {
        **LLAMA_4, "num_local_experts": 0, "num_experts_per_tok": 0, "interleave_moe_layer_step": 0, "moe_layers": [],
        "intermediate_size_mlp": 72, "no_rope_layers": [1] * 3, "tie_word_embeddings": True, "sliding_window": 40}),
    "llama4, images": Case("llama4_text", {**LLAMA_4, "num_local_experts": 3}, inside="llama4"),
    "gemma3n_text": Case("gemma3n_text", GEMMA_3N),
    "gemma3n_text, two streams, windows over pages, bfloat16": Case("gemma3n_text", {
        **GEMMA_3N, "sliding_window": 150, "num_kv_shared_layers": 3, "vocab_size_per_layer_input": 310, "hidden_size_per_layer_input": 12,
        "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 6, "intermediate_size": 72}, dtype="bfloat16"),
    "mellum": Case("mellum", {**FEW_EXPERTS, "head_dim": 32, "sliding_window": 40, "mlp_layer_types": ["dense", "sparse", "sparse"],
                              "layer_types": TWO_ROPES["layer_types"], "rope_parameters": TWO_ROPES["rope_parameters"]}),
    "mellum, no windows, bfloat16": Case("mellum", {**FEW_EXPERTS, "attention_bias": True, "tie_word_embeddings": True, "norm_topk_prob":
                                                    False}, dtype="bfloat16"),
    "afmoe": Case("afmoe", AFMOE),
    "afmoe, other layers, bfloat16": Case("afmoe", {
        **AFMOE, "num_dense_layers": 0, "num_shared_experts": 1, "mup_enabled": False, "attention_bias": True, "num_key_value_heads": 1,
        "sliding_window": 150, "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": True}, dtype="bfloat16"),
    "gpt_neox": Case("gpt_neox", {"vocab_size": 301, **rope("default", partial_rotary_factor=0.25)}, shard="60KB"),
    "gpt_neox, one behind the other, whole heads, bfloat16": Case("gpt_neox", {
        "use_parallel_residual": False, "hidden_act": "gelu_new", "attention_bias": False, "tie_word_embeddings": True, "layer_norm_eps":
        1e-3, **rope("linear", factor=4.0, partial_rotary_factor=1.0)}, dtype="bfloat16"),
    "phi": Case("phi", {"vocab_size": 301, **rope("default", partial_rotary_factor=0.5)}),
    "phi, tied, other heads, bfloat16": Case("phi", {
        "num_key_value_heads": 1, "hidden_size": 160, "num_attention_heads": 2, "tie_word_embeddings": True, "hidden_act": "gelu",
        "layer_norm_eps": 1e-3, **rope("linear", factor=4.0, partial_rotary_factor=0.4)}, dtype="bfloat16"),
    "stablelm, side by side": Case("stablelm", {"use_parallel_residual": True, "qk_layernorm": True, "vocab_size": 301,
                                                **rope("default", partial_rotary_factor=0.25)}, shard="60KB"),
    "stablelm, norms of every head, bfloat16": Case("stablelm", {"qk_layernorm": True, "use_qkv_bias": True, "num_key_value_heads": 1,
                                                                 "layer_norm_eps": 1e-3}, dtype="bfloat16"),
    "olmo": Case("olmo", {"vocab_size": 301, "clip_qkv": 0.7}),
    "olmo, not clipped, biases, tied, bfloat16": Case("olmo", {
        "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1, **rope("linear", factor=4.0)}, dtype="bfloat16"),
    # Weights of routers that are small beside their jitter, so that experts come near each other.
    "phimoe": Case("phimoe", {"num_local_experts": 6, "intermediate_size": 40, "attention_bias": True, "lm_head_bias": True, "head_dim": 32,
                              "router_jitter_noise": 0.2, "sliding_window": 40, "rope_parameters": {
                                  "rope_type": "longrope", "rope_theta": 5000.0, "short_mscale": 1.25, "long_mscale": 1.25, "short_factor":
                                  [1 + 0.1 * i for i in range(16)], "long_factor": [2.0] * 16, "factor": 1.0,
                                  "original_max_position_embeddings": CONTEXT}}),
    "phimoe, no biases, tied, bfloat16": Case("phimoe", {
        "num_local_experts": 4, "intermediate_size": 40, "tie_word_embeddings": True, "num_key_value_heads": 1, "router_jitter_noise": 0.05,
        **rope("default")}, dtype="bfloat16"),
    "internlm2": Case("internlm2", {"vocab_size": 301, **rope("dynamic", factor=2.0)}),
    "internlm2, biases, one KV head, bfloat16": Case("internlm2", {"attention_bias": True, "num_key_value_heads": 1}, dtype="bfloat16"),
    "internlm3": Case("internlm3", {"head_dim": 32, "vocab_size": 301}),
    "internlm3, biases, tied, bfloat16": Case("internlm3", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True,
                                                            "head_dim": 16, "num_key_value_heads": 1}, dtype="bfloat16"),
    "olmo_hybrid": Case("olmo_hybrid", {
        "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24, "rms_norm_eps": 1e-3,
        "linear_value_head_dim": 20, "rope_parameters": None, "vocab_size": 301, "initializer_range": 0.12}, shard="100KB"),
    "olmo_hybrid, positions, no doubles, bfloat16": Case("olmo_hybrid", {
        "layer_types": ["full_attention", "linear_attention", "linear_attention"], "linear_key_head_dim": 12, "linear_conv_kernel_dim": 2,
        "linear_allow_neg_eigval": False, "attention_bias": True, "tie_word_embeddings": True, "initializer_range": 0.12,
        **rope("linear", factor=4.0)}, dtype="bfloat16"),
    "kimi_linear": Case("kimi_linear", {**KIMI, "vocab_size": 301, "rms_norm_eps": 1e-3, "initializer_range": 0.15}, shard="100KB"),
    "kimi_linear, one group, other layers, bfloat16": Case("kimi_linear", {
        **KIMI, **ONE_GROUP, "num_hidden_layers": 4, "layer_types": ["full_attention", "linear_attention", "full_attention",
                                                                     "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "linear_conv_kernel_dim": 2, "linear_head_dim": 40,
        "norm_topk_prob": False, "q_lora_rank": 36}, dtype="bfloat16"),
    "jamba": Case("jamba", {**JAMBA, "vocab_size": 301, "rms_norm_eps": 1e-3, "initializer_range": 0.15}, shard="100KB"),
    "jamba, no experts, tied, bfloat16": Case("jamba", {
        **JAMBA, "num_hidden_layers": 3, "num_experts": 1, "mamba_conv_bias": False, "mamba_d_conv": 2, "mamba_dt_rank": "auto",
        "num_key_value_heads": 1, "tie_word_embeddings": True}, dtype="bfloat16"),
    "mamba": Case("mamba", {**SPACES, "vocab_size": 301}, shard="100KB"),
    "mamba, own head, no bias, bfloat16": Case("mamba", {
        **SPACES, "num_hidden_layers": 2, "use_conv_bias": False, "conv_kernel": 2, "time_step_rank": "auto", "tie_word_embeddings": False},
        dtype="bfloat16"),
    "mamba2": Case("mamba2", {**SPACES_2, "vocab_size": 301}, shard="100KB"),
    "mamba2, tied, no bias, bfloat16": Case("mamba2", {
        **SPACES_2, "n_groups": 1, "num_hidden_layers": 2, "use_conv_bias": False, "conv_kernel": 2, "tie_word_embeddings": True},
        dtype="bfloat16"),
    "falcon_mamba": Case("falcon_mamba", {**SPACES, "intermediate_size": 160, "tie_word_embeddings": False, "mixer_rms_eps": 1e-3}),
    "falcon_mamba, tied, bfloat16": Case("falcon_mamba", {**SPACES, "num_hidden_layers": 2, "state_size": 16}, dtype="bfloat16"),
    "rwkv7": Case("rwkv7", {"vocab_size": 301, "norm_eps": 1e-3}, shard="100KB"),
    "rwkv7, tied, no biases, bfloat16": Case("rwkv7", {"num_hidden_layers": 2, "head_dim": 32, "norm_bias": False, "tie_word_embeddings":
                                                       True}, dtype="bfloat16"),
    "mistral4": Case("mistral4", {**LATENT, **ONE_GROUP, "rope_parameters": GROWING_PARTS, "first_k_dense_replace": 0,
                                  "initializer_range": 0.15}, inside="mistral3"),
    "mistral4, queries at once, bfloat16": Case("mistral4", {
        **LATENT, **ONE_GROUP, "q_lora_rank": None, "norm_topk_prob": False, "rope_parameters": GROWING_PARTS}, dtype="bfloat16",
        inside="mistral3"),
    "bamba": Case("bamba", {**MAMBA, "num_hidden_layers": 4, "attn_layer_indices": [1], "vocab_size": 301}),
    "bamba, biases, tied, bfloat16": Case("bamba", {
        **MAMBA, "attn_layer_indices": [0, 2], "mamba_conv_bias": False, "mamba_n_groups": 1, "attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": True, "num_key_value_heads": 1}, dtype="bfloat16"),
    "hyperclovax": Case("hyperclovax", {"attention_multiplier": 0.3, "embedding_multiplier": 10.0, "logits_scaling": 0.125,
                                        "residual_multiplier": 0.4, "head_dim": 32, "vocab_size": 301}),
    "hyperclovax, images": Case("hyperclovax", {"attention_multiplier": 0.3, "head_dim": 32, "tie_word_embeddings": False},
                                inside="hyperclovax_vision_v2"),
    "hyperclovax, biases, tied, bfloat16": Case("hyperclovax", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
                                                dtype="bfloat16"),
    "iquestcoder": Case("iquestcoder", {"head_dim": 32, "num_key_value_heads": 1, "tie_word_embeddings": True}),
    "jais2": Case("jais2", {"num_key_value_heads": 4, "vocab_size": 301, "eos_token_id": 1}),
    "jais2, no biases, tied, bfloat16": Case("jais2", {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
                                                       "head_dim": 32, "eos_token_id": 1}, dtype="bfloat16"),
    "youtu": Case("youtu", {**{key: value for key, value in LATENT.items() if key not in GLM_EXPERTS}, "embedding_initializer_range": 0.4,
                            "bos_token_id": 1, "eos_token_id": 2}),
    "youtu, sharpened, halves, own head, bfloat16": Case("youtu", {
        **{key: value for key, value in LATENT.items() if key not in GLM_EXPERTS}, **SHARPENED, "rope_interleave": False,
        "attention_bias": True, "tie_word_embeddings": False, "q_lora_rank": None, "bos_token_id": 1, "eos_token_id": 2}, dtype="bfloat16"),
    "qwen2_vl": Case("qwen2_vl_text", placed(2, 3, 3), inside="qwen2_vl"),
    "qwen2_5_vl, flat, older dialect, bfloat16": Case("qwen2_5_vl_text", {
        **placed(2, 3, 3), "use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}, dtype="bfloat16",
        inside="qwen2_5_vl", older=True),
    "qwen3_vl": Case("qwen3_vl_text", {**placed(6, 5, 5, mrope_interleaved=True), "head_dim": 32, "tie_word_embeddings": True},
                     inside="qwen3_vl"),
    "qwen3_vl_moe": Case("qwen3_vl_moe_text", {**placed(6, 5, 5, mrope_interleaved=True), **FEW_EXPERTS, "head_dim": 32},
                         inside="qwen3_vl_moe"),
    "qwen3_vl_moe, square, bfloat16": Case("qwen3_vl_moe_text", {
        **placed(2, 3, 3), "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
        dtype="bfloat16", inside="qwen3_vl_moe"),
    "glm4v": Case("glm4v_text", placed(1, 1, 2, partial_rotary_factor=0.5), inside="glm4v"),
    "glm4v_moe, bfloat16": Case("glm4v_moe_text", {**GLM_EXPERTS, **placed(1, 1, 2, partial_rotary_factor=0.5)}, dtype="bfloat16",
                                inside="glm4v_moe"),
    "glmga": Case("glm4v_text", placed(1, 1, 2, partial_rotary_factor=0.5), inside="glmga"),
    "glmga, mixture, bfloat16": Case("glm4v_moe_text", {**GLM_EXPERTS, **placed(1, 1, 2, partial_rotary_factor=0.5)}, dtype="bfloat16",
                                     inside="glmga"),
    # Inside one of these transformers leaves the divisor of logits out, which llama.cpp and vLLM do not.
    "cohere2_vision": Case("cohere2", {"sliding_window": 40, "logit_scale": 1.0}, inside="cohere2_vision"),
    "aya_vision, bfloat16": Case("cohere2", {"sliding_window": 40, "logit_scale": 1.0}, dtype="bfloat16", inside="aya_vision"),
    "lfm2_vl": Case("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}, inside="lfm2_vl"),
    "internvl, qwen3": Case("qwen3", {"head_dim": 32}, inside="internvl"),
    "internvl, qwen2, bfloat16": Case("qwen2", dtype="bfloat16", inside="internvl"),
    "idefics3": Case("llama", {"tie_word_embeddings": True}, inside="idefics3"),
    "smolvlm, own head, bfloat16": Case("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}, dtype="bfloat16",
                                        inside="smolvlm"),
    "llava_next, mistral": Case("mistral", {"sliding_window": None, "head_dim": 32}, inside="llava_next"),
    "llava_onevision, bfloat16": Case("qwen2", dtype="bfloat16", inside="llava_onevision"),
    "minicpmv4_6": Case("qwen3_5_text", DELTA, inside="minicpmv4_6"),
    "minicpm_ocr": Case("qwen3_5_text", {**DELTA, "tie_word_embeddings": True}, inside="minicpm_ocr"),
    "minicpmv4_7, bfloat16": Case("qwen3_5_text", DELTA, dtype="bfloat16", inside="minicpmv4_7"),
    "lfm3_vl": Case("lfm3", {"num_hidden_layers": 5, "head_dim": 16, "sliding_window": 40, "initializer_range": 0.15, "eos_token_id": 7,
                             "bos_token_id": 1, "tie_word_embeddings": True}, inside="lfm3_vl"),
    "llava, mistral": Case("mistral", {"sliding_window": None, "head_dim": 32}, inside="llava"),
}
