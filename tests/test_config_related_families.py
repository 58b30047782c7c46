"""config.json of families closely related to others: read as transformers reads it, and what is refused by name."""

import json

import pytest
from config_samples import LLAMA, SMALL, refused
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from effllm.runtime.config import parse_config

# What checkpoints state, shortened by the sizes that every config has: nothing in it is unknown.
PUBLISHED = {
    "ministral": {"architectures": ["MinistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "dtype": "bfloat16",
                  "eos_token_id": 2, "head_dim": 16, "hidden_act": "silu", "initializer_range": 0.02, "layer_types": [
                      "full_attention", *["sliding_attention"] * 3], "max_position_embeddings": 131072, "rms_norm_eps": 1e-05,
                  "rope_theta": 1e8, "sliding_window": 32768, "tie_word_embeddings": False, "use_cache": True},
    "nanochat": {"architectures": ["NanoChatForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0, "dtype":
                 "bfloat16", "eos_token_id": 1, "final_logit_softcapping": 15.0, "hidden_act": "relu2", "initializer_range": 0.02,
                 "max_position_embeddings": 2048, "pad_token_id": 1, "rms_norm_eps": 1e-06, "rope_parameters": {
                     "rope_theta": 10000.0, "rope_type": "default"}, "tie_word_embeddings": False, "use_cache": True},
    "hy_v3": {"architectures": ["HYV3ForCausalLM"], "attention_bias": False, "bos_token_id": 1, "dtype": "bfloat16",
              "enable_moe_fp32_combine": False, "eos_token_id": 2, "first_k_dense_replace": 1, "head_dim": 16, "hidden_act": "silu",
              "max_position_embeddings": 262144, "moe_intermediate_size": 48, "moe_router_enable_expert_bias": True,
              "moe_router_use_sigmoid": True, "num_experts": 12, "num_experts_per_tok": 3, "num_nextn_predict_layers": 1,
              "num_shared_experts": 1, "qk_norm": True, "rms_norm_eps": 1e-05, "rope_parameters": {
                  "rope_theta": 11158840.0, "rope_type": "default"}, "route_norm": True, "router_scaling_factor": 2.826,
              "tie_word_embeddings": False},
    "cohere2_moe": {"architectures": ["Cohere2MoeForCausalLM"], "attention_bias": False, "bos_token_id": 2, "eos_token_id": 3,
                    "expert_selection_fn": "sigmoid", "first_k_dense_replace": 1, "head_dim": 16, "layer_norm_eps": 1e-05, "layer_types": [
                        "full_attention", *["sliding_attention"] * 3], "logit_scale": 0.25, "max_position_embeddings": 500000,
                    "norm_topk_prob": True, "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1,
                    "prefix_dense_intermediate_size": 96, "prefix_dense_sliding_window_pattern": 1, "rms_norm_eps": 1e-06, "rope_theta":
                    50000, "shared_expert_combination_strategy": "average", "sliding_window": 4096, "sliding_window_pattern": 4,
                    "tie_word_embeddings": True, "use_cache": True, "use_gated_activation": True, "use_parallel_block": True},
    "minicpm3": {"architectures": ["MiniCPM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "auto_map": {
                     "AutoConfig": "configuration_minicpm.MiniCPM3Config", "AutoModel": "modeling_minicpm.MiniCPM3Model",
                     "AutoModelForCausalLM": "modeling_minicpm.MiniCPM3ForCausalLM"}, "bos_token_id": 1, "dim_model_base": 256,
                 "num_attention_heads": 4, "num_key_value_heads": 4,
                 "eos_token_id": [2, 3], "hidden_act": "silu", "initializer_range": 0.1, "kv_lora_rank": 256, "max_position_embeddings":
                 32768, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "rms_norm_eps": 1e-05, "rope_scaling": {
                     "type": "longrope", "long_factor": [1.0] * 16, "short_factor": [1.0] * 16, "original_max_position_embeddings":
                     32768}, "scale_depth": 1.4, "scale_emb": 12, "torch_dtype": "bfloat16", "use_cache": True},
    "exaone": {"activation_function": "silu", "architectures": ["ExaoneForCausalLM"], "attention_dropout": 0.0, "auto_map": {
                   "AutoConfig": "configuration_exaone.ExaoneConfig", "AutoModelForCausalLM": "modeling_exaone.ExaoneForCausalLM"},
               "bos_token_id": 1, "embed_dropout": 0.0, "eos_token_id": 2, "head_dim": 16, "layer_norm_epsilon": 1e-05,
               "max_position_embeddings": 32768, "num_hidden_layers": None, "num_layers": 4, "pad_token_id": 0, "rope_scaling": {
                   "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
                   "rope_type": "llama3"}, "rope_theta": 1000000.0, "tie_word_embeddings": False, "torch_dtype": "float32"},
    "minicpm": {"architectures": ["MiniCPMForCausalLM"], "attention_bias": False, "auto_map": {
                    "AutoConfig": "configuration_minicpm.MiniCPMConfig", "AutoModel": "modeling_minicpm.MiniCPMModel",
                    "AutoModelForSeq2SeqLM": "modeling_minicpm.MiniCPMForCausalLM"}, "bos_token_id": 1, "dim_model_base": 256,
                "eos_token_id": [2, 3], "mup_denominator": 32, "rms_norm_eps": 1e-06, "rope_scaling": {
                    "rope_type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 8, "original_max_position_embeddings":
                    32768}, "max_position_embeddings": 32768, "rope_theta": 10000.0, "scale_depth": 1.4, "scale_emb": 12,
                "torch_dtype": "bfloat16"},
    "mimo": {"architectures": ["MiMoForCausalLM"], "attention_bias": True, "auto_map": {
                 "AutoConfig": "configuration_mimo.MiMoConfig", "AutoModel": "modeling_mimo.MiMoModel", "AutoModelForCausalLM":
                 "modeling_mimo.MiMoForCausalLM"}, "head_dim": 16, "max_position_embeddings": 32768, "max_window_layers": 36,
             "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 640000, "sliding_window": 32768,
             "tie_word_embeddings": False, "use_sliding_window": False},
    "bailing_moe_v2": {"architectures": ["BailingMoeV2ForCausalLM"], "auto_map": {
                           "AutoConfig": "configuration_bailing_moe_v2.BailingMoeV2Config", "AutoModelForCausalLM":
                           "modeling_bailing_moe_v2.BailingMoeV2ForCausalLM"}, "embedding_dropout": 0.0, "eos_token_id": 2,
                       "first_k_dense_replace": 1, "head_dim": 16, "max_position_embeddings": 32768, "max_window_layers": 20,
                       "moe_intermediate_size": 48, "moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": 48,
                       "mtp_loss_scaling_factor": 0, "n_group": 4, "norm_topk_prob": True, "num_experts": 16, "num_experts_per_tok": 2,
                       "num_nextn_predict_layers": 0, "num_shared_experts": 1, "output_dropout": 0.0, "partial_rotary_factor": 0.5,
                       "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 600000, "rotary_dim": 8, "routed_scaling_factor": 2.5,
                       "router_dtype": "fp32", "score_function": "sigmoid", "tie_word_embeddings": False, "topk_group": 2,
                       "use_bias": False, "use_qk_norm": True, "use_qkv_bias": False, "use_rmsnorm": True, "use_sliding_window": False},
    "falcon": {"activation": "gelu", "alibi": False, "apply_residual_connection_post_layernorm": False, "architectures": [
                   "FalconForCausalLM"], "attention_dropout": 0.0, "auto_map": {
                       "AutoConfig": "configuration_falcon.FalconConfig", "AutoModelForCausalLM": "modeling_falcon.FalconForCausalLM"},
               "bias": False, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0, "layer_norm_epsilon": 1e-05, "multi_query":
               True, "new_decoder_architecture": False, "num_kv_heads": 71, "parallel_attn": True, "torch_dtype": "bfloat16"},
    "gpt2": {"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 50, "embd_pdrop":
             0.1, "eos_token_id": 50, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 96, "n_head": 6,
             "n_layer": 4, "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
             "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True, "task_specific_params": {
                 "text-generation": {"do_sample": True, "max_length": 50}}},
    "flex_olmo": {"architectures": ["FlexOlmoForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 2,
                  "max_position_embeddings": 4096, "norm_topk_prob": False, "num_experts": 7, "num_experts_per_tok": 7, "pad_token_id": 1,
                  "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000, "router_aux_loss_coef":
                  0.01, "torch_dtype": "bfloat16", "use_cache": True},
}


def base(family: str) -> dict[str, object]:
    return {**LLAMA, "model_type": family, **PUBLISHED[family]}


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_configs_are_known_to_the_last_key(family: str) -> None:
    """Strict: an unknown key would be an error."""
    config = parse_config(base(family), strict=True)
    assert config.family == family and config.warnings == ()


@pytest.mark.parametrize("family", [family for family in PUBLISHED if family in CONFIG_MAPPING])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "eos_token_id": [7, 9]}], ids=["defaults", "others"])
def test_what_is_left_out_is_what_transformers_takes(family: str, changes: dict[str, object]) -> None:
    sizes = {**SMALL, "hidden_size": 128, "num_attention_heads": 8, **({"num_key_value_heads": 8} if family == "minicpm3" else {})}
    full = CONFIG_MAPPING[family](**sizes, **changes)
    bare = {"model_type": family, **sizes, **changes}
    silent, said = parse_config(bare), parse_config(json.loads(full.to_json_string()), strict=True)
    # Two numbers that a config leaves out are those that its vocabulary has no place for.
    same = ("windows", "ropes", "norm_eps", "tie_word_embeddings", "max_position_embeddings", "moe", "head_dim", "num_key_value_heads",
            "attn_scale", "embedding_multiplier", "residual_multiplier", "logits_scaling", "mla", "intermediate_size",
            "layer_intermediate_sizes", "hidden_act", "qk_norm", "qkv_bias", "norm_kind")
    assert {name: getattr(silent, name) for name in same} == {name: getattr(said, name) for name in same}
    assert silent.eos_token_ids == tuple(each for each in said.eos_token_ids if each < full.vocab_size)
    kinds = getattr(full, "layer_types", None) or ["full_attention"] * full.num_hidden_layers
    assert silent.windows == tuple(full.sliding_window if kind == "sliding_attention" else None for kind in kinds)
    assert silent.max_position_embeddings == full.max_position_embeddings


