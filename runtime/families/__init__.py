"""Model families, one file each; the file's name is the checkpoint's `model_type`.

A family says which config keys it uses, which tensors it has by role, and how a block computes over a backend's `BlockOps`. To add one:
a file with the members of `Family`, and its name in FAMILIES; `docs/architecture/families.md` has the steps. A member that a file does
not define is taken from the family that the file names in LIKE, or else from Llama.

Roles of a layer's tensors, by part of the layer. `<matrix>_bias` is the bias of any matrix.

attention           q, k, v, o; q_norm, k_norm; o_norm (of o's output), attn_sub_norm (of o's input); sinks (one logit per query head);
                    attn_gate (output gate); `groups.<number>.o_in` (matrices before o). A layer that uses another layer's keys and values
                    has no k, v and k_norm; one whose keys are its values has no v
latent attention    kv_a, kv_a_norm and kv_b in place of k and v; q_a, q_a_norm and q_b in place of q, if queries have a rank
MLP                 gate, up, down; down_norm (of down's output), ffn_sub_norm (of its input); curve_above, curve_below (xIELU). In a
                    bundled folder `bundles` holds up and down
norms               input_norm and post_norm before attention and MLP; entry_norm (replaces the first layer's input), middle_norm (replaces
                    the stream between attention and MLP); input_norm_in, input_norm_out, post_norm_in, post_norm_out (low-rank gates of
                    these norms' outputs)
experts             router, `experts.<number>.<role>`, correction (bias of the scores); `shared.<role>` of the shared expert, shared.scale
                    (its gate); `seen.<role>` (router and experts of image rows)
  beside an MLP     router_scale, expert_scales, expert_norm, experts_after; mlp_after
  of lower width    experts_in (projects the experts' input down), experts_out (projects their output up)
  router as an MLP  router_in, router_share, router_norm, router_first, router_second, before the router
sparse attention    index_q, index_k and their norms, index_weights; index_entered (norm of the input of index queries);
                    index_pool_ape (added to the scores of tokens within a pool)
compressed keys     key_rows, key_weights, key_bias, key_norm; of their indexer index_rows, index_row_weights, index_bias, index_norm
query scaling       query_scale_slope, query_scale_offset; of index queries index_query_scale_slope, index_query_scale_offset
other attention     lambda_q1, lambda_k1, lambda_q2, lambda_k2 (differential); dynamic_mask, dynamic_mask_rate; cross_attn_gate,
                    cross_mlp_gate (gates of layers that attend to images)
recurrent layers    in place of q, k, v and o: state_in, state_gate (output gate), state_out. Depending on the kind: state_rate, state_beta,
                    state_conv, state_decay, state_dt, state_skip, state_norm; state_gate_wide and state_rate_wide (second matrices of
                    low-rank state_gate and state_rate); state_keys (B and C); state_rate_norm, state_b_norm, state_c_norm; state_heads,
                    state_temps (convolved queries and keys)
  RWKV 7            state_r, state_k, state_v in place of state_in; low-rank `state_<letter>_in` and `_out`; state_direction,
                    state_remains, state_bonus; `shift_<letter>`, shift_up
per-layer inputs    input_gate, input_out, input_after; layer_scale (multiplies the layer's output); low_in, low_out, low_norm (LAuReL)
residual streams    stream_norm, stream_router, predict, correct, stream_scale (AltUp); attn_mix and mlp_mix, each with a base and a scale
                    (hyper-connections); `<branch>.mix_norm`, `.mix_down`, `.mix_up`, `.mix_in` (gated residuals)
residual scales     entry_scale, entry_offset (first layer); attn_scale, attn_offset, attn_branch_scale, attn_branch_offset, and mlp_...
shared blocks       mlp_low, gate_wide, up_wide, q_low, q_wide and so on (low-rank branches beside the block); lent_out (reads its output)
n-grams             ngram_key, ngram_value, ngram_conv and norms

Roles outside the layers: embed; positions (learned position embeddings); norm; head, absent if tied to the embedding; head_bias; head_in,
head_norm (a matrix and a norm between norm and head); layer_embed, layer_proj, layer_norm (per-layer inputs); `streams.<number>.enter`
and `.leave`; leave_mix; vector (projection of a pooled text), preceded by vector_in if that is an MLP; `blocks.<number>.<role>` of shared
blocks; rope_alpha (learned rotary frequencies); `picks.<layer>` (experts by token id); `layers.<number>.ngrams` (a layer's n-gram table).

A multimodal checkpoint is read as the text generator within it: COMPOSITE maps its `model_type` to those that the text part may have, the
default first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from ..config_reader import ConfigError, Keys, show

if TYPE_CHECKING:
    import numpy as np

    from ..config import ModelConfig
    from ..layer import Block

FAMILIES = ("afmoe", "apertus", "arcee", "axk1", "axk2", "bailing_hybrid", "bailing_moe_v2", "bamba", "beam", "bitnet", "bloom", "codegen",
            "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "cwm", "dbrx", "deepseek_ocr2_text", "deepseek_v2", "deepseek_v3",
            "deepseek_v32", "deepseek_v4", "diffllama", "doge", "dots1", "embedding_gemma2_text", "ernie4_5", "ernie4_5_moe",
            "ernie4_5_vl_moe_text", "exaone", "exaone4", "exaone_moe", "falcon", "falcon_h1", "falcon_mamba", "flex_olmo", "flint", "gemma",
            "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm5_next_text",
            "glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite", "granite_swa", "granitemoe",
            "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hy_v4",
            "hyperclovax", "internlm2", "internlm3", "iquestcoder", "jais2", "jamba", "kimi_linear", "kolibri1", "laguna", "lara_mini",
            "lfm2", "lfm2_moe", "lfm3", "llama", "llama4_text", "longcat_flash", "mamba", "mamba2", "mellum", "mimo", "mimo_v2_flash",
            "minicpm", "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mistral4",
            "mistral_large4_text", "mixtral", "mllama_text_model", "modernbert_decoder", "molmo2_text", "mpt", "muse_glimmer_text",
            "nanbeige", "nanochat", "nemotron", "nemotron_h", "nemotron_nas", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "opt",
            "ouro", "persimmon", "phi", "phi3", "phi4_multimodal", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text",
            "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen4_exp_text", "rwkv7", "seed_oss", "smollm3", "solar_open", "stablelm",
            "starcoder2", "step3p5", "unlimited_ocr_text", "vaultgemma", "whisper", "youtu", "zamba2", "zaya")
EMBEDDING_FAMILIES = ("embedding_gemma2_text",)  # bidirectional whatever a config says: they generate nothing
# The `model_type` that transformers uses, and those of published checkpoints.
NEMOTRON_OMNI = ("nemotron_h_omni", "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Omni_Reasoning_V3")
NEMOTRON_VISION = (*NEMOTRON_OMNI, "NemotronH_Nano_VL_V2")  # of the last only the text part is read
HYPERCLOVAX_VISION = ("hyperclovax_vision_v2", "vlm")  # as transformers has it, and as published
COMPOSITE: Mapping[str, tuple[str, ...]] = {
    "apertus1p5": ("apertus1p5_text",), "audioflamingo3": ("qwen2",), "aya_vision": ("cohere2",), "blip-2": ("opt",),
    "cohere2_vision": ("cohere2", "cohere2_moe"),
    "cohere_compass": ("cohere_compass_text",), **dict.fromkeys(("deepseek_ocr", "deepseek_ocr2"), ("deepseek_ocr2_text",)),
    "embedding_gemma2": ("embedding_gemma2_text",),
    **dict.fromkeys(("ernie4_5_moe_vl", "ernie4_5_vl_moe"), ("ernie4_5_vl_moe_text",)),
    "exaone4_5": ("exaone4", "exaone4_5_text"), "fast_vlm": ("qwen2",), "gemma3": ("gemma3_text",), "minicpm_ocr": ("qwen3_5_text",),
    "unlimited_ocr": ("unlimited_ocr_text",),
    "gemma3n": ("gemma3n_text",), "gemma4": ("gemma4_text",), "gemma4_unified": ("gemma4_unified_text",),
    "glm46v": ("glm4v_moe_text", "glm4v_text"), "glm4v": ("glm4v_text",), "glm4v_moe": ("glm4v_moe_text",), "glm_ocr": ("glm_ocr_text",),
    "glmga": ("glm4v_text", "glm4v_moe_text"),
    "glmasr": ("llama",),
    "glm5_next": ("glm5_next_text",), "granite4_vision": ("granite4_vision_text", "granite"),
    "got_ocr2": ("qwen2",), "granite_docling": ("granite_docling_text",),
    "granite_speech": ("granite",), "hunyuan_vl": ("hunyuan_vl_text",), "hy_v4_vl": ("hy_v4_vl_text",),
    **dict.fromkeys(HYPERCLOVAX_VISION, ("hyperclovax",)),
    "idefics2": ("mistral",), "idefics3": ("llama",), "internvl": ("qwen2", "qwen3", "llama", "qwen3_moe"),
    "internvl_chat": ("qwen2", "qwen3", "llama", "qwen3_moe", "internlm2"),
    "deepseek_vl": ("llama",), "janus": ("llama",),
    "kimi_k25": ("deepseek_v3", "kimi_k2"), "kimi_vl": ("deepseek_v3",),
    "lfm2_vl": ("lfm2", "lfm2_moe"), "lfm3_vl": ("lfm3",), "lighton_ocr": ("qwen3",),
    "llama4": ("llama4_text",), "llava": ("llama", "mistral", "qwen2"), "llava_next": ("llama", "mistral", "qwen2", "granite"),
    "llava_onevision": ("qwen2",), "llava_qwen2": ("qwen2",), "minicpmv4_6": ("qwen3_5_text",), "minicpmv4_7": ("qwen3_5_text",),
    "minimax_m3_vl": ("minimax_m3_vl_text",), "mistral3": ("mistral", "ministral3", "mistral4"),
    "mistral_large4": ("mistral_large4_text",), "mllama": ("mllama_text_model",), "molmo2": ("molmo2_text",),
    "muse_glimmer": ("muse_glimmer_text",), **dict.fromkeys(NEMOTRON_VISION, ("nemotron_h",)), "ovis2": ("qwen2",),
    "paddleocr_vl": ("paddleocr_vl_text",), "paligemma": ("gemma", "gemma2"), "perception_lm": ("llama",),
    "qianfan_ocr": ("qwen3",), "qwen2_5_omni": ("qwen2_5_omni_text",), "qwen2_5_vl": ("qwen2_5_vl_text",),
    "qwen2_audio": ("qwen2",), "qwen2_vl": ("qwen2_vl_text",), "qwen3_5": ("qwen3_5_text",), "qwen3_5_moe": ("qwen3_5_moe_text",),
    "qwen3_asr": ("qwen3", "qwen3_asr_text"),
    "qwen3_omni_moe": ("qwen3_omni_moe_text",), "qwen3_vl": ("qwen3_vl_text",), "qwen3_vl_moe": ("qwen3_vl_moe_text",),
    "qwen4_exp": ("qwen4_exp_text",),
    "smolvlm": ("llama",), "step3p7": ("step3p5",), "voxtral": ("llama",)}
# Composites whose text tensors `stores/composite.py` renames to those of a text-only checkpoint; of the others the families know the
# prefixes.
PREFIX_STRIPPED = (*NEMOTRON_VISION, *HYPERCLOVAX_VISION, "apertus1p5", "audioflamingo3", "aya_vision", "blip-2", "cohere2_vision",
                   "cohere_compass", "deepseek_ocr", "deepseek_ocr2", "deepseek_vl", "ernie4_5_moe_vl", "ernie4_5_vl_moe", "exaone4_5",
                   "fast_vlm", "glm46v", "glm4v", "glm4v_moe", "glm5_next", "glm_ocr", "glmasr", "glmga", "got_ocr2", "granite4_vision",
                   "granite_docling", "granite_speech", "hunyuan_vl", "hy_v4_vl", "idefics2", "idefics3", "internvl", "internvl_chat",
                   "janus", "kimi_k25", "kimi_vl", "lfm2_vl", "lfm3_vl", "lighton_ocr", "llama4", "llava", "llava_next", "llava_onevision",
                   "llava_qwen2", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "minimax_m3_vl", "mistral_large4", "mllama", "muse_glimmer",
                   "ovis2", "paddleocr_vl", "paligemma", "perception_lm", "qianfan_ocr", "qwen2_5_omni", "qwen2_5_vl", "qwen2_audio",
                   "qwen2_vl", "qwen3_asr", "qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp", "smolvlm", "step3p7",
                   "unlimited_ocr", "voxtral")
CAUSAL_LM_COMPOSITES = ("llava_qwen2",)  # their architectures end in ForCausalLM
PREFIX_LM = ("paligemma",)  # prompts with images are bidirectional
# A `model_type` that is another name of a family -> the family.
MODEL_TYPE_ALIASES: Mapping[str, str] = {
    "AXK1": "axk1", "apertus1p5_text": "apertus",
    "exaone4_5_text": "exaone4", "gemma4_unified_text": "gemma4_text",
    "glm4v_moe_text": "glm4_moe", "glm4v_text": "glm4",
    "granite4_vision_text": "granite", "granite_docling_text": "granite",
    "glm_ocr_text": "glm4", "hunyuan_vl_text": "hunyuan_v1_dense", "hy_v4_vl_text": "hy_v4",
    "kimi_k2": "deepseek_v3", "llama_bidirec": "llama", "minimax_m1": "minimax", "minimax_text_01": "minimax",
    "modernbert-decoder": "modernbert_decoder", "nemotron-nas": "nemotron_nas", "paddleocr_vl_text": "llama", "phi4mm": "phi4_multimodal",
    "qwen2_5_omni_text": "qwen2",
    "qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2", "qwen3_asr_text": "qwen3",
    "qwen3_omni_moe_text": "qwen3_moe", "qwen3_vl_moe_text": "qwen3_moe",
    "qwen3_vl_text": "qwen3", "sarvam_mla": "deepseek_v3", "sarvam_moe": "bailing_moe_v2"}
_QWEN2_VL = {"bos_token_id": 151_643, "eos_token_id": 151_645, "max_window_layers": 80, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
             "rope_theta": 1e6}
# Such a `model_type` -> defaults of absent keys, where they differ from the family's.
MODEL_TYPE_DEFAULTS: Mapping[str, Mapping[str, object]] = {
    "apertus1p5_text": {"vocab_size": 266_752},
    "gemma4_unified_text": {"hidden_size_per_layer_input": 0, "max_position_embeddings": 262_144, "sliding_window": 1024},
    "glm4v_moe_text": {"attention_bias": True, "max_position_embeddings": 65_536, "num_nextn_predict_layers": 0, "vocab_size": 151_424},
    "glm4v_text": {"head_dim": None, "max_position_embeddings": 32_768, "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5},
    "glm_ocr_text": {"attention_bias": False, "head_dim": None, "max_position_embeddings": 131_072, "num_key_value_heads": 8,
                     "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5},
    "granite_docling_text": {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "eos_token_id": 100_257,
                             "logits_scaling": 4.0, "max_position_embeddings": 32_768, "num_key_value_heads": 4,
                             "residual_multiplier": 0.263, "rms_norm_eps": 1e-5},
    "hy_v4_vl_text": {"hidden_size": 6144, "index_n_heads": 32, "intermediate_size": 18_432, "moe_intermediate_size": 2048,
                      "num_attention_heads": 64, "num_hidden_layers": 78, "q_lora_rank": 2048},
    "llama_bidirec": {"is_causal": False},
    # `postnorm: false` is another block, which the family refuses; it is the default of the code that these bring.
    "minimax_m1": {"postnorm": False}, "minimax_text_01": {"postnorm": False},
    "paddleocr_vl_text": {"head_dim": 128, "max_position_embeddings": 131_072, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
                          "rope_theta": 500_000.0},
    "qwen2_5_omni_text": {"num_key_value_heads": 4, "rope_theta": 1e6}, "qwen2_5_vl_text": _QWEN2_VL, "qwen2_vl_text": _QWEN2_VL,
    "qwen3_omni_moe_text": {"norm_topk_prob": True, "rope_theta": 1e6, "sliding_window": None},
    "qwen3_vl_moe_text": {"max_position_embeddings": 128_000, "moe_intermediate_size": 1408, "norm_topk_prob": True,
                          "num_experts_per_tok": 4, "num_key_value_heads": 16, "rope_theta": 500_000.0},
    "qwen3_vl_text": {"max_position_embeddings": 128_000, "rope_theta": 500_000.0},
    "sarvam_mla": {"first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 16_384, "n_group": 1, "n_routed_experts": 128,
                   "num_attention_heads": 64, "num_hidden_layers": 32, "num_nextn_predict_layers": 0, "q_lora_rank": None, "topk_group": 1,
                   "vocab_size": 262_144},
    "sarvam_moe": {"eos_token_id": 1, "first_k_dense_replace": 1, "head_dim": 64, "hidden_size": 4096, "intermediate_size": 8192,
                   "max_position_embeddings": 131_072, "moe_intermediate_size": 1024, "num_attention_heads": 64, "num_experts": 128,
                   "num_experts_per_tok": 6, "num_hidden_layers": 19, "num_key_value_heads": 4, "num_shared_experts": 1,
                   "rms_norm_eps": 1e-6, "rope_theta": 8e6, "routed_scaling_factor": 2.5, "vocab_size": 262_144}}
# Such a `model_type` -> its names of keys -> the family's.
MODEL_TYPE_KEYS: Mapping[str, Mapping[str, str]] = {
    "sarvam_mla": {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
    # As transformers writes them.
    "sarvam_moe": {"attention_bias": "use_qkv_bias", "n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}}
# Prefixes of the text part's tensors in multimodal checkpoints: older, newer, without a head.
MULTIMODAL_PREFIXES = ("language_model.model.", "model.language_model.", "language_model.")
MULTIMODAL_HEADS = ("language_model.lm_head.weight",)
EXPERT_ROLES = ("gate", "up", "down")  # roles of a gated MLP
SHARED_EXPERT_ROLES = ("shared.gate", "shared.up", "shared.down", "shared.scale")  # the last one is optional
VISION_PREFIX = "seen."  # of the roles of router, correction and experts that image rows have for themselves


@dataclass(frozen=True)
class TensorRule:
    """A tensor that a checkpoint must hold."""

    name: str
    shape: tuple[int, ...]  # as stored; of a matrix [N, K]
    also: tuple[str, ...] = ()  # other names under which it is published
    part_of: tuple[str, int, int] | None = None  # (name, first row, rows) of a fused tensor that holds it, if none has `name`
    plain: bool = False  # is used as raw values: low-bit codes of other tools are dequantized
    coefficients: bool = False  # has two dimensions but is used in float32, like a vector
    optional: bool = False  # a checkpoint need not hold it


def with_multimodal_names(rules: Mapping[str, TensorRule]) -> dict[str, TensorRule]:
    """The same tensors, also under the names that multimodal checkpoints give them."""
    def names(role: str, rule: TensorRule) -> tuple[str, ...]:
        return MULTIMODAL_HEADS if role == "head" else tuple(prefix + rule.name.removeprefix("model.") for prefix in MULTIMODAL_PREFIXES)

    return {role: replace(rule, also=names(role, rule)) for role, rule in rules.items()}


def fused(rules: Mapping[str, TensorRule], layer: int, matrices: Mapping[str, tuple[str, ...]]) -> dict[str, TensorRule]:
    """A layer's tensors where some are stored fused. `matrices`: name of a fused matrix -> roles of its parts, from the first row on."""
    result = dict(rules)
    for name, roles in matrices.items():
        rows = [rules[role].shape[0] for role in roles]
        for i, role in enumerate(roles):
            result[role] = replace(rules[role], part_of=(f"model.layers.{layer}.{name}.weight", sum(rows[:i]), sum(rows)))
    return result


