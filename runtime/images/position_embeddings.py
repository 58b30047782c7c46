"""Interpolation of learned position embeddings: a tower learned them for a square grid, and an image has another. Each function reproduces
the arithmetic of some family's training code.

Rounding matters: what is a product in one family is a quotient in another.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

SHARPNESS = -0.75  # of the cubic of `by_cubic`
Taps = tuple[np.ndarray, np.ndarray, np.ndarray]  # of n places along a side the two that lie next, int64 [n], and the second's share [n, 1]


def row_major(lines: int, columns: int) -> np.ndarray:
    """Row and column of each patch, line by line, int64 [lines * columns, 2]."""
    return np.stack(np.divmod(np.arange(lines * columns), columns), axis=1)


def taps(count: int, wanted: int) -> Taps:
    """Linear interpolation from `count` points to `wanted` with half-pixel centers: both neighbours and the weight of the second."""
    at = ((np.arange(wanted, dtype=np.float32) + np.float32(0.5)) * np.float32(count / wanted) - np.float32(0.5)).clip(0)
    low = at.astype(np.int64)
    return low, np.minimum(low + 1, count - 1), (at - low.astype(np.float32))[:, None]


def bilinear_aligned(table: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Bilinear interpolation with aligned corners: [side, side, D] -> [n, D] for patches at (row, column) int64 [n, 2]."""
    side, taps = len(table), []
    for axis in (0, 1):
        at = np.linspace(0, side - 1, int(places[:, axis].max()) + 1, dtype=np.float32)[places[:, axis]]
        low = at.astype(np.int64)
        taps.append((low, np.minimum(low + 1, side - 1), (at - low.astype(np.float32))[:, None]))
    return blend(table, *taps)


def blend(table: np.ndarray, rows: Taps, columns: Taps) -> np.ndarray:
    """Combine four neighbours of each point: [side, side, D] -> [n, D]."""
    (top, bottom, down), (left, right, across) = rows, columns
    return (1 - down) * ((1 - across) * table[top, left] + across * table[top, right]) \
        + down * ((1 - across) * table[bottom, left] + across * table[bottom, right])


def bilinear(table: np.ndarray, places: np.ndarray, across: int | None = None) -> np.ndarray:
    """Bilinear interpolation with half-pixel centers, clamped at the border: [side, side, D] -> [n, D] for patches at (row, column) int64
    [n, 2]. The grid spans the whole table, or with `across` the corner of a grid with so many patches a side."""
    side, taps = len(table), []
    for axis in (0, 1):
        count = np.float32(across or places[:, axis].max() + 1)
        at = (places[:, axis].astype(np.float32) + np.float32(0.5)) * np.float32(side) / count - np.float32(0.5)
        low = np.floor(at)
        near = low.astype(np.int64)
        taps.append((np.clip(near, 0, side - 1), np.clip(near + 1, 0, side - 1), (at - low)[:, None]))
    return blend(table, *taps)


def bicubic(table: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Bicubic interpolation (Keys 1981) with half-pixel centers, clamped at the border: [side, side, D] -> [n, D] for patches at (row,
    column) int64 [n, 2]."""
    side, taps = len(table), []
    for axis in (0, 1):
        count = np.float32(places[:, axis].max() + 1)
        at = ((places[:, axis].astype(np.float32) + np.float32(0.5)) / count) * np.float32(side) - np.float32(0.5)
        low = np.floor(at)
        off = (at - low)[:, None]
        far = [SHARPNESS * (d**3 - 5 * d**2 + 8 * d - 4) for d in (off + 1, 2 - off)]
        near = [(SHARPNESS + 2) * d**3 - (SHARPNESS + 3) * d**2 + 1 for d in (off, 1 - off)]
        taps.append([(np.clip(low.astype(np.int64) + step, 0, side - 1), weight)
                     for step, weight in ((-1, far[0]), (0, near[0]), (1, near[1]), (2, far[1]))])
    return sum(down * sum(across * table[row, column] for column, across in taps[1]) for row, down in taps[0]).astype(np.float32)


def resample(table: np.ndarray, rows: int, columns: int, weigh: Callable[[int, int], np.ndarray] | None = None) -> np.ndarray:
    """Separable resampling with antialiasing: [side, side, D] -> [rows * columns, D]. `weigh`: the filter, `linear_weights` by default."""
    down, across = ((weigh or linear_weights)(len(table), count) for count in (rows, columns))
    return np.einsum("rs,scd->rcd", down, np.einsum("ct,std->scd", across, table)).reshape(rows * columns, -1)


def linear_weights(side: int, count: int) -> np.ndarray:
    """Antialiased linear filter from `side` points to `count`, float32 [count, side]."""
    step = side / count
    far = np.abs(np.arange(side)[None] + 0.5 - (np.arange(count)[:, None] + 0.5) * step) / max(1.0, step)
    weights = np.maximum(0, 1 - far)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def cubic_weights(side: int, count: int) -> np.ndarray:
    """Antialiased cubic filter (Keys 1981, a = -1/2), as `linear_weights`."""
    step = side / count
    far = np.abs(np.arange(side)[None] + 0.5 - (np.arange(count)[:, None] + 0.5) * step) / max(1.0, step)
    near, beyond = 1.5 * far**3 - 2.5 * far**2 + 1, -0.5 * far**3 + 2.5 * far**2 - 4 * far + 2
    weights = np.where(far < 1, near, np.where(far < 2, beyond, 0))
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def nearest_indices(side: int, *shares: np.ndarray) -> np.ndarray:
    """Indices into a table of `side` x `side` for fractional coordinates, float32 [lines] and [columns]: int64 [lines * columns]."""
    borders = (1 / side + np.arange(side - 1) * (1 / side)).astype(np.float32)
    down, across = (np.searchsorted(borders, each, side="right") for each in shares)
    return (down[:, None] * side + across).reshape(-1)


def float32_fractions(count: int) -> np.ndarray:
    """Fractional coordinate i * (1 / n) of each of n patches, float32 [count]. Rounded as in training: i * (1 / n) may be below i / n, so
    some table entries are used twice."""
    return np.minimum(np.arange(count, dtype=np.float32) * (np.float32(1) / np.float32(count)), np.float32(1 - 1e-6))
