"""Fp8 (E4M3) in vectors: shifted right by one bit, keeping the sign, a code is the half-precision float of 2**-8 times its value."""

from __future__ import annotations

from llvmlite import ir

from .int8_ir import FLOATS, I8, LANES, constant, load, offset
from .intrinsics import F16, F32, HAS_HALF, I16, I32

SIGN_AND_REST = 0xBF80 - (1 << 16)  # mask of the bits of a half that a code fills
HALF_SCALE = 256.0  # factor by which the halves are too small


def widen(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    """16-bit integers that are finite halves -> float32. Without the conversion instruction by a multiplication, which is exact."""
    count = halves.type.count
    floats, words = ir.VectorType(F32, count), ir.VectorType(I32, count)
    if HAS_HALF:
        return builder.fpext(builder.bitcast(halves, ir.VectorType(F16, count)), floats)
    wide = builder.zext(halves, words)
    magnitude = builder.bitcast(builder.shl(builder.and_(wide, constant(words, 0x7FFF)), constant(words, 13)), floats)
    scaled = builder.bitcast(builder.fmul(magnitude, constant(floats, 2.0**112)), words)
    return builder.bitcast(builder.or_(scaled, builder.shl(builder.and_(wide, constant(words, 0x8000)), constant(words, 16))), floats)


def halves_of(builder: ir.IRBuilder, raised: ir.Value) -> ir.Value:
    """Codes in the high bytes of 16-bit integers -> the halves they represent, 2**-8 times as large."""
    kind = raised.type
    return builder.and_(builder.ashr(raised, constant(kind, 1)), constant(kind, SIGN_AND_REST))


def small_scales(builder: ir.IRBuilder, address: ir.Value, piece: int) -> ir.Value:
    """The fp8 scales of a piece's rows, a byte each, as float32."""
    halves = ir.VectorType(I16, LANES)
    raw = builder.zext(load(builder, offset(builder, address, LANES * piece), ir.VectorType(I8, LANES)), halves)
    return builder.fmul(widen(builder, halves_of(builder, builder.shl(raw, constant(halves, 8)))), constant(FLOATS, HALF_SCALE))
