"""A low-bit weight as arrays, before it is packed: what methods make and what packing keeps. `dequantize` is its meaning."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .spec import QuantSpec
from .weight import from_f32, to_f32


@dataclass(frozen=True)
class Sparse:
    """Corrections added to the base: `value[i]` (float32 that bfloat16 holds exactly) at (`row[i]`, `col[i]`), sorted by both."""

    row: np.ndarray
    col: np.ndarray
    value: np.ndarray


@dataclass(frozen=True)
class Codes:
    """codes uint8 [N, K]; scales uint8 (of a block format the bits of halves, uint16) [N, G] and zeros uint8 [N, G] or None, with
    G = ceil(K / group); rows float32 [N] that bfloat16 holds exactly; levels int8 [2**bits] of a codebook and of mxfp, steps uint8 [16] of
    a codebook, else None."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    rows: np.ndarray
    levels: np.ndarray | None = None
    steps: np.ndarray | None = None
    sparse: Sparse | None = None


def scale_values(steps: np.ndarray | None = None) -> np.ndarray:
    """What each scale code means, float32: the steps of a codebook (16), else the code itself (256)."""
    return (np.arange(256) if steps is None else steps).astype(np.float32)


def factors(codes: Codes) -> np.ndarray:
    """What the groups are multiplied by beside the row scale, float32 [N, G]."""
    if codes.scales.dtype == np.uint16:
        return to_f32(codes.scales, "f16")
    if codes.levels is not None and codes.steps is None:  # exponents; 0 is a zero, where E8M0 has 2**-127
        return (codes.scales.astype(np.uint32) << np.uint32(23)).view(np.float32)
    return scale_values(codes.steps)[codes.scales]


def bf16(values: np.ndarray) -> np.ndarray:
    """float32 rounded to what bfloat16 holds."""
    return to_f32(from_f32(values, "bf16"), "bf16")


def values(codes: Codes, spec: QuantSpec) -> np.ndarray:
    """v(code), int16 [N, K]: the integers that a kernel multiplies."""
    if codes.levels is not None:
        return codes.levels.astype(np.int16)[codes.codes]
    if spec.scheme == "affine":
        return codes.codes.astype(np.int16) - spread(codes.zeros, spec, codes.codes.shape[1]).astype(np.int16)
    return codes.codes.astype(np.int16) - np.int16(1 if spec.scheme == "ternary" else 1 << (spec.bits - 1))


def spread(per_group: np.ndarray, spec: QuantSpec, depth: int) -> np.ndarray:
    """[N, G] -> [N, K]: each group's value at every input of it."""
    return np.repeat(per_group, spec.group, axis=1)[:, :depth]


def dequantize(codes: Codes, spec: QuantSpec) -> np.ndarray:
    """float32 [N, K]. Products are rounded once: row * (f * v), with f * v exact in float32."""
    w = codes.rows[:, None] * (spread(factors(codes), spec, codes.codes.shape[1]) * values(codes, spec))
    if codes.sparse is not None:
        w[codes.sparse.row, codes.sparse.col] += codes.sparse.value
    return w
