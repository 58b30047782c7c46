"""Which layers of a GGUF file have a state in the place of keys and values: those of which it says that they have no heads for these."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...kernels.delta_shape import DeltaShape
from ...offload.header import damaged
from ..config import ModelConfig
from . import linear_attention

HEADS = "attention.head_count_kv"


def layers_without(path: Path, key: str, value: np.ndarray, layers: object, kinds: tuple[str, str]) -> tuple[np.ndarray, list[str]]:
    """(the counts of layers that have keys and values, the kind of each layer), of counts by layer, of `layers`; `kinds`: without
    heads, and with. Raises CheckpointError."""
    if value.dtype.kind not in "iu" or (value < 0).any() or not value.any() or len(value) != layers:
        damaged(path, f"states {key} {value[:8].tolist()}, expected a number of heads for each layer, 0 where it has none")
    return value[value > 0], [kinds[int(count > 0)] for count in value]


def order(role: str, config: ModelConfig) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Which row, and which column, of a tensor of a checkpoint each of a file's is; None where they lie as they do there."""
    return linear_attention.order(role, config.state) if isinstance(config.state, DeltaShape) else (None, None)
