"""Places that a tower learned for a square of patches, read for pictures that have another number of them: each family as it was trained.

Bits count: what is a product in one family is a quotient in another.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

SHARPNESS = -0.75  # of the cubic of `by_cubic`
Taps = tuple[np.ndarray, np.ndarray, np.ndarray]  # of n places along a side the two that lie next, int64 [n], and the second's share [n, 1]


def row_major(lines: int, columns: int) -> np.ndarray:
    """Rows and columns of patches line by line, int64 [lines * columns, 2]."""
    return np.stack(np.divmod(np.arange(lines * columns), columns), axis=1)


def taps(count: int, wanted: int) -> Taps:
    """Of `count` points in a row those on both sides of each of `wanted`, and how much the second counts; middles of first and last keep
    their distance from the borders."""
    at = ((np.arange(wanted, dtype=np.float32) + np.float32(0.5)) * np.float32(count / wanted) - np.float32(0.5)).clip(0)
    low = at.astype(np.int64)
    return low, np.minimum(low + 1, count - 1), (at - low.astype(np.float32))[:, None]


def bilinear_aligned(table: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Places learned for a square [side, side, D] -> [n, D] for patches at rows and columns int64 [n, 2] of a picture: its corners are
    those of the square, and what lies between is read in proportion."""
    side, taps = len(table), []
    for axis in (0, 1):
        at = np.linspace(0, side - 1, int(places[:, axis].max()) + 1, dtype=np.float32)[places[:, axis]]
        low = at.astype(np.int64)
        taps.append((low, np.minimum(low + 1, side - 1), (at - low.astype(np.float32))[:, None]))
    return blend(table, *taps)


def blend(table: np.ndarray, rows: Taps, columns: Taps) -> np.ndarray:
    """Of [side, side, D] -> [n, D], each of four."""
    (top, bottom, down), (left, right, across) = rows, columns
    return (1 - down) * ((1 - across) * table[top, left] + across * table[top, right]) \
        + down * ((1 - across) * table[bottom, left] + across * table[bottom, right])


def bilinear(table: np.ndarray, places: np.ndarray, across: int | None = None) -> np.ndarray:
    """Places learned for a square [side, side, D] -> [n, D] for patches at rows and columns int64 [n, 2] of a picture, whose borders are
    those of the square, or those of a corner of one with so many patches `across`: in proportion to the two that lie nearest, beyond a
    border by what lies on it."""
    side, taps = len(table), []
    for axis in (0, 1):
        count = np.float32(across or places[:, axis].max() + 1)
        at = (places[:, axis].astype(np.float32) + np.float32(0.5)) * np.float32(side) / count - np.float32(0.5)
        low = np.floor(at)
        near = low.astype(np.int64)
        taps.append((np.clip(near, 0, side - 1), np.clip(near + 1, 0, side - 1), (at - low)[:, None]))
    return blend(table, *taps)


def bicubic(table: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Places learned for a square [side, side, D] -> [n, D] for patches at rows and columns int64 [n, 2] of a picture, whose borders are
    those of the square: by cubic convolution (Keys 1981), beyond a border by what lies on it."""
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
    """Places learned for a square [side, side, D] -> [rows * columns, D]: in proportion where there are more, means where there
    are fewer. `weigh`: as `triangle`, which it is by default."""
    down, across = ((weigh or linear_weights)(len(table), count) for count in (rows, columns))
    return np.einsum("rs,scd->rcd", down, np.einsum("ct,std->scd", across, table)).reshape(rows * columns, -1)


def linear_weights(side: int, count: int) -> np.ndarray:
    """How much each of `side` numbers has of each of `count` that take their place, float32 [count, side]: a triangle around each, as wide
    as what it stands for and at least as a neighbour is away."""
    step = side / count
    far = np.abs(np.arange(side)[None] + 0.5 - (np.arange(count)[:, None] + 0.5) * step) / max(1.0, step)
    weights = np.maximum(0, 1 - far)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def cubic_weights(side: int, count: int) -> np.ndarray:
    """As `triangle`, by a cubic (Keys 1981, with -1/2) that is twice as wide."""
    step = side / count
    far = np.abs(np.arange(side)[None] + 0.5 - (np.arange(count)[:, None] + 0.5) * step) / max(1.0, step)
    near, beyond = 1.5 * far**3 - 2.5 * far**2 + 1, -0.5 * far**3 + 2.5 * far**2 - 4 * far + 2
    weights = np.where(far < 1, near, np.where(far < 2, beyond, 0))
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def nearest_indices(side: int, *shares: np.ndarray) -> np.ndarray:
    """Which places of a square of `side` are at shares of its height and of its width, float32 [lines] and [columns]: int64 [lines *
    columns]."""
    borders = (1 / side + np.arange(side - 1) * (1 / side)).astype(np.float32)
    down, across = (np.searchsorted(borders, each, side="right") for each in shares)
    return (down[:, None] * side + across).reshape(-1)


def float32_fractions(count: int) -> np.ndarray:
    """Where each of so many patches in a row begins, float32 [count], rounded as models were trained: some places are met by two, since
    i * (1 / n) may be less than i / n."""
    return np.minimum(np.arange(count, dtype=np.float32) * (np.float32(1) / np.float32(count)), np.float32(1 - 1e-6))
