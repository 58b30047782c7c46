"""GGUF metadata common to layers with a recurrent state in place of a KV cache: which layers they are, and how their tensors are stored."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np

from ...kernels.conv_shape import ConvShape
from ...kernels.delta_shape import DeltaShape
from ...kernels.kda_shape import KdaShape
from ...kernels.mamba1_shape import Mamba1Shape
from ...kernels.mamba2_shape import Mamba2Shape
from ...kernels.rwkv7_shape import Rwkv7Shape
from ...offload.gguf_header import Value
from ...offload.safetensors_header import damaged
from ..config import ModelConfig
from . import (
    falcon_h1,
    glm5_next,
    jamba,
    kimi_delta_attention,
    linear_attention,
    mamba,
    mamba2,
    nemotron_h,
    rwkv7,
    short_conv,
    state_spaces,
)

KV_HEADS = "attention.head_count_kv"
# Kind -> what files say of it.
MODULE_BY_SHAPE = {ConvShape: short_conv, DeltaShape: linear_attention, KdaShape: kimi_delta_attention, Mamba1Shape: jamba,
                   Mamba2Shape: state_spaces,
                   Rwkv7Shape: rwkv7}
# Those whose files say it otherwise.
MODULE_BY_FAMILY = {falcon_h1.FAMILY: falcon_h1, glm5_next.FAMILY: glm5_next, nemotron_h.FAMILY: nemotron_h, mamba.NAME: mamba,
                    mamba.FALCON_MAMBA: mamba, mamba2.NAME: mamba2}
# Ends of names of what is stored as less than zero, and as more.
NEGATIVE_DECAYS = linear_attention.DECAY, state_spaces.DECAY, nemotron_h.DECAY, kimi_delta_attention.NEGATIVE_DECAY
POSITIVE_DECAYS = (kimi_delta_attention.POSITIVE_DECAY,)


def split_kv_heads(path: Path, key: str, value: np.ndarray, layers: object, kinds: tuple[str, str]) -> tuple[np.ndarray, list[str]]:
    """(the counts of layers that have keys and values, the kind of each layer), of counts by layer, of `layers`; `kinds`: without
    heads, and with. Raises CheckpointError."""
    if value.dtype.kind not in "iu" or (value < 0).any() or not value.any() or len(value) != layers:
        damaged(path, f"states {key} {value[:8].tolist()}, expected a number of heads for each layer, 0 where it has none")
    return value[value > 0], [kinds[int(count > 0)] for count in value]


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of its states, without the architecture's prefix."""
    return {} if config.recurrent is None else _module(config).export_keys(config)


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """(whether it is so, what files cannot say of its states)."""
    if config.recurrent is not None:
        yield from _module(config).export_limits(config)


def _module(config: ModelConfig) -> ModuleType:
    """What files say of its states."""
    return MODULE_BY_FAMILY.get(config.family) or MODULE_BY_SHAPE[type(config.recurrent)]


def reordering(role: str, config: ModelConfig) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Which row, and which column, of a tensor of a checkpoint each of a file's is; None where they lie as they do there."""
    return linear_attention.value_head_order(role, config) if isinstance(config.recurrent, DeltaShape) else (None, None)


def decay_sign(config: ModelConfig) -> float:
    """On which side of zero files have decays."""
    return 1.0 if config.family == kimi_delta_attention.LING_FAMILY else -1.0


def gguf_shape(role: str, config: ModelConfig, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a tensor of a checkpoint."""
    if role in ("state_conv", "ngram_conv") and not isinstance(config.recurrent, KdaShape):
        return shape[0], shape[-1]
    if isinstance(config.recurrent, Mamba2Shape) and role in ("state_decay", "state_skip"):
        return *shape, 1
    if isinstance(config.recurrent, Mamba2Shape) and role == "state_norm":
        return config.recurrent.groups, shape[0] // config.recurrent.groups
    if config.family == kimi_delta_attention.LING_FAMILY and role == "state_decay":
        return *shape, 1
    if role.startswith("shift_") and role != "shift_up":
        return shape[0], 1, 1, shape[1]
    return shape
