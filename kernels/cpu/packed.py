"""Low-bit weights times up to 16 columns (decode): memory-bound; weights are read once and unpacked once.

Activations are quantized to int8 per token and 32 inputs (`packed_activations.py`), redundantly by every worker, which is cheaper than a
second job. The argument block is that of `linear.py`, with more fields per matrix. Matrices of one job have one format; several that read
the same input are one job.
"""

from __future__ import annotations

import numpy as np
from numpy import float32, int64

from ..compile import kernel
from ..layout import ONE_SCALE
from ..lazy_numba import inlined
from ..tiles import ROWS, TILE
from .arithmetic import gate_values, normalise
from .intrinsics import bits_to_f32, call, f32_at, f64_at, i64_at, u16_at, u32_at
from .kv.unpack_loops import prefetch
from .linear import (
    ACT,
    ADD,
    DEPTH,
    EPS,
    FINE,
    FIRST,
    GATED,
    MATRICES,
    MODE,
    NORM,
    NORM_BIAS,
    NORM_WEIGHT,
    SCRATCH,
    SCRATCH_STRIDE,
    TOKENS,
    X,
)
from .packed_activations import (
    PAD,
    RECORD,
    column_nbytes,
    column_parts,
    columns_at_once,
    make_records,
    make_seeds,
    num_column_groups,
    quantize_column,
    quantize_rest,
)
from .packed_avx2 import USES_AVX2
from .packed_avx2_single import SPREAD, spread_records
from .packed_avx512 import FEW_COLUMNS, PAIR, USES_AVX512
from .packed_formats import COLUMNS, EXPAND, PAIRS, SINGLE
from .packed_loops import COLUMNS_AT_ONCE, PREFETCH_NBYTES, STREAMS, SUMS_NBYTES
from .packed_matrix import (
    BIAS,
    CODEBOOK_TILE,
    FIELDS,
    HALF_TILE,
    LOOPS,
    OUT,
    OUT_STRIDE,
    ROW_COUNT,
    SCALES,
    SHIFT,
    SPARSE,
    SPARSE_COUNT,
    TABLES,
    TILES,
    codes_at,
    scale_block,
    scales_nbytes_of,
    scaling_of,
    tile_nbytes_of,
    zeros_of,
)
from .packed_vectors import put_block
from .work_distribution import first_region, take_block

