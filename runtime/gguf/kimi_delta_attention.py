"""GGUF metadata of models with Kimi Delta Attention, Kimi Linear and Ling 3: KDA layers have zero key-value heads, latent attention
widths have other names, and queries, keys and values are separate matrices (`split_matrices.py`).

Decays are stored negated for Kimi Linear and positive for Ling 3, where a checkpoint has their logarithms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ...offload.gguf_header import GgufHeader, Value, shown_value
from ...offload.safetensors_header import CheckpointError, damaged
from ..config import MAX_LAYERS, ModelConfig
from .family_context import FamilyContext
from .latent_attention import MLA_LENGTHS

KIMI, LING = "kimi-linear", "bailingmoe3"
KIMI_FAMILY, LING_FAMILY = "kimi_linear", "bailing_hybrid"
LAYER_TYPES = "linear_attention", "full_attention"
CONV_KERNEL, HEAD_DIM, GATE_LOWER_BOUND, SAFE_GATE = "ssm.conv_kernel", "kda.head_dim", "kda.gate_lower_bound", "kda.safe_gate"
SHARED_EXPERT_WIDTH = "expert_shared_feed_forward_length"
COMMON_KEYS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
               "expert_feed_forward_length": "moe_intermediate_size",
               "expert_shared_count": "num_shared_experts", "leading_dense_block_count": "first_k_dense_replace",
               "expert_weights_scale": "routed_scaling_factor", "expert_weights_norm": "norm_topk_prob",
               "expert_gating_func": "scoring_func",
               "expert_group_count": "n_group", "expert_group_used_count": "topk_group", "attention.kv_lora_rank": "kv_lora_rank",
               "attention.q_lora_rank": "q_lora_rank", CONV_KERNEL: "linear_conv_kernel_dim", HEAD_DIM: "linear_head_dim"}
KEYS = {KIMI: COMMON_KEYS, LING: {**COMMON_KEYS, SHARED_EXPERT_WIDTH: "moe_shared_expert_intermediate_size",
                                  GATE_LOWER_BOUND: "kda_lower_bound",
                                  "nextn_predict_layers": "num_nextn_predict_layers"}}
REQUIRED = ("attention.kv_lora_rank", "attention.head_count_kv", "rope.dimension_count", *MLA_LENGTHS, CONV_KERNEL, HEAD_DIM,
            "expert_feed_forward_length",
            "expert_shared_count")
# Per-layer clamps of the experts' gates: key of the file -> key of config.json.
SWIGLU_CLAMPS = {"swiglu_clamp_exp": "expert_swiglu_limit_list", "swiglu_clamp_shexp": "share_expert_swiglu_limit_list"}
OTHER_KEYS = frozenset((*MLA_LENGTHS, SAFE_GATE, *SWIGLU_CLAMPS))
_ATTENTION_NAMES = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "ssm_conv1d_q": "q_conv1d", "ssm_conv1d_k": "k_conv1d",
                    "ssm_conv1d_v": "v_conv1d", "ssm_beta": "b_proj", "ssm_norm": "o_norm", "attn_q_a": "q_a_proj",
                    "attn_q_a_norm": "q_a_layernorm", "attn_q_b": "q_b_proj", "attn_kv_a_mqa": "kv_a_proj_with_mqa",
                    "attn_kv_a_norm": "kv_a_layernorm",
                    **dict.fromkeys(("attn_kv_b", "attn_k_b", "attn_v_b"), "kv_b_proj")}
NAMES = {KIMI: {**{part: f"self_attn.{target}" for part, target in _ATTENTION_NAMES.items()}, "ssm_f_a": "self_attn.f_a_proj",
                "ssm_f_b": "self_attn.f_b_proj", "ssm_g_a": "self_attn.g_a_proj", "ssm_g_b": "self_attn.g_b_proj"},
         LING: {**{part: f"attention.{target}" for part, target in _ATTENTION_NAMES.items()}, "attn_output": "attention.dense",
                "attn_gate": "attention.g_proj", "ssm_g_a": "attention.g_proj", "ssm_f_a": "attention.f_proj"}}
_SHARED_EXPERT_PREFIX = {KIMI: "block_sparse_moe.shared_experts.", LING: "mlp.shared_experts."}
LAYER_NAMES = {name: {**NAMES[name], "exp_probs_b": correction, **{f"ffn_{part}_shexp": f"{_SHARED_EXPERT_PREFIX[name]}{part}_proj"
                                                                   for part in ("gate", "up", "down")}}
               for name, correction in ((KIMI, "block_sparse_moe.gate.e_score_correction_bias"), (LING, "mlp.gate.expert_bias"))}
FULL_NAMES = {KIMI: {"ssm_a": "self_attn.A_log", "ssm_dt.bias": "self_attn.dt_bias"},
              LING: {"ssm_a": "attention.A_log", "ssm_dt.bias": "attention.dt_bias"}}
# Role -> tensor of a layer in the file; SPLIT_TENSORS: role -> the tensors it is stored as.
ROLES = {"state_gate": "ssm_g_a", "state_gate_wide": "ssm_g_b", "state_rate": "ssm_f_a", "state_rate_wide": "ssm_f_b",
         "state_out": "attn_output"}
HIGH_PRECISION_ROLES = ("state_rate", "state_rate_wide", "state_gate_wide")  # exported with the embedding's precision
SPLIT_TENSORS = {"state_in": ("attn_q", "attn_k", "attn_v"), "state_conv": ("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v")}
ARCHITECTURES = {name: {"keys": KEYS[name], "layer_names": LAYER_NAMES[name], "full_names": FULL_NAMES[name], "other_keys": OTHER_KEYS,
                        "layer_kinds": LAYER_TYPES,
                        "roles": ROLES,
                        "split_tensors": SPLIT_TENSORS, "required_keys": (*REQUIRED, GATE_LOWER_BOUND) if name == LING else REQUIRED,
               "outer_names": {"token_embd.weight": "model.word_embeddings.weight"} if name == LING else {}} for name in (KIMI, LING)}
# Name suffixes of the decays that files store negated, and of those they store positive.
NEGATIVE_DECAY, POSITIVE_DECAY = ".self_attn.A_log", ".attention.A_log"
DEFAULT_ROPE_THETA = 10_000.0


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, from this architecture's own keys. Raises CheckpointError."""
    context.require_sigmoid_scores(raw)
    header, name, raw["sliding_window"] = context.header, context.name, context.window
    data, path, layers = header.metadata, header.path, raw["num_hidden_layers"]
    key_length, value_length, rope_dims = (data[f"{name}.{key}"] for key in (*MLA_LENGTHS, "rope.dimension_count"))
    for key, width in zip((*MLA_LENGTHS, "rope.dimension_count"), (key_length, value_length, rope_dims)):
        if type(width) is not int or not 0 < width < 1 << 16:
            damaged(path, f"states {name}.{key} {shown_value(width)}, expected a width")
    if rope_dims >= key_length:
        damaged(path, f"states {name}.rope.dimension_count {rope_dims} of heads of {key_length}")
    _check_gates(header, name, data)
    raw |= {"qk_rope_head_dim": rope_dims, "qk_nope_head_dim": key_length - rope_dims, "v_head_dim": value_length,
            "linear_num_heads": raw["num_attention_heads"],
            "num_key_value_heads": raw["num_attention_heads"]}
    raw.pop("head_dim", None)
    # llama.cpp's defaults.
    for key, default in (("q_lora_rank", None), ("first_k_dense_replace", 0), ("routed_scaling_factor", 1.0), ("n_group", 1),
                         ("topk_group", 1), ("norm_topk_prob", name == KIMI)):
        raw.setdefault(key, default)
    if name == KIMI:
        raw.pop("rope_theta", None)  # no RoPE
        return
    raw.setdefault("rope_theta", DEFAULT_ROPE_THETA)
    if "moe_shared_expert_intermediate_size" in raw:
        raw["num_shared_experts"] = 1  # the key states the total width
    for key, config_key in SWIGLU_CLAMPS.items():
        if (clamps := data.get(f"{name}.{key}")) is not None:  # one value, or one per layer
            raw[config_key] = [clamps] * layers if np.ndim(clamps) == 0 and type(layers) is int else np.asarray(clamps).tolist()
    mtp_layers = raw.setdefault("num_nextn_predict_layers", 0)
    if type(mtp_layers) is int and type(layers) is int and 0 <= mtp_layers < layers <= MAX_LAYERS:
        raw["num_hidden_layers"] = layers - mtp_layers  # the file's count includes them
        if isinstance(kinds := raw.get("layer_types"), list):
            raw["layer_types"] = kinds[: layers - mtp_layers]


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of these families, without the architecture's prefix."""
    state, moe = config.recurrent, config.moe
    heads = [0 if layer in config.recurrent_layers else config.num_key_value_heads for layer in range(config.num_hidden_layers)]
    keys = {"attention.head_count_kv": np.array(heads, np.int32), CONV_KERNEL: state.taps, HEAD_DIM: state.key_dim,
            "expert_group_count": moe.num_groups,
            "expert_group_used_count": moe.top_groups}
    if state.decay_bound is not None:
        keys[GATE_LOWER_BOUND] = float(state.decay_bound)
    if config.family == LING_FAMILY:
        keys |= {SAFE_GATE: True, SHARED_EXPERT_WIDTH: moe.shared_expert_dim}
        layers = range(config.num_hidden_layers)
        keys |= {key: np.array([config.gate_limits[layer][index] or 0.0 for layer in layers], np.float32)
                 for index, key in enumerate(SWIGLU_CLAMPS) if config.gate_limits}
    return keys


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express."""
    state = config.recurrent
    yield state.value_heads != config.num_attention_heads, \
        f"has {state.value_heads} heads of linear attention beside {config.num_attention_heads} of attention"
    yield not config.moe.shared_expert_dim, "has no shared expert"
    yield config.family == KIMI_FAMILY and not config.moe.renormalise, "does not normalize its expert weights"
    if config.family == LING_FAMILY:
        yield state.decay_bound is None, "has decays without a bound"
        yield config.rope.kind != "default", f"has rotary positions of kind {config.rope.kind}"


def _check_gates(header: GgufHeader, name: str, data: Mapping[str, Value]) -> None:
    """Raises CheckpointError for gate clamps and decay settings that are not supported."""
    for key in SWIGLU_CLAMPS if name == KIMI else ():
        if np.any(np.asarray(data.get(f"{name}.{key}", 0))):
            raise CheckpointError(f"{header.path} states {name}.{key}: gates that are clamped are not supported for this architecture",
                                  "models of the family without them run")
    if data.get(f"{name}.{SAFE_GATE}", True) is not True:
        damaged(header.path, f"states {name}.{SAFE_GATE} {shown_value(data[f'{name}.{SAFE_GATE}'])}, which no program runs")
