"""Low-bit weights in lookup layout (`lut_layout.py`) times up to 16 columns.

A single column uses table lookup. Several are multiplied as in `packed.py`, from quads expanded once: tables belong to one column, so each
further column would cost as much as the first. Argument block and results are those of `packed.py`, bit for bit.
"""

from __future__ import annotations

from numpy import float32, int64

from ..compile import kernel
from ..layout import ONE_SCALE
from ..lazy_numba import inlined
from ..tiles import ROWS, SCHEME_SHIFT, TILE
from . import lut_loops as loops
from . import packed, packed_activations
from .arithmetic import gate_values, normalise
from .intrinsics import f64_at, i64_at
from .linear import ACT, DEPTH, EPS, FIRST, GATED, MATRICES, MODE, NORM, NORM_BIAS, NORM_WEIGHT, SCRATCH, SCRATCH_STRIDE, TOKENS, X
from .lut_layout import BITS, PAIR, expand_tiles, pair_at
from .lut_loops import PAIRS_AT_ONCE, SUMS
from .packed import (
    BLOCKS_AT_ONCE,
    COLUMNS_AT,
    GATE_SUMS_AT,
    MAX_COLUMNS,
    QUADS_AT,
    STRETCH_TILES,
    SUMS_AT,
    SUMS_NBYTES,
    TABLE_AT,
    X_AT,
    ZERO_AT,
)
from .packed_activations import PAD
from .packed_matrix import FIELDS, KIND, ROW_COUNT, SCALES, SHIFT, TILES, WEIGHT, WHOLE_TILE, scales_nbytes_of, zeros_of
from .work_distribution import first_region, take_block

RUN_NBYTES = 131_072  # bytes read in sequence of a pair of row blocks


