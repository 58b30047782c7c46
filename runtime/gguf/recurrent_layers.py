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
# Shape of the recurrent state -> module with its metadata.
MODULE_BY_SHAPE = {ConvShape: short_conv, DeltaShape: linear_attention, KdaShape: kimi_delta_attention, Mamba1Shape: jamba,
                   Mamba2Shape: state_spaces,
                   Rwkv7Shape: rwkv7}
# Families whose metadata differs from that of their shape.
MODULE_BY_FAMILY = {falcon_h1.FAMILY: falcon_h1, glm5_next.FAMILY: glm5_next, nemotron_h.FAMILY: nemotron_h, mamba.NAME: mamba,
                    mamba.FALCON_MAMBA: mamba, mamba2.NAME: mamba2}
# Name suffixes of the decays A_log that files store as -exp(A_log), and as exp(A_log).
NEGATIVE_DECAYS = linear_attention.DECAY, state_spaces.DECAY, nemotron_h.DECAY, kimi_delta_attention.NEGATIVE_DECAY
POSITIVE_DECAYS = (kimi_delta_attention.POSITIVE_DECAY,)


def split_kv_heads(path: Path, key: str, value: np.ndarray, layers: object, kinds: tuple[str, str]) -> tuple[np.ndarray, list[str]]:
    """(nonzero KV head counts, type of each layer) from per-layer KV head counts; `kinds`: type of a layer without and with KV heads.

    Raises CheckpointError.
    """
    if value.dtype.kind not in "iu" or (value < 0).any() or not value.any() or len(value) != layers:
        damaged(path, f"states {key} {value[:8].tolist()}, expected a number of heads for each layer, 0 where it has none")
    return value[value > 0], [kinds[int(count > 0)] for count in value]


def export_keys(config: ModelConfig) -> dict[str, Value]:
    """Metadata keys of the recurrent layers, without the architecture's prefix."""
    return {} if config.recurrent is None else _module(config).export_keys(config)


def export_limits(config: ModelConfig) -> Iterator[tuple[bool, str]]:
    """Pairs (applies, description) of what a GGUF file cannot express of the recurrent layers."""
    if config.recurrent is not None:
        yield from _module(config).export_limits(config)


def _module(config: ModelConfig) -> ModuleType:
    """The module with the metadata of its recurrent layers."""
    return MODULE_BY_FAMILY.get(config.family) or MODULE_BY_SHAPE[type(config.recurrent)]


def reordering(role: str, config: ModelConfig) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(rows, columns): the checkpoint's row and column for each of the file's; None for the same order."""
    return linear_attention.value_head_order(role, config) if isinstance(config.recurrent, DeltaShape) else (None, None)


def decay_sign(config: ModelConfig) -> float:
    """The sign of decays in the file."""
    return 1.0 if config.family == kimi_delta_attention.LING_FAMILY else -1.0


def gguf_shape(role: str, config: ModelConfig, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The file's shape of a recurrent layer's tensor; `shape` is the checkpoint's."""
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