def is_parallel_block(roles: Collection[str]) -> bool:
    """Whether attention and MLP of a layer both read the layer's input, under one norm or under input_norm and mlp_norm."""
    return "input_norm" in roles and "post_norm" not in roles


def is_cross_attention(roles: Collection[str]) -> bool:
    """Whether a layer attends to images only, and is skipped for a text without any."""
    return "cross_attn_gate" in roles


def expert_role(expert: int, role: str) -> str:
    """The role of an expert's matrix: gate, up or down."""
    return f"experts.{expert}.{role}"


def expert_roles(expert: int) -> list[str]:
    """The roles of an expert's matrices, in the order of `Expert`; not all experts have a gate."""
    return [expert_role(expert, role) for role in EXPERT_ROLES]


def expert_of(role: str) -> int | None:
    """The number of the expert that a role belongs to; None for a role of the layer."""
    return int(role.split(".")[1]) if role.startswith("experts.") else None


def base_role(role: str) -> str:
    """A role without its prefix: gate for `experts.7.gate`."""
    return role.rpartition(".")[2]


@dataclass(frozen=True)
class Family:
    """The members of a module in this folder. Those that are None for most families are described in `stores/tensor_views.py`."""

    KEYS_HARMLESS: frozenset[str]  # config keys without effect on an answer, besides those of `config_keys.py`
    REFUSED_UNLESS: Mapping[str, object]  # config key -> its only supported value; takes precedence over `config_keys.py`
    NAMES: Mapping[str, str]  # role of an expert's matrix -> its name in checkpoints
    config: Callable[[Keys], ModelConfig]
    layer_tensors: Callable[[ModelConfig, int], dict[str, TensorRule]]  # of one layer, by role
    outer_tensors: Callable[[ModelConfig], dict[str, TensorRule]]  # those outside the layers, by role
    block: Block
    stored_rows: Callable[[ModelConfig, int], dict[str, tuple[str, np.ndarray]]] | None
    joined_rows: Callable[[ModelConfig, int], dict[str, tuple[tuple[str, int], ...]]] | None
    stacked_rows: Callable[[ModelConfig, int], dict[str, tuple[str, ...]]] | None
    transposed_columns: Callable[[ModelConfig, int], dict[str, tuple[str, int]]] | None