MAX_COLUMNS = SUMS_NBYTES // (4 * ROWS)
BLOCKS_AT_ONCE = PAIR if USES_AVX512 else 1  # row blocks multiplied together if there are several columns
STREAM_NBYTES = 131_072 if STREAMS > 1 else 65_536
BLOCK_MULTIPLE = max(BLOCKS_AT_ONCE, STREAMS)  # a block of work has a multiple of this many row blocks
MAX_GATE_BLOCKS = 16  # row blocks of gates in a block of work: their sums are kept until the rows of `up` are multiplied
RUN_MULTIPLE = max(1, BLOCKS_AT_ONCE // STREAMS)  # a run is a multiple of this, so that row blocks can always be multiplied in groups
STRETCH_TILES = 16 // BLOCKS_AT_ONCE  # tiles of a row block expanded at once: 8 KiB together
SETS_NBYTES = 4096  # addresses this far apart map to the same L1 cache set
# Scratch of a worker, byte offsets: addresses of a job's streams, sums, the expanded stretch, then columns, then their records. Gates have
# sums of their own after the others: for a single column, those of a whole block of work.
TABLE_AT, X_AT, APART_AT, ZERO_AT, SUMS_AT = 0, 256, 320, 384, 448
GATE_SUMS_AT = SUMS_AT + BLOCKS_AT_ONCE * SUMS_NBYTES
QUADS_AT = GATE_SUMS_AT + 2 * SUMS_NBYTES
COLUMNS_AT = QUADS_AT + STRETCH_TILES * BLOCKS_AT_ONCE * 512
assert COLUMNS_AT % 64 == 0 and BLOCKS_AT_ONCE <= 2


def scratch_nbytes(depth: int, tokens: int) -> int:
    """Scratch per worker: columns, and their records in multiples of COLUMNS_AT_ONCE; for a single column expanded, where applicable."""
    records = max(-(-tokens // COLUMNS_AT_ONCE) * COLUMNS_AT_ONCE * RECORD, RECORD + SPREAD if USES_AVX2 else 0)
    return 64 + COLUMNS_AT + tokens * column_nbytes(depth) + SETS_NBYTES + records * (-(-depth // PAD) * PAD // TILE)


@inlined()
def records_at(scratch, columns_end):
    """Start of the records. For eight columns a tile's records take as many bytes as its expanded quads; both pass through L1 together, and
    if they mapped to the same cache sets a pass took a tenth longer."""
    return columns_end + (scratch + QUADS_AT + SETS_NBYTES // 2 - columns_end) % SETS_NBYTES


@inlined()
def multiply_stretch(a, m, block, tokens, scratch, records, begin, end, ahead, ahead_apart, sums):
    """Add tiles [begin, end) of BLOCKS_AT_ONCE row blocks, expanded in scratch, times several columns to float32 [BLOCKS_AT_ONCE][16][16],
    with each row block's columns in multiples of COLUMNS_AT_ONCE. Past the last row block it is repeated. `ahead`: address of the codes
    expanded next, with those of a second row block `ahead_apart` further."""
    small = scales_nbytes_of(a, m)
    scales = a[m + SCALES] + block * small
    zeros, zero_shift = zeros_of(a, m, block, scratch + ZERO_AT)
    if BLOCKS_AT_ONCE > 1:
        offsets, second = i64_at(scratch + APART_AT), (block + 1) * ROWS < a[m + ROW_COUNT]
        offsets[0], offsets[1], offsets[3] = STRETCH_TILES * 512, small if second else 0, ahead_apart
        offsets[2] = zeros_of(a, m, block + 1, scratch + ZERO_AT)[0] - zeros if second else 0
    column = (a[DEPTH] + PAD - 1) // PAD * PAD // TILE * RECORD
    loop = i64_at(a[m + LOOPS])[COLUMNS]
    share = tile_nbytes_of(a, m) // num_column_groups(tokens)  # each column group prefetches its part of the next stretch
    t = int64(0)
    while t < tokens:
        count = columns_at_once(tokens - t)
        call(loop, (count, scratch + QUADS_AT, a[m + TABLES], scales, zeros, records + t * column, begin, end, a[m + SHIFT], zero_shift,
                    sums + 4 * ROWS * t, ahead, share, scratch + APART_AT))
        ahead += share * STRETCH_TILES
        t += count


@inlined()
def clear_sums(tokens, sums):
    """Zero the sums that `multiply_stretch` adds to."""
    for r in range(BLOCKS_AT_ONCE):
        clean = f32_at(sums + r * SUMS_NBYTES)
        for i in range((tokens + COLUMNS_AT_ONCE - 1) // COLUMNS_AT_ONCE * COLUMNS_AT_ONCE * ROWS):
            clean[i] = float32(0.0)


@inlined()
def _pair_sums(a, m, block, num_blocks, tokens, scratch, records, sums, following):
    """`_block_sums` of `num_blocks` row blocks, without intermediate stretches."""
    small = scales_nbytes_of(a, m)
    table, zero_shift, last = i64_at(scratch + TABLE_AT), int64(0), (a[m + ROW_COUNT] + ROWS - 1) // ROWS - 1
    for r in range(num_blocks):
        at = min(block + r, last)
        table[r], table[PAIR + r] = codes_at(a, m, at), a[m + SCALES] + at * small
        table[2 * PAIR + r], zero_shift = zeros_of(a, m, at, scratch + ZERO_AT)
        table[3 * PAIR + r] = following + r * a[m + TILES] * tile_nbytes_of(a, m)
        table[4 * PAIR + r] = table[PAIR + r] + PAIR * small
    clear_sums(tokens, sums)
    call(i64_at(a[m + LOOPS])[PAIRS],
         (tokens, num_blocks, scratch + TABLE_AT, a[m + TABLES], records, a[m + TILES], a[m + SHIFT], zero_shift, sums))


@inlined()
def _block_sums(a, m, block, num_blocks, tokens, scratch, records, sums, following):
    """`num_blocks` row blocks of matrix m, BLOCKS_AT_ONCE or one, times several columns -> float32 [BLOCKS_AT_ONCE][16][16] at `sums`.
    `following`: address of the codes read next, prefetched throughout: prefetching only a stretch ahead comes too late."""
    if USES_AVX512 and scaling_of(a, m) != HALF_TILE:
        _pair_sums(a, m, block, num_blocks, tokens, scratch, records, sums, following)
        return
    expand, tiles, tile = i64_at(a[m + LOOPS])[EXPAND], a[m + TILES], tile_nbytes_of(a, m)
    codes, last = codes_at(a, m, block), (a[m + ROW_COUNT] + ROWS - 1) // ROWS - 1
    clear_sums(tokens, sums)
    for begin in range(0, tiles, STRETCH_TILES):
        end = min(begin + STRETCH_TILES, tiles)
        for r in range(BLOCKS_AT_ONCE):
            block_codes = codes + min(r, last - block) * tiles * tile
            call(expand, (block_codes + begin * tile, a[m + TABLES], end - begin, scratch + QUADS_AT + r * STRETCH_TILES * 512))
        multiply_stretch(a, m, block, tokens, scratch, records, begin, end, following + begin * tile, tiles * tile, sums)


@inlined()
def finish(a, m, block, sums, x):
    """Row scales, corrections and bias of a row block's 16 sums, in place. `x`: the column before quantization."""
    scale_block(a, m, block, sums)
    if a[m + SPARSE] != 0:
        value, starts = f32_at(sums), u32_at(a[m + SPARSE])
        at = a[m + SPARSE] + 4 * ((a[m + ROW_COUNT] + ROWS - 1) // ROWS + 1)
        position, correction, column = u32_at(at), u16_at(at + 4 * a[m + SPARSE_COUNT]), f32_at(x)
        for i in range(int64(starts[block]), int64(starts[block + 1])):
            value[position[i] >> np.uint32(28)] += (bits_to_f32(np.uint32(correction[i]) << np.uint32(16))
                                                    * column[int64(position[i] & np.uint32(0x0FFFFFFF))])
    if a[m + BIAS] != 0:
        value, bias, rows = f32_at(sums), f32_at(a[m + BIAS] + 4 * ROWS * block), min(ROWS, a[m + ROW_COUNT] - ROWS * block)
        for row in range(rows):
            value[row] += bias[row]


@inlined()
def write(a, m, block, token, sums):
    """Write a row block's results: stored or added."""
    first = ROWS * block
    rows, mode = min(ROWS, a[m + ROW_COUNT] - first), a[MODE]  # read once: to the compiler, stores may alias the arguments
    target = a[m + OUT] + 4 * (token * a[m + OUT_STRIDE] + first)
    if rows == ROWS:
        put_block(sums, target, 1 if mode == ADD else 0)
        return
    value, out = f32_at(sums), f32_at(target)
    for row in range(rows):
        out[row] = out[row] + value[row] if mode == ADD else value[row]


@inlined()
def _stream_sums(a, m, block, run, blocks, scratch, sums, following):
    """STREAMS row blocks of matrix m, `run` apart, times one column -> float32 [STREAMS][16] at `sums`.

    Past the end the last block is repeated. `following`: address of the codes read next, also in streams; 0 if they follow these.
    """
    table = i64_at(scratch + TABLE_AT)
    tile, small, zero_shift = a[m + TILES] * tile_nbytes_of(a, m), scales_nbytes_of(a, m), int64(0)
    for i in range(STREAMS):
        at = min(block + i * run, blocks - 1)
        table[i], table[STREAMS + i] = codes_at(a, m, at), a[m + SCALES] + at * small
        table[2 * STREAMS + i], zero_shift = zeros_of(a, m, at, scratch + ZERO_AT)
        table[3 * STREAMS + i] = following + i * run * tile if following != 0 else table[i] + tile
    call(i64_at(a[m + LOOPS])[SINGLE],
         (scratch + TABLE_AT, a[m + TABLES], scratch + X_AT, a[m + TILES], a[m + SHIFT], zero_shift, sums))


@inlined()
def _run(a, m):
    """Row blocks per stream of matrix m in a block of work."""
    if a[MODE] == GATED and STREAMS == 1:
        return int64(MAX_GATE_BLOCKS)
    run = max(RUN_MULTIPLE, STREAM_NBYTES // (a[m + TILES] * tile_nbytes_of(a, m)) // RUN_MULTIPLE * RUN_MULTIPLE)
    return min(run, MAX_GATE_BLOCKS // STREAMS) if a[MODE] == GATED else run


@inlined()
def _num_works(a, m):
    """Blocks of work of matrix m."""
    blocks, step = (a[m + ROW_COUNT] + ROWS - 1) // ROWS, STREAMS * _run(a, m)
    return (blocks + step - 1) // step


@inlined()
def _block_range(a, work):
    """The matrix of a block of work, its first row block and its end: all have equal size, so that no worker waits for another's last one.
    """
    m, works = int64(FIRST), _num_works(a, FIRST)
    while work >= works:
        work -= works
        m += FIELDS
        works = _num_works(a, m)
    blocks = (a[m + ROW_COUNT] + ROWS - 1) // ROWS
    units = (blocks + BLOCK_MULTIPLE - 1) // BLOCK_MULTIPLE
    return m, units * work // works * BLOCK_MULTIPLE, min(units * (work + 1) // works * BLOCK_MULTIPLE, blocks)


@inlined()
def _quantize_columns(args, columns, columns_per_token):
    """Norm all tokens and quantize them to int8, `columns_per_token` columns per token."""
    a, eps = i64_at(args), float32(f64_at(args)[EPS])
    depth = a[DEPTH]
    scales, _, totals, normed, nbytes = column_parts(depth)
    for t in range(a[TOKENS]):
        at = columns + columns_per_token * t * nbytes
        normalise(a[X] + 4 * t * depth, at + normed, depth, a[NORM] % ONE_SCALE, a[NORM_WEIGHT], a[NORM_BIAS], eps)
        quantize_column(at + normed, depth, at, at + scales, at + totals, a[NORM])
        if columns_per_token == 2:
            quantize_rest(at + normed, depth, at, at + scales, at + totals, nbytes)


@inlined()
def _seed_columns(depth, tokens, has_columns, way, columns, records, spread_at):
    """Initial values for the loops of a `way`, for one column or `has_columns`, and the records that hold them."""
    scales, seeds, totals, _, nbytes = column_parts(depth)
    tiles = (depth + PAD - 1) // PAD * PAD // TILE
    if not (has_columns and USES_AVX2):
        for t in range(tokens):
            make_seeds(way, columns + t * nbytes + totals, columns + t * nbytes + seeds, tiles)
    spread = USES_AVX2 and not has_columns and way == CODEBOOK_TILE
    if has_columns or spread:
        make_records(tokens, tiles, columns, columns + scales, columns + seeds, nbytes, records)
    if spread:
        spread_records(records, tiles, spread_at)


@inlined()
def _write_sums(a, m, row, run, count, columns_per_token, columns, sums, gates):
    """Write 16 sums of each of `count` products: with `run` 0 of a row block and that many tokens, else of row blocks `run` apart and one
    token; in a GATED stage these are up's, and the gate's are at `gates`."""
    _, _, _, normed, nbytes = column_parts(a[DEPTH])
    written = m + FIELDS if a[MODE] == GATED else m
    for i in range(count):
        token, block = (i, row) if run == 0 else (int64(0), row + i * run)
        column, sums_offset = columns + columns_per_token * token * nbytes + normed, 4 * ROWS * columns_per_token * i
        if columns_per_token == 2:
            put_block(sums + sums_offset + 4 * ROWS, sums + sums_offset, 1)
        finish(a, written, block, sums + sums_offset, column)
        if a[MODE] == GATED:
            finish(a, m, block, gates + sums_offset, column)
    if a[MODE] == GATED:  # all at once: a loop over 16 values would not be vectorized
        gate_values(gates, sums, ROWS * count, a[ACT])
    for i in range(count):
        token, block = (i, row) if run == 0 else (int64(0), row + i * run)
        write(a, m, block, token, (gates if a[MODE] == GATED else sums) + 4 * ROWS * columns_per_token * i)


@kernel()
def packed_columns(args, worker, counter):
    """y[t, n] of low-bit weights for up to 16 columns. A block of work is several runs of row blocks, in parallel for one column. With FINE
    a token is two columns: its quantized activations, and the quantized rounding error."""
    a = i64_at(args)
    columns_per_token, depth, gated = 2 if a[MODE] == FINE else 1, a[DEPTH], a[MODE] == GATED
    tokens = columns_per_token * a[TOKENS]
    scales, seeds, _, _, nbytes = column_parts(depth)
    scratch = (a[SCRATCH] + worker * a[SCRATCH_STRIDE] + 63) // 64 * 64
    x, sums, others = i64_at(scratch + X_AT), scratch + SUMS_AT, scratch + GATE_SUMS_AT
    columns = scratch + COLUMNS_AT
    records = records_at(scratch, columns + tokens * nbytes)
    x[0], x[1], x[2], x[3] = columns, columns + scales, columns + seeds, records + (depth + PAD - 1) // PAD * PAD // TILE * RECORD
    works = int64(0)
    for i in range(1 if gated else a[MATRICES]):
        works += _num_works(a, FIRST + i * FIELDS)
    ready, seeded, region, ended = False, int64(-1), first_region(worker), int64(0)
    while True:
        work, region, ended = take_block(counter, region, ended, works)
        if work < 0:
            return
        m, begin, last = _block_range(a, work)
        blocks, way = (a[m + ROW_COUNT] + ROWS - 1) // ROWS, scaling_of(a, m)
        has_columns = tokens > 1 or way == HALF_TILE  # half tiles are rare and have no single-column loop
        up = FIELDS if gated else 0
        written = m + up  # the matrix whose products are written: `up`, if there is a gate
        first = up if has_columns else 0  # the matrix that is read first
        if not ready:
            prefetch(codes_at(a, m + first, begin),
                     BLOCKS_AT_ONCE * a[m + TILES] * tile_nbytes_of(a, m + first) if has_columns else PREFETCH_NBYTES)
            _quantize_columns(args, columns, columns_per_token)
            ready = True
        if seeded != way:
            seeded = way
            _seed_columns(depth, tokens, has_columns, way, columns, records, x[3])
        run = (last - begin + STREAMS - 1) // STREAMS
        if gated and not has_columns:  # all gates first, STREAMS row blocks at a time
            following = codes_at(a, written, begin)
            for step in range(run):
                to = others + 4 * ROWS * STREAMS * step
                _stream_sums(a, m, begin + step, run, blocks, scratch, to, following if step == run - 1 else int64(0))
        num_blocks = 1 if USES_AVX512 and tokens <= FEW_COLUMNS and way != HALF_TILE else BLOCKS_AT_ONCE
        for step in range(0, last - begin if has_columns else run, num_blocks if has_columns else 1):
            gates = others if has_columns else others + 4 * ROWS * STREAMS * step
            if has_columns:
                after = codes_at(a, written, begin + step + num_blocks)
                next_codes = codes_at(a, m, begin + step) if gated else after
                _block_sums(a, written, begin + step, num_blocks, tokens, scratch, records, sums, next_codes)
                if gated:
                    _block_sums(a, m, begin + step, num_blocks, tokens, scratch, records, gates, after)
            else:
                following = codes_at(a, m, last) if step == run - 1 else int64(0)
                _stream_sums(a, written, begin + step, run, blocks, scratch, sums, following)
            for r in range(min(num_blocks, last - begin - step) if has_columns else 1):
                count = tokens // columns_per_token if has_columns else min(STREAMS, (last - begin - step + run - 1) // run)
                _write_sums(a, m, begin + step + r, 0 if has_columns else run, count, columns_per_token, columns, sums + r * SUMS_NBYTES,
                            gates + r * SUMS_NBYTES)
