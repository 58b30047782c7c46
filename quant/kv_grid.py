"""Quantization grids of the KV codec: values to codes, scales and zeros. NumPy, float32, vectorised over any leading axes.

A group's values are `scale · (code - half + zero · unit)`, half = (2^bits - 1) / 2. K, groups of 32 tokens of one channel: the scale is
2^(e / 8), e and zero signed bytes, the unit 1/64 of the grid's width, so that a zero reaches two widths to either side. V, groups of 16
channels of one token: the scale is 2^((top - step) / 4) with one `top` per page, step and zero of 4 bits, the unit 1/32 of the width.

Scale and zero are searched jointly for the least squared error: on Gaussian values at 4 bits that is 0.5 dB better than searching the
scale and rounding the matching zero, and leaves nothing for a refit of the scale to gain.

Every operation is one float32 operation in a stated order and scales come from a table, so that the compiled search
(`kernels/cpu/kv/seal.py`) chooses the same codes bit for bit, on every instruction set.
"""

from __future__ import annotations

import numpy as np

from ..kernels.kv_layout import MANTISSA_BITS

OCTAVE_K, OCTAVE_V = 8, 4  # steps of a scale in a factor of two
UNITS_K, UNITS_V = 64, 32  # units of a zero in the width of a grid
MOST_STEPS, LEAST_ZERO_V, MOST_ZERO_V = 15, -8, 7
TINY = np.float32(2.0**-24)
# Tried below the scale that holds the group (octaves), and to either side of the zero in its middle (units): fewer bits clip more. Of
# many bits, also above it: a zero that is rounded or at its end must not clip.
OCTAVES = {10: 0.1, 8: 0.1, 6: 0.2, 5: 0.25, 4: 0.4, 3: 0.6, 2: 0.9, 1: 1.2}
ZEROS = {10: 0, 8: 0, 6: 1, 5: 1, 4: 2, 3: 2, 2: 3, 1: 3}
ABOVE = {10: 2, 8: 2, 6: 2, 5: 1, 4: 0, 3: 0, 2: 0, 1: 0}
# A zero of so many units more and codes of one less are the same values: the earlier of two candidates stays unless the later is better by
# more than rounding can make it.
NEARLY = np.float32(1 - 2.0**-12)
LARGEST = np.float32(2.0**60)  # errors of larger values would overflow
MANTISSAS = np.array(MANTISSA_BITS, np.uint32).view(np.float32)


def half(bits: int) -> np.float32:
    """The middle of the codes."""
    return np.float32(((1 << bits) - 1) / 2)


