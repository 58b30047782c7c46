"""Matrix kernels over weights in their stored type (f32, f16, bf16), for few columns and for many.

Few columns (decode): some rows of W at a time are read once from memory, converted in registers and multiplied with every column while they
are in cache; a sum's order depends on neither the number of columns nor the neighboring rows. Memory-bound. Many columns (prefill): 96 rows
of W at a time are widened to float32 in the L2 cache, and a register tile multiplies them with activations packed as panels [depth,
TILE_COLUMNS]. Compute-bound.

Both take an argument block; slot names are below. Several matrices that read the same input are one job.
"""

from __future__ import annotations

from numpy import float32, int64

from ..compile import kernel
from ..layout import F32
from ..lazy_numba import inlined
from .arithmetic import dot, expand, gated, normalise
from .inner_loops import FEW_ROWS, MANY_ROWS, TILE_COLUMNS, TILE_ROWS, tile_product
from .intrinsics import f32_at, f64_at, fetch_add, i64_at
from .work_distribution import first_region, matrix_of, take_block

# Slots of the argument block.
X, TOKENS, DEPTH, NORM, NORM_WEIGHT, NORM_BIAS, EPS, SCRATCH, SCRATCH_STRIDE, MODE, ACT, MATRICES, FIRST = range(13)
# Per matrix, from slot FIRST on.
WEIGHT, DTYPE, ROWS, BIAS, OUT, OUT_STRIDE, FIELDS = range(7)
# PLAIN: y = Wx + b. ADD: y += Wx + b. GATED: y = act(W0 x + b0) * (W1 x + b1). FINE: as PLAIN, for heads and routers: integer kernels
# also quantize and multiply the rounding error of x, and no float kernel rounds x.
PLAIN, ADD, GATED, FINE = range(4)

STREAM_NBYTES, MAX_STREAM_ROWS = 131_072, 32
LONG_DEPTH = 4096  # x takes 16 KiB or more
SUMS, HEADROOM = 16, 64  # floats of scratch: for sums; before the normed rows (sums, then the table of row addresses)
MANY_BLOCK = 96  # a multiple of TILE_ROWS on every target (12 and 6)
DEPTH_BLOCK = 512


@inlined()
def biased(value, bias, row):
    """`value` plus the bias of a row. `bias`: address of a vector, 0 for none."""
    return value + f32_at(bias)[row] if bias != 0 else value


@inlined()
def store_block(sums, columns, tokens, first, rows, bias, out, stride, mode):
    """Sums of a block of rows, float32 [rows, columns] at an address, with their biases to y[t, first + row]; `mode` PLAIN or ADD."""
    c, y = f32_at(sums), f32_at(out)
    for t in range(tokens):
        for row in range(rows):
            value = biased(c[row * columns + t], bias, first + row)
            y[t * stride + first + row] = value + y[t * stride + first + row] if mode == ADD else value