@pytest.mark.parametrize(("family", "key", "value"), [
    ("ministral", "attention_bias", True), ("ministral", "layer_types", ["chunked_attention"] * 4), ("ministral", "sliding_window", -1),
    ("flex_olmo", "clip_qkv", 8.0), ("flex_olmo", "num_experts_per_tok", 8), ("flex_olmo", "sliding_window", 512),
    ("hy_v3", "route_norm", False), ("hy_v3", "qk_norm", False), ("hy_v3", "mlp_bias", True),
    ("hy_v3", "auto_map", {"AutoModel": "modeling_other.Model"}), ("hy_v3", "mlp_layer_types", ["moe"] * 4),
    ("cohere2_moe", "expert_selection_fn", "tanh"), ("cohere2_moe", "shared_expert_combination_strategy", "product"),
    ("cohere2_moe", "use_parallel_block", False), ("cohere2_moe", "use_qk_norm", True),
    ("minicpm3", "scale_depth", 0), ("minicpm3", "dim_model_base", 0), ("minicpm3", "kv_lora_rank", 4096),
    ("minicpm3", "auto_map", {"AutoModel": "modeling_other.Model"}),
    ("exaone", "num_layers", 0), ("exaone", "num_hidden_layers", 3), ("exaone", "auto_map", {"AutoModel": "other.Model"}),
    ("minicpm", "auto_map", {"AutoModelForCausalLM": "modeling_minicpm.MiniCPM3ForCausalLM"}), ("minicpm", "scale_emb", 0),
    ("mimo", "attention_bias", False), ("mimo", "use_mrope", True), ("bailing_moe_v2", "score_function", "softmax"),
    ("bailing_moe_v2", "use_qkv_bias", True), ("bailing_moe_v2", "n_group", 3), ("bailing_moe_v2", "rotary_dim", 17),
    ("falcon", "alibi", True), ("falcon", "num_ln_in_parallel_attn", 2), ("falcon", "ffn_hidden_size", 0),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True), ("gpt2", "n_head", 0), ("gpt2", "add_cross_attention", True),
    ("nanochat", "mlp_bias", True), ("nanochat", "final_logit_softcapping", -1), ("nanochat", "layer_types", ["sliding_attention"] * 4)])
