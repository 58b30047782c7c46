"""The two grids of the KV codec: how numbers become codes, scales and zeros. NumPy, float32, vectorised over whatever axes come first.

A group's values are `scale · (code - half + zero · unit)`, half = (2^bits - 1) / 2. K, groups of 32 tokens of one channel: the scale is
2^(e / 8), e and zero signed bytes, the unit 1/64 of the grid's width, so that a zero reaches two widths to either side. V, groups of 16
channels of one token: the scale is 2^((top - step) / 4) with one `top` a page, step and zero of 4 bits, the unit 1/32 of the width.

Scale and zero are searched together for the least squared error: on Gaussian values at 4 bits that is 0.5 dB better than searching the
scale and rounding the zero that belongs to it, and leaves nothing for a refit of the scale to gain.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

OCTAVE_K, OCTAVE_V = 8, 4  # steps of a scale in a factor of two
UNITS_K, UNITS_V = 64, 32  # units of a zero in the width of a grid
MOST_STEPS, LEAST_ZERO_V, MOST_ZERO_V = 15, -8, 7
TINY = np.float32(2.0**-24)
# Tried below the scale that holds the group (octaves), and to either side of the zero in its middle (units): fewer bits clip more. Of
# many bits, also above it: a zero that is rounded or at its end must not clip.
OCTAVES = {8: 0.1, 6: 0.2, 5: 0.25, 4: 0.4, 3: 0.6, 2: 0.9, 1: 1.2}
ZEROS = {8: 0, 6: 1, 5: 1, 4: 2, 3: 2, 2: 3, 1: 3}
ABOVE = {8: 2, 6: 2, 5: 1, 4: 0, 3: 0, 2: 0, 1: 0}


def half(bits: int) -> np.float32:
    """The middle of the codes."""
    return np.float32(((1 << bits) - 1) / 2)


def scale_k(exponent: np.ndarray) -> np.ndarray:
    """int8 exponents as float32 scales."""
    return np.exp2(exponent.astype(np.float32) / OCTAVE_K)


def scale_v(top: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Scales of V: `top` int, `step` of 4 bits below it."""
    return np.exp2((top.astype(np.float32) - step.astype(np.float32)) / OCTAVE_V)


def _values(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, bits: int, units: int) -> np.ndarray:
    return scale * (codes.astype(np.float32) + (zero.astype(np.float32) * np.float32((1 << bits) / units) - half(bits)))


def decode_k(codes: np.ndarray, exponent: np.ndarray, zero: np.ndarray, bits: int) -> np.ndarray:
    """Codes [..., 32], exponent and zero int8 [..., 1] -> float32."""
    return _values(codes, scale_k(exponent), zero, bits, UNITS_K)


def decode_v(codes: np.ndarray, step: np.ndarray, zero: np.ndarray, top: np.ndarray, bits: int) -> np.ndarray:
    """Codes [..., 16], step, zero and top [..., 1] -> float32."""
    return _values(codes, scale_v(top, step), zero, bits, UNITS_V)


def encode_k(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Groups x float32 [..., 32] -> (codes uint8 [..., 32], exponent int8 [..., 1], zero int8 [..., 1])."""
    need, middle = _range(x, bits)
    first = np.ceil(need * OCTAVE_K)
    best: list[np.ndarray] = []
    for exponent in _scales(first, OCTAVE_K, bits, -128, 127):
        scale = np.exp2(exponent / OCTAVE_K)
        for zero in _zeros(middle, scale, bits, UNITS_K, -128, 127):
            best = _try(best, x, scale, zero, bits, UNITS_K, exponent)
    return best[1], best[2].astype(np.int8), best[3].astype(np.int8)


def first_v(x: np.ndarray, bits: int) -> np.ndarray:
    """Steps of the scale that holds each group of x float32 [..., 16], and of what `encode_v` tries above it; a page's largest is `top`."""
    return np.ceil(_range(x, bits)[0] * OCTAVE_V) + ABOVE[bits]


def encode_v(x: np.ndarray, bits: int, top: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Groups x float32 [..., 16], `top` [..., 1] -> (codes uint8 [..., 16], step uint8 [..., 1], zero int8 [..., 1])."""
    need, middle = _range(x, bits)
    best: list[np.ndarray] = []
    for below in _scales(np.ceil(need * OCTAVE_V) - top, OCTAVE_V, bits, -MOST_STEPS, 0):
        scale = np.exp2((top + below) / OCTAVE_V)
        for zero in _zeros(middle, scale, bits, UNITS_V, LEAST_ZERO_V, MOST_ZERO_V):
            best = _try(best, x, scale, zero, bits, UNITS_V, below)
    return best[1], (-best[2]).astype(np.uint8), best[3].astype(np.int8)


def _range(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """log2 of the scale that holds each group, and the group's middle."""
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    return np.log2(np.maximum((high - low) / ((1 << bits) - 1), TINY)), (high + low) / 2


def _scales(first: np.ndarray, octave: int, bits: int, least: int, most: int) -> Iterator[np.ndarray]:
    for below in range(-ABOVE[bits], int(OCTAVES[bits] * octave) + 2):
        yield np.clip(first - below, least, most)


def _zeros(middle: np.ndarray, scale: np.ndarray, bits: int, units: int, least: int, most: int) -> Iterator[np.ndarray]:
    zero = np.rint(middle / (scale * np.float32((1 << bits) / units)))
    for aside in range(-ZEROS[bits], ZEROS[bits] + 1):
        yield np.clip(zero + aside, least, most)


def _try(best: list[np.ndarray], x: np.ndarray, scale: np.ndarray, zero: np.ndarray, bits: int, units: int,
         stored: np.ndarray) -> list[np.ndarray]:
    """Group by group [error, codes, stored scale, zero] of whichever has the smaller error; the earlier where they are equal."""
    shift = zero * np.float32((1 << bits) / units) - half(bits)
    codes = np.clip(np.rint(x / scale - shift), 0, (1 << bits) - 1)
    error = np.square(scale * (codes + shift) - x).sum(-1, keepdims=True)
    other = [error, codes.astype(np.uint8), stored, zero]
    if not best:
        return other
    better = error < best[0]
    return [np.where(better, new, old) for new, old in zip(other, best, strict=True)]
