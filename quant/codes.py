"""Quantized weights as unpacked arrays: what methods produce and `pack.py` stores. `dequantize` defines their meaning."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..kernels.tiles import ROWS, SUPER_BLOCK
from .codebooks import E4M3
from .spec import QuantSpec
from .weight import from_f32, to_f32


@dataclass(frozen=True)
class Sparse:
    """Outlier corrections added to the base, sorted by (row, col): `value[i]` at (`row[i]`, `col[i]`)."""

    row: np.ndarray
    col: np.ndarray
    value: np.ndarray  # float32 that bfloat16 represents exactly


@dataclass(frozen=True)
class Codes:
    """A quantized weight [N, K] in groups of inputs, G = ceil(K / group). An array that a scheme does not have is None."""

    codes: np.ndarray  # uint8 [N, K]
    # uint8 [N, G]; bits of float16 as uint16 for block, offset and minimum; int8 for signed and table, and bits of E4M3 for nvfp;
    # float32 [ceil(N / 16), G] for float
    scales: np.ndarray
    zeros: np.ndarray | None  # uint8 [N, G], of affine and offset
    rows: np.ndarray  # float32 [N], of float and nvfp any values, else values that bfloat16 holds exactly
    levels: np.ndarray | None = None  # int8 [2**bits], of codebook, table, mxfp and nvfp
    steps: np.ndarray | None = None  # uint8 [16], of codebook
    sparse: Sparse | None = None  # outliers
    supers: np.ndarray | None = None  # bits of float16 as uint16 [N, ceil(K / 256), 1 or 2]: d, or d and e, of super-blocks
    minima: np.ndarray | None = None  # uint8 [N, G]: minimum codes of super-blocks with e; bits of float16 as uint16 for minimum, added


def scale_values(steps: np.ndarray | None = None) -> np.ndarray:
    """Value of each scale code, float32: the steps of a codebook (16), else the code itself (256)."""
    return (np.arange(256) if steps is None else steps).astype(np.float32)


def factors(codes: Codes) -> np.ndarray:
    """Group scale factors in addition to the row scale, float32 [N, G]."""
    if codes.supers is not None:
        return _supers(codes, 0) * codes.scales
    if codes.scales.dtype == np.int8:
        return E4M3[codes.scales.view(np.uint8)]
    if codes.scales.dtype == np.float32:
        return np.repeat(codes.scales, ROWS, axis=0)[: len(codes.codes)]
    if codes.scales.dtype == np.uint16:
        return to_f32(codes.scales, "f16")
    if codes.levels is not None and codes.steps is None:  # E8M0 exponents; 0 gives zero instead of 2**-127
        return (codes.scales.astype(np.uint32) << np.uint32(23)).view(np.float32)
    return scale_values(codes.steps)[codes.scales]


def minimum_values(codes: Codes) -> np.ndarray | None:
    """Minimum subtracted from each group, float32 [N, G]; None without any."""
    if codes.minima is None:
        return None
    return _supers(codes, 1) * codes.minima if codes.supers is not None else -to_f32(codes.minima, "f16")


def _supers(codes: Codes, which: int) -> np.ndarray:
    """d or e of every group, float32 [N, G]. Times codes of at most 8 bits it is exact."""
    groups, depth = codes.scales.shape[1], codes.codes.shape[1]
    halves = to_f32(np.ascontiguousarray(codes.supers[:, :, which]), "f16")
    return np.repeat(halves, SUPER_BLOCK // (32 if groups == -(-depth // 32) else 16), axis=1)[:, :groups]


def bf16(values: np.ndarray) -> np.ndarray:
    """float32 values rounded to bfloat16."""
    return to_f32(from_f32(values, "bf16"), "bf16")


def values(codes: Codes, spec: QuantSpec) -> np.ndarray:
    """v(code), int16 [N, K]: the integers that kernels multiply; float32 for float formats."""
    if spec.scheme == "float":
        return E4M3[codes.codes]
    if codes.levels is not None:
        return codes.levels.astype(np.int16)[codes.codes]
    if spec.scheme in ("super", "nibble", "minimum"):
        return codes.codes.astype(np.int16)
    if spec.scheme in ("affine", "offset"):
        return codes.codes.astype(np.int16) - expand_groups(codes.zeros, spec, codes.codes.shape[1]).astype(np.int16)
    return codes.codes.astype(np.int16) - np.int16(1 if spec.scheme == "ternary" else 1 << (spec.bits - 1))


def expand_groups(per_group: np.ndarray, spec: QuantSpec, depth: int) -> np.ndarray:
    """[N, G] -> [N, K]: each group's value repeated for its inputs."""
    return np.repeat(per_group, spec.group, axis=1)[:, :depth]


def dequantize(codes: Codes, spec: QuantSpec) -> np.ndarray:
    """float32 [N, K]. Products are rounded once: row * (f * v), with f * v exact in float32; a minimum is subtracted before the row."""
    depth = codes.codes.shape[1]
    w = expand_groups(factors(codes), spec, depth) * values(codes, spec)
    if (minima := minimum_values(codes)) is not None:
        w -= expand_groups(minima, spec, depth)
    w = codes.rows[:, None] * w
    if codes.sparse is not None:
        w[codes.sparse.row, codes.sparse.col] += codes.sparse.value
    return w
