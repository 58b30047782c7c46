"""GGUF metadata of Granite Swash: which layers have a window and which are rotary, all with one base."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...offload.gguf_header import Value, shown_value
from ...offload.safetensors_header import damaged
from ..config import ModelConfig
from ..config_rope import LOCAL
from .family_context import FamilyContext

NAME, DENSE, MOE = "granite_swa", "granite_swa", "granitemoe_swa"  # of a file, and families
ROPE_PATTERN = "attention.rope_pattern"
FULL_NAMES = {"attn_sinks.weight": "self_attn.sinks"}
ROLES = {"sinks": "attn_sinks.weight"}
FUSED = {"ffn_up_shexp": ("ffn_gate_shexp", "ffn_up_shexp")}
DEFAULT_ROPE_THETA = 10_000.0


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, with what no common key states. Raises CheckpointError."""
    header, window, kinds = context.header, context.window, context.layer_types(raw, 1)
    raw |= {"sliding_window": window, "layer_types": kinds, "attention_bias": "blk.0.attn_q.bias" in header.tensors}
    if window is None and LOCAL in kinds:
        damaged(header.path, f"states 0 for {NAME}.attention.sliding_window, or nothing: the width of its sliding window is unknown")
    for key, name in (("attention_multiplier", "attention.scale"), ("logits_scaling", "logit_scale")):
        if key not in raw:
            damaged(header.path, f"lacks key {NAME}.{name}")
    theta, layers = raw.setdefault("rope_theta", DEFAULT_ROPE_THETA), raw["num_hidden_layers"]
    rope_pattern = header.metadata.get(f"{NAME}.{ROPE_PATTERN}")
    if rope_pattern is not None:
        is_boolean = isinstance(rope_pattern, np.ndarray) and rope_pattern.dtype.kind in "biu" and np.isin(rope_pattern, (0, 1)).all()
        if not is_boolean or len(rope_pattern) != layers:
            damaged(header.path,
                    f"states {NAME}.{ROPE_PATTERN} {shown_value(rope_pattern)}, expected a boolean for each of {layers} layers")
        raw["layer_rope_theta"] = [theta if each else 0 for each in rope_pattern]
    if "num_local_experts" in raw:
        raw["model_type"] = MOE
        raw.setdefault("shared_intermediate_size", 0)
    else:
        raw["mlp_bias"] = "blk.0.ffn_gate.bias" in header.tensors
        raw.pop("shared_intermediate_size", None)


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of the family, without the architecture's prefix."""
    window = next((window for window in config.windows if window is not None), 0)
    keys: dict[str, Value] = {"attention.sliding_window": window,
                              "attention.sliding_window_pattern": np.array([window is not None for window in config.windows], np.int32)}
    if None in config.ropes:
        keys[ROPE_PATTERN] = np.array([rope is not None for rope in config.ropes], np.int32)
    return keys


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express."""
    yield config.rope is None, "has no rotary positions"
    yield len({rope.theta for rope in config.ropes if rope is not None}) > 1, "has several bases of rotary positions"
