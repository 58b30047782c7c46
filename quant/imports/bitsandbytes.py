"""bitsandbytes weights: NF4 and FP4, and LLM.int8. Pure functions of arrays.

At four bits two codes share a byte, the first in its upper half, row after row without gaps. The 16 levels are stored beside them, and
so is the absmax of every block of values, which may continue into the next row. The absmax values may be quantized themselves (double
quantization): codes of 256 levels under an absmax of their own, offset by one mean. JSON states the block sizes. Kernels multiply the
codes by integer levels and scales (`table4:16`): the nearest, under a half per 256 inputs.

At eight bits (LLM.int8) a row is signed bytes, scaled so that 127 is its absmax.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import gcd, prod

import numpy as np

from ...kernels.tiles import MAX_TABLE_PRODUCT, SUPER_BLOCK
from ..codes import Codes
from ..spec import QuantSpec
from ..weight import from_f32

LEVELS, SCALE_LEVELS = 16, 256
MOST_NBYTES, MOST_SIZE = 1 << 10, 1 << 40  # of what is said of a weight
TOP = np.float32(127)  # the byte that a row's largest magnitude is
MOST_MEAN = 3e38  # that float32 holds
BY_ROW = 0  # the order of bytes that is read; the others suit a GPU
SPEC = QuantSpec(4, 16, "table")
BLOCKS, USUAL = tuple(1 << bits for bits in range(5, 13)), 64  # values of a block that the package makes
WHOLE, MOST_CODE = np.arange(32, 127.5, 0.5, np.float32), 127  # tried for the largest level; what int8 holds
# Of a step between scales, squared, what choosing the half of 256 inputs leaves as error; a twelfth where it is not chosen (measured).
LEFT = 0.01
SPANS = np.linspace(0.6, 1, 8, dtype=np.float32)  # tried: the scale of the largest magnitude, as a part of the most that it can be
LEAST_POWER = -126  # of two, that bfloat16 holds


@dataclass(frozen=True)
class QuantState:
    """The state stored beside a 4-bit weight: its shape, block size, and for double-quantized absmax values their block size and mean."""

    shape: tuple[int, int]
    block: int
    outer_block: int
    mean: float


def parse_quant_state(stated: np.ndarray) -> QuantState:
    """From JSON, uint8 [n]. Raises ValueError for malformed or unsupported state."""
    try:
        found = json.loads(stated[:MOST_NBYTES].tobytes().decode("utf-8"))
    except RecursionError as error:
        raise ValueError("its quant_state nests too deeply") from error
    except ValueError as error:
        raise ValueError("its quant_state is not JSON") from error
    shape = found.get("shape") if isinstance(found, dict) else None
    if not isinstance(shape, list) or len(shape) != 2:
        raise ValueError("it does not say its shape")
    sizes = found.get("blocksize"), found.get("nested_blocksize", 1), *shape
    if any(type(size) is not int or not 0 < size < MOST_SIZE for size in sizes):
        raise ValueError("its shape or block sizes are invalid")
    mean = found.get("nested_offset", 0.0)
    if type(mean) not in (int, float) or not abs(mean) < MOST_MEAN:
        raise ValueError("the mean of its scales is not a number")
    return QuantState((sizes[2], sizes[3]), sizes[0], sizes[1], float(mean))


def magnitudes(said: QuantState, stored: np.ndarray, levels: np.ndarray | None, outer: np.ndarray | None) -> np.ndarray:
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
    check(packed, levels, scales, block, shape)
    both = np.stack([np.repeat(levels, LEVELS), np.tile(levels, LEVELS)], axis=1)  # of each byte, which are taken as one word
    values = both.view(np.uint64).reshape(-1).take(packed).view(np.float32)[:count]
    whole = count // block * block
    values[:whole].reshape(-1, block)[:] *= scales[: whole // block, None]
    values[whole:] *= scales[-1]
    return values.reshape(shape)


def spec_of(shape: tuple[int, int], scales: int) -> QuantSpec | None:
    """That in which kernels multiply the codes of a weight with so many magnitudes, where it is smaller than halves."""
    fits = shape[1] % SPEC.group == 0 and SPEC.nbytes(shape) < QuantSpec.raw("f16").nbytes(shape)
    return SPEC if fits and any(-(-prod(shape) // block) == scales for block in BLOCKS) else None


def integer_levels(levels: np.ndarray) -> tuple[np.ndarray, np.float32, int]:
    """Levels float32 [16] as whole numbers int8, what one of them stands for, and the largest scale code beside them: such that both are
    rounded by as little as can be."""
    largest = np.abs(levels).max()
    if largest == 0:
        return np.zeros(LEVELS, np.int8), np.float32(0), 1
    apart = levels.astype(np.float64) / largest
    made = np.rint(apart * WHOLE[:, None].astype(np.float64))
    most = np.minimum(MAX_TABLE_PRODUCT // np.abs(made).max(1), MOST_CODE)
    lost = np.square(made / WHOLE[:, None] - apart).mean(1) + LEFT * np.square(apart).mean() / np.square(most)
    best = int(lost.argmin())
    return made[best].astype(np.int8), largest / WHOLE[best], int(most[best])


def integer_scales(scales: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scales float32 [n, S, each] of super-blocks -> row * d * s: rows float32 [n], powers of two; d float32 [n, S] that halves hold under
    them; s int8 [n, S, each] of at most `most`. Of several d for the largest scale the one of the least squared error."""
    large = np.abs(scales).max(2)
    safe = np.where(large == 0, np.float32(1), large)[..., None]
    apart, least = scales / safe, np.full(large.shape, np.inf, np.float32)
    steps, codes = np.zeros(large.shape, np.float32), np.zeros(scales.shape, np.float32)
    for span in np.unique(np.rint(SPANS * most)):
        own = np.clip(np.rint(apart * span), -most, most)
        step = (apart * own).sum(2) / np.maximum(np.square(own).sum(2), 1)
        lost = np.square(apart - step[..., None] * own).sum(2)
        better = lost < least
        least, steps = np.where(better, lost, least), np.where(better, step, steps)
        codes = np.where(better[..., None], own, codes)
    found = steps.astype(np.float64) * large
    rows = np.exp2(np.maximum(np.frexp(found.max(1))[1] - 1, LEAST_POWER))  # the largest d is 1 to 2
    return rows.astype(np.float32), (found / rows[:, None]).astype(np.float32), codes.astype(np.int8)


