"""Tiny random models of families with unusual blocks, as `family_models.CASES`."""

from family_sizes import CONTEXT, LATENT, NEMOTRON, NEMOTRON_EXPERTS, ONE_GROUP, Case, rope

LARGE_4 = {**{key: value for key, value in {**LATENT, **ONE_GROUP}.items() if key != "q_lora_rank"},
           "index_topk": 300, "index_head_dim": 32, "index_n_heads": 8,
           "no_rope_layers": [1, 0, 1], "initializer_range": 0.15,
           **rope("yarn", factor=8.0, original_max_position_embeddings=48, attention_factor=1.0)}
GLM_5_NEXT = {**{key: value for key, value in LATENT.items() if key not in ("qk_rope_head_dim", "first_k_dense_replace")},
              "num_hidden_layers": 4, "qk_rope_head_dim": 0, "linear_head_dim": 24, "linear_num_heads": 3, "index_topk": 320,
              "index_kpool": 16, "index_head_dim": 32, "index_n_heads": 8, "initializer_range": 0.15, "hc_mult": 2, "rope_parameters": None}
ZAYA = {"head_dim": 32, "num_experts": 6, "moe_intermediate_size": 40, "router_hidden_size": 24, "intermediate_size": None,
        "initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 7}
AXK_2 = {**LATENT, "index_topk": 300, "index_head_dim": 32, "index_n_heads": 8, "gated_norm_rank": 12, "initializer_range": 0.15}
ERNIE = {"moe_num_experts": 12, "moe_k": 3, "moe_intermediate_size": [40, 24], "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 7,
         **rope("default", mrope_section=[3, 3, 2])}
HY_4 = {**{key: value for key, value in LATENT.items() if key != "first_k_dense_replace"}, "hc_mult": 2, "index_topk": 300,
        "index_head_dim": 32, "index_n_heads": 8, "initializer_range": 0.15, "rope_interleave": False}  # as transformers turns them
# An epsilon so large that each norm's shows.
BEAM = {"num_hidden_layers": 4, "head_dim": 32, "sliding_window": 40, "moe_intermediate_size": 40, "num_experts": 12,
        "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "rms_norm_eps": 1e-2, "final_logit_softcapping": 3.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", *["sparse"] * 3], "initializer_range": 0.12}
NEWEST = {
    "ernie4_5_vl_moe": Case("ernie4_5_vl_moe_text", ERNIE, inside="ernie4_5_vl_moe"),
    "ernie4_5_vl_moe, nothing shared, other layers, bfloat16": Case("ernie4_5_vl_moe_text", {
        **ERNIE, "moe_num_shared_experts": 0, "mlp_layer_types": ["sparse", "dense", "sparse"], "moe_intermediate_size": [24, 40],
        "num_key_value_heads": 1}, dtype="bfloat16", inside="ernie4_5_vl_moe"),
    "mistral_large4": Case("mistral_large4_text", {**LARGE_4, "indexer_types": ["full", "shared", "shared"]}, inside="mistral_large4"),
    "mistral_large4, latents and choices that are shared, bfloat16": Case("mistral_large4_text", {
        **LARGE_4, "num_hidden_layers": 5, "no_rope_layers": [1, 0, 1, 0, 1], "kv_source_layers": [0, 1, 0, 1, 4], "indexer_types": [
            "full", "shared", "full", "shared", "full"], "final_logit_softcapping": 3.0, "mlp_layer_types": ["sparse", "dense"] * 2 + [
                "sparse"]}, dtype="bfloat16", inside="mistral_large4"),
    "mistral_large4, all seen, bfloat16": Case("mistral_large4_text", {**LARGE_4, "index_topk": CONTEXT}, dtype="bfloat16",
                                               inside="mistral_large4"),
    "glm5_next": Case("glm5_next_text", GLM_5_NEXT, inside="glm5_next"),
    "glm5_next, no bound, other layers, a choice that is shared, bfloat16": Case("glm5_next_text", {
        **GLM_5_NEXT, "layer_types": ["indexed_attention", "indexed_attention", "linear_attention", "linear_attention"],
        "indexer_types": ["full", "shared", "full", "full"], "linear_lower_bound": None, "hc_mult": 3, "hc_sinkhorn_iters": 3,
        "mlp_layer_types": ["dense", "sparse"] * 2, "n_group": 4, "topk_group": 2, "index_kpool": 4, "index_topk": 100,
        "norm_topk_prob": False}, dtype="bfloat16", inside="glm5_next"),
    "beam": Case("beam", {**BEAM, "vocab_size": 301}),
    "beam, positions everywhere, other layers, biases, tied, bfloat16": Case("beam", {
        **BEAM, "sliding_window": 150, "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1, "n_group": 1,
        "topk_group": 1, "norm_topk_prob": False, "final_logit_softcapping": None, "layer_types": [
            "full_attention", "sliding_attention", "sliding_attention", "full_attention"], "mlp_layer_types": ["sparse", "dense"] * 2,
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0},
                            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}}, dtype="bfloat16"),
    "diffllama": Case("diffllama", {"head_dim": 32, "vocab_size": 301}),
    "diffllama, biases, as many keys, tied, bfloat16": Case("diffllama", {
        "num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True, "num_hidden_layers": 4,
        **rope("linear", factor=4.0)}, dtype="bfloat16"),
    "doge": Case("doge", {"vocab_size": 301}),
    "doge, biases, one KV head, tied, bfloat16": Case("doge", {
        "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, **rope("linear", factor=4.0)},
        dtype="bfloat16"),
    "zaya": Case("zaya", ZAYA),
    "zaya, windows, longer convolutions, bfloat16": Case("zaya", {
        **ZAYA, "cca_time0": 3, "cca_time1": 4, "num_key_value_heads": 1, "sliding_window": 40, "tie_word_embeddings": False,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]}, dtype="bfloat16"),
    "hy_v4_vl": Case("hy_v4_vl_text", {**HY_4, **rope("default", mrope_section=[4, 2, 2]), "rope_interleave": True}, inside="hy_v4_vl"),
    "hy_v4": Case("hy_v4", {**HY_4, "vocab_size": 301}),
    "hy_v4, three streams, other layers, groups, tied, bfloat16": Case("hy_v4", {
        **HY_4, "num_hidden_layers": 5, "hc_mult": 3, "hc_eps": 1e-3, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "dense"],
        "indexer_types": ["full", "shared", "shared", "full", "shared"], "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
        "tie_word_embeddings": True, "norm_topk_prob": False, "index_topk": CONTEXT}, dtype="bfloat16"),
    "axk2": Case("axk2", {**AXK_2, "vocab_size": 301}),
    "axk2, groups, other layers, tied, bfloat16": Case("axk2", {
        **AXK_2, "n_group": 4, "topk_group": 2, "mlp_layer_types": ["sparse", "dense", "sparse"], "n_shared_experts": 1, "gated_norm_rank":
        7, "tie_word_embeddings": True, "norm_topk_prob": False, "index_topk": CONTEXT}, dtype="bfloat16"),
    "nemotron_h_omni, bfloat16": Case("nemotron_h", {
        **NEMOTRON, **NEMOTRON_EXPERTS, "layers_block_type": ["mamba", "moe", "attention", "moe"]}, dtype="bfloat16",
        inside="nemotron_h_omni"),
}
