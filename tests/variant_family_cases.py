"""Tiny random models of families that are variants of others, as `family_models.CASES`."""

from family_sizes import CONTEXT, DELTA, FEW_EXPERTS, GLM_EXPERTS, LATENT, RAMP, Case, rope

# Latent attention of no two widths alike.
PARTS = {"num_key_value_heads": 4, "q_lora_rank": 36, "kv_lora_rank": 48, "qk_nope_head_dim": 20, "qk_rope_head_dim": 16,
         "v_head_dim": 28}
# Cohere's layers with a window turn, the others do not.
COMPASS = {"num_hidden_layers": 4, "sliding_window": 40, "layer_types": [*["sliding_attention"] * 3, "full_attention"],
           "rope_parameters": {"full_attention": None, "sliding_attention": {
               "rope_type": "default", "rope_theta": 300.0, "mrope_section": [4, 2, 2]}}}
# What of a model sees and hears, as small as it can be.
SENSES = {"vision_config": {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
                            "patch_size": 8, "crop_size": 32},
          "audio_config": {"hidden_size": 32, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2, "ext_pw_out_channel": 32,
                           "nemo_conv_channels": 32, "input_size": 16, "depthwise_separable_out_channel": 32}}
FALCON_1 = {"eos_token_id": 7, "bos_token_id": 7}
LIGHTNING = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
             "intermediate_size": 40, "num_local_experts": 6, "num_experts_per_tok": 2, "full_attn_alpha_factor": 3.5,
             "full_attn_beta_factor": 0.8, "linear_attn_alpha_factor": 2.5, "linear_attn_beta_factor": 1.25, "mlp_alpha_factor": 3.0,
             "mlp_beta_factor": 1.5, "eos_token_id": 7, "bos_token_id": 1}
DBRX = {"d_model": 64, "n_heads": 4, "n_layers": 3, "max_seq_len": CONTEXT, "attn_config": {
    "kv_n_heads": 2, "clip_qkv": 0.7, "rope_theta": 10_000.0}, "ffn_config": {"ffn_hidden_size": 40, "moe_num_experts": 6, "moe_top_k": 3}}
LONGCAT = {"num_hidden_layers": 4, "num_key_value_heads": 4, "q_lora_rank": 36, "kv_lora_rank": 48, "qk_nope_head_dim": 20, "head_dim": 16,
           "qk_rope_head_dim": 16, "qk_head_dim": 36, "v_head_dim": 28, "n_routed_experts": 7, "zero_expert_num": 5, "moe_topk": 3,
           "expert_ffn_hidden_size": 40, "routed_scaling_factor": 2.5}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}  # of a small vocabulary

