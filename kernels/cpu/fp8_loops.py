"""Fp8 (E4M3) weights times up to 16 columns: codes are read once and converted to float32 in registers.

No 8-bit integer covers the range of E4M3, so activations stay float32 and are not rounded. Shifted right by one bit, a code is the
half-precision float of 2**-8 times its value, subnormals included, which one instruction widens. A vector holds two inputs of a row side by
side (0 and 2 of a quad, or 1 and 3), so columns are stored in that order, and neither codes nor sums need shuffles.

A row's sum has four chains within a group, one per place in a quad, joined in pairs (0 and 1, 2 and 3) and added, times the group's scale,
to two chains over all groups. So its bits do not depend on other rows or columns, threads or instruction sets.

`_product` compiles, for one column, to some 22 instructions per 64 weights with AVX-512, eight of which multiply or widen, and to twice as
many with AVX2. The argument block is that of `packed.py`; more columns use `gemm.multiply_exact`.
"""

from __future__ import annotations

from llvmlite import ir
from numpy import float32, int64

from ..compile import kernel
from ..lazy_numba import inlined, llvm_intrinsic, types
from ..tiles import ROWS, TILE
from .arithmetic import gate_values, normalise
from .fp8_vectors import HALF_SCALE, halves_of, widen
from .int8_ir import (
    BYTES,
    FLOATS,
    HALVES,
    I8,
    INSTRUCTION_SET,
    LANES,
    NEON,
    PIECES,
    WIDTH,
    constant,
    fma,
    load,
    offset,
    prefetch_lines,
    splat,
    store,
)
from .intrinsics import F32, I16, I32, I64, f32_at, f64_at, i64_at
from .ir_loop import Loop
from .linear import ACT, DEPTH, EPS, FIRST, GATED, MATRICES, MODE, NORM, NORM_BIAS, NORM_WEIGHT, SCRATCH, SCRATCH_STRIDE, TOKENS, X
from .packed import write
from .packed_matrix import BIAS, FIELDS, ROW_COUNT, ROW_SCALES, SCALES, SHIFT, TILES, WEIGHT
from .work_distribution import first_region, take_block

MAX_COLUMNS = 16
QUAD, QUADS = 4 * ROWS, TILE // 4  # bytes of a quad's codes, quads of a tile
UP = float32(HALF_SCALE)
HAS_32_REGISTERS = INSTRUCTION_SET == "avx512" or NEON
COLUMNS_AT_ONCE = 4 if HAS_32_REGISTERS else 2  # columns multiplied while a weight is in a register
PREFETCH_NBYTES = 2048  # prefetch distance
BLOCK_NBYTES = 131_072  # approximate size of a block of work
PAD = 128  # inputs of a column are padded with zeros to a multiple of the longest group
# Scratch of a worker, in bytes: two sums of every row and column, the sums of gates, then columns.
TOTALS_NBYTES = 8 * ROWS * MAX_COLUMNS
SUMS_AT, OTHERS_AT, COLUMNS_AT = TOTALS_NBYTES, TOTALS_NBYTES + 4 * ROWS * MAX_COLUMNS, TOTALS_NBYTES + 8 * ROWS * MAX_COLUMNS


