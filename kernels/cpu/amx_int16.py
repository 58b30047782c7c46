"""Conversion of float32 to the two-byte integers multiplied by the matrix unit (AMX): activations, and weights of formats wider than a
byte.

A value becomes rint(x * INT16_MAX / largest), 16 bits and a sign, where `largest` is taken over a token, or over a row within a span of
inputs. The high byte is rounded to nearest, so that the low byte is signed as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from ..lazy_numba import llvm_intrinsic
from .amx import AMX_ROWS, BLOCK, INPUTS, QUAD_NBYTES, STEP_NBYTES, TILE_NBYTES
from .gemm_tiles import ROUND, ROUND_BITS
from .int8_ir import BYTES, FLOATS, HALVES, I8, LANES, WORDS, constant, function, load, offset, splat, store
from .intrinsics import F32, I32, I64
from .ir_loop import Loop

INT16_MAX = 127.0 * 256.0
MIN_NORMAL = 2.0**-126  # the smallest normal number


def _largest(builder: ir.IRBuilder, x: ir.Value, count: ir.Value) -> ir.Value:
    """Bits of the largest magnitude among `count` floats."""
    loop = Loop(builder, builder.lshr(count, I64(LANES.bit_length() - 1)), [constant(WORDS, 0)], "largest")
    bits = load(builder, builder.add(x, builder.mul(loop.index, I64(4 * LANES))), WORDS, 4)
    magnitude = builder.and_(bits, constant(WORDS, 0x7FFFFFFF))
    top, = loop.end([builder.select(builder.icmp_unsigned(">", magnitude, loop.values[0]), magnitude, loop.values[0])])
    return builder.call(function(builder, I32, [WORDS], f"llvm.vector.reduce.umax.v{LANES}i32"), [top])


def _scale(builder: ir.IRBuilder, top: ir.Value, maximum: float = INT16_MAX) -> tuple[ir.Value, ir.Value]:
    """The scale of the integers, and its inverse, in every lane: 0 if subnormal; NaN if some value is not finite."""
    largest = builder.bitcast(top, F32)
    scale = builder.fdiv(largest, F32(maximum))
    scale = builder.select(builder.icmp_unsigned("<", top, I32(0x7F800000)), scale, F32(float("nan")))
    normal = builder.fcmp_ordered(">=", scale, F32(MIN_NORMAL))
    inverse = builder.select(normal, builder.fdiv(F32(maximum), largest), F32(0.0))
    return scale, splat(builder, inverse, FLOATS)


def _numbers(builder: ir.IRBuilder, x: ir.Value, inverse: ir.Value) -> ir.Value:
    rounded = builder.fadd(builder.fmul(load(builder, x, FLOATS, 4), inverse), constant(FLOATS, ROUND))
    return builder.sub(builder.bitcast(rounded, WORDS), constant(WORDS, ROUND_BITS))


@llvm_intrinsic
def scale_token(builder, x, count, scale, inverse):
    """The scale of `count` >= 1 float32 of a token, a multiple of 64, stored as float32 at `scale`, and its inverse."""
    value, row_scale = _scale(builder, _largest(builder, x, count))
    store(builder, value, scale, 4)
    store(builder, builder.extract_element(row_scale, I32(0)), inverse, 4)


@llvm_intrinsic
def pack_token(builder, x, count, inverse, steps):
    """Pack `count` >= 1 float32 of a token, a multiple of 64, into a panel's steps, starting at its own row of `steps`."""
    narrow = ir.VectorType(I8, LANES)
    inverse = splat(builder, load(builder, inverse, F32, 4), FLOATS)
    loop = Loop(builder, builder.lshr(count, I64(INPUTS.bit_length() - 1)), [x, steps], "numbers")
    x, steps = loop.values
    for i in range(0, INPUTS, LANES):
        numbers = _numbers(builder, offset(builder, x, 4 * i), inverse)
        upper = builder.ashr(builder.add(numbers, constant(WORDS, 128)), constant(WORDS, 8))
        store(builder, builder.trunc(upper, narrow), offset(builder, steps, i))
        store(builder, builder.trunc(numbers, narrow), offset(builder, steps, TILE_NBYTES + i))
    loop.end([offset(builder, x, 4 * INPUTS), offset(builder, steps, STEP_NBYTES)])


