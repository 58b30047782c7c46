"""Fp8 (E4M3) weights times many columns as products of bf16 pairs (AVX-512 BF16).

bf16 holds every E4M3 value, so weights are exact; activations are rounded to bf16 as in `linear_bf16.py`, whose panels these are. A sum
over a group is one chain of products in the order of inputs; sums of groups, each times its scale, are added in order, and the result is
multiplied by the row's scale: results depend neither on other tokens nor on threads. A block's codes are expanded for a span of inputs, as
words [pair][16 rows], once for all panels. From 64 tokens on this is 1.8 times as fast as float32 tiles, compute-bound like them.
"""

from __future__ import annotations

from llvmlite import ir

from ..compile import kernel
from ..lazy_numba import inlined, llvm_intrinsic, types
from ..tiles import ROWS as STRIP_ROWS
from ..tiles import TILE
from . import linear_bf16, low_bit
from .bf16_pairs import PAIRS_STEP, multiply_pairs
from .gemm import COUNT, DEPTH, FIRST, MATRICES, MODE, SCRATCH, SCRATCH_STRIDE, X
from .gemm_formats import BIAS, CODES, FIELDS, GROUP, OUT, OUT_STRIDE, ROW_SCALES, ROWS, SCALES, stored_depth
from .inner_loops import TILE_COLUMNS
from .int8_ir import FLOATS, WORDS, constant, fma, load, offset, splat, store
from .intrinsics import I32, I64, f32_at, fetch_add, i64_at
from .ir_loop import Loop
from .linear import store_block
from .panel_products import PanelProduct
from .work_distribution import matrix_of

BLOCK_ROWS, SPAN = 64, 512  # a multiple of STRIP_ROWS; inputs, a multiple of all groups
PAIR_NBYTES = 4 * STRIP_ROWS
STRIP_NBYTES = SPAN // 2 * PAIR_NBYTES  # of a strip's expanded span
HALF_STRIP = STRIP_ROWS // 2
QUAD_NBYTES = 4 * STRIP_ROWS


def scratch_floats(tokens: int) -> int:
    """Floats of scratch per worker."""
    return BLOCK_ROWS // STRIP_ROWS * STRIP_NBYTES // 4 + BLOCK_ROWS * (-(-tokens // TILE_COLUMNS) * TILE_COLUMNS)


