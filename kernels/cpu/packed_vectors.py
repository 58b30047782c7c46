"""Vector code around the loops of `packed_loops.py`: quantizing activations to int8, applying row scales, writing results."""

from __future__ import annotations

from llvmlite import ir

from ..lazy_numba import llvm_intrinsic
from ..tiles import ROWS, TILE
from .inner_loops import VECTOR
from .int8_ir import I8, constant, function, load, offset, splat, store
from .intrinsics import F32, I16, I32, I64
from .ir_loop import Loop

MAGIC, MAGIC_BITS = 1.5 * 2**23, 0x4B400000  # adding it to a small float32 leaves the nearest integer in the low bits
MIN_SCALE = 2.0**-126  # minimum scale of activations: the inverse of a smaller one could be infinite


@llvm_intrinsic
def quantize_tiles(builder, x, tiles, codes, scales, totals, minimum):
    """float32 [tiles * 32] -> int8 of the same count, float32 scales per 32 (largest magnitude / 127), int32 totals per 16. `tiles` >= 1;
    `minimum`: lower bound of the largest magnitude, as float bits.

    Rounds to nearest, ties to even; with a subnormal scale all are zeros. NaN and infinity make the scale NaN, so that they stay visible.
    """
    parts = TILE // VECTOR
    words, small = ir.VectorType(I32, VECTOR), ir.VectorType(I8, VECTOR)
    wide = ir.VectorType(F32, VECTOR)
    reduce = lambda name, value: builder.call(function(builder, I32, [words], f"llvm.vector.reduce.{name}.v{VECTOR}i32"), [value])  # noqa: E731
    minimum = builder.trunc(minimum, I32)
    loop = Loop(builder, tiles, [], "quantize")
    tile = loop.index
    at = builder.add(x, builder.mul(tile, I64(4 * TILE)))
    values = [load(builder, offset(builder, at, 4 * VECTOR * i), wide, 4) for i in range(parts)]
    # Magnitudes are ordered like their bits, and NaN is above infinity: a few vector maxima, where a maximum of floats would become a chain
    # of scalar steps that each test for NaN.
    sizes = [builder.and_(builder.bitcast(value, words), constant(words, 0x7FFFFFFF)) for value in values]
    while len(sizes) > 1:
        sizes = [builder.select(builder.icmp_unsigned(">", a, b), a, b) for a, b in zip(sizes[::2], sizes[1::2])]
    top = reduce("umax", sizes[0])
    top = builder.bitcast(builder.select(builder.icmp_unsigned(">", top, minimum), top, minimum), F32)
    nan_marker = builder.fmul(top, F32(0.0))  # NaN if any value is not finite
    scale = builder.fdiv(top, F32(127.0))
    inverse = builder.select(builder.fcmp_ordered(">=", scale, F32(MIN_SCALE)), builder.fdiv(F32(127.0), top), F32(0.0))
    store(builder, builder.fadd(scale, nan_marker), builder.add(scales, builder.mul(tile, I64(4))), 4)
    inverse, sums = splat(builder, inverse, wide), []
    for i, value in enumerate(values):
        moved = builder.fadd(builder.fmul(value, inverse), constant(wide, MAGIC))
        number = builder.sub(builder.bitcast(moved, words), constant(words, MAGIC_BITS))
        store(builder, builder.trunc(number, small), builder.add(codes, builder.add(builder.mul(tile, I64(TILE)), I64(VECTOR * i))))
        sums.append(reduce("add", number))
    for half in (0, 1):
        tile_sum = sums[half * parts // 2]
        for more in sums[half * parts // 2 + 1 : (half + 1) * parts // 2]:
            tile_sum = builder.add(tile_sum, more)
        store(builder, tile_sum, builder.add(totals, builder.add(builder.mul(tile, I64(8)), I64(4 * half))), 4)
    loop.end([])


@llvm_intrinsic
def scale_rows(builder, sums, row_scales):
    """16 float32 at `sums` times 16 bfloat16 at `row_scales`, in place."""
    halves, words, wide = ir.VectorType(I16, VECTOR), ir.VectorType(I32, VECTOR), ir.VectorType(F32, VECTOR)
    for i in range(ROWS // VECTOR):
        at = offset(builder, sums, 4 * VECTOR * i)
        bits = builder.zext(load(builder, offset(builder, row_scales, 2 * VECTOR * i), halves, 2), words)
        scale = builder.bitcast(builder.shl(bits, constant(words, 16)), wide)
        store(builder, builder.fmul(load(builder, at, wide, 4), scale), at, 4)


@llvm_intrinsic
def put_block(builder, sums, target, add):
    """16 float32 from `sums` to `target`, added to what is there where `add` is not 0."""
    wide = ir.VectorType(F32, VECTOR)
    adding = builder.icmp_signed("!=", add, I64(0))
    for i in range(ROWS // VECTOR):
        value = load(builder, offset(builder, sums, 4 * VECTOR * i), wide, 4)
        to = offset(builder, target, 4 * VECTOR * i)
        with builder.if_else(adding) as (then, otherwise):
            with then:
                store(builder, builder.fadd(load(builder, to, wide, 4), value), to, 4)
            with otherwise:
                store(builder, value, to, 4)