RELATED = {
    "nanbeige": Case("nanbeige", {"num_loops": 2, "head_dim": 32, "vocab_size": 301}),
    "nanbeige, three rounds, biases, bfloat16": Case("nanbeige", {
        "num_loops": 3, "num_hidden_layers": 2, "attention_bias": True, "tie_word_embeddings": True}, dtype="bfloat16"),
    "ouro": Case("ouro", {"num_loops": 3, "num_hidden_layers": 2, "num_key_value_heads": 4, "vocab_size": 301}),
    "dbrx": Case("dbrx", {**DBRX, "vocab_size": 301}, shard="100KB"),
    "dbrx, shares as they come, wide clips, bfloat16": Case("dbrx", {
        **DBRX, "attn_config": {"kv_n_heads": 1, "clip_qkv": 4.0, "rope_theta": 500.0}, "ffn_config": {
            "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "moe_normalize_expert_weights": None},
        **rope("default", rope_theta=500.0)}, dtype="bfloat16"),
    # An epsilon so large that what is normed next shows what the stream was multiplied by.
    "minimax": Case("minimax", {**LIGHTNING, "head_dim": 32, "vocab_size": 301, "rms_norm_eps": 0.05}, shard="100KB"),
    "minimax_text_01, other layers, tied": Case("minimax_text_01", {
        **LIGHTNING, "num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "full_attention"], "num_attention_heads":
        6, "num_key_value_heads": 1, "hidden_size": 96, "tie_word_embeddings": True, "rms_norm_eps": 1e-3, "mlp_alpha_factor": 1}),
    "cohere_compass_text": Case("cohere_compass_text", {**COMPASS, "vocab_size": 301, "logit_scale": 0.25, "layer_norm_eps": 1e-3}),
    "cohere_compass_text, all turn, own head, bfloat16": Case("cohere_compass_text", {
        "attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 1, "rope_parameters": {"full_attention": {
            "rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}}}, dtype="bfloat16"),
    "cohere_compass, bfloat16": Case("cohere_compass_text", {**COMPASS, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}}, dtype="bfloat16", inside="cohere_compass"),
    "phi4_multimodal": Case("phi4_multimodal", {**SENSES, "vocab_size": 301, **rope("default", partial_rotary_factor=0.5)}),
    "phi4mm, longrope, adapters, bfloat16": Case("phi4mm", {
        **SENSES, "tie_word_embeddings": True, "sliding_window": 50, **rope(
            "longrope", short_factor=RAMP[:4], long_factor=[4 * x for x in RAMP[:4]], partial_rotary_factor=0.5),
        "original_max_position_embeddings": 64}, dtype="bfloat16"),
    "falcon": Case("falcon", {**FALCON_1, "vocab_size": 301}, shard="60KB"),
    "falcon, two norms, groups, biases, own head, bfloat16": Case("falcon", {
        **FALCON_1, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "tie_word_embeddings": False, "ffn_hidden_size": 72,
        **rope("linear", factor=4.0)}, dtype="bfloat16"),
    "falcon, one norm, groups": Case("falcon", {**FALCON_1, "new_decoder_architecture": True, "num_kv_heads": 2,
                                                "num_ln_in_parallel_attn": 1}),
    "falcon, one behind the other, heads of their own": Case("falcon", {
        **FALCON_1, "parallel_attn": False, "multi_query": False, "bias": True, "activation": "relu", "layer_norm_epsilon": 1e-3}),
    "gpt2": Case("gpt2", {"vocab_size": 301, "eos_token_id": 7, "bos_token_id": 7}, shard="60KB"),
    "gpt2, other widths, own head, bfloat16": Case("gpt2", {
        "n_inner": 72, "activation_function": "gelu", "scale_attn_weights": False, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3,
        "eos_token_id": 7, "bos_token_id": 7}, dtype="bfloat16"),
    "kimi_k25, bfloat16": Case("deepseek_v3", {**LATENT, "n_group": 1, "topk_group": 1}, dtype="bfloat16", inside="kimi_k25"),
    "deepseek_ocr2_text": Case("deepseek_ocr2_text", {
        **GLM_EXPERTS, "mlp_layer_types": ["dense", "sparse", "sparse"], "vocab_size": 301, "attention_bias": True}, shard="100KB",
        inside="deepseek_ocr2"),
    "deepseek_ocr2, groups, other layers, bfloat16": Case("deepseek_ocr2_text", {
        **GLM_EXPERTS, "mlp_layer_types": ["sparse", "dense", "sparse"], "n_group": 4, "topk_group": 2, "num_key_value_heads": 4,
        "topk_method": "group_limited_greedy", **rope("linear", factor=4.0)}, dtype="bfloat16", inside="deepseek_ocr2"),
    "unlimited_ocr_text": Case("unlimited_ocr_text", {**GLM_EXPERTS, "vocab_size": 301, "num_key_value_heads": 4}, inside="unlimited_ocr"),
    "unlimited_ocr, full attention, bfloat16": Case("unlimited_ocr_text", {
        **GLM_EXPERTS, "layer_types": ["full_attention"] * 3, "mlp_layer_types": ["dense", "sparse", "dense"], "num_key_value_heads": 4},
        dtype="bfloat16", inside="unlimited_ocr"),
    "mllama_text_model": Case("mllama_text_model", {"vocab_size": 301, "cross_attention_layers": [1]}, shard="60KB", inside="mllama"),
    "mllama, bfloat16": Case("mllama_text_model", {
        "num_hidden_layers": 5, "cross_attention_layers": [0, 3, 4], "num_key_value_heads": 1, **rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)}, dtype="bfloat16",
        inside="mllama"),
    "whisper": Case("whisper", {"d_model": 64, "decoder_layers": 2, "decoder_ffn_dim": 88, "decoder_attention_heads": 4,
                                "max_target_positions": CONTEXT, "vocab_size": 301, "init_std": 0.2}),
    "whisper, own head, bfloat16": Case("whisper", {
        "hidden_size": 48, "decoder_layers": 3, "decoder_ffn_dim": 56, "decoder_attention_heads": 3, "max_target_positions": CONTEXT,
        "init_std": 0.2, "scale_embedding": True, "activation_function": "relu", "tie_word_embeddings": False}, dtype="bfloat16"),
    "molmo2_text": Case("molmo2_text", {"vocab_size": 301, "additional_vocab_size": 16, "head_dim": 24}, shard="60KB", inside="molmo2"),
    "molmo2, norms behind, stretched in a layer, bfloat16": Case("molmo2_text", {
        "qk_norm_type": "olmo", "norm_after": True, "additional_vocab_size": 8, "head_dim": 16, "num_key_value_heads": 4,
        "rope_scaling_layers": [1], **rope("yarn", factor=8.0, original_max_position_embeddings=64)}, dtype="bfloat16", inside="molmo2"),
    "gpt_bigcode": Case("gpt_bigcode", {**FALCON_1, "vocab_size": 301}, shard="60KB"),
    "gpt_bigcode, other widths, own head, bfloat16": Case("gpt_bigcode", {
        **FALCON_1, "n_inner": 72, "activation_function": "gelu", "scale_attn_weights": False, "tie_word_embeddings": False,
        "layer_norm_epsilon": 1e-3}, dtype="bfloat16"),
    "gpt_neo": Case("gpt_neo", {**FALCON_1, "vocab_size": 301, "window_size": 40, "attention_types": [
        [["global", "local"], 1], [["local"], 1]]}),
    "gpt_neo, windows over pages, bfloat16": Case("gpt_neo", {
        **FALCON_1, "num_hidden_layers": 4, "num_attention_heads": 2, "window_size": 150, "attention_types": [[["global", "local"], 2]],
        "activation_function": "relu", "layer_norm_epsilon": 1e-3}, dtype="bfloat16"),
    "gptj": Case("gptj", {**FALCON_1, "vocab_size": 301, "rotary_dim": 8}),
    "gptj, whole heads turn, tied, bfloat16": Case("gptj", {
        **FALCON_1, "rotary_dim": 16, "n_inner": 72, "activation_function": "gelu", "tie_word_embeddings": True}, dtype="bfloat16"),
    "codegen": Case("codegen", {**FALCON_1, "vocab_size": 301, "rotary_dim": 8}, shard="60KB"),
    "codegen, eight heads, bfloat16": Case("codegen", {**FALCON_1, "hidden_size": 96, "num_attention_heads": 8, "rotary_dim": 6},
                                           dtype="bfloat16"),
    "persimmon": Case("persimmon", {"vocab_size": 301, "layer_norm_eps": 1e-3}, shard="60KB"),
    "persimmon, no norms of heads, more turns, tied, bfloat16": Case("persimmon", {
        "qk_layernorm": False, "tie_word_embeddings": True, "hidden_act": "gelu", "hidden_size": 96, **rope(
            "linear", factor=4.0, partial_rotary_factor=0.75)}, dtype="bfloat16"),
    "minicpm": Case("minicpm", {"attention_multiplier": 0.25, "embedding_multiplier": 12.0, "residual_multiplier": 0.4, "logits_scaling":
                                4.0, "vocab_size": 301, "tie_word_embeddings": True}),
    "minicpm, longrope, own head, bfloat16": Case("minicpm", {
        "attention_multiplier": 0.25, "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 2.0, "num_key_value_heads":
        1, "tie_word_embeddings": False, **rope("longrope", short_factor=RAMP, long_factor=[4 * x for x in RAMP],
                                                original_max_position_embeddings=64)}, dtype="bfloat16"),
    "exaone": Case("exaone", {"vocab_size": 301, "head_dim": 16}),
    "exaone, llama3, tied, bfloat16": Case("exaone", {
        "head_dim": 16, "tie_word_embeddings": True, "num_key_value_heads": 1, **rope(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)}, dtype="bfloat16"),
    "mimo": Case("mimo", {"vocab_size": 301}),
    "bailing_moe_v2": Case("bailing_moe_v2", {**GLM_EXPERTS, "head_dim": 32, "use_qk_norm": True, "n_group": 4, "topk_group": 2, **rope(
        "default", partial_rotary_factor=0.5)}),
    "bailing_moe_v2, one group, tied, bfloat16": Case("bailing_moe_v2", {
        **GLM_EXPERTS, "head_dim": 16, "use_qk_norm": True, "tie_word_embeddings": True, "num_key_value_heads": 1,
        "first_k_dense_replace": 0, "n_shared_experts": 1, **rope("default", partial_rotary_factor=0.25)}, dtype="bfloat16"),
    "hy_v3": Case("hy_v3", {**FEW_EXPERTS, **rope("default"), "num_shared_experts": 2, "head_dim": 32, "vocab_size": 301}),
    "hy_v3, other layers, biases, tied, bfloat16": Case("hy_v3", {
        **FEW_EXPERTS, "num_shared_experts": 1, "head_dim": 16, "mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True,
        "tie_word_embeddings": True, "num_key_value_heads": 1, "router_scaling_factor": 1.5}, dtype="bfloat16"),
    "cohere2_moe": Case("cohere2_moe", {
        "num_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 40, "head_dim": 32, "num_hidden_layers": 5, "sliding_window": 40,
        "mlp_layer_types": ["dense", *["sparse"] * 4], "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
        "prefix_dense_intermediate_size": 72, "num_shared_experts": 2, "expert_selection_fn": "sigmoid", "logit_scale": 0.25,
        "rms_norm_eps": 1e-5}),
    "cohere2_moe, softmax, sums, layer norms, bfloat16": Case("cohere2_moe", {
        "num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40, "head_dim": 16, "sliding_window": 150, "num_shared_experts": 1,
        "shared_expert_combination_strategy": "sum", "tie_word_embeddings": False, "attention_bias": True, "sliding_window_pattern": 2,
        **rope("linear", factor=4.0)}, dtype="bfloat16"),
    "cohere2_moe, sigmoids that do not add up, nothing shared": Case("cohere2_moe", {
        "num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40, "head_dim": 16, "sliding_window": 40, "norm_topk_prob": False,
        "expert_selection_fn": "sigmoid", "sliding_window_pattern": 2, "prefix_dense_sliding_window_pattern": 2, "mlp_layer_types": [
            "dense", "dense", "sparse"]}),
    "cohere2_moe, images, bfloat16": Case("cohere2_moe", {
        "num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40, "head_dim": 16, "sliding_window": 40, "num_shared_experts": 1,
        "logit_scale": 1.0}, dtype="bfloat16", inside="cohere2_vision"),
    "longcat_flash": Case("longcat_flash", {**LONGCAT, "vocab_size": 301}, shard="200KB"),
    "longcat_flash, nothing handed on, biases, yarn, bfloat16": Case("longcat_flash", {
        **LONGCAT, "zero_expert_num": 0, "num_hidden_layers": 2, "attention_bias": True, "tie_word_embeddings": True, **rope(
            "yarn", factor=8.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.8)}, dtype="bfloat16"),
    "minicpm3": Case("minicpm3", {**PARTS, "scale_emb": 5, "scale_depth": 1.1, "dim_model_base": 16, "vocab_size": 301}),
    "minicpm3, longrope, queries at once, own head, bfloat16": Case("minicpm3", {
        **PARTS, "q_lora_rank": None, "tie_word_embeddings": False, "attention_bias": True, **rope(
            "longrope", short_factor=RAMP, long_factor=[4 * x for x in RAMP], original_max_position_embeddings=64)}, dtype="bfloat16"),
    "modernbert_decoder": Case("modernbert-decoder", {**SPECIAL, "local_attention": 80, "vocab_size": 301, "classifier_activation":
                                                      "silu"}),
    "modernbert_decoder, biases, other layers, own head, bfloat16": Case("modernbert-decoder", {
        **SPECIAL, "local_attention": 300, "norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True,
        "decoder_bias": False, "tie_word_embeddings": False, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "hidden_size": 96, "intermediate_size": 40}, dtype="bfloat16"),
    "nanochat": Case("nanochat", {"final_logit_softcapping": 3.0, "vocab_size": 301}),
    "nanochat, biases, no cap, tied, bfloat16": Case("nanochat", {
        "final_logit_softcapping": None, "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1, "hidden_act":
        "gelu", **rope("linear", factor=4.0)}, dtype="bfloat16"),
    "ministral": Case("ministral", {"head_dim": 32, "sliding_window": 40, "vocab_size": 301, "layer_types": [
        "full_attention", "sliding_attention", "sliding_attention"]}),
    "ministral, windows everywhere, bfloat16": Case("ministral", {
        "head_dim": 16, "sliding_window": 150, "tie_word_embeddings": True, **rope("linear", factor=4.0)}, dtype="bfloat16"),
    "flex_olmo": Case("flex_olmo", {"num_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 40, "vocab_size": 301}),
    "flex_olmo, shares add up, biases, tied, bfloat16": Case("flex_olmo", {
        "num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40, "norm_topk_prob": True, "attention_bias": True,
        "tie_word_embeddings": True, "num_key_value_heads": 1}, dtype="bfloat16"),
    "apertus1p5": Case("apertus1p5_text", {"head_dim": 32, "output_vocab_size": 260}, inside="apertus1p5"),
    "apertus1p5_text, whole head, tied, bfloat16": Case("apertus1p5_text", {
        "vocab_size": 301, "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1}, dtype="bfloat16"),
    "sarvam_moe": Case("sarvam_moe", {**GLM_EXPERTS, "head_dim": 32, "vocab_size": 301}),
    "sarvam_moe, one shared, tied, bfloat16": Case("sarvam_moe", {
        **GLM_EXPERTS, "head_dim": 16, "tie_word_embeddings": True, "num_key_value_heads": 1, "n_shared_experts": 1}, dtype="bfloat16"),
    "sarvam_mla": Case("sarvam_mla", {**LATENT, "q_lora_rank": None, "vocab_size": 301}),
    "sarvam_mla, yarn, bfloat16": Case("sarvam_mla", {
        **LATENT, "q_lora_rank": None, **rope(
            "yarn", factor=8.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.8)}, dtype="bfloat16"),
    "lara_mini": Case("lara_mini", {
        **DELTA, "num_hidden_layers": 5, "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 24, "sliding_window": 40, "tie_word_embeddings": True, "vocab_size": 301}, shard="100KB"),
    "lara_mini, other layers, shares as they come, own head, bfloat16": Case("lara_mini", {
        **DELTA, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 56,
        "sliding_window": 150, "norm_topk_prob": False, "attention_bias": True, "tie_word_embeddings": False, "layer_types": [
            "full_attention", "linear_attention", "sliding_attention", "linear_attention"]}, dtype="bfloat16"),
}
