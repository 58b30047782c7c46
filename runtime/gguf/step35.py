"""GGUF metadata of Step 3.5 and 3.7: query heads, windows and gate clamps as per-layer lists that include multi-token prediction layers;
that half of each head rotates in layers without a window is implied by the architecture.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...offload.gguf_header import GgufHeader, Value, shown_value
from ...offload.safetensors_header import damaged
from ..config import MAX_LAYERS, ModelConfig
from ..config_rope import GLOBAL, LOCAL
from ..families.glm4_moe_lite import DENSE, SPARSE
from ..families.step3p5 import GATE_LIMIT_KEYS
from .family_context import SIGMOID, FamilyContext
from .laguna import QUERY_HEADS

FAMILY, NAME = "step3p5", "step35"
SHARED_EXPERT_WIDTH, LOCAL_ROPE_THETA, MTP_LAYERS = "expert_shared_feed_forward_length", "rope.freq_base_swa", "nextn_predict_layers"
SWIGLU_CLAMPS = dict(zip(("swiglu_clamp_exp", "swiglu_clamp_shexp"), GATE_LIMIT_KEYS))
ROTARY_FACTORS = {GLOBAL: 0.5, LOCAL: 1.0}  # by layer type
KEYS = {"expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size", SHARED_EXPERT_WIDTH: "share_expert_dim",
        "expert_weights_scale": "moe_router_scaling_factor",
        "expert_weights_norm":
        "norm_expert_weight", "expert_gating_func": "scoring_func", MTP_LAYERS: "num_nextn_predict_layers"}
OTHER_KEYS = frozenset({QUERY_HEADS, LOCAL_ROPE_THETA, *SWIGLU_CLAMPS, "leading_dense_block_count", "moe_every_n_layers"})
REQUIRED = ("attention.key_length", "attention.sliding_window", "expert_feed_forward_length", SHARED_EXPERT_WIDTH)
NAMES = {"attn_gate": "self_attn.g_proj", "exp_probs_b": "moe.router_bias", **{
    f"ffn_{part}_shexp": f"share_expert.{part}_proj" for part in ("gate", "up", "down")}}


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, with what no common key states; lists include MTP layers.

    Raises CheckpointError.
    """
    context.require_sigmoid_scores(raw)
    header, kinds = context.header, context.layer_types(raw, 1)
    layers, mtp_layers = raw["num_hidden_layers"], raw.setdefault("num_nextn_predict_layers", 0)
    if type(layers) is not int or type(mtp_layers) is not int or not 0 <= mtp_layers < layers <= MAX_LAYERS:
        damaged(header.path, f"states {NAME}.block_count {shown_value(layers)} and {NAME}.{MTP_LAYERS} {shown_value(mtp_layers)}")
    heads = raw.pop("num_attention_heads_per_layer", [raw["num_attention_heads"]] * layers)
    if len(heads) != layers:
        damaged(header.path, f"states {NAME}.{QUERY_HEADS} for {len(heads)} of {layers} layers")
    heads_by_kind = {kind: {count for count, layer_kind in zip(heads, kinds) if layer_kind == kind} or {heads[0]}
                     for kind in (GLOBAL, LOCAL)}
    if any(len(each) > 1 for each in heads_by_kind.values()):
        damaged(header.path, f"states {NAME}.{QUERY_HEADS} that differ among layers of one kind")
    raw |= {"num_hidden_layers": layers - mtp_layers, "layer_types": kinds, "sliding_window": context.window,
            "num_attention_heads": min(heads_by_kind[GLOBAL]), "num_sliding_attention_heads": min(heads_by_kind[LOCAL]),
            "attention_bias": "blk.0.attn_q.bias" in header.tensors, "mlp_layer_types": [
                SPARSE if f"blk.{layer}.ffn_gate_inp.weight" in header.tensors else DENSE for layer in range(layers - mtp_layers)]}
    raw.setdefault("norm_expert_weight", False)  # llama.cpp's default; in a checkpoint an absent key means true
    for key, config_key in SWIGLU_CLAMPS.items():
        if (clamps := header.metadata.get(f"{NAME}.{key}")) is not None:
            raw[config_key] = np.asarray(clamps).tolist() if np.ndim(clamps) else [clamps] * layers


def split_rope_tables(header: GgufHeader, raw: dict[str, object]) -> None:
    """Split the RoPE settings of `raw` into sections for layers without and with a sliding window."""
    theta, scaling = raw.pop("rope_theta", 10_000.0), dict(raw.pop("rope_scaling", None) or {})
    for name in ("short_factor", "long_factor"):  # files state factors for a whole head; only the rotated part is used
        if name in scaling:
            scaling[name] = scaling[name][: int(raw["head_dim"] * ROTARY_FACTORS[GLOBAL]) // 2]
    raw["rope_parameters"] = {
        GLOBAL: {"rope_type": "default", **scaling, "rope_theta": theta, "partial_rotary_factor": ROTARY_FACTORS[GLOBAL]},
        LOCAL: {"rope_type": "default", "rope_theta": header.metadata.get(f"{NAME}.{LOCAL_ROPE_THETA}", theta),
                "partial_rotary_factor": ROTARY_FACTORS[LOCAL]}}


def pad_rope_factors(divisors: np.ndarray, config: ModelConfig) -> np.ndarray:
    """RoPE frequency factors padded with ones to those of a whole head."""
    return np.concatenate([divisors, np.ones(config.head_dim // 2 - len(divisors), divisors.dtype)])


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys in addition to those of every mixture of experts, without the architecture's prefix."""
    moe, layers = config.moe, range(config.num_hidden_layers)
    local = next(rope for rope, window in zip(config.ropes, config.windows) if window is not None)
    keys: dict[str, Value] = {
        QUERY_HEADS: np.array([config.query_heads_of(layer) for layer in layers], np.int32), "attention.sliding_window_pattern": np.array(
            [window is not None for window in config.windows], np.bool_), "expert_feed_forward_length": moe.expert_dim,
            SHARED_EXPERT_WIDTH: moe.shared_expert_dim,
        "expert_gating_func": SIGMOID, "expert_weights_norm": True, "expert_weights_scale": float(moe.routed_scale),
        "leading_dense_block_count":
        min(moe.layers, default=config.num_hidden_layers), "rope.dimension_count": config.head_dim, LOCAL_ROPE_THETA: float(local.theta)}
    return keys | {key: np.array([config.gate_limits[layer][index] or 0.0 for layer in layers], np.float32)
                   for index, key in enumerate(SWIGLU_CLAMPS) if config.gate_limits}


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express."""
    kinds = {GLOBAL if window is None else LOCAL for window in config.windows}
    yield len(kinds) < 2, "has layers of one kind"
    yield any(rope.partial_rotary_factor != ROTARY_FACTORS[GLOBAL if window is None else LOCAL]
              for rope, window in zip(config.ropes, config.windows)), "rotates another part of a head"
    yield any(rope.kind != "default" for rope, window in zip(config.ropes, config.windows) if window is not None), \
        "scales RoPE in layers with a window"
    yield config.rope.kind not in ("default", "linear", "llama3", "longrope"), f"has rotary positions of kind {config.rope.kind}"
    yield config.attn_scale not in (None, config.head_dim**-0.5), "does not scale its scores by head_dim"
