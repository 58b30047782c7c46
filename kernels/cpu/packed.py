"""Low-bit weights times up to 16 columns (decode): memory is the limit, the weights are read once and unpacked once.

Activations are quantized here, per token and 32 inputs, to int8; every worker does it for itself, which is cheaper than a second job.
The argument block is that of `linear.py`, with more fields per matrix. Matrices of one job have one format; several that read the
same input are one job.
"""

from __future__ import annotations

import numpy as np
from numpy import float32, int64

from ..compile import kernel
from ..deferred import inlined
from ..tiles import (
    AFFINE,
    BLOCK,
    CODEBOOK,
    LEVEL_SHIFT,
    MXFP,
    OFFSET,
    ROWS,
    SCHEME_MASK,
    SCHEME_SHIFT,
    SIGNED,
    SIGNED_NBYTES,
    SUPER,
    SUPER_BLOCK,
    SUPER_NBYTES,
    TERNARY,
    TILE,
)
from .arithmetic import gate_values, normalise
from .int8_ir import seed_of
from .intrinsics import bits_to_f32, f32_at, f64_at, fetch_add, i32_at, i64_at, u8_at, u16_at, u32_at
from .linear import ACT, ADD, DEPTH, EPS, FIRST, GATED, MATRICES, MODE, NORM, NORM_BIAS, NORM_WEIGHT, SCRATCH, SCRATCH_STRIDE, TOKENS, X
from .packed_formats import columns_of, expand_of, single_of
from .packed_loops import ABREAST, STREAMS
from .packed_loops import RECORD as RECORD_ABREAST
from .packed_turns import IN_TURN, make_column
from .packed_turns import RECORD as RECORD_IN_TURN
from .packed_vectors import put_block, quantize_tiles, scale_rows

# Per matrix, from slot FIRST on. KIND is `kind_of` the format; addresses, 0 for what a format lacks; a group is 32 << SHIFT inputs, with
# SHIFT -1 half a tile.
WEIGHT, KIND, ROW_COUNT, BIAS, OUT, OUT_STRIDE, TILES, SHIFT, SCALES, ZEROS, ROW_SCALES, TABLES, SPARSE, SPARSE_COUNT, FIELDS = range(15)
MOST_COLUMNS = 16
RECORD = RECORD_IN_TURN if IN_TURN else RECORD_ABREAST
STREAM_NBYTES = 131_072
STRETCH = 16  # tiles that are expanded at once: 8 KiB
PAD = SUPER_BLOCK  # inputs of a column are padded with zeros to whole groups of the longest kind
SETS_NBYTES = 4096  # addresses so far apart share a set of the first-level cache
WHOLE, BOOK, HALF = 0, 1, 2  # sums are scaled by whole tiles, as a codebook's, by halves of tiles
# Scratch of a worker, in bytes: addresses of a job's streams, sums, the expanded stretch, then columns, then their records.
TABLE_AT, X_AT, ZERO_AT, SUMS_AT, QUADS_AT = 0, 256, 320, 384, 384 + 12 * ROWS * MOST_COLUMNS
COLUMNS_AT = QUADS_AT + STRETCH * 512


def kind_of(bits: int, scheme: int) -> int:
    """A format's number."""
    return bits << SCHEME_SHIFT | scheme