def _weights(builder: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    """A vector of codes -> four of float32: inputs 0 and 2 of its first rows and of its last, then 1 and 3."""
    raw, vectors = builder.bitcast(load(builder, address, BYTES), HALVES), []
    for halves in (halves_of(builder, builder.shl(raw, constant(HALVES, 8))), halves_of(builder, raw)):
        for first in (0, LANES):
            order = ir.Constant(ir.VectorType(I32, LANES), list(range(first, first + LANES)))
            vectors.append(widen(builder, builder.shuffle_vector(halves, halves, order)))
    return vectors


def _pair(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Two neighbouring float32 in every two lanes."""
    return builder.bitcast(splat(builder, load(builder, address, I64, 4), ir.VectorType(I64, LANES // 2)), FLOATS)


def _product(count: int):
    @llvm_intrinsic
    def run(builder, codes, x, column_stride, quads, scale: types.float32, totals):
        """totals[c, row, 2] += scale * sum over the `quads` of a group, for `count` columns x, `column_stride` bytes from one to the next.

        codes: of 16 rows. totals: float32 [count][16][2] at an address.
        """
        num_pieces = min(PIECES, 2) if count == 1 else 1
        columns = [builder.add(x, builder.mul(column_stride, I64(c))) for c in range(count)]
        scale = splat(builder, scale, FLOATS)
        for piece in range(0, PIECES, num_pieces):
            loop = Loop(builder, quads, [constant(FLOATS, 0.0)] * (4 * num_pieces * count), "quads")
            at, sums = builder.add(codes, builder.mul(loop.index, I64(QUAD))), list(loop.values)
            if piece == 0:
                prefetch_lines(builder, offset(builder, at, PREFETCH_NBYTES), QUAD)
            weights = [vector for index in range(piece, piece + num_pieces)
                       for vector in _weights(builder, offset(builder, at, WIDTH * index))]
            for c, column in enumerate(columns):
                address = builder.add(column, builder.mul(loop.index, I64(16)))
                pairs = [_pair(builder, offset(builder, address, 8 * which)) for which in (0, 1)]
                for i, weight in enumerate(weights):
                    accumulator = 4 * num_pieces * c + i
                    sums[accumulator] = fma(builder, weight, pairs[i % 4 // 2], sums[accumulator])
            sums = loop.end(sums)
            for accumulator in range(0, len(sums), 4):
                c, index = divmod(accumulator // 4, num_pieces)
                for half in (0, 1):
                    both = builder.fadd(sums[accumulator + half], sums[accumulator + half + 2])
                    to = offset(builder, totals, 8 * ROWS * c + 4 * LANES * (2 * (piece + index) + half))
                    store(builder, fma(builder, both, scale, load(builder, to, FLOATS, 4)), to, 4)

    return run


_one, _some = _product(1), _product(COLUMNS_AT_ONCE)


@inlined()
def _block_sums(a, m, block, tokens, x, column_stride, totals, out):
    """A row block of matrix m times columns -> float32 [tokens][16] at `out`, including row scales and bias."""
    tiles, shift = a[m + TILES], a[m + SHIFT]
    groups, quads = tiles >> shift, int64(QUADS) << shift
    codes, scales = a[m + WEIGHT] + block * tiles * QUADS * QUAD, f32_at(a[m + SCALES] + 4 * block * groups)
    total, value, rows = f32_at(totals), f32_at(out), f32_at(a[m + ROW_SCALES] + 4 * ROWS * block)
    for i in range(2 * ROWS * tokens):
        total[i] = float32(0.0)
    for group in range(groups):
        at, t = x + 16 * quads * group, int64(0)
        while t < tokens:
            if tokens - t >= COLUMNS_AT_ONCE:
                _some(codes, at + t * column_stride, column_stride, quads, scales[group], totals + 8 * ROWS * t)
                t += COLUMNS_AT_ONCE
            else:
                _one(codes, at + t * column_stride, column_stride, quads, scales[group], totals + 8 * ROWS * t)
                t += 1
        codes += quads * QUAD
    num_rows = min(ROWS, a[m + ROW_COUNT] - ROWS * block)
    for t in range(tokens):
        for row in range(ROWS):
            value[ROWS * t + row] = (total[2 * (ROWS * t + row)] + total[2 * (ROWS * t + row) + 1]) * UP * rows[row]
        if a[m + BIAS] != 0:
            bias = f32_at(a[m + BIAS] + 4 * ROWS * block)
            for row in range(num_rows):
                value[ROWS * t + row] += bias[row]


@inlined()
def _put_column(x, depth, padded):
    """float32 [depth], in place with room for `padded` -> zero-padded, each four in the order 0, 2, 1, 3."""
    values = f32_at(x)
    for i in range(depth, padded):
        values[i] = float32(0.0)
    for i in range(0, padded, 4):
        values[i + 1], values[i + 2] = values[i + 2], values[i + 1]


@inlined()
def _works(a, m):
    """Blocks of work of matrix m, and the row blocks of each."""
    run = max(int64(1), BLOCK_NBYTES // (a[m + TILES] * QUADS * QUAD))
    return ((a[m + ROW_COUNT] + ROWS - 1) // ROWS + run - 1) // run, run


@kernel()
def fp8_columns(args, worker, counter):
    """y[t, n] for up to 16 columns. A block of work is a run of row blocks, with GATED of both matrices."""
    a = i64_at(args)
    tokens, depth, mode = a[TOKENS], a[DEPTH], a[MODE]
    scratch = (a[SCRATCH] + worker * a[SCRATCH_STRIDE] + 63) // 64 * 64
    sums, others, x = scratch + SUMS_AT, scratch + OTHERS_AT, scratch + COLUMNS_AT
    padded = (depth + PAD - 1) // PAD * PAD
    column_stride = 4 * padded
    works = int64(0)
    for i in range(1 if mode == GATED else a[MATRICES]):
        works += _works(a, FIRST + i * FIELDS)[0]
    ready, region, ended = False, first_region(worker), int64(0)
    while True:
        work, region, ended = take_block(counter, region, ended, works)
        if work < 0:
            return
        if not ready:  # every worker computes the norm: cheaper than a second job
            eps = float32(f64_at(args)[EPS])
            for t in range(tokens):
                normalise(a[X] + 4 * t * depth, x + t * column_stride, depth, a[NORM], a[NORM_WEIGHT], a[NORM_BIAS], eps)
                _put_column(x + t * column_stride, depth, padded)
            ready = True
        m = int64(FIRST)
        num_works, run = _works(a, m)
        while work >= num_works:
            work -= num_works
            m += FIELDS
            num_works, run = _works(a, m)
        blocks = (a[m + ROW_COUNT] + ROWS - 1) // ROWS
        for block in range(work * run, min((work + 1) * run, blocks)):
            _block_sums(a, m, block, tokens, x, column_stride, scratch, sums)
            if mode == GATED:
                _block_sums(a, m + FIELDS, block, tokens, x, column_stride, scratch, others)
                gate_values(sums, others, ROWS * tokens, a[ACT])
            for t in range(tokens):
                write(a, m, block, t, sums + 4 * ROWS * t)


@llvm_intrinsic
def fp8_tile_to_f32(builder, codes, scale, rows, out, stride):
    """A tile as float32: row * (scale * v), its 16 rows `stride` bytes apart at `out`. scale: address of a float32; rows: float32 [16]."""
    bytes_, halves, floats = ir.VectorType(I8, 4), ir.VectorType(I16, 4), ir.VectorType(F32, 4)
    scale = splat(builder, load(builder, scale, F32, 4), floats)
    loop = Loop(builder, I64(ROWS), [out], "rows")
    at = builder.add(codes, builder.mul(loop.index, I64(4)))
    row = splat(builder, load(builder, builder.add(rows, builder.mul(loop.index, I64(4))), F32, 4), floats)
    for quad in range(QUADS):
        raw = builder.zext(load(builder, offset(builder, at, QUAD * quad), bytes_), halves)
        value = widen(builder, halves_of(builder, builder.shl(raw, constant(halves, 8))))
        value = builder.fmul(builder.fmul(value, constant(floats, HALF_SCALE)), scale)
        store(builder, builder.fmul(row, value), offset(builder, loop.values[0], 16 * quad), 4)
    loop.end([builder.add(loop.values[0], stride)])