@llvm_intrinsic
def pack_byte_block(builder, x, scale, steps, minimum):
    """Pack BLOCK float32 of a token as bytes into two steps of a panel, starting at its own row of `steps`, and their scale to `scale`.
    Same numerics as `gemm_pack.pack_panel`."""
    narrow = ir.VectorType(I8, LANES)
    top, minimum = _largest(builder, x, I64(BLOCK)), builder.trunc(minimum, I32)
    value, inverse = _scale(builder, builder.select(builder.icmp_unsigned(">", top, minimum), top, minimum), 127.0)
    store(builder, value, scale, 4)
    for i in range(0, BLOCK, LANES):
        numbers = builder.trunc(_numbers(builder, offset(builder, x, 4 * i), inverse), narrow)
        store(builder, numbers, offset(builder, steps, i // INPUTS * STEP_NBYTES + i % INPUTS))


def transposed(builder: ir.IRBuilder, rows: Sequence[ir.Value]) -> list[ir.Value]:
    """Transpose sixteen rows of sixteen words."""

    def pairs(values: list[ir.Value], distance: int, first: list[int], second: list[int]) -> list[ir.Value]:
        result: list[ir.Value | None] = [None] * AMX_ROWS
        for i in range(AMX_ROWS):
            if not i & distance:
                for at, order in ((i, first), (i | distance, second)):
                    result[at] = builder.shuffle_vector(values[i], values[i | distance], ir.Constant(ir.VectorType(I32, AMX_ROWS), order))
        return result

    values = list(rows)
    for distance in (1, 2, 4, 8):  # swaps elements whose row and column differ in one bit
        first = [i if not i & distance else AMX_ROWS + (i ^ distance) for i in range(AMX_ROWS)]
        second = [i | distance if not i & distance else AMX_ROWS + i for i in range(AMX_ROWS)]
        values = pairs(values, distance, first, second)
    return values


@llvm_intrinsic
def pack_rows(builder, rows, pitch, count, scratch, factors, out, second):
    """Pack `count` >= 1 float32, a multiple of 64, of 16 rows `pitch` bytes apart as a row block's byte quads at `out`: the high bytes, and
    `second` bytes further the low ones. Each row's scale, times 256, to `factors` (float32 [16]).

    scratch: 16 floats, then two tiles.
    """
    wide = lambda builder, name, kind, a, b: builder.call(function(builder, kind, [a.type, b.type], f"llvm.x86.avx512.{name}.512"), [a, b])  # noqa: E731
    tiles = offset(builder, scratch, 4 * AMX_ROWS)
    loop = Loop(builder, I64(AMX_ROWS), [rows, scratch, factors], "rows")
    row, inverse, factor = loop.values
    value, scale = _scale(builder, _largest(builder, row, count))
    store(builder, builder.fmul(value, F32(256.0)), factor, 4)
    store(builder, builder.extract_element(scale, I32(0)), inverse, 4)
    loop.end([builder.add(row, pitch), offset(builder, inverse, 4), offset(builder, factor, 4)])

    steps = Loop(builder, builder.lshr(count, I64(INPUTS.bit_length() - 1)), [rows, out], "steps")
    first, offset_bytes = steps.values
    loop = Loop(builder, I64(AMX_ROWS), [first, scratch, tiles], "numbers")
    row, inverse, tile = loop.values
    inverse = splat(builder, load(builder, inverse, F32, 4), FLOATS)
    numbers = [_numbers(builder, offset(builder, row, 4 * i), inverse) for i in range(0, INPUTS, LANES)]
    halves = [wide(builder, "packssdw", HALVES, *numbers[i : i + 2]) for i in (0, 2)]
    upper = [builder.ashr(builder.add(half, constant(HALVES, 128)), constant(HALVES, 8)) for half in halves]
    lower = [builder.and_(half, constant(HALVES, 255)) for half in halves]
    store(builder, wide(builder, "packsswb", BYTES, *upper), tile)
    store(builder, wide(builder, "packuswb", BYTES, *lower), offset(builder, tile, TILE_NBYTES))
    loop.end([builder.add(row, pitch), offset(builder, loop.values[1], 4), offset(builder, tile, INPUTS)])
    for plane in (0, 1):
        lines = [load(builder, offset(builder, tiles, TILE_NBYTES * plane + INPUTS * i), WORDS) for i in range(AMX_ROWS)]
        to = builder.add(offset_bytes, second) if plane else offset_bytes
        for i, quad in enumerate(transposed(builder, lines)):  # packing left word 4 l + j as the quad 4 j + l
            store(builder, quad, offset(builder, to, QUAD_NBYTES * (4 * (i % 4) + i // 4)))
    steps.end([offset(builder, first, 4 * INPUTS), offset(builder, offset_bytes, QUAD_NBYTES * AMX_ROWS)])