@inlined()
def _stream_rows(pitch):
    """Rows that one stream reads in sequence: about 128 KiB."""
    return min(MAX_STREAM_ROWS, max(1, STREAM_NBYTES // pitch))


@inlined()
def _pitch(a, m):
    """Bytes per row of matrix m."""
    return a[DEPTH] * (4 if a[m + DTYPE] == F32 else 2)


@inlined()
def _few_blocks(a, m, streams):
    """Blocks of work of matrix m for few columns."""
    step = streams * _stream_rows(_pitch(a, m))
    return (a[m + ROWS] + step - 1) // step


@kernel()
def few_columns(args, worker, counter):
    """y[t, n] for few t.

    A block is read as several parallel streams of `stream` rows each, so that the prefetcher follows a few long runs; reading neighboring
    rows together would be a sequence of short runs (57% of the memory bandwidth against 94% with 4 KiB rows). With GATED half of the
    streams belong to the gate and the other half to the up matrix.
    """
    a = i64_at(args)
    tokens, depth, mode, matrices = a[TOKENS], a[DEPTH], a[MODE], a[MATRICES]
    scratch = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    table = scratch + 4 * SUMS
    sums, pointers = f32_at(scratch), i64_at(table)
    # an x that fills the L1 cache is read from L2, so more rows have to share it
    streams = FEW_ROWS if depth < LONG_DEPTH else MANY_ROWS
    matrix_streams = streams // 2 if mode == GATED else streams
    x = a[X]
    ready = a[NORM] == 0
    blocks = int64(0)
    for i in range(1 if mode == GATED else matrices):
        blocks += _few_blocks(a, FIRST + i * FIELDS, matrix_streams)
    region, ended = first_region(worker), int64(0)
    while True:
        block, region, ended = take_block(counter, region, ended, blocks)
        if block < 0:
            return
        row_of = int64(FIRST)
        while block >= _few_blocks(a, row_of, matrix_streams):
            block -= _few_blocks(a, row_of, matrix_streams)
            row_of += FIELDS
        pitch = _pitch(a, row_of)
        stream = _stream_rows(pitch)
        if not ready:  # every worker computes the norm: cheaper than a second job
            x = scratch + 4 * HEADROOM
            eps = float32(f64_at(args)[EPS])
            for t in range(tokens):
                normalise(a[X] + 4 * t * depth, x + 4 * t * depth, depth, a[NORM], a[NORM_WEIGHT], a[NORM_BIAS], eps)
            ready = True
        rows, dtype, out_stride = a[row_of + ROWS], a[row_of + DTYPE], a[row_of + OUT_STRIDE]
        out, other = f32_at(a[row_of + OUT]), row_of + FIELDS
        begin = block * matrix_streams * stream
        stream = (min(matrix_streams * stream, rows - begin) + matrix_streams - 1) // matrix_streams  # the last block has shorter streams
        for row in range(begin, begin + stream):
            for i in range(matrix_streams):
                at = min(row + i * stream, rows - 1)  # past the end the last row is repeated and its sum dropped
                pointers[i] = a[row_of + WEIGHT] + at * pitch
                if mode == GATED:
                    pointers[matrix_streams + i] = a[other + WEIGHT] + at * pitch
            for t in range(tokens):
                dot(table, streams, dtype, x + 4 * t * depth, depth, scratch)
                for i in range(matrix_streams):
                    at = row + i * stream
                    if at < rows:
                        value = biased(sums[i], a[row_of + BIAS], at)
                        if mode == GATED:
                            value = gated(value, biased(sums[matrix_streams + i], a[other + BIAS], at), a[ACT])
                        out[t * out_stride + at] = value + out[t * out_stride + at] if mode == ADD else value


@kernel()
def pack_columns(args, worker, counter):
    """Norm rows of X and transpose them into panels [panel][depth][TILE_COLUMNS] at matrix slot 0's OUT; blocks are panels."""
    a = i64_at(args)
    tokens, depth = a[TOKENS], a[DEPTH]
    eps = float32(f64_at(args)[EPS])
    rows = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    panels = (tokens + TILE_COLUMNS - 1) // TILE_COLUMNS
    while True:
        panel = fetch_add(counter, 1)
        if panel >= panels:
            return
        first = panel * TILE_COLUMNS
        panel_tokens = min(TILE_COLUMNS, tokens - first)
        for t in range(panel_tokens):
            normalise(a[X] + 4 * (first + t) * depth, rows + 4 * t * depth, depth, a[NORM], a[NORM_WEIGHT], a[NORM_BIAS], eps)
        source, out = f32_at(rows), f32_at(a[FIRST + OUT] + 4 * panel * depth * TILE_COLUMNS)
        for k in range(depth):
            for t in range(panel_tokens):
                out[k * TILE_COLUMNS + t] = source[t * depth + k]
            for t in range(panel_tokens, TILE_COLUMNS):
                out[k * TILE_COLUMNS + t] = float32(0.0)


@kernel()
def many_columns(args, worker, counter):
    """y[t, n] for many t from packed panels at X. Blocks are MANY_BLOCK rows.

    Scratch: W[MANY_BLOCK, DEPTH_BLOCK], C[MANY_BLOCK, columns].
    """
    a = i64_at(args)
    tokens, depth, mode, matrices = a[TOKENS], a[DEPTH], a[MODE], a[MATRICES]
    panels = (tokens + TILE_COLUMNS - 1) // TILE_COLUMNS
    columns = panels * TILE_COLUMNS
    wide = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    sums = wide + 4 * MANY_BLOCK * DEPTH_BLOCK
    while True:
        row_of, block = matrix_of(a, fetch_add(counter, 1), FIRST, matrices, FIELDS, ROWS, MANY_BLOCK)
        if row_of < 0:
            return
        dtype = a[row_of + DTYPE]
        item = 4 if dtype == F32 else 2
        first = block * MANY_BLOCK
        rows = min(MANY_BLOCK, a[row_of + ROWS] - first)
        tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
        for start in range(0, depth, DEPTH_BLOCK):
            span = min(DEPTH_BLOCK, depth - start)
            for row in range(rows):
                expand(a[row_of + WEIGHT] + ((first + row) * depth + start) * item, dtype, wide + 4 * row * DEPTH_BLOCK, span)
            for row in range(rows, tiles * TILE_ROWS):
                blank = f32_at(wide + 4 * row * DEPTH_BLOCK)
                for k in range(span):
                    blank[k] = float32(0.0)
            for panel in range(panels):
                b = a[X] + 4 * (panel * depth + start) * TILE_COLUMNS
                for tile in range(tiles):
                    tile_product(wide + 4 * tile * TILE_ROWS * DEPTH_BLOCK, 4 * DEPTH_BLOCK, b, 4 * TILE_COLUMNS,
                                 sums + 4 * (tile * TILE_ROWS * columns + panel * TILE_COLUMNS), 4 * columns, span, 1 if start else 0)
        store_block(sums, columns, tokens, first, rows, a[row_of + BIAS], a[row_of + OUT], a[row_of + OUT_STRIDE], mode)
