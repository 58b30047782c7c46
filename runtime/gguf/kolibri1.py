"""GGUF metadata of Kolibri 1: sliding windows as one boolean per layer, and sigmoid expert scores. That the correction applies to
logits, not scores, is implied by the architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ...offload.gguf_header import Value
from ...offload.safetensors_header import CheckpointError
from ..config import ModelConfig
from .family_context import KOLIBRI_WINDOW_PERIOD, SIGMOID, FamilyContext

FAMILY = NAME = "kolibri1"
SHARED_EXPERT_COUNT, GATING_FUNC, SHARED_EXPERT_WIDTH = "expert_shared_count", "expert_gating_func", "expert_shared_feed_forward_length"
KEYS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
        SHARED_EXPERT_WIDTH: "shared_expert_intermediate_size", "expert_weights_norm": "norm_topk_prob"}
OTHER_KEYS = frozenset({SHARED_EXPERT_COUNT, GATING_FUNC})
REQUIRED = ("attention.sliding_window", "expert_feed_forward_length", "expert_weights_norm", SHARED_EXPERT_WIDTH)
NAMES = {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}


def complete_config(context: FamilyContext, raw: dict[str, object]) -> None:
    """Complete `raw`, the config.json being assembled, with what no common key states. Raises CheckpointError."""
    header, kinds = context.header, context.layer_types(raw, KOLIBRI_WINDOW_PERIOD)
    for key, only in ((GATING_FUNC, SIGMOID), (SHARED_EXPERT_COUNT, 1)):
        if (found := header.metadata.get(f"{NAME}.{key}")) != only:
            raise CheckpointError(f"{header.path}: {NAME}.{key} = {found} is not supported for this architecture",
                                  "use a file that llama.cpp's converter made, or the folder of the original checkpoint")
    raw |= {"sliding_window": context.window, "layer_types": kinds}


def export_keys(config: ModelConfig) -> Mapping[str, Value]:
    """Metadata keys in addition to those of every mixture of experts, without the architecture's prefix."""
    return {"attention.sliding_window_pattern": np.array([window is not None for window in config.windows], np.int32),
            "expert_feed_forward_length": config.moe.expert_dim, SHARED_EXPERT_WIDTH: config.intermediate_size, SHARED_EXPERT_COUNT: 1,
            GATING_FUNC: SIGMOID,
            "expert_weights_norm": config.moe.renormalise}


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express."""
    yield set(config.windows) == {None}, "has no window"
