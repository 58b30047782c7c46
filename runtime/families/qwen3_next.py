"""Qwen 3 Next (80B-A3B, Coder Next): the predecessor of Qwen 3.5's MoE, with many more experts.

Checkpoints fuse the input projections of linear attention key head by key head: `in_proj_qkvz` has the rows of each head's query, key,
values and gates, `in_proj_ba` those of its betas and decays. The store splits them (`tensor_views.py`). GGUF files keep the checkpoint's
order of value heads.
"""

from __future__ import annotations

import numpy as np

from ...kernels.delta_shape import DeltaShape
from ..config import ModelConfig
from ..config_reader import Keys
from . import qwen3_5_moe_text
from .qwen3_5_moe_text import moe_hybrid_config

LIKE = qwen3_5_moe_text
REFUSED_UNLESS = {**qwen3_5_moe_text.REFUSED_UNLESS, "use_sliding_window": False}


def config(keys: Keys) -> ModelConfig:
    return moe_hybrid_config(keys, experts=512, per_token=10, mtp_layers=1)  # published configs do not state their MTP layer


def fused_rows(shape: DeltaShape) -> dict[str, tuple[str, np.ndarray]]:
    """Name of a linear-attention matrix, below `linear_attn.` -> the fused matrix that stores it, and its rows of it."""
    values_per_key = shape.value_heads // shape.key_heads
    value_rows = values_per_key * shape.value_dim
    rows_by_part, first = {}, 0

    def rows(first: int, count: int, head_rows: int) -> np.ndarray:
        return (np.arange(shape.key_heads)[:, None] * head_rows + first + np.arange(count)).reshape(-1)

    parts, head_rows = {"q": shape.key_dim, "k": shape.key_dim, "v": value_rows, "z": value_rows}, 2 * (shape.key_dim + value_rows)
    for part, count in parts.items():
        rows_by_part[part] = rows(first, count, head_rows)
        first += count
    return {"in_proj_qkv": ("in_proj_qkvz", np.concatenate([rows_by_part[part] for part in "qkv"])),
            "in_proj_z": ("in_proj_qkvz", rows_by_part["z"]),
            "in_proj_b": ("in_proj_ba", rows(0, values_per_key, 2 * values_per_key)),
            "in_proj_a": ("in_proj_ba", rows(values_per_key, values_per_key, 2 * values_per_key))}


def stored_rows(config: ModelConfig, layer: int) -> dict[str, tuple[str, np.ndarray]]:
    """Names of a layer's split matrices -> the fused ones that store them, and their rows."""
    if layer not in config.recurrent_layers:
        return {}
    prefix = f"model.layers.{layer}.linear_attn."
    return {f"{prefix}{name}.weight": (f"{prefix}{fused}.weight", rows) for name, (fused, rows) in fused_rows(config.recurrent).items()}