def scratch_nbytes(depth: int) -> int:
    """Scratch per worker: for one column, its tables follow it, where further columns would be."""
    padded = -(-depth // PAD) * PAD
    return max(packed.scratch_nbytes(depth, MAX_COLUMNS), packed.scratch_nbytes(depth, 1) + padded // TILE * loops.TABLES_NBYTES + 64)


_sums2, _sums3, _sums4 = (loops.look_up_sums(bits) for bits in BITS)


@inlined()
def _look_up(bits, table, x, groups, in_group, zero_stride, out):
    if bits == 2:
        _sums2(table, x, groups, in_group, zero_stride, out)
    elif bits == 3:
        _sums3(table, x, groups, in_group, zero_stride, out)
    else:
        _sums4(table, x, groups, in_group, zero_stride, out)


@inlined()
def _pair_sums(a, m, pair, run, pairs, scratch, sums):
    """PAIRS_AT_ONCE pairs of matrix m, `run` apart, times one column -> float32 [PAIRS_AT_ONCE][32] at `sums`. Past the end the last pair
    is repeated.
    """
    table, bits, tiles, shift = i64_at(scratch + TABLE_AT), a[m + KIND] >> SCHEME_SHIFT, a[m + TILES], a[m + SHIFT]
    small, zero_shift = scales_nbytes_of(a, m), int64(0)
    for i in range(PAIRS_AT_ONCE):
        at = min(pair + i * run, pairs - 1)
        table[i] = a[m + WEIGHT] + at * tiles * (bits * 4 * PAIR)
        for half in range(2):
            table[PAIRS_AT_ONCE + 2 * i + half] = a[m + SCALES] + (2 * at + half) * small
            table[3 * PAIRS_AT_ONCE + 2 * i + half], zero_shift = zeros_of(a, m, 2 * at + half, scratch + ZERO_AT)
    _look_up(bits, scratch + TABLE_AT, scratch + X_AT, tiles >> shift, int64(1) << shift, int64(ROWS if zero_shift == shift else 0), sums)


@inlined()
def _block_sums(a, m, block, tokens, scratch, records, sums):
    """BLOCKS_AT_ONCE row blocks of matrix m, of one pair, times several columns -> float32 [BLOCKS_AT_ONCE][16][16] at `sums`."""
    bits, tiles = a[m + KIND] >> SCHEME_SHIFT, a[m + TILES]
    packed.clear_sums(tokens, sums)
    for begin in range(0, tiles, STRETCH_TILES):
        end = min(begin + STRETCH_TILES, tiles)
        for r in range(BLOCKS_AT_ONCE):
            expand_tiles(bits, a[m + WEIGHT] + pair_at(bits, tiles, block + r, begin), end - begin,
                         scratch + QUADS_AT + r * STRETCH_TILES * 512)
        ahead = a[m + WEIGHT] + pair_at(bits, tiles, block, end)
        packed.multiply_stretch(a, m, block, tokens, scratch, records, begin, end, ahead, ROWS, sums)


@inlined()
def _run(a, m):
    """Pairs of row blocks of matrix m that are read consecutively."""
    return max(1, RUN_NBYTES // (a[m + TILES] * (a[m + KIND] >> SCHEME_SHIFT) * 4 * PAIR))


@inlined()
def _works(a, m):
    """Blocks of work of matrix m."""
    pairs, step = (a[m + ROW_COUNT] + PAIR - 1) // PAIR, PAIRS_AT_ONCE * _run(a, m)
    return (pairs + step - 1) // step


@inlined()
def _quantize_columns(args, columns, records, tables):
    """Norm all tokens and quantize them to int8; for one token with its tables, for several with their records."""
    a, eps = i64_at(args), float32(f64_at(args)[EPS])
    tokens, depth = a[TOKENS], a[DEPTH]
    scales, seeds, totals, normed, nbytes = packed_activations.column_parts(depth)
    tiles = (depth + PAD - 1) // PAD * PAD // TILE
    for t in range(tokens):
        at = columns + t * nbytes
        normalise(a[X] + 4 * t * depth, at + normed, depth, a[NORM] % ONE_SCALE, a[NORM_WEIGHT], a[NORM_BIAS], eps)
        packed_activations.quantize_column(at + normed, depth, at, at + scales, at + totals, a[NORM])
        if tokens > 1 and not packed.USES_AVX2:
            packed_activations.make_seeds(WHOLE_TILE, at + totals, at + seeds, tiles)
    if tokens > 1:
        packed_activations.make_records(tokens, tiles, columns, columns + scales, columns + seeds, nbytes, records)
    else:
        loops.make_tables(columns, tiles, tables)


@inlined()
def _write_sums(a, m, block, run, count, columns, sums, others):
    """Write 16 sums of each of `count` products: with `run` 0 of a row block and that many tokens, else of one token and row blocks in
    pairs `run` apart; in a GATED stage these are the gate's, and up's are at `others`."""
    _, _, _, normed, nbytes = packed_activations.column_parts(a[DEPTH])
    for i in range(count):
        token, row_block = (i, block) if run == 0 else (int64(0), block + i // 2 * 2 * run + i % 2)
        column, at = columns + token * nbytes + normed, 4 * ROWS * i
        packed.finish(a, m, row_block, sums + at, column)
        if a[MODE] == GATED:
            packed.finish(a, m + FIELDS, row_block, others + at, column)
    if a[MODE] == GATED:
        gate_values(sums, others, ROWS * count, a[ACT])
    for i in range(count):
        token, row_block = (i, block) if run == 0 else (int64(0), block + i // 2 * 2 * run + i % 2)
        packed.write(a, m, row_block, token, sums + 4 * ROWS * i)


@kernel()
def looked_up_columns(args, worker, counter):
    """y[t, n] of weights in lookup layout for up to 16 columns. A block of work is several parallel runs of pairs of row blocks for one
    column."""
    a = i64_at(args)
    tokens, depth, mode, matrices = a[TOKENS], a[DEPTH], a[MODE], a[MATRICES]
    scratch = (a[SCRATCH] + worker * a[SCRATCH_STRIDE] + 63) // 64 * 64
    x, sums = i64_at(scratch + X_AT), scratch + SUMS_AT
    others = scratch + GATE_SUMS_AT
    scales, seeds, totals, _, nbytes = packed_activations.column_parts(depth)
    columns = scratch + COLUMNS_AT
    records = packed.records_at(scratch, columns + tokens * nbytes)
    x[0], x[1], x[2], x[3] = columns, columns + scales, columns + seeds, (columns + nbytes + 63) // 64 * 64
    works = int64(0)
    for i in range(1 if mode == GATED else matrices):
        works += _works(a, FIRST + i * FIELDS)
    ready, seeded, region, ended = False, int64(-1), first_region(worker), int64(0)
    while True:
        work, region, ended = take_block(counter, region, ended, works)
        if work < 0:
            return
        m = int64(FIRST)
        while work >= _works(a, m):
            work -= _works(a, m)
            m += FIELDS
        pairs, run = (a[m + ROW_COUNT] + PAIR - 1) // PAIR, _run(a, m)
        up = m + FIELDS
        if not ready:
            _quantize_columns(args, columns, records, x[3])
            ready = True
        begin = work * PAIRS_AT_ONCE * run
        last = min(begin + PAIRS_AT_ONCE * run, pairs)
        run = (last - begin + PAIRS_AT_ONCE - 1) // PAIRS_AT_ONCE
        for step in range(0, 2 * (last - begin) if tokens > 1 else run, BLOCKS_AT_ONCE if tokens > 1 else 1):
            for matrix, to in ((m, sums), (up, others)):
                if matrix == m or mode == GATED:
                    if tokens > 1:
                        _block_sums(a, matrix, 2 * begin + step, tokens, scratch, records, to)
                        continue
                    if seeded != a[matrix + KIND] >> SCHEME_SHIFT:
                        seeded = a[matrix + KIND] >> SCHEME_SHIFT
                        loops.make_seeds(seeded, columns + totals, x[2], (depth + PAD - 1) // PAD * PAD // TILE)
                    _pair_sums(a, matrix, begin + step, run, pairs, scratch, to)
            for r in range(BLOCKS_AT_ONCE if tokens > 1 else 1):
                count = tokens if tokens > 1 else min(SUMS // ROWS, 2 * ((last - begin - step + run - 1) // run))
                block = 2 * begin + step + r if tokens > 1 else 2 * (begin + step)
                _write_sums(a, m, block, 0 if tokens > 1 else run, count, columns, sums + r * SUMS_NBYTES, others + r * SUMS_NBYTES)
