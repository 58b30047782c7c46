"""Few rows times a page of stored keys or values: widened in registers, where each number is used once for every row.

Keys are stored [D, tokens] and values [tokens, D], so scores and outputs are the same product. A page passes through the L1 cache once, in
its stored type; while it is multiplied, the next data is prefetched, a line or two per step. On AVX-512 a step of 8 rows is two `vcvtph2ps`
and 16 `vfmadd231ps` with factors from memory.
"""

from __future__ import annotations

from ..layout import F32, PAGE
from ..lazy_numba import inlined, llvm_intrinsic
from .inner_loops import DECODE_TILE_ROWS, FLOATS, VECTOR, plain_f32, widen_f16
from .int8_ir import NEXT_PAGE, fma, load, offset, opaque_address, prefetch_lines, splat, store
from .intrinsics import F32 as SINGLE
from .intrinsics import I64, f32_at

HIGH_ROWS = 8 if VECTOR == 16 else DECODE_TILE_ROWS  # rows of a tile; 16 registers have space for DECODE_TILE_ROWS only


def _tile(widen, item: int, rows: int, vectors: int, row_step: int, depth_step: int):
    """A has strides `row_step` and `depth_step` in bytes, as immediates, so that instructions read it from memory at no cost. (A sum of
    registers as the address would cost an extra instruction, and so would a broadcast for two vectors.)"""
    nbytes = item * VECTOR * vectors

    @llvm_intrinsic
    def tile(builder, a, b, b_stride, c, c_stride, depth, ahead):
        """C[R, N] += A[R, depth] @ B[depth, N], A and C float32, B stored; strides in bytes. Prefetches as many bytes from `ahead` on as
        are read of B. Each element is one chain of fused multiply-adds in the order of `depth`."""
        addresses = [offset(builder, builder.add(c, builder.mul(I64(row), c_stride)), 4 * VECTOR * part)
                     for row in range(rows) for part in range(vectors)]
        start = [load(builder, address, FLOATS, 4) for address in addresses]
        entry = builder.basic_block
        loop, done = builder.append_basic_block("depth"), builder.append_basic_block("depth.done")
        builder.branch(loop)
        builder.position_at_end(loop)
        left, factors, source, prefetch_at = (builder.phi(I64) for _ in range(4))
        sums = [builder.phi(FLOATS) for _ in range(rows * vectors)]
        prefetch_lines(builder, prefetch_at, nbytes, NEXT_PAGE)
        updated = []
        for part in range(vectors):
            factor_at, value = opaque_address(builder, factors), widen(builder, offset(builder, source, item * VECTOR * part))
            for row in range(rows):
                factor = splat(builder, load(builder, offset(builder, factor_at, row_step * row), SINGLE, 4), FLOATS)
                updated.append(fma(builder, factor, value, sums[rows * part + row]))
        fewer = builder.sub(left, I64(1))
        first = [depth, a, b, ahead, *(start[vectors * row + part] for part in range(vectors) for row in range(rows))]
        carried = [fewer, offset(builder, factors, depth_step), builder.add(source, b_stride), offset(builder, prefetch_at, nbytes)]
        for phi, begin, value in zip([left, factors, source, prefetch_at, *sums], first, [*carried, *updated], strict=True):
            phi.add_incoming(begin, entry)
            phi.add_incoming(value, loop)
        builder.cbranch(builder.icmp_signed(">", fewer, I64(0)), loop, done)
        builder.position_at_end(done)
        for index, address in enumerate(addresses):
            row, part = divmod(index, vectors)
            store(builder, updated[rows * part + row], address, 4)

    return tile


def _stripe(rows: int, turned: bool):
    """The tiles of a height: for both stored types, a pair of vectors wide or one. Strides of A as in `_product`."""
    steps = (4, 4 * rows) if turned else (4 * PAGE, 4)
    half_pair, half_one = (_tile(widen_f16, 2, rows, vectors, *steps) for vectors in (2, 1))
    full_pair, full_one = (_tile(plain_f32, 4, rows, vectors, *steps) for vectors in (2, 1))

    @inlined()
    def stripe(a, b, b_stride, dtype, c, c_stride, pair, depth, ahead):
        if dtype == F32:
            if pair:
                full_pair(a, b, b_stride, c, c_stride, depth, ahead)
            else:
                full_one(a, b, b_stride, c, c_stride, depth, ahead)
        elif pair:
            half_pair(a, b, b_stride, c, c_stride, depth, ahead)
        else:
            half_one(a, b, b_stride, c, c_stride, depth, ahead)

    return stripe


def _product(turned: bool):
    """`turned`: A is [tiles of rows, depth, rows of the tile], as from `turn_rows`; otherwise [rows, PAGE]."""
    high, low = _stripe(HIGH_ROWS, turned), _stripe(DECODE_TILE_ROWS, turned)

    @inlined()
    def product(a, b, b_stride, dtype, c, c_stride, rows, columns, depth, ahead):
        item = 4 if dtype == F32 else 2
        for j in range(0, columns, 2 * VECTOR):
            pair, r = j + 2 * VECTOR <= columns, 0
            while r < rows:
                queries_at, target = a + 4 * r * (depth if turned else PAGE), c + r * c_stride + 4 * j
                if r + HIGH_ROWS <= rows:
                    high(queries_at, b + item * j, b_stride, dtype, target, c_stride, pair, depth, ahead)
                    r += HIGH_ROWS
                else:
                    low(queries_at, b + item * j, b_stride, dtype, target, c_stride, pair, depth, ahead)
                    r += DECODE_TILE_ROWS
            ahead += item * depth * min(2 * VECTOR, columns - j)

    return product


# C[rows, columns] += A[rows, depth] @ B[depth, columns], B of a stored type (`layout.F32` or F16): scores from queries in the order of
# `transpose_rows`, outputs from softmax weights [rows, PAGE]. Strides in bytes; `rows` a multiple of DECODE_TILE_ROWS, `columns` of VECTOR,
# `depth` at least 1. As many bytes as are read of B are prefetched from `ahead` on.
stored_scores, stored_outputs = _product(True), _product(False)


@inlined()
def transpose_rows(rows_at, rows, depth, out):
    """Transpose float32 [rows, depth] -> [tiles, depth, rows of a tile]: the input of `stored_scores`."""
    r = 0
    while r < rows:
        tile_rows = HIGH_ROWS if r + HIGH_ROWS <= rows else DECODE_TILE_ROWS
        source, target = f32_at(rows_at + 4 * r * depth), f32_at(out + 4 * r * depth)
        for i in range(depth):
            for row in range(tile_rows):
                target[i * tile_rows + row] = source[row * depth + i]
        r += tile_rows
