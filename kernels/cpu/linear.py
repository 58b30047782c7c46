"""Matrix kernels over weights in their stored type (f32, f16, bf16): a few columns, and many.

Few columns (decode): each row of W is read once from memory, converted in registers and multiplied with every column while it is
in the first-level cache; the sum's order does not depend on the number of columns. Limited by memory.
Many columns (prefill): 96 rows of W at a time are expanded to float32 in the second-level cache, and a register tile multiplies
them with activations packed as panels [depth, TILE_COLUMNS]. Limited by the multiply-add units.

Both take their work as an argument block; slot names are below. Several matrices that read the same input are one job.
"""

from __future__ import annotations

from numba import float32

from ..compile import kernel
from ..layout import F32
from .arithmetic import activate, dot, expand, normalise
from .intrinsics import TILE_COLUMNS, TILE_ROWS, f32_at, f64_at, fetch_add, i64_at, tile_product

# Slots of the argument block.
X, TOKENS, DEPTH, NORM, NORM_WEIGHT, NORM_BIAS, EPS, SCRATCH, SCRATCH_STRIDE, MODE, ACT, MATRICES, FIRST = range(13)
# Per matrix, from slot FIRST on.
WEIGHT, DTYPE, ROWS, BIAS, OUT, OUT_STRIDE, FIELDS = range(7)
PLAIN, ADD, GATED = 0, 1, 2  # y = Wx + b · y += Wx + b · y = act(W0 x + b0) * (W1 x + b1)

FEW_BLOCK = 16
MANY_BLOCK = 96  # a multiple of TILE_ROWS on every target (12 and 6)
DEPTH_BLOCK = 512


@kernel()
def few_columns(args, worker, counter):
    """y[t, n] for few t. Blocks are FEW_BLOCK rows of one matrix."""
    a = i64_at(args)
    tokens, depth, mode, matrices = a[TOKENS], a[DEPTH], a[MODE], a[MATRICES]
    x = a[X]
    ready = a[NORM] == 0
    groups = 1 if mode == GATED else matrices
    while True:
        block = fetch_add(counter, 1)
        row_of = FIRST
        for _ in range(groups):
            here = (a[row_of + ROWS] + FEW_BLOCK - 1) // FEW_BLOCK
            if block < here:
                break
            block -= here
            row_of += FIELDS
        else:
            return
        if not ready:  # every worker norms for itself: cheaper than a second job
            x = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
            eps = float32(f64_at(args)[EPS])
            for t in range(tokens):
                normalise(a[X] + 4 * t * depth, x + 4 * t * depth, depth, a[NORM], a[NORM_WEIGHT], a[NORM_BIAS], eps)
            ready = True
        rows, dtype, stride, bias = a[row_of + ROWS], a[row_of + DTYPE], a[row_of + OUT_STRIDE], a[row_of + BIAS]
        pitch = depth * (4 if dtype == F32 else 2)
        out = f32_at(a[row_of + OUT])
        for row in range(block * FEW_BLOCK, min(rows, (block + 1) * FEW_BLOCK)):
            address = a[row_of + WEIGHT] + row * pitch
            for t in range(tokens):
                value = dot(address, dtype, x + 4 * t * depth, depth)
                if bias != 0:
                    value += f32_at(bias)[row]
                if mode == GATED:
                    other = row_of + FIELDS
                    up = dot(a[other + WEIGHT] + row * pitch, dtype, x + 4 * t * depth, depth)
                    if a[other + BIAS] != 0:
                        up += f32_at(a[other + BIAS])[row]
                    value = activate(value, a[ACT]) * up
                if mode == ADD:
                    value += out[t * stride + row]
                out[t * stride + row] = value


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
    """y[t, n] for many t from packed panels at X. Blocks are MANY_BLOCK rows; scratch: W[MANY_BLOCK, DEPTH_BLOCK], C[MANY_BLOCK, columns]."""
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
                value = c[row * columns + t]
                if bias != 0:
                    value += f32_at(bias)[first + row]
                if mode == ADD:
                    value += out[t * stride + first + row]
                out[t * stride + first + row] = value


@kernel()
def gate_rows(args, worker, counter):
    """y[i] = act(gate[i]) * up[i] over TOKENS rows of DEPTH values; X is the gate, slot FIRST + WEIGHT up, FIRST + OUT y. Blocks are rows."""
    a = i64_at(args)
    depth, act = a[DEPTH], a[ACT]
    while True:
        row = fetch_add(counter, 1)
        if row >= a[TOKENS]:
            return
        gate, up, out = f32_at(a[X] + 4 * row * depth), f32_at(a[FIRST + WEIGHT] + 4 * row * depth), f32_at(a[FIRST + OUT] + 4 * row * depth)
        if act == 0:  # the loop-invariant branch is taken out here so that the common case is vectorised
            for i in range(depth):
                out[i] = activate(gate[i], 0) * up[i]
        else:
            for i in range(depth):
                out[i] = activate(gate[i], act) * up[i]