def column_nbytes(depth: int) -> int:
    """Bytes of one quantized column: int8 values, float32 scales per 32, int32 sums and seeds per 16, the normed float32 values."""
    padded = -(-depth // PAD) * PAD
    return padded + padded // 32 * 4 + padded // 16 * 8 + 4 * padded


def seeds_way(scheme: str, group: int) -> int:
    """Which seeds a format's loops take; a gated pair has to agree in them."""
    return BOOK if scheme in ("codebook", "signed") else HALF if group < TILE else WHOLE


def scratch_nbytes(depth: int, tokens: int) -> int:
    """Scratch of one worker: columns, and their records in whole ABREASTs."""
    records = -(-tokens // ABREAST) * ABREAST * (-(-depth // PAD) * PAD // TILE) * RECORD
    return 64 + COLUMNS_AT + tokens * column_nbytes(depth) + SETS_NBYTES + records


@inlined()
def quantize_column(x, depth, codes, scales, totals):
    """float32 [depth], with room up to whole PADs -> int8 [padded], float32 per 32 and int32 totals per 16."""
    padded = (depth + PAD - 1) // PAD * PAD
    values = f32_at(x)
    for i in range(depth, padded):
        values[i] = float32(0.0)
    quantize_tiles(x, padded // TILE, codes, scales, totals)


@inlined()
def make_seeds(way, totals, seeds, tiles):
    """What the loops of codebooks start their sums from; for the other formats the totals, of a tile or of its halves."""
    total, seed = i32_at(totals), i32_at(seeds)
    for tile in range(tiles):
        if way == BOOK:
            seed[2 * tile], seed[2 * tile + 1] = seed_of(total[2 * tile]), seed_of(total[2 * tile + 1])
        elif way == HALF:
            seed[2 * tile], seed[2 * tile + 1] = total[2 * tile], total[2 * tile + 1]
        else:
            seed[2 * tile] = total[2 * tile] + total[2 * tile + 1]


@inlined()
def _abreast(left):
    """How many columns are multiplied together where so many are left: all, or ABREAST, though one of them be of no use, or one."""
    if IN_TURN:
        return int64(left)
    return int64(ABREAST) if left + 1 >= ABREAST else int64(1)


@inlined()
def _turns(tokens):
    """How many times `_abreast` is asked for so many columns."""
    if IN_TURN:
        return int64(1)
    left = tokens % ABREAST
    return tokens // ABREAST + (1 if _abreast(left) > 1 else left)


@inlined()
def records_at(scratch, columns_end):
    """Where records begin. Of eight columns a tile's records are as many bytes as its expanded quads: they go through the sets of the
    first-level cache together, and where these were the same sets a pass took a tenth longer."""
    return columns_end + (scratch + QUADS_AT + SETS_NBYTES // 2 - columns_end) % SETS_NBYTES


@inlined()
def make_records(tokens, tiles, codes, scales, seeds, x_nbytes, records):
    """Columns, `x_nbytes` apart in all three parts, as `columns` reads them. What ABREAST lack is the last column again. Columns that are
    multiplied in turn have seeds of their own, for every format."""
    if IN_TURN:
        for t in range(tokens):
            make_column(codes + t * x_nbytes, scales + t * x_nbytes, tiles, tokens * RECORD, records + t * RECORD)
        return
    t = int64(0)
    while t < tokens:
        count = _abreast(tokens - t)
        for c in range(count):
            at = min(t + c, tokens - 1) * x_nbytes
            code, scale, seed = i32_at(codes + at), i32_at(scales + at), i32_at(seeds + at)  # records lie on words
            for tile in range(tiles):
                record = records + (t * tiles + tile * count) * RECORD
                own, seeded = i32_at(record + 32 * c), i32_at(record + 36 * count + 8 * c)
                for i in range(8):
                    own[i] = code[8 * tile + i]
                i32_at(record + 32 * count + 4 * c)[0] = scale[tile]
                seeded[0], seeded[1] = seed[2 * tile], seed[2 * tile + 1]
        t += count


@inlined()
def _zeros(a, m, block, constant_at):
    """Where a row block's zeros begin, and by how much its tiles are shifted to find them; for formats that store none they are made."""
    scheme = a[m + KIND] & SCHEME_MASK
    if scheme == AFFINE or scheme == OFFSET:
        return a[m + ZEROS] + block * (a[m + TILES] >> a[m + SHIFT]) * ROWS, a[m + SHIFT]
    zero, value = u8_at(constant_at), 1 << ((a[m + KIND] >> SCHEME_SHIFT) - 1)
    if scheme == TERNARY or scheme == MXFP:
        value = 1 if scheme == TERNARY else LEVEL_SHIFT
    for row in range(ROWS):
        zero[row] = value
    return constant_at, int64(62)


@inlined()
def _way(a, m):
    scheme = a[m + KIND] & SCHEME_MASK
    if scheme == CODEBOOK or scheme == SIGNED:
        return BOOK
    return HALF if a[m + SHIFT] < 0 else WHOLE


@inlined()
def _tile_nbytes(a, m):
    return a[m + KIND] >> SCHEME_SHIFT << 6


@inlined()
def _scale_nbytes(a, m):
    """Bytes of a row block's scales."""
    way, scheme = _way(a, m), a[m + KIND] & SCHEME_MASK
    if scheme == SUPER:
        return (a[m + TILES] >> 3) * SUPER_NBYTES
    if scheme == SIGNED:
        return (a[m + TILES] >> 3) * SIGNED_NBYTES
    if scheme == BLOCK or scheme == OFFSET:
        return (a[m + TILES] >> a[m + SHIFT]) * 2 * ROWS
    if way == WHOLE:
        return (a[m + TILES] >> a[m + SHIFT]) * ROWS
    return a[m + TILES] * (ROWS if way == BOOK else 2 * ROWS)


@inlined()
def multiply_stretch(a, m, block, tokens, scratch, records, begin, end, ahead, sums):
    """Adds tiles [begin, end) of a row block, expanded in scratch, times several columns to float32 [tokens][16] at `sums`, with room for
    whole ABREASTs. `ahead`: where the codes that are expanded next lie."""
    scales = a[m + SCALES] + block * _scale_nbytes(a, m)
    zeros, zero_shift = _zeros(a, m, block, scratch + ZERO_AT)
    column = (a[DEPTH] + PAD - 1) // PAD * PAD // TILE * RECORD
    share = _tile_nbytes(a, m) // _turns(tokens)  # every turn asks for its part of the next stretch
    t = int64(0)
    while t < tokens:
        count = _abreast(tokens - t)
        columns_of(a[m + KIND], count, scratch + QUADS_AT, a[m + TABLES], scales, zeros, records + t * column, begin, end, a[m + SHIFT],
                   zero_shift, sums + 4 * ROWS * t, ahead, share)
        ahead += share * STRETCH
        t += count


@inlined()
def _block_sums(a, m, block, tokens, scratch, records, sums):
    """One row block of matrix m times several columns -> float32 [tokens][16] at `sums`."""
    kind, tiles, tile = a[m + KIND], a[m + TILES], _tile_nbytes(a, m)
    codes, clean = a[m + WEIGHT] + block * tiles * tile, f32_at(sums)
    for i in range((tokens + ABREAST - 1) // ABREAST * ABREAST * ROWS):
        clean[i] = float32(0.0)
    for begin in range(0, tiles, STRETCH):
        end = min(begin + STRETCH, tiles)
        expand_of(kind, codes + begin * tile, a[m + TABLES], end - begin, scratch + QUADS_AT)
        multiply_stretch(a, m, block, tokens, scratch, records, begin, end, codes + end * tile, sums)


@inlined()
def _finish(a, m, block, sums, x):
    """Row scales, corrections and bias of a row block's 16 sums, in place. `x`: the column before it was quantized."""
    scale_rows(sums, a[m + ROW_SCALES] + 2 * ROWS * block)
    if a[m + SPARSE] != 0:
        value, starts = f32_at(sums), u32_at(a[m + SPARSE])
        at = a[m + SPARSE] + 4 * ((a[m + ROW_COUNT] + ROWS - 1) // ROWS + 1)
        place, correction, column = u32_at(at), u16_at(at + 4 * a[m + SPARSE_COUNT]), f32_at(x)
        for i in range(int64(starts[block]), int64(starts[block + 1])):
            value[place[i] >> np.uint32(28)] += (bits_to_f32(np.uint32(correction[i]) << np.uint32(16))
                                                 * column[int64(place[i] & np.uint32(0x0FFFFFFF))])
    if a[m + BIAS] != 0:
        value, bias, rows = f32_at(sums), f32_at(a[m + BIAS] + 4 * ROWS * block), min(ROWS, a[m + ROW_COUNT] - ROWS * block)
        for row in range(rows):
            value[row] += bias[row]


@inlined()
def _write(a, m, block, token, sums):
    """A row block's results to the output: plain, or added."""
    first = ROWS * block
    rows, mode = min(ROWS, a[m + ROW_COUNT] - first), a[MODE]  # read once: what is written could be anything to the compiler
    target = a[m + OUT] + 4 * (token * a[m + OUT_STRIDE] + first)
    if rows == ROWS:
        put_block(sums, target, 1 if mode == ADD else 0)
        return
    value, out = f32_at(sums), f32_at(target)
    for row in range(rows):
        out[row] = out[row] + value[row] if mode == ADD else value[row]


@inlined()
def _stream_sums(a, m, block, run, blocks, scratch, sums):
    """STREAMS row blocks of matrix m, `run` apart, times one column -> float32 [STREAMS][16] at `sums`.

    Past the end the last block is repeated.
    """
    table = i64_at(scratch + TABLE_AT)
    tile, small, zero_shift = a[m + TILES] * _tile_nbytes(a, m), _scale_nbytes(a, m), int64(0)
    for i in range(STREAMS):
        at = min(block + i * run, blocks - 1)
        table[i], table[STREAMS + i] = a[m + WEIGHT] + at * tile, a[m + SCALES] + at * small
        table[2 * STREAMS + i], zero_shift = _zeros(a, m, at, scratch + ZERO_AT)
    single_of(a[m + KIND], scratch + TABLE_AT, a[m + TABLES], scratch + X_AT, a[m + TILES], a[m + SHIFT], zero_shift, sums)


@kernel()
def packed_columns(args, worker, counter):
    """y[t, n] of low-bit weights for up to 16 columns. A block of work is some runs of row blocks, side by side for one column."""
    a = i64_at(args)
    tokens, depth, mode, matrices = a[TOKENS], a[DEPTH], a[MODE], a[MATRICES]
    scratch = (a[SCRATCH] + worker * a[SCRATCH_STRIDE] + 63) // 64 * 64
    x, sums = i64_at(scratch + X_AT), scratch + SUMS_AT
    others = sums + 4 * ROWS * MOST_COLUMNS
    padded = (depth + PAD - 1) // PAD * PAD
    x_nbytes = padded + padded // 32 * 4 + padded // 16 * 8 + 4 * padded
    columns = scratch + COLUMNS_AT
    totals, normed = columns + padded + padded // 32 * 4 + padded // 16 * 4, columns + padded + padded // 32 * 4 + padded // 16 * 8
    x[0], x[1], x[2] = columns, columns + padded, columns + padded + padded // 32 * 4
    records = records_at(scratch, columns + tokens * x_nbytes)
    groups = 1 if mode == GATED else matrices
    ready, seeded = False, int64(-1)
    while True:
        work = fetch_add(counter, 1)
        m = FIRST
        for _ in range(groups):
            blocks = (a[m + ROW_COUNT] + ROWS - 1) // ROWS
            run = max(1, STREAM_NBYTES // (a[m + TILES] * _tile_nbytes(a, m)))
            if mode == GATED:
                run = min(run, MOST_COLUMNS // STREAMS)  # what `others` holds
            here = (blocks + STREAMS * run - 1) // (STREAMS * run)
            if work < here:
                break
            work -= here
            m += FIELDS
        else:
            return
        written = m + FIELDS if mode == GATED else m  # the matrix whose products are written: up, beside a gate
        if not ready:
            eps = float32(f64_at(args)[EPS])
            for t in range(tokens):
                at = t * x_nbytes
                normalise(a[X] + 4 * t * depth, normed + at, depth, a[NORM], a[NORM_WEIGHT], a[NORM_BIAS], eps)
                quantize_column(normed + at, depth, x[0] + at, x[1] + at, totals + at)
            ready = True
        way = _way(a, m)
        several = tokens > 1 or way == HALF  # half tiles are rare: no loop of their own for a single column
        if seeded != way:
            seeded = way
            if not (several and IN_TURN):
                for t in range(tokens):
                    make_seeds(way, totals + t * x_nbytes, x[2] + t * x_nbytes, padded // TILE)
            if several:
                make_records(tokens, padded // TILE, x[0], x[1], x[2], x_nbytes, records)
        begin = work * STREAMS * run
        last = min(begin + STREAMS * run, blocks)
        run = (last - begin + STREAMS - 1) // STREAMS
        if mode == GATED and not several:  # all gates first: two streams at a time, as everywhere
            for step in range(run):
                _stream_sums(a, m, begin + step, run, blocks, scratch, others + 4 * ROWS * STREAMS * step)
        for step in range(last - begin if several else run):
            gates = others if several else others + 4 * ROWS * STREAMS * step
            if several:
                _block_sums(a, written, begin + step, tokens, scratch, records, sums)
                if mode == GATED:
                    _block_sums(a, m, begin + step, tokens, scratch, records, gates)
            else:
                _stream_sums(a, written, begin + step, run, blocks, scratch, sums)
            count = tokens if several else min(STREAMS, (last - begin - step + run - 1) // run)
            for i in range(count):
                token, block = (i, begin + step) if several else (int64(0), begin + step + i * run)
                column, here = normed + token * x_nbytes, 4 * ROWS * i
                _finish(a, written, block, sums + here, column)
                if mode == GATED:
                    _finish(a, m, block, gates + here, column)
            if mode == GATED:  # all at once: a loop of a block's 16 values would not be vectorised
                gate_values(gates, sums, ROWS * count, a[ACT])
            for i in range(count):
                token, block = (i, begin + step) if several else (int64(0), begin + step + i * run)
                _write(a, m, block, token, (gates if mode == GATED else sums) + 4 * ROWS * i)