def test_what_a_family_cannot_do_is_named(family: str, key: str, value: object) -> None:
    refused({**base(family), key: value}, key)


def test_layers_of_ministral() -> None:
    config = parse_config(base("ministral"), strict=True)
    assert config.windows == (None, 32_768, 32_768, 32_768) and {rope.theta for rope in config.ropes} == {1e8}
    assert parse_config({**base("ministral"), "layer_types": None}, strict=True).windows == (32_768,) * 4
    assert parse_config({**base("ministral"), "layer_types": None, "sliding_window": None}, strict=True).windows == (None,) * 4


def test_what_minicpm_4_1_would_not_attend_to_is_reported() -> None:
    sparse = parse_config({**base("minicpm"), "sparse_config": {"block_size": 64, "dense_len": 8192, "topk": 64}}, strict=True)
    assert len(sparse.warnings) == 1 and "effllm uses full attention" in sparse.warnings[0]
    assert sparse.residual_multiplier == 0.7 and sparse.logits_scaling == 96 / 256


def test_kimi_k2_5_is_read_as_its_text_part() -> None:
    """As it is published: with remote code for the whole and the text model, and a vision tower."""
    inner = {**LLAMA, "model_type": "kimi_k2", "num_key_value_heads": 6, "architectures": ["DeepseekV3ForCausalLM"], "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "n_group": 1, "topk_group": 1, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "tie_word_embeddings": False, "num_nextn_predict_layers": 0}
    raw = {"architectures": ["KimiK25ForConditionalGeneration"], "auto_map": {
        "AutoConfig": "configuration_kimi_k25.KimiK25Config", "AutoModelForCausalLM": "modeling_kimi_k25.KimiK25ForConditionalGeneration"},
        "bos_token_id": 1, "eos_token_id": 2, "ignore_index": -100, "media_placeholder_token_id": 9, "model_type": "kimi_k25",
        "pad_token_id": 0, "text_config": inner, "use_unified_vision_chunk": True, "video_placeholder": "<v>", "vision_config": {}}
    config = parse_config(raw, strict=True)
    assert config.family == "deepseek_v3" and not config.tie_word_embeddings and config.moe.num_experts == 8
    assert len(config.warnings) == 1 and "takes images too" in config.warnings[0]
    refused({**raw, "auto_map": {"AutoModel": "modeling_other.Other"}}, "auto_map")


def test_what_published_configs_say_to_other_programs_is_no_unknown_key() -> None:
    """SmolLM2's, and what transformers writes of a GGUF file: a key that nobody here knows is an error with --strict."""
    said = {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}},
            "_model_name_or_path": "tales", "unk_token_id": 0}
    assert parse_config({**LLAMA, **said}, True) == parse_config(LLAMA, True)
    refused({**LLAMA, **said, "rope_interleaved": True}, "rope_interleaved")
