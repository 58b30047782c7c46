"""GGUF metadata of Muse Glimmer: the query scale is stored as per-head norms, which a checkpoint does not have, and the final norm has
no offset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ...offload.gguf_header import Value
from ..config import ModelConfig
from ..config_rope import LOCAL
from ..families.muse_glimmer_text import POST_NORM_EPS, WEIGHTED_QK_NORM_KEY
from .family_context import FamilyContext

FAMILY, NAME = "muse_glimmer_text", "muse-glimmer"
WINDOW_PERIOD = 4  # every fourth layer has no sliding window
KEYS = {"logit_scale": "output_multiplier", "final_logit_softcapping": "final_logit_softcapping", "rope.freq_base_swa": "rope_theta"}
REQUIRED = ("attention.key_length", "attention.sliding_window", "logit_scale")
NAMES = {"attn_gate": "self_attn.gate_proj"}
UNSHIFTED_NORMS = frozenset({"model.norm.weight"})  # norms stored without an offset


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, with what no common key states: only layers with a window have RoPE."""
    window, kinds = context.window, context.layer_types(raw, WINDOW_PERIOD)
    theta = raw.get("rope_theta", 10_000.0)
    raw |= {"sliding_window": window, "layer_types": kinds, "layer_rope_theta": [theta if kind == LOCAL else 0 for kind in kinds],
            "post_norm_eps": POST_NORM_EPS, WEIGHTED_QK_NORM_KEY: True, "qk_scale_factor": 1.0}
    raw.setdefault("final_logit_softcapping", None)


def export_keys(config: ModelConfig) -> Mapping[str, Value]:
    """Metadata keys of the family, without the architecture's prefix."""
    return {"attention.sliding_window_pattern": np.array([window is not None for window in config.windows], np.bool_),
            "logit_scale": float(1 / config.logits_scaling)}


def head_norms(config: ModelConfig) -> dict[str, np.ndarray]:
    """QK norm tensors by name, for a model whose QK norms have no weight: the query scale is stored as the q norm's."""
    if config.qk_norm:
        return {}
    scale, ones = config.attn_scale * config.head_dim**0.5, np.ones(config.head_dim, "<f4")
    return {f"blk.{layer}.attn_{letter}_norm.weight": ones * np.float32(factor)
            for layer in range(config.num_hidden_layers) for letter, factor in (("q", scale), ("k", 1.0))}


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express."""
    yield set(config.windows) == {None}, "has no window"
    yield [rope is None for rope in config.ropes] != [window is None for window in config.windows], \
        "rotates other layers than those with a window"
    yield config.post_norm_eps != POST_NORM_EPS, f"has post-norms with an epsilon of {config.post_norm_eps}"