def packable(packed: np.ndarray, levels: np.ndarray, scales: np.ndarray, block: int, shape: tuple[int, int]) -> Codes:
    """What `dequantize` takes -> codes of SPEC, the very ones; their levels and scales are rounded. Raises ValueError as that does, and for
    blocks that end within a group."""
    codes = np.empty((packed.size, 2), np.uint8)
    codes[:, 0], codes[:, 1] = packed >> 4, packed & 15
    own = factors(packed, levels, scales, block, shape)
    return Codes(codes.reshape(-1)[: prod(shape)].reshape(shape), own[0], None, own[1], own[3], supers=own[2])


def factors(packed: np.ndarray, levels: np.ndarray, scales: np.ndarray, block: int, shape: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """What `packable` has beside the codes: scales, rows, supers and levels."""
    n, k = shape
    check(packed, levels, scales, block, shape)
    if block % SPEC.group or k % SPEC.group:
        raise ValueError(f"blocks of {block} values, which end within {SPEC.group}")
    made, unit, most = integer_levels(levels)
    width, supers = gcd(block, k, SUPER_BLOCK), -(-k // SUPER_BLOCK)  # inputs that share a scale
    own = np.zeros((n, supers * (SUPER_BLOCK // width)), np.float32)
    with np.errstate(over="ignore"):  # looked for below
        own[:, : k // width] = (scales * unit)[np.arange(n * k // width) * width // block].reshape(n, -1)
    if not np.isfinite(own).all():
        raise ValueError("a scale times its levels is more than float32 holds")
    rows, steps, codes = integer_scales(own.reshape(n, supers, -1), most)
    codes = np.repeat(codes.reshape(n, -1), width // SPEC.group, axis=1)[:, : k // SPEC.group]
    return np.ascontiguousarray(codes), rows, from_f32(steps, "f16")[..., None], made


def check(packed: np.ndarray, levels: np.ndarray, scales: np.ndarray, block: int, shape: tuple[int, int]) -> None:
    """Raises ValueError for bytes, levels and magnitudes that are not those of a weight of this shape."""
    count = prod(shape)
    if packed.shape != (-(-count // 2),) or scales.shape != (-(-count // block),):
        raise ValueError(f"{packed.size} bytes and {scales.size} scales for a weight of shape {list(shape)}")
    if levels.shape != (LEVELS,) or not np.isfinite(levels).all():
        raise ValueError(f"{levels.size} levels, expected {LEVELS} numbers")


def row_scales(most: np.ndarray, order: np.ndarray | None, rows: int) -> np.ndarray:
    """Scales float32 [N, 1] of bytes in so many rows, from the largest magnitudes [N] of rows; `order` says how the bytes lie. Raises
    ValueError for another order than by rows, and for magnitudes of other rows."""
    if most.shape != (rows,):
        raise ValueError(f"{most.size} scales for {rows} rows")
    if order is not None and order.reshape(-1).tolist() != [BY_ROW]:
        raise ValueError("bytes in the order of a GPU")
    return most.reshape(-1, 1) / TOP
