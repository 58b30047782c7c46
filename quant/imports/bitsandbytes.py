"""Weights as bitsandbytes stores them. Pure functions of arrays.

Of four bits (NF4, FP4) two codes share a byte, the first in its upper half, row after row without a gap. The levels that they stand for
lie beside them, and so does the largest magnitude of every block of values, which may go on in the next row. These magnitudes may be codes
themselves (double quantization), of 256 levels under a largest magnitude of their own, below one mean. JSON says how long blocks are.

Of eight bits (LLM.int8) a row is signed bytes, and 127 of them its largest magnitude.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod

import numpy as np

LEVELS, SCALE_LEVELS = 16, 256
MOST_NBYTES, MOST_SIZE = 1 << 10, 1 << 40  # of what is said of a weight
TOP = np.float32(127)  # the byte that a row's largest magnitude is
MOST_MEAN = 3e38  # that float32 holds
BY_ROW = 0  # the order of bytes that is read; the others suit a GPU


@dataclass(frozen=True)
class Said:
    """What stands beside a weight of four bits: its shape, the values of a block, and of magnitudes that are codes block and mean."""

    shape: tuple[int, int]
    block: int
    outer_block: int
    mean: float


def said_of(stated: np.ndarray) -> Said:
    """From JSON, uint8 [n]. Raises ValueError for what is none, or says something else."""
    try:
        found = json.loads(stated[:MOST_NBYTES].tobytes().decode("utf-8"))
    except RecursionError as error:
        raise ValueError("what it says of itself nests too deeply") from error
    except ValueError as error:
        raise ValueError("what it says of itself is no JSON") from error
    shape = found.get("shape") if isinstance(found, dict) else None
    if not isinstance(shape, list) or len(shape) != 2:
        raise ValueError("it does not say its shape")
    sizes = found.get("blocksize"), found.get("nested_blocksize", 1), *shape
    if any(type(size) is not int or not 0 < size < MOST_SIZE for size in sizes):
        raise ValueError("its shape or the sizes of its blocks are no numbers that can be")
    mean = found.get("nested_offset", 0.0)
    if type(mean) not in (int, float) or not abs(mean) < MOST_MEAN:
        raise ValueError("the mean of its scales is no number")
    return Said((sizes[2], sizes[3]), sizes[0], sizes[1], float(mean))


def magnitudes(said: Said, stored: np.ndarray, levels: np.ndarray | None, outer: np.ndarray | None) -> np.ndarray:
    """Those of the blocks, float32 [blocks], of floats or of codes uint8 with their levels [256] and their own magnitudes. Raises
    ValueError where they do not fit one another, or one is no number."""
    count = -(-prod(said.shape) // said.block)
    if stored.shape != (count,):
        raise ValueError(f"{stored.size} scales for {count} blocks of {said.block}")
    if stored.dtype == np.uint8:
        fits = levels is not None and outer is not None and levels.shape == (SCALE_LEVELS,)
        if not fits or outer.shape != (-(-count // said.outer_block),):
            raise ValueError(f"{count} scales that are codes, and no {SCALE_LEVELS} levels and magnitudes for them")
        with np.errstate(over="ignore", invalid="ignore"):  # looked for below
            spread = np.repeat(outer, min(said.outer_block, count))[:count]
            stored = levels[stored] * spread + np.float32(said.mean)
    if not np.isfinite(stored).all():
        raise ValueError("a scale is NaN or infinity")
    return stored


def dequantize(packed: np.ndarray, levels: np.ndarray, scales: np.ndarray, block: int, shape: tuple[int, int]) -> np.ndarray:
    """Bytes of codes uint8 [n * k / 2], levels float32 [16], magnitudes of blocks of so many values -> float32 [n, k], of which only the
    product is rounded. The first row begins a block. Raises ValueError where they do not fit one another."""
    count = prod(shape)
    if packed.shape != (-(-count // 2),) or scales.shape != (-(-count // block),):
        raise ValueError(f"{packed.size} bytes and {scales.size} scales for a weight of shape {list(shape)}")
    if levels.shape != (LEVELS,) or not np.isfinite(levels).all():
        raise ValueError(f"{levels.size} levels, expected {LEVELS} numbers")
    both = np.stack([np.repeat(levels, LEVELS), np.tile(levels, LEVELS)], axis=1)  # of each byte, which are taken as one word
    values = both.view(np.uint64).reshape(-1).take(packed).view(np.float32)[:count]
    whole = count // block * block
    values[:whole].reshape(-1, block)[:] *= scales[: whole // block, None]
    values[whole:] *= scales[-1]
    return values.reshape(shape)


def row_scales(most: np.ndarray, order: np.ndarray | None, rows: int) -> np.ndarray:
    """Scales float32 [N, 1] of bytes in so many rows, from the largest magnitudes [N] of rows; `order` says how the bytes lie. Raises
    ValueError for another order than by rows, and for magnitudes of other rows."""
    if most.shape != (rows,):
        raise ValueError(f"{most.size} scales for {rows} rows")
    if order is not None and order.reshape(-1).tolist() != [BY_ROW]:
        raise ValueError("bytes in the order of a GPU")
    return most.reshape(-1, 1) / TOP
