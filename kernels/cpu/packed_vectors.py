"""What surrounds the loops of `packed_loops.py`: activations to int8, row scales, results to the output."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..tiles import ROWS, TILE
from .inner_loops import VECTOR
from .int8_ir import I8, constant, function, load, offset, splat, store
from .intrinsics import F32, I16, I32, I64
from .packed_loops import begin_loop, end_loop

MAGIC, MAGIC_BITS = 1.5 * 2**23, 0x4B400000  # added to a small float, it leaves the nearest whole number in the low bits
SMALLEST = 2.0**-126  # scale of activations; below it, its inverse could be infinite


@intrinsic
def quantize_tiles(typingctx, x, tiles, codes, scales, totals):
    """float32 [tiles * 32] -> int8 of the same count, float32 scales per 32 (largest magnitude / 127), int32 totals per 16. `tiles` >= 1.

    Rounds to nearest, ties to even; with a scale below the normal numbers all are zeros. NaN and infinity make the scale NaN, so that
    they stay visible.
    """

    def codegen(context, builder, signature, args):
        x, tiles, codes, scales, totals = args
        parts = TILE // VECTOR
        words, small = ir.VectorType(I32, VECTOR), ir.VectorType(I8, VECTOR)
        wide = ir.VectorType(F32, VECTOR)
        reduce = lambda name, kind, *values: builder.call(  # noqa: E731
            function(builder, kind, [value.type for value in values],
                     f"llvm.vector.reduce.{name}.v{VECTOR}{'f32' if kind is F32 else 'i32'}"),
            values)
        magnitude = function(builder, wide, [wide], f"llvm.fabs.v{VECTOR}f32")
        blocks, tile, _ = begin_loop(builder, "quantize", I64(0), [])
        at = builder.add(x, builder.mul(tile, I64(4 * TILE)))
        values = [load(builder, offset(builder, at, 4 * VECTOR * i), wide, 4) for i in range(parts)]
        top = builder.call(magnitude, [values[0]])
        seen = builder.fmul(values[0], constant(wide, 0.0))
        for value in values[1:]:
            other = builder.call(magnitude, [value])
            top = builder.select(builder.fcmp_ordered(">", other, top), other, top)
            seen = builder.fadd(seen, builder.fmul(value, constant(wide, 0.0)))
        top = builder.call(function(builder, F32, [wide], f"llvm.vector.reduce.fmax.v{VECTOR}f32"), [top])
        seen = builder.call(function(builder, F32, [F32, wide], f"llvm.vector.reduce.fadd.v{VECTOR}f32"), [F32(0.0), seen],
                            fastmath=("reassoc",))
        scale = builder.fdiv(top, F32(127.0))
        inverse = builder.select(builder.fcmp_ordered(">=", scale, F32(SMALLEST)), builder.fdiv(F32(127.0), top), F32(0.0))
        store(builder, builder.fadd(scale, seen), builder.add(scales, builder.mul(tile, I64(4))), 4)
        inverse, sums = splat(builder, inverse, wide), []
        for i, value in enumerate(values):
            moved = builder.fadd(builder.fmul(value, inverse), constant(wide, MAGIC))
            number = builder.sub(builder.bitcast(moved, words), constant(words, MAGIC_BITS))
            store(builder, builder.trunc(number, small), builder.add(codes, builder.add(builder.mul(tile, I64(TILE)), I64(VECTOR * i))))
            sums.append(reduce("add", I32, number))
        for half in (0, 1):
            own = sums[half * parts // 2]
            for more in sums[half * parts // 2 + 1 : (half + 1) * parts // 2]:
                own = builder.add(own, more)
            store(builder, own, builder.add(totals, builder.add(builder.mul(tile, I64(8)), I64(4 * half))), 4)
        end_loop(builder, blocks, tile, tiles, [], [])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def scale_rows(typingctx, sums, row_scales):
    """16 float32 at `sums` times 16 bfloat16 at `row_scales`, in place."""

    def codegen(context, builder, signature, args):
        halves, words, wide = ir.VectorType(I16, VECTOR), ir.VectorType(I32, VECTOR), ir.VectorType(F32, VECTOR)
        for i in range(ROWS // VECTOR):
            at = offset(builder, args[0], 4 * VECTOR * i)
            bits = builder.zext(load(builder, offset(builder, args[1], 2 * VECTOR * i), halves, 2), words)
            scale = builder.bitcast(builder.shl(bits, constant(words, 16)), wide)
            store(builder, builder.fmul(load(builder, at, wide, 4), scale), at, 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def put_block(typingctx, sums, target, add):
    """16 float32 from `sums` to `target`, added to what is there where `add` is not 0."""

    def codegen(context, builder, signature, args):
        wide = ir.VectorType(F32, VECTOR)
        adding = builder.icmp_signed("!=", args[2], I64(0))
        for i in range(ROWS // VECTOR):
            value = load(builder, offset(builder, args[0], 4 * VECTOR * i), wide, 4)
            to = offset(builder, args[1], 4 * VECTOR * i)
            with builder.if_else(adding) as (then, otherwise):
                with then:
                    store(builder, builder.fadd(load(builder, to, wide, 4), value), to, 4)
                with otherwise:
                    store(builder, value, to, 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen
