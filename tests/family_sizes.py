"""Small configs per family, and the definition of test cases for tests that create random models."""

from dataclasses import dataclass, field

# Of families whose layers are made of the same stages one; what stages and passes are held to is held to by these in every run.
OF_ALL_KINDS = frozenset((
    "afmoe", "apertus", "bailing_hybrid", "cohere", "deepseek_v3", "falcon", "falcon_h1", "gemma3_text", "gemma3n_text", "gemma4_text",
    "gpt2", "gpt_oss", "kimi_linear", "laguna", "lfm2", "llama", "llama4_text", "mamba", "mixtral", "nanochat", "nemotron_h", "olmo2",
    "phi3", "qwen2", "qwen2_moe", "qwen3_5_text"))
CONTEXT = 512
RAMP = [1.0 + 0.1 * i for i in range(8)]


@dataclass(frozen=True)
class Case:
    """A family with changes to the small config; `shard` and `dtype` are how it is saved, `older` rewrites the config's dialect.

    `images`: the model is saved inside one that takes images; `inside`: inside this one.
    """

    family: str
    changes: dict[str, object] = field(default_factory=dict)
    shard: str = "5GB"
    dtype: str = "float32"
    older: bool = False
    images: bool = False
    inside: str = ""


def rope(kind: str, **values: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **values}}


CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
TWO_ROPES = {"sliding_window": 40, "query_pre_attn_scalar": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
             "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 50_000.0},
                                 "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}}

GROWING = {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 8.0, "original_max_position_embeddings": 48, "mscale": 1.0,
           "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3}

# Weights wide enough that gate and up are clamped now and then.
GPT_OSS = {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 32, "initializer_range": 0.3, "eos_token_id": None}
GLM_EXPERTS = {"n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 2,
               "routed_scaling_factor": 1.75, "first_k_dense_replace": 1}
GRANITE = {"attention_multiplier": 0.3, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 7.0}
GRANITE_4 = {"num_local_experts": 0, "layer_types": ["full_attention"] * 3, "shared_intermediate_size": 104, "mamba_n_heads": 4,
             "position_embedding_type": "rope", "tie_word_embeddings": True}
# Six heads of 32 in two groups.
MAMBA = {"mamba_n_heads": 6, "mamba_expand": 3, "mamba_d_head": 32, "mamba_n_groups": 2, "mamba_d_state": 24}
NEMOTRON = {"head_dim": 32, "mamba_num_heads": 6, "mamba_head_dim": 20, "n_groups": 2, "ssm_state_size": 24, "num_hidden_layers": None,
            "time_step_min": 1e-12}
NEMOTRON_EXPERTS = {"n_routed_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "moe_shared_expert_intermediate_size":
                    56, "routed_scaling_factor": 2.5, "intermediate_size": 40}
# Three state heads of 40 for a width of 64, and every multiplier another number.
FALCON = {"head_dim": 32, "mamba_d_ssm": 120, "mamba_n_heads": 3, "mamba_d_head": 40, "mamba_d_state": 24, "mamba_n_groups": 1,
          "attention_in_multiplier": 0.8, "attention_out_multiplier": 0.9375, "embedding_multiplier": 5.7, "key_multiplier": 0.39,
          "lm_head_multiplier": 0.31, "mlp_multipliers": [0.88, 0.59], "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.24,
          "ssm_multipliers": [0.35, 0.25, 0.45, 0.5, 0.7]}
ERNIE_EXPERTS = {"moe_num_experts": 12, "moe_k": 3, "moe_intermediate_size": 40, "moe_num_shared_experts": 2, "moe_layer_start_index": 1}
K_EXPERTS = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "num_shared_experts": 2,
             "routed_scaling_factor": 1.75}
FEW_EXPERTS = {"num_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40}

GEMMA_4 = {"num_hidden_layers": 6, "head_dim": 16, "global_head_dim": 32, "sliding_window": 40, "vocab_size_per_layer_input": 300,
           "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "final_logit_softcapping": 3.0,
           "layer_types": ["sliding_attention", "full_attention"] * 3}
# With weights as wide as the others' transformers itself is 1e-4 of the largest logit from what float64 makes of the model.
KEYS_AS_VALUES = {"num_hidden_layers": 4, "layer_types": GEMMA_4["layer_types"][:4], "initializer_range": 0.12,
                  "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True,
                  "num_global_key_value_heads": 1}
GEMMA_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 40}

# Cuts of half the gates, or of few: of nearly none that are left transformers' own rounding would be most of a small model's logits.
GEMMA_3N = {"num_hidden_layers": 6, "head_dim": 16, "sliding_window": 40, "vocab_size_per_layer_input": 290, "laurel_rank": 12,
            "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "final_logit_softcapping": 3.0, "altup_num_inputs": 4,
            "layer_types": GEMMA_4["layer_types"], "intermediate_size": [88, 88, 72, 88, 104, 88],
            "activation_sparsity_pattern": [0.6, 0.3, 0.8, 0.0, 0.0, 0.5]}

# Heads of linear attention: two of values for each of keys, of other widths than attention's.
DELTA = {"num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24,
         "linear_value_head_dim": 20}

# Latent attention: no two widths are the same.
LATENT = {**GLM_EXPERTS, "num_key_value_heads": 4, "q_lora_rank": 36, "kv_lora_rank": 48, "qk_nope_head_dim": 20, "qk_rope_head_dim": 16,
          "v_head_dim": 28, "first_k_dense_replace": 1}
# Of Kimi Linear: three heads of linear attention, in groups of experts.
KIMI = {"num_hidden_layers": 5, "num_key_value_heads": 4, "kv_lora_rank": 48, "qk_nope_head_dim": 20, "qk_rope_head_dim": 16, "v_head_dim":
        28, "linear_head_dim": 24, "linear_num_heads": 3, "num_local_experts": 12, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
        "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "bos_token_id": 1, "eos_token_id": 7}
# Of Jamba: two of six layers attend, every second has experts.
JAMBA = {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 6, "num_experts_per_tok": 2,
         "intermediate_size": 40, "mamba_d_state": 12, "mamba_dt_rank": 10, "mamba_expand": 3}
SPACES = {"intermediate_size": 128, "num_hidden_layers": 4, "state_size": 12, "time_step_rank": 10}  # of Mamba
SHARPENED = rope("yarn", factor=8.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.7)
OF_BLOCKS = {"moe_intermediate_size": 32, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "q_lora_rank": 64}
SAME_SCALES = rope("yarn", factor=8.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.7)
ONE_GROUP = {"n_group": 1, "topk_group": 1}
