"""Matrix kernels over weights in their stored type (f32, f16, bf16): a few columns, and many.

Few columns (decode): four rows of W at a time are read once from memory, converted in registers and multiplied with every column while they
are in cache; a sum's order depends on neither the number of columns nor the neighbouring rows. Limited by memory.
Many columns (prefill): 96 rows of W at a time are expanded to float32 in the second-level cache, and a register tile multiplies
them with activations packed as panels [depth, TILE_COLUMNS]. Limited by the multiply-add units.

Both take their work as an argument block; slot names are below. Several matrices that read the same input are one job.
"""

from __future__ import annotations

from numba import float32

from ..compile import inlined, kernel
from ..layout import F32
from .arithmetic import activate, dot_four, expand, normalise
from .inner_loops import DOT_ROWS, TILE_COLUMNS, TILE_ROWS, tile_product
from .intrinsics import f32_at, f64_at, fetch_add, i64_at

# Slots of the argument block.
X, TOKENS, DEPTH, NORM, NORM_WEIGHT, NORM_BIAS, EPS, SCRATCH, SCRATCH_STRIDE, MODE, ACT, MATRICES, FIRST = range(13)
# Per matrix, from slot FIRST on.
WEIGHT, DTYPE, ROWS, BIAS, OUT, OUT_STRIDE, FIELDS = range(7)
PLAIN, ADD, GATED = 0, 1, 2  # y = Wx + b · y += Wx + b · y = act(W0 x + b0) * (W1 x + b1)

STREAM_NBYTES, MOST_STREAM_ROWS = 131_072, 32
HEADROOM = 16  # floats of scratch before the normed rows
MANY_BLOCK = 96  # a multiple of TILE_ROWS on every target (12 and 6)
DEPTH_BLOCK = 512


@inlined()
def _biased(value, bias, row):
    """`bias` is the address of a vector, 0 for none."""
    return value + f32_at(bias)[row] if bias != 0 else value


@inlined()
def _stream_rows(pitch):
    """Rows that one of four streams reads in a row: about 128 KiB."""
    return min(MOST_STREAM_ROWS, max(1, STREAM_NBYTES // pitch))


@kernel()
def few_columns(args, worker, counter):
    """y[t, n] for few t.

    A block is read as DOT_ROWS streams side by side, each `stream` rows long: the prefetcher then follows four long runs, where four
    neighbouring rows at a time would be one short one after the other (57% of the read roof against 94% with 4 KiB rows).
    With GATED two streams are the gate's and two the up matrix's.
    """
    a = i64_at(args)
    tokens, depth, mode, matrices = a[TOKENS], a[DEPTH], a[MODE], a[MATRICES]
    scratch = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    sums = f32_at(scratch)
    x = a[X]
    ready = a[NORM] == 0
    groups = 1 if mode == GATED else matrices
    while True:
        block = fetch_add(counter, 1)
        row_of = FIRST
        for _ in range(groups):
            pitch = depth * (4 if a[row_of + DTYPE] == F32 else 2)
            stream = _stream_rows(pitch)
            size = 2 * stream if mode == GATED else DOT_ROWS * stream
            here = (a[row_of + ROWS] + size - 1) // size
            if block < here:
                break
            block -= here
            row_of += FIELDS
        else:
            return
        if not ready:  # every worker norms for itself: cheaper than a second job
            x = scratch + 4 * HEADROOM
            eps = float32(f64_at(args)[EPS])
            for t in range(tokens):
                normalise(a[X] + 4 * t * depth, x + 4 * t * depth, depth, a[NORM], a[NORM_WEIGHT], a[NORM_BIAS], eps)
            ready = True
        rows, dtype, stride = a[row_of + ROWS], a[row_of + DTYPE], a[row_of + OUT_STRIDE]
        out, base = f32_at(a[row_of + OUT]), a[row_of + WEIGHT]
        other = row_of + FIELDS
        for row in range(block * size, block * size + stream):
            r1, r2, r3 = row + stream, row + 2 * stream, row + 3 * stream
            # past the end a stream repeats the last row, and the sums are dropped
            p0, p1 = base + min(row, rows - 1) * pitch, base + min(r1, rows - 1) * pitch
            if mode == GATED:
                p2, p3 = a[other + WEIGHT] + min(row, rows - 1) * pitch, a[other + WEIGHT] + min(r1, rows - 1) * pitch
            else:
                p2, p3 = base + min(r2, rows - 1) * pitch, base + min(r3, rows - 1) * pitch
            for t in range(tokens):
                dot_four((p0, p1, p2, p3), dtype, x + 4 * t * depth, depth, scratch)
                if mode == GATED:
                    for i in range(2):
                        at = row + i * stream
                        if at < rows:
                            gate = _biased(sums[i], a[row_of + BIAS], at)
                            out[t * stride + at] = activate(gate, a[ACT]) * _biased(sums[i + 2], a[other + BIAS], at)
                else:
                    for i in range(DOT_ROWS):
                        at = row + i * stream
                        if at < rows:
                            value = _biased(sums[i], a[row_of + BIAS], at)
                            out[t * stride + at] = value + out[t * stride + at] if mode == ADD else value


@kernel()
def pack_columns(args, worker, counter):
    """Norm rows of X and turn them into panels [panel][depth][TILE_COLUMNS] at matrix slot 0's OUT; blocks are panels."""
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
        here = min(TILE_COLUMNS, tokens - first)
        for t in range(here):
            normalise(a[X] + 4 * (first + t) * depth, rows + 4 * t * depth, depth, a[NORM], a[NORM_WEIGHT], a[NORM_BIAS], eps)
        source, out = f32_at(rows), f32_at(a[FIRST + OUT] + 4 * panel * depth * TILE_COLUMNS)
        for k in range(depth):
            for t in range(here):
                out[k * TILE_COLUMNS + t] = source[t * depth + k]
            for t in range(here, TILE_COLUMNS):
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
        block = fetch_add(counter, 1)
        row_of = FIRST
        for _ in range(matrices):
            here = (a[row_of + ROWS] + MANY_BLOCK - 1) // MANY_BLOCK
            if block < here:
                break
            block -= here
            row_of += FIELDS
        else:
            return
        dtype, stride, bias = a[row_of + DTYPE], a[row_of + OUT_STRIDE], a[row_of + BIAS]
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
        c, out = f32_at(sums), f32_at(a[row_of + OUT])
        for t in range(tokens):
            for row in range(rows):
                value = _biased(c[row * columns + t], bias, first + row)
                out[t * stride + first + row] = value + out[t * stride + first + row] if mode == ADD else value


@kernel()
def gate_rows(args, worker, counter):
    """y[i] = act(gate[i]) * up[i] over TOKENS rows of DEPTH values. Blocks are rows.

    X is the gate, slot FIRST + WEIGHT the up rows, FIRST + OUT y.
    """
    a = i64_at(args)
    depth, act = a[DEPTH], a[ACT]
    while True:
        row = fetch_add(counter, 1)
        if row >= a[TOKENS]:
            return
        start = 4 * row * depth
        gate, up, out = f32_at(a[X] + start), f32_at(a[FIRST + WEIGHT] + start), f32_at(a[FIRST + OUT] + start)
        if act == 0:  # the loop-invariant branch is taken out here so that the common case is vectorised
            for i in range(depth):
                out[i] = activate(gate[i], 0) * up[i]
        else:
            for i in range(depth):
                out[i] = activate(gate[i], act) * up[i]