@llvm_intrinsic
def _expand_tiles(builder, codes, tiles, out):
    """`tiles` >= 1 tiles of codes, [8 quads][16 rows][4 inputs], as words of bf16 pairs [16 pairs][16 rows] each.

    Exponent and mantissa of a code in the place of a float32's are 2**-120 of its value, subnormals included."""
    loop = Loop(builder, builder.mul(tiles, I64(TILE // 4)), [codes, out], "quads")
    codes, out = loop.values
    quad = load(builder, codes, WORDS)
    values = []
    for byte in range(4):
        shift = 24 - 8 * byte
        raised = builder.shl(quad, constant(WORDS, shift)) if shift else quad
        magnitude = builder.and_(builder.lshr(raised, constant(WORDS, 4)), constant(WORDS, 0x07F00000))
        scaled = builder.bitcast(builder.fmul(builder.bitcast(magnitude, FLOATS), constant(FLOATS, 2.0**120)), WORDS)
        values.append(builder.or_(scaled, builder.and_(raised, constant(WORDS, -(1 << 31)))))
    for pair in (0, 1):
        even, odd = values[2 * pair], values[2 * pair + 1]  # their low halves are zeros
        store(builder, builder.or_(builder.lshr(even, constant(WORDS, 16)), odd), offset(builder, out, PAIR_NBYTES * pair))
    loop.end([offset(builder, codes, QUAD_NBYTES), offset(builder, out, 2 * PAIR_NBYTES)])


def _strip_tile(rows: int, vectors: int):
    @llvm_intrinsic
    def strip_tile(builder, a, b, pairs, scale: types.float32, c, c_stride, accumulate):
        """C[rows, 16 * vectors] = C * `accumulate` (0 or 1) + `scale` * (A @ B) over `pairs` >= 1 pairs of a group.

        a: words [pair][16 rows]; b: words [pair][16 * vectors]; c: float32, rows `c_stride` bytes apart.
        """
        zero = ir.Constant(FLOATS, [0.0] * FLOATS.count)
        loop = Loop(builder, pairs, [a, b, *[zero] * (rows * vectors)], "pairs")
        a, b, *totals = loop.values
        parts = [load(builder, offset(builder, b, 64 * part), WORDS, 4) for part in range(vectors)]
        for row in range(rows):
            weights = splat(builder, load(builder, offset(builder, a, 4 * row), I32, 4), WORDS)
            for part in range(vectors):
                totals[vectors * row + part] = multiply_pairs(builder, totals[vectors * row + part], weights, parts[part])
        _, _, *totals = loop.end([offset(builder, a, PAIR_NBYTES), offset(builder, b, 64 * vectors), *totals])
        factor, adds = splat(builder, scale, FLOATS), builder.icmp_signed("!=", accumulate, I64(0))
        for index, total in enumerate(totals):
            row, part = divmod(index, vectors)
            at = offset(builder, builder.add(c, builder.mul(I64(row), c_stride)), 64 * part)
            before = builder.select(adds, load(builder, at, FLOATS, 4), zero)
            store(builder, fma(builder, total, factor, before), at, 4)

    return strip_tile


_tile, _half_tile = _strip_tile(HALF_STRIP, 2), _strip_tile(STRIP_ROWS, 1)


@inlined()
def _multiply_strip(a, m, block, start, count, group, groups, words, padded, sums, columns):
    """C[16 rows, columns] (+)= a strip's inputs `start` to `start + count`, expanded at `words`, times all panels, with the groups' scales;
    accumulates unless `start` is 0. sums: address of C."""
    tokens = a[COUNT]
    scales = f32_at(a[m + SCALES] + 4 * block * groups)
    for token in range(0, tokens, TILE_COLUMNS):
        is_half = tokens - token <= PAIRS_STEP
        panel = a[X] + 2 * token * padded
        for first in range(0, count, group):
            pairs, scale = min(group, count - first) // 2, scales[(start + first) // group]
            at, c = words + PAIR_NBYTES * (first // 2), sums + 4 * token
            adds = 1 if start + first else 0
            if is_half:
                _half_tile(at, panel + 2 * (start + first) * PAIRS_STEP, pairs, scale, c, 4 * columns, adds)
            else:
                b = panel + 2 * (start + first) * TILE_COLUMNS
                _tile(at, b, pairs, scale, c, 4 * columns, adds)
                _tile(at + 4 * HALF_STRIP, b, pairs, scale, c + 4 * HALF_STRIP * columns, 4 * columns, adds)


@kernel()
def multiply(args, worker, counter):
    """y[t, n], `mode` PLAIN or ADD, from the panels of `linear_bf16.pack_columns` at X. Blocks are BLOCK_ROWS rows.

    Scratch: expanded codes [strip][SPAN / 2 pairs][16 rows], C[BLOCK_ROWS, columns].
    """
    a = i64_at(args)
    tokens, depth, mode = a[COUNT], a[DEPTH], a[MODE]
    padded = (depth + TILE - 1) // TILE * TILE
    columns = (tokens + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    words = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    sums = words + BLOCK_ROWS // STRIP_ROWS * STRIP_NBYTES
    while True:
        m, work = matrix_of(a, fetch_add(counter, 1), FIRST, a[MATRICES], FIELDS, ROWS, BLOCK_ROWS)
        if m < 0:
            return
        first = work * BLOCK_ROWS
        rows = min(BLOCK_ROWS, a[m + ROWS] - first)
        strips, group, stored = (rows + STRIP_ROWS - 1) // STRIP_ROWS, a[m + GROUP], stored_depth(a, m, depth)
        for start in range(0, padded, SPAN):
            count = min(SPAN, padded - start)
            for strip in range(strips):
                codes = a[m + CODES] + ((first // STRIP_ROWS + strip) * stored + start) * STRIP_ROWS
                _expand_tiles(codes, count // TILE, words + strip * STRIP_NBYTES)
            for strip in range(strips):
                _multiply_strip(a, m, first // STRIP_ROWS + strip, start, count, group, stored // group, words + strip * STRIP_NBYTES,
                                padded, sums + 4 * strip * STRIP_ROWS * columns, columns)
        c, scales = f32_at(sums), f32_at(a[m + ROW_SCALES] + 4 * first)
        for row in range(rows):
            for t in range(tokens):
                c[row * columns + t] *= scales[row]
        store_block(sums, columns, tokens, first, rows, a[m + BIAS], a[m + OUT], a[m + OUT_STRIDE], mode)


run_many = PanelProduct(linear_bf16.panel_floats, linear_bf16.pack_columns, multiply, low_bit.fill_codes, low_bit.run_exact)