# A list of two hundred names would help nobody.
UNKNOWN_FAMILY_HINT = "effllm search WORDS finds models that run here, docs/models.md has all families; a newer effllm may have more"


def resolve_model_type(raw: Mapping[str, object]) -> dict[str, object]:
    """A config with the `model_type` of its family, and with the defaults and key names of the alias that it had, if any."""
    model_type = str(raw.get("model_type"))
    if model_type not in MODEL_TYPE_ALIASES:
        return dict(raw)
    names = MODEL_TYPE_KEYS.get(model_type, {})
    stated = {names.get(key, key): value for key, value in raw.items()}
    return {**MODEL_TYPE_DEFAULTS.get(model_type, {}), **stated, "model_type": MODEL_TYPE_ALIASES[model_type]}


def is_embedding_model(raw: Mapping[str, object]) -> bool:
    """Whether the config, or the text part of a composite, is of a family that only makes embeddings."""
    model_type = str(raw.get("model_type"))
    return not {model_type, *COMPOSITE.get(model_type, ())}.isdisjoint(EMBEDDING_FAMILIES)


def get(model_type: str) -> Family:
    """The family of a `model_type`. Raises ConfigError naming it."""
    if model_type not in FAMILIES:
        raise ConfigError(f"model type {show(model_type)} is not supported", UNKNOWN_FAMILY_HINT)
    return _load(model_type)


@cache
def _load(name: str) -> Family:
    """The members of a family's module; those it lacks come from its LIKE, or from Llama."""
    from . import llama  # which imports this module

    module = import_module(f".{name}", __name__)
    members = vars(module)
    while module is not llama:
        module = vars(module).get("LIKE", llama)
        members = {**vars(module), **members}
    return Family(**{field.name: members.get(field.name) for field in fields(Family)})
