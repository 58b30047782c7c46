"""Widens fp8 (E4M3) weights to half precision: each code's value times its block's scale, rounded once."""

from __future__ import annotations

import numpy as np
from numpy import float32, int64, uint32

from ..compile import jit
from ..lazy_numba import inlined
from .arithmetic import INFINITY, narrow_half
from .intrinsics import HAS_HALF, bits_to_f32, f32_at, f32_to_half, u8_at, u16_at

SUBNORMAL = np.float32(2.0**-9)  # unit of codes without an exponent
BIAS = 120 << 23  # difference of the exponent biases of E4M3 and float32
OVERFLOW = np.float32(65520.0)  # rounds to infinity in half precision


@inlined()
def e4m3(code):
    """Float32 value of a code; there are no infinities and one NaN of either sign."""
    magnitude = code & uint32(127)
    bits = (magnitude << uint32(20)) + uint32(BIAS)
    value = bits_to_f32(bits) if magnitude >= uint32(8) else float32(magnitude) * SUBNORMAL
    value = value if magnitude != uint32(127) else float32(np.nan)
    return -value if code >= uint32(128) else value


if HAS_HALF:

    @inlined()
    def to_half(value):
        return f32_to_half(value)

else:

    @inlined()
    def to_half(value):
        """Nearest half, ties to even; what is too large is infinite."""
        half = narrow_half(value)
        return half + np.uint16(1) if OVERFLOW <= abs(value) < INFINITY else half


@jit("int64(int64, int64)")
def has_nan(codes, count):
    """1 if one of the `count` codes at an address is NaN, else 0."""
    code, result = u8_at(codes), np.uint8(0)
    for i in range(count):
        result |= np.uint8((code[i] & np.uint8(127)) == np.uint8(127))
    return int64(result)


@jit("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def e4m3_to_half(codes, rows, depth, scales, stride, high, wide, out):
    """Codes [rows, depth] at an address, and float32 scales at another, one per `high` rows and `wide` inputs, with scale rows `stride`
    apart -> halves [rows, depth] at `out`."""
    for row in range(rows):
        source, target = u8_at(codes + row * depth), u16_at(out + 2 * row * depth)
        row_scales = f32_at(scales + 4 * (row // high) * stride)
        for begin in range(0, depth, wide):
            scale = row_scales[begin // wide]
            for k in range(begin, min(depth, begin + wide)):
                target[k] = to_half(e4m3(uint32(source[k])) * scale)
