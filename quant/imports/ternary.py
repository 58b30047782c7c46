"""Ternary weights as BitNet trains and stores them: -1, 0 or 1 times one scale per matrix. Pure functions of arrays.

Packed, four rows share a byte, lowest bits first: rows a quarter of the matrix apart, each value plus one. Unpacked master weights are
floats, rounded in every forward pass by absmean quantization: to the nearest of -1, 0 and 1 after division by the mean magnitude.
"""

from __future__ import annotations

import numpy as np

from ...kernels.layout import MIN_ABSMAX
from ..codes import Codes, bf16
from ..spec import GROUPS, QuantSpec

IN_BYTE = 4
LEAST_MEAN = np.float32(MIN_ABSMAX)  # of magnitudes
MOST_SCALE = 255  # a scale of a group is a whole number up to this


def spec_of(depth: int) -> QuantSpec:
    """The format that holds such a weight: the longest groups that its inputs fill."""
    return QuantSpec(2, next((group for group in sorted(GROUPS["ternary"], reverse=True) if depth % group == 0), min(GROUPS["ternary"])),
                     "ternary")


def unpack(packed: np.ndarray, begin: int, end: int) -> np.ndarray:
    """Rows [begin, end) of packed uint8 [N / 4, K] as codes 0, 1, 2, uint8 [end - begin, K]. Raises ValueError for a fourth value."""
    height = len(packed)
    parts = []
    for quarter in range(begin // height, -(-end // height)):
        first, last = max(begin, quarter * height) - quarter * height, min(end, (quarter + 1) * height) - quarter * height
        parts.append(packed[first:last] >> np.uint8(2 * quarter) & np.uint8(3))
    codes = parts[0] if len(parts) == 1 else np.concatenate(parts)
    if codes.size and int(codes.max()) > 2:
        raise ValueError("two bits that stand for neither -1, 0 nor 1")
    return codes


def codes_from_floats(values: np.ndarray) -> np.ndarray:
    """Codes of float32 [n, K] that are exactly -1, 0 and 1. Raises ValueError for others."""
    if not np.isin(values, (-1, 0, 1)).all():
        raise ValueError("numbers other than -1, 0 and 1")
    return (values + 1).astype(np.uint8)


def absmean(blocks: object, count: int) -> np.float32:
    """Mean magnitude, the scale of absmean quantization, of `count` values given as float32 arrays."""
    total = sum(float(np.abs(block, dtype=np.float64).sum()) for block in blocks)
    return max(np.float32(total / max(1, count)), LEAST_MEAN)


def absmean_codes(values: np.ndarray, mean: np.float32) -> np.ndarray:
    """float32 [n, K] -> codes of the nearest of -1, 0 and 1 times `mean`, ties to 0. Raises ValueError for NaN or infinity."""
    if not np.isfinite(values).all():
        raise ValueError("NaN or infinity")
    return (np.clip(np.rint(values * (np.float32(1) / mean)), -1, 1) + 1).astype(np.uint8)


def factors(number: float) -> tuple[np.float32, int]:
    """(row scale, group scale) whose product is a matrix's number: the number itself and 1 if bfloat16 holds it, else the pair that is
    nearest, within one part in 3,400, on average in 18,000. Raises ValueError for what is no number above zero."""
    if not np.isfinite(number) or number <= 0:
        raise ValueError(f"a scale of {number}")
    scales = np.arange(1, MOST_SCALE + 1)
    rows = bf16((number / scales).astype(np.float32))
    best = int(np.abs(rows.astype(np.float64) * scales - number).argmin())
    return rows[best], int(scales[best])


def packable(codes: np.ndarray, number: float, spec: QuantSpec) -> Codes:
    """Codes [n, K] of a matrix whose values are multiples of `number`, as kernels take them."""
    row, scale = factors(number)
    groups = -(-codes.shape[1] // spec.group)
    return Codes(codes, np.full((len(codes), groups), scale, np.uint8), None, np.full(len(codes), row, np.float32))
