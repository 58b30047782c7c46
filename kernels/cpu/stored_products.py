"""Few rows times a matrix of stored keys or values: widened in registers, where each number is used once for every row.

Keys lie [D, tokens] and values [tokens, D], so scores and outputs are the same product. A page passes through the first-level cache
once, in the type it is stored in; while it is multiplied, what comes next is asked for, a line or two a step: the processor itself does
not look beyond the row ahead of it. On AVX-512 a step of 8 rows is two `vcvtph2ps` and 16 `vfmadd231ps`, whose factors come
from memory.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..compile import inlined
from ..layout import F32, PAGE
from .inner_loops import FLOATS, LOW_ROWS, VECTOR
from .int8_ir import ask, constant, function, in_register, load, offset, splat, store
from .intrinsics import F16, HAS_HALF, I16, I32, I64, f32_at
from .intrinsics import F32 as SINGLE

HIGH_ROWS = 8 if VECTOR == 16 else LOW_ROWS  # of a tile; 16 registers have no room for more than LOW_ROWS


def _widen_f16(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """VECTOR halves as floats; without an instruction for it as `arithmetic.widen_half` does it."""
    if HAS_HALF:
        return builder.fpext(load(builder, address, ir.VectorType(F16, VECTOR), 2), FLOATS)
    words = ir.VectorType(I32, VECTOR)
    raw = builder.zext(load(builder, address, ir.VectorType(I16, VECTOR), 2), words)
    bits = builder.shl(builder.and_(raw, constant(words, 0x7FFF)), constant(words, 13))
    finite = builder.fmul(builder.bitcast(bits, FLOATS), constant(FLOATS, 2.0**112))
    special = builder.icmp_unsigned(">=", bits, constant(words, 0x7C00 << 13))
    magnitude = builder.select(special, builder.or_(bits, constant(words, 0x7F800000)), builder.bitcast(finite, words))
    sign = builder.shl(builder.and_(raw, constant(words, 0x8000)), constant(words, 16))
    return builder.bitcast(builder.or_(magnitude, sign), FLOATS)


def _plain_f32(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return load(builder, address, FLOATS, 4)


def _tile(widen, item: int, rows: int, vectors: int, row_step: int, depth_step: int):
    """A is `row_step` bytes from row to row and `depth_step` from column to column: numbers in the instructions, which then read it from
    memory at no cost. (An address that is a sum of registers would cost an instruction more, and so would a broadcast for two vectors.)"""
    nbytes = item * VECTOR * vectors

    @intrinsic
    def tile(typingctx, a, b, b_stride, c, c_stride, depth, ahead):
        """C[R, N] += A[R, depth] @ B[depth, N], A and C float32, B stored; strides in bytes. As many bytes from `ahead` on are asked for as
        are read of B. Each element is one chain of fused multiply-adds in the order of `depth`."""

        def codegen(context, builder, signature, args):
            a, b, b_stride, c, c_stride, depth, ahead = args
            fma = function(builder, FLOATS, [FLOATS] * 3, f"llvm.fma.v{VECTOR}f32")
            places = [offset(builder, builder.add(c, builder.mul(I64(row), c_stride)), 4 * VECTOR * part)
                      for row in range(rows) for part in range(vectors)]
            start = [load(builder, place, FLOATS, 4) for place in places]
            entry = builder.basic_block
            loop, done = builder.append_basic_block("depth"), builder.append_basic_block("depth.done")
            builder.branch(loop)
            builder.position_at_end(loop)
            left, factors, source, wanted = (builder.phi(I64) for _ in range(4))
            sums = [builder.phi(FLOATS) for _ in range(rows * vectors)]
            ask(builder, wanted, nbytes)
            updated = []
            for part in range(vectors):
                own, value = in_register(builder, factors), widen(builder, offset(builder, source, item * VECTOR * part))
                for row in range(rows):
                    factor = splat(builder, load(builder, offset(builder, own, row_step * row), SINGLE, 4), FLOATS)
                    updated.append(builder.call(fma, [factor, value, sums[rows * part + row]]))
            fewer = builder.sub(left, I64(1))
            first = [depth, a, b, ahead, *(start[vectors * row + part] for part in range(vectors) for row in range(rows))]
            carried = [fewer, offset(builder, factors, depth_step), builder.add(source, b_stride), offset(builder, wanted, nbytes)]
            for phi, begin, value in zip([left, factors, source, wanted, *sums], first, [*carried, *updated], strict=True):
                phi.add_incoming(begin, entry)
                phi.add_incoming(value, loop)
            builder.cbranch(builder.icmp_signed(">", fewer, I64(0)), loop, done)
            builder.position_at_end(done)
            for index, place in enumerate(places):
                row, part = divmod(index, vectors)
                store(builder, updated[rows * part + row], place, 4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return tile


def _product(across: bool):
    """`across`: A lies [tiles of rows, depth, rows of the tile], as `turn_rows` leaves it; otherwise [rows, PAGE]."""

    def tiles(rows: int) -> list:
        steps = (4, 4 * rows) if across else (4 * PAGE, 4)
        return [_tile(widen, item, rows, vectors, *steps) for widen, item in ((_widen_f16, 2), (_plain_f32, 4)) for vectors in (2, 1)]

    half_high_2, half_high_1, full_high_2, full_high_1 = tiles(HIGH_ROWS)
    half_low_2, half_low_1, full_low_2, full_low_1 = tiles(LOW_ROWS)

    @inlined()
    def product(a, b, b_stride, dtype, c, c_stride, rows, columns, depth, ahead):
        item = 4 if dtype == F32 else 2
        for j in range(0, columns, 2 * VECTOR):
            pair, r = j + 2 * VECTOR <= columns, 0
            source = b + item * j
            while r < rows:
                own, target = a + 4 * r * (depth if across else PAGE), c + r * c_stride + 4 * j
                if r + HIGH_ROWS <= rows:
                    if dtype == F32:
                        if pair:
                            full_high_2(own, source, b_stride, target, c_stride, depth, ahead)
                        else:
                            full_high_1(own, source, b_stride, target, c_stride, depth, ahead)
                    elif pair:
                        half_high_2(own, source, b_stride, target, c_stride, depth, ahead)
                    else:
                        half_high_1(own, source, b_stride, target, c_stride, depth, ahead)
                    r += HIGH_ROWS
                else:
                    if dtype == F32:
                        if pair:
                            full_low_2(own, source, b_stride, target, c_stride, depth, ahead)
                        else:
                            full_low_1(own, source, b_stride, target, c_stride, depth, ahead)
                    elif pair:
                        half_low_2(own, source, b_stride, target, c_stride, depth, ahead)
                    else:
                        half_low_1(own, source, b_stride, target, c_stride, depth, ahead)
                    r += LOW_ROWS
            ahead += item * depth * min(2 * VECTOR, columns - j)

    return product


# C[rows, columns] += A[rows, depth] @ B[depth, columns], B of a stored type (`layout.F32` or F16): scores from queries as `turn_rows`
# leaves them, outputs from softmax weights [rows, PAGE]. Strides in bytes; `rows` a multiple of LOW_ROWS, `columns` of VECTOR, `depth` at
# least 1. As much from `ahead` on is asked for as is read of B.
stored_scores, stored_outputs = _product(True), _product(False)


@inlined()
def turn_rows(rows_at, rows, depth, out):
    """float32 [rows, depth] -> [tiles, depth, rows of a tile]: what `stored_scores` takes."""
    r = 0
    while r < rows:
        here = HIGH_ROWS if r + HIGH_ROWS <= rows else LOW_ROWS
        source, target = f32_at(rows_at + 4 * r * depth), f32_at(out + 4 * r * depth)
        for i in range(depth):
            for row in range(here):
                target[i * here + row] = source[row * depth + i]
        r += here