def scale_k(exponent: np.ndarray) -> np.ndarray:
    """int8 exponents as float32 scales."""
    return _power(exponent.astype(np.int32) * (8 // OCTAVE_K))


def scale_v(top: np.ndarray, step: np.ndarray) -> np.ndarray:
    """Scales of V: `top` int, `step` of 4 bits below it."""
    return _power((top.astype(np.int32) - step.astype(np.int32)) * (8 // OCTAVE_V))


def _power(eighths: np.ndarray) -> np.ndarray:
    """2^(eighths / 8), float32."""
    return np.ldexp(MANTISSAS[eighths & 7], eighths >> 3)


def _values(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, bits: int, units: int) -> np.ndarray:
    return scale * (codes.astype(np.float32) + (zero.astype(np.float32) * np.float32((1 << bits) / units) - half(bits)))


def decode_k(codes: np.ndarray, exponent: np.ndarray, zero: np.ndarray, bits: int) -> np.ndarray:
    """Codes [..., 32], exponent and zero int8 [..., 1] -> float32."""
    return _values(codes, scale_k(exponent), zero, bits, UNITS_K)


def decode_v(codes: np.ndarray, step: np.ndarray, zero: np.ndarray, top: np.ndarray, bits: int) -> np.ndarray:
    """Codes [..., 16], step, zero and top [..., 1] -> float32."""
    return _values(codes, scale_v(top, step), zero, bits, UNITS_V)


def encode_k(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Groups x float32 [..., 32] -> (codes uint16 [..., 32], exponent int8 [..., 1], zero int8 [..., 1])."""
    codes, exponent, zero = _search(x, bits, OCTAVE_K, UNITS_K, (-128, 127), (-128, 127))
    return codes, exponent.astype(np.int8), zero.astype(np.int8)


def first_v(x: np.ndarray, bits: int) -> np.ndarray:
    """Steps of the scale that holds each group of x float32 [..., 16], and of what `encode_v` tries above it; a page's largest is `top`."""
    return _first(x.min(-1, keepdims=True), x.max(-1, keepdims=True), bits, OCTAVE_V) + ABOVE[bits]


def encode_v(x: np.ndarray, bits: int, top: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Groups x float32 [..., 16], `top` int [..., 1] -> (codes uint16 [..., 16], step uint8 [..., 1], zero int8 [..., 1])."""
    least = np.broadcast_to(top - MOST_STEPS, (*x.shape[:-1], 1))[..., 0]
    codes, exponent, zero = _search(x, bits, OCTAVE_V, UNITS_V, (least, least + MOST_STEPS), (LEAST_ZERO_V, MOST_ZERO_V))
    return codes, (top - exponent).astype(np.uint8), zero.astype(np.int8)


def tried(bits: int, octave: int) -> range:
    """Steps below the scale that holds a group at which the search looks."""
    return range(-ABOVE[bits], int(OCTAVES[bits] * octave) + 2)


def _first(low: np.ndarray, high: np.ndarray, bits: int, octave: int) -> np.ndarray:
    """The exponent, in steps of 1 / octave, of the smallest scale that holds groups of these ends. Counted in the table, because two
    logarithms may round to either side of a step."""
    mantissa, exponent = np.frexp(np.maximum((high - low) / np.float32((1 << bits) - 1), TINY))
    eighths = 8 * (exponent - 1) + np.searchsorted(MANTISSAS, mantissa * 2)
    return -(-eighths // (8 // octave))


def _search(x: np.ndarray, bits: int, octave: int, units: int, ends: tuple, zeros: tuple[int, int]) -> tuple[np.ndarray, ...]:
    """(codes [..., n], exponent [..., 1], zero [..., 1]) of groups [..., n] with the smallest error, the earlier where two are all but
    equal. `ends`: of the exponent; `zeros`: of a zero."""
    x = np.ascontiguousarray(np.moveaxis(x, -1, 0))  # a group's values far apart: a sum over them adds them in order
    low, high = x.min(0), x.max(0)
    first, middle = _first(low, high, bits, octave), (low + high) * np.float32(0.5)
    unit, per_unit = np.float32((1 << bits) / units), np.float32(units / (1 << bits))
    best: list[np.ndarray] = []
    for below in tried(bits, octave):
        exponent = np.clip(first - below, *ends)
        scale, inverse = _power(exponent * (8 // octave)), _power(exponent * -(8 // octave))
        y, centre = x * inverse, np.rint(middle * inverse * per_unit)
        for aside in range(-ZEROS[bits], ZEROS[bits] + 1):
            zero = np.clip(centre + np.float32(aside), *zeros)
            away = y - (zero * unit - half(bits))
            codes = np.rint(np.clip(away, 0, (1 << bits) - 1))
            other = [_sum(np.square(codes - away)) * (scale * scale), codes.astype(np.uint16), exponent, zero]
            if best:
                better = other[0] < best[0] * NEARLY
                other = [np.where(better, new, old) for new, old in zip(other, best, strict=True)]
            best = other
    _, codes, exponent, zero = best
    return np.moveaxis(codes, 0, -1), exponent[..., None], zero[..., None]


def _sum(rows: np.ndarray) -> np.ndarray:
    """Rows added one after another."""
    total = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total
