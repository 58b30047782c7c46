"""FP8 weights (E4M3: no infinities, one NaN) scaled per block, row or tensor. Pure functions of arrays."""

from __future__ import annotations

from math import prod

import numpy as np

from ...kernels.tiles import ROWS, TILE
from ..codebooks import E4M3
from ..codes import Codes
from ..spec import GROUPS, QuantSpec
from .blocks import block_size

VALUES = E4M3
NO_POWER = 255  # the NaN among the scales of `powers_of_two`


def powers_of_two(codes: np.ndarray) -> np.ndarray:
    """E8M0 scales, none of them NO_POWER: 2**(code - 127) as float32."""
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
    form, high, wide = _cover(shape, scales.shape, block)
    return scales.reshape(form), high, wide


def _cover(shape: tuple[int, int], scales: tuple[int, ...], block: tuple[int, int]) -> tuple[tuple[int, int], int, int]:
    """The form [n, k] of scales of a shape, and what `blocks` says of them."""
    (rows, depth), form = shape, scales
    if len(form) < 2 and prod(form) in (1, rows):  # blocks may be as many as there are rows
        form = prod(form), 1
    if len(form) != 2 or not 0 < form[0] <= rows or not 0 < form[1] <= depth:
        raise ValueError(f"scales of shape {scales} for a weight of shape {shape}")
    if form in ((1, 1), (rows, 1)):
        return form, 1 if form[0] == rows else rows, depth
    high, wide = (stated or block_size(size, count) for stated, size, count in zip(block, shape, form))
    if form != (-(-rows // high), -(-depth // wide)):
        raise ValueError(f"scales of shape {scales} for a weight of shape {shape} in blocks of {high} x {wide}")
    return form, high, wide


def spec_of(shape: tuple[int, int], scales: tuple[int, ...], block: tuple[int, int] = (0, 0)) -> QuantSpec | None:
    """The format that holds weights of `shape` with scales of a shape exactly; None where there is none, or the scales do not fit. Sixteen
    rows share a scale of a block, and blocks begin on tiles."""
    try:
        form, high, wide = _cover(shape, scales, block)
    except ValueError:
        return None
    by_row = form[1] == 1 and high in (1, shape[0])
    if not by_row and (high % ROWS and form[0] > 1 or wide % TILE and form[1] > 1):
        return None
    width = shape[1] if form[1] == 1 else wide
    fitting = [group for group in GROUPS["float"] if width % group == 0 and shape[1] % group == 0]
    return QuantSpec(8, max(fitting, default=TILE), "float")


def packable(codes: np.ndarray, scales: np.ndarray, spec: QuantSpec, block: tuple[int, int] = (0, 0)) -> Codes:
    """Codes uint8 [N, K] and scales as `dequantize` takes them -> what `spec`, which is theirs, holds. Raises ValueError where they do not
    fit one another, or one is no number."""
    own, rows = factors(codes.shape, scales, spec, block)
    return Codes(codes, own, None, rows)


def factors(shape: tuple[int, int], scales: np.ndarray, spec: QuantSpec, block: tuple[int, int] = (0, 0)) -> tuple[np.ndarray, np.ndarray]:
    """Scales float32 [ceil(N / 16), K / group] and rows float32 [N], as in `Codes`; arguments and errors are those of `packable`."""
    (n, k), (scales, high, wide) = shape, blocks(shape, scales, block)
    if not np.isfinite(scales).all():
        raise ValueError("a scale is NaN or infinity")
    count, groups = -(-n // ROWS), -(-k // spec.group)
    if scales.shape in ((1, 1), (n, 1)):
        return np.ones((count, groups), np.float32), np.broadcast_to(scales[:, 0], (n,)).astype(np.float32)
    spread = scales[np.arange(count) * ROWS // high][:, np.arange(groups) * spec.group // wide]
    return np.ascontiguousarray(spread, np.float32), np.ones(n, np.float32)
