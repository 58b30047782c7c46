"""GGUF metadata of Laguna: query heads per layer, one layer in several without a window, and separate RoPE keys for layers with one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ...offload.gguf_header import GgufHeader, GgufTensor, Value, shown_value
from ...offload.safetensors_header import CheckpointError, damaged
from ..config import MAX_LAYERS, ModelConfig
from ..config_rope import GLOBAL, LOCAL
from .family_context import FamilyContext

NAME = FAMILY = "laguna"
QUERY_HEADS = "attention.head_count"  # one value, or one per layer
WINDOW_PATTERN, WINDOW_PERIOD = "attention.sliding_window_pattern", 4  # default: the first of every four layers has no sliding window
LOCAL_ROPE_THETA, LOCAL_ROPE_DIMS = "rope.freq_base_swa", "rope.dimension_count_swa"
OTHER_KEYS = frozenset({QUERY_HEADS, WINDOW_PATTERN, LOCAL_ROPE_THETA, LOCAL_ROPE_DIMS})
SHARED_EXPERT_WIDTH = "expert_shared_feed_forward_length"
KEYS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
        "expert_weights_scale": "moe_routed_scaling_factor", "expert_weights_norm": "norm_topk_prob",
        "expert_gating_func": "scoring_func", "leading_dense_block_count": "first_k_dense_replace",
        SHARED_EXPERT_WIDTH: "shared_expert_intermediate_size"}
REQUIRED = ("attention.key_length", "expert_feed_forward_length", SHARED_EXPERT_WIDTH, "expert_weights_scale", "expert_weights_norm",
            "leading_dense_block_count")


def query_heads(value: Value, raw: dict[str, object]) -> Value:
    """The number of query heads; per-layer numbers are put into `raw`, and the first is returned."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.size:
        raw["num_attention_heads_per_layer"] = value.tolist()
        return value[:1]
    return value


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, with what no common key states. Raises CheckpointError."""
    context.require_sigmoid_scores(raw)
    header, window = context.header, context.window
    layers, gate_rows = raw["num_hidden_layers"], _gate_rows(header.tensors)
    if not isinstance(layers, int) or not 0 < layers <= MAX_LAYERS:
        return  # the config reader refuses it
    period, dense_layers = header.metadata.get(f"{NAME}.{WINDOW_PATTERN}", WINDOW_PERIOD), raw.pop("first_k_dense_replace")
    if type(period) is not int or period < 1:
        damaged(header.path, f"states {NAME}.{WINDOW_PATTERN} {shown_value(period)}, expected a number of layers")
    if header.metadata.get(f"{NAME}.expert_shared_count", 1) != 1:
        raise CheckpointError(f"{header.path} states {NAME}.expert_shared_count {header.metadata[f'{NAME}.expert_shared_count']}, which is "
                              "not supported", "there must be one shared expert")
    heads = raw.get("num_attention_heads_per_layer", [raw["num_attention_heads"]])
    raw |= {"attention_bias": "blk.0.attn_q.bias" in header.tensors, "sliding_window": window, "layer_types": [
                LOCAL if window and layer % period else GLOBAL for layer in range(layers)],
            "gating": "per-head" if gate_rows == heads[0] else "per-element",
            "mlp_layer_types": ["dense" if type(dense_layers) is int and layer < dense_layers else "sparse" for layer in range(layers)]}


def _gate_rows(tensors: Mapping[str, GgufTensor]) -> int | None:
    """Rows of the first layer's attention gate; None if it has none."""
    gate = tensors.get("blk.0.attn_gate.weight")
    return gate.shape[0] if gate is not None and len(gate.shape) == 2 else None


def split_rope_tables(header: GgufHeader, raw: dict[str, object]) -> None:
    """Split the RoPE settings of `raw` into sections for layers without and with a sliding window."""
    head_dim = raw["head_dim"]
    global_rope = {"rope_type": "default", **(raw.pop("rope_scaling", None) or {}), "rope_theta": raw.pop("rope_theta", 10_000.0),
                   "partial_rotary_factor": raw.pop("partial_rotary_factor", 1.0)}
    theta = header.metadata.get(f"{NAME}.{LOCAL_ROPE_THETA}", global_rope["rope_theta"])
    rope_dims = header.metadata.get(f"{NAME}.{LOCAL_ROPE_DIMS}", head_dim)
    if type(rope_dims) is not int or type(head_dim) is not int or not 0 < rope_dims <= head_dim:
        damaged(header.path, f"states {NAME}.{LOCAL_ROPE_DIMS} {shown_value(rope_dims)} for heads of {shown_value(head_dim)}")
    local_rope = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": rope_dims / head_dim}
    raw["rope_parameters"] = {GLOBAL: global_rope, LOCAL: local_rope}


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys in addition to those of every mixture of experts, without the architecture's prefix."""
    moe = config.moe
    keys: dict[str, Value] = {
        SHARED_EXPERT_WIDTH: moe.shared_expert_dim, "expert_shared_count": 1, "expert_feed_forward_length": moe.expert_dim,
        "leading_dense_block_count": min(
            moe.layers, default=config.num_hidden_layers),
        QUERY_HEADS: np.array([config.query_heads_of(layer) for layer in range(config.num_hidden_layers)], np.int32)}
    local = next((rope for rope, window in zip(config.ropes, config.windows) if window is not None), None)
    if local is not None:
        keys |= {WINDOW_PATTERN: _window_period(config), LOCAL_ROPE_THETA: float(local.theta),
                 LOCAL_ROPE_DIMS: int(config.head_dim * local.partial_rotary_factor)}
    return keys


def _window_period(config: ModelConfig) -> int:
    """The period of layers without a sliding window."""
    global_layers = [layer for layer, window in enumerate(config.windows) if window is None]
    return global_layers[1] if len(global_layers) > 1 else config.num_hidden_layers


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express."""
    has_window = [window is not None for window in config.windows]
    local_ropes = [rope for rope, window in zip(config.ropes, config.windows) if window is not None]
    yield any(has_window) and has_window != [layer % _window_period(config) != 0 for layer in range(config.num_hidden_layers)], \
        "does not have a layer without a window as the first of each group"
    yield any(rope.kind != "default" for rope in local_ropes), "scales RoPE in layers with a window"
    yield config.rope.kind not in ("default", "linear", "yarn"), f"has rotary positions of kind {config.rope.kind}"
