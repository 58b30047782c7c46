"""GGUF metadata of Mellum 2: layers with a window have RoPE keys of their own, unscaled."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...offload.gguf_header import GgufHeader, Value
from ..config import ModelConfig
from ..config_rope import GLOBAL, LOCAL
from .family_context import FamilyContext

NAME = FAMILY = "mellum"
LOCAL_ROPE_THETA, WINDOW_PERIOD = "rope.freq_base_swa", 4  # default: every fourth layer has no window
OTHER_KEYS = frozenset({LOCAL_ROPE_THETA})
KEYS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size"}
REQUIRED = ("expert_feed_forward_length",)


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled: sliding windows."""
    window, kinds = context.window, context.layer_types(raw, WINDOW_PERIOD)
    raw |= {"sliding_window": window, "layer_types": kinds if window else [GLOBAL] * len(kinds)}


def split_rope_tables(header: GgufHeader, raw: dict[str, object]) -> None:
    """Split the RoPE settings of `raw` into sections for layers without and with a sliding window."""
    global_rope = {"rope_type": "default", **(raw.pop("rope_scaling", None) or {}), "rope_theta": raw.pop("rope_theta", 10_000.0)}
    theta = header.metadata.get(f"{NAME}.{LOCAL_ROPE_THETA}", global_rope["rope_theta"])
    raw["rope_parameters"] = {GLOBAL: global_rope, LOCAL: {"rope_type": "default", "rope_theta": theta}}


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of this family, without the architecture's prefix."""
    local = next((rope for rope, window in zip(config.ropes, config.windows) if window is not None), None)
    if local is None:
        return {}
    return {"attention.sliding_window_pattern": np.array([window is not None for window in config.windows], np.bool_),
            LOCAL_ROPE_THETA: float(local.theta)}


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express."""
    local_ropes = [rope for rope, window in zip(config.ropes, config.windows) if window is not None]
    yield any(rope.kind != "default" for rope in local_ropes), "scales RoPE in layers with a window"
    yield any(rope.theta != config.rope.theta for rope in local_ropes), \
        "has another rope_theta in layers with a window, which llama.cpp ignores"
    yield config.rope.kind not in ("default", "linear", "yarn"), f"has rotary positions of kind {config.rope.kind}"
