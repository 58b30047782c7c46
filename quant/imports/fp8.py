"""Weights of eight bits in floating point (E4M3: no infinities, one NaN), scaled per block, row or tensor. Pure functions of arrays."""

from __future__ import annotations

import numpy as np

from .blocks import block_size


def _table() -> np.ndarray:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    values[(codes & 127) == 127] = np.nan
    return np.where(codes >= 128, -values, values).astype(np.float32)


VALUES = _table()
NO_POWER = 255  # the NaN among the scales of `powers_of_two`


def powers_of_two(codes: np.ndarray) -> np.ndarray:
    """Scales of eight bits that are exponents alone (E8M0), none of them NO_POWER: 2**(code - 127) as float32."""
    return np.ldexp(np.float32(1), codes.astype(np.int32) - 127)


def dequantize(codes: np.ndarray, scales: np.ndarray, block: tuple[int, int] = (0, 0)) -> np.ndarray:
    """uint8 [N, K] and float32 scales: one, [N, 1], or [n, k] for blocks that cover the weight -> float32 [N, K]. `block`: rows and inputs
    of one (128 x 128 as published), 0 where that is not said; then it is a power of two that the number of scales leaves.

    Raises ValueError for scales that cover it in no way.
    """
    scales, high, wide = blocks(codes.shape, scales, block)
    if scales.shape in ((1, 1), (len(codes), 1)):
        return VALUES[codes] * scales
    return VALUES[codes] * np.repeat(np.repeat(scales, high, axis=0)[: len(codes)], wide, axis=1)[:, : codes.shape[1]]


def blocks(shape: tuple[int, int], scales: np.ndarray, block: tuple[int, int] = (0, 0)) -> tuple[np.ndarray, int, int]:
    """Scales [n, k] of a weight of `shape`, and the rows and inputs that share one; arguments and errors are those of `dequantize`."""
    rows, depth = shape
    if scales.ndim < 2 and scales.size in (1, rows):  # blocks may be as many as there are rows
        scales = scales.reshape(-1, 1)
    if scales.ndim != 2 or not 0 < scales.shape[0] <= rows or not 0 < scales.shape[1] <= depth:
        raise ValueError(f"scales of shape {scales.shape} for a weight of shape {shape}")
    if scales.shape in ((1, 1), (rows, 1)):
        return scales, 1 if len(scales) == rows else rows, depth
    high, wide = (stated or block_size(size, count) for stated, size, count in zip(block, shape, scales.shape))
    if scales.shape != (-(-rows // high), -(-depth // wide)):
        raise ValueError(f"scales of shape {scales.shape} for a weight of shape {shape} in blocks of {high} x {wide}")
    return scales, high, wide
