"""GGUF metadata of MiMo V2 Flash: key-value heads and windows as per-layer lists that include multi-token prediction layers, values
narrower than keys, and their scale.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...offload.gguf_header import Value, shown_value
from ...offload.safetensors_header import CheckpointError, damaged
from ..config import MAX_LAYERS, ModelConfig
from ..config_rope import LOCAL
from .family_context import FamilyContext

FAMILY, NAME = "mimo_v2_flash", "mimo2"
KV_HEADS, MTP_LAYERS = "attention.head_count_kv", "nextn_predict_layers"
VALUE_SCALE, LOCAL_ROPE_THETA = "attention.value_scale", "rope.freq_base_swa"
PER_LAYER_KEYS = (KV_HEADS,)
VALUE_LENGTH, ROPE_DIMS = "attention.value_length", "rope.dimension_count"
KEYS = {"expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size", "expert_gating_func": "scoring_func",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_weights_norm": "norm_topk_prob", "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
        MTP_LAYERS: "num_nextn_predict_layers", VALUE_SCALE: "attention_value_scale", LOCAL_ROPE_THETA: "swa_rope_theta",
        VALUE_LENGTH: "v_head_dim"}
REQUIRED = ("attention.key_length", VALUE_LENGTH, ROPE_DIMS, "attention.sliding_window", KV_HEADS, "expert_feed_forward_length")
NAMES = {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
FULL_NAMES = {"attn_sinks.weight": "self_attn.attention_sink_bias"}
ROLES = {"sinks": "attn_sinks"}
ARCHITECTURE = {"keys": KEYS, "required_keys": REQUIRED, "layer_names": NAMES, "full_names": FULL_NAMES, "roles": ROLES,
                "window_pattern": True}


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, from this architecture's own keys. Raises CheckpointError."""
    context.require_sigmoid_scores(raw)
    header, kinds = context.header, context.layer_types(raw, 1)  # including MTP layers
    data, path, blocks = header.metadata, header.path, raw["num_hidden_layers"]
    mtp_layers, heads = raw.setdefault("num_nextn_predict_layers", 0), np.atleast_1d(data[f"{NAME}.{KV_HEADS}"])
    if type(blocks) is not int or type(mtp_layers) is not int or not 0 <= mtp_layers < blocks <= MAX_LAYERS:
        damaged(path, f"states {NAME}.block_count {shown_value(blocks)} and {NAME}.{MTP_LAYERS} {shown_value(mtp_layers)}")
    if heads.dtype.kind not in "iu" or len(heads) not in (1, blocks):
        damaged(path, f"states {NAME}.{KV_HEADS} {shown_value(data[f'{NAME}.{KV_HEADS}'])}, expected a number for each of {blocks} layers")
    head_dim, rope_dims, layers = raw["head_dim"], data[f"{NAME}.{ROPE_DIMS}"], blocks - mtp_layers
    if type(head_dim) is not int or type(rope_dims) is not int or not 0 < rope_dims <= head_dim:
        damaged(path, f"states {NAME}.{ROPE_DIMS} {shown_value(rope_dims)} of heads of {shown_value(head_dim)}")
    has_window = [kind == LOCAL for kind in kinds[:layers]]
    layer_heads = np.broadcast_to(heads, blocks)
    heads_by_window = {windowed: {int(count) for count, is_windowed in zip(layer_heads, has_window) if is_windowed == windowed}
                       for windowed in (False, True)}
    global_heads = next(iter(heads_by_window[False] or {0}))
    if heads_by_window[False] - {global_heads} or heads_by_window[True] - {2 * global_heads}:
        raise CheckpointError(f"{path} states {NAME}.{KV_HEADS} {heads[:8].tolist()}, which is not supported",
                              "models of this family have twice as many KV heads in layers with a window")
    raw |= {"num_hidden_layers": layers, "num_key_value_heads": global_heads, "sliding_window": context.window,
            "partial_rotary_factor": rope_dims / head_dim,
            "hybrid_layer_pattern": [int(value) for value in has_window], "attention_bias": "blk.0.attn_q.bias" in header.tensors,
            "moe_layer_freq": [int(f"blk.{layer}.ffn_gate_inp.weight" in header.tensors) for layer in range(layers)]}
    raw.setdefault("attention_value_scale", 1.0)
    raw.setdefault("swa_rope_theta", raw.get("rope_theta"))


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys in addition to those of every model, without the architecture's prefix."""
    local = next((rope for rope, window in zip(config.ropes, config.windows) if window is not None), config.rope)
    layers = range(config.num_hidden_layers)
    return {KV_HEADS: np.array([config.kv_heads_of(layer)[0] for layer in layers], np.int32), VALUE_LENGTH: config.v_head_dim,
            VALUE_SCALE: config.multiplier("v"),
            LOCAL_ROPE_THETA: float(local.theta), "expert_feed_forward_length": config.moe.expert_dim,
            "attention.sliding_window_pattern": np.array([window is not None for window in config.windows], np.bool_)}


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express, or of what llama.cpp assumes otherwise."""
    moe = config.moe
    yield set(config.windows) == {None}, "has no window"
    yield any(rope.kind != "default" for rope in config.ropes), "scales its RoPE"
    yield moe.routed_scale != 1.0, f"scales its expert weights by {moe.routed_scale:g}"
    yield not moe.renormalise, "does not normalize its expert weights"
    yield moe.top_groups < moe.num_groups, "chooses groups of experts"
