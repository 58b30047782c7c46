"""MLP kernels over neuron bundles: a bundle is a neuron's row of `up` (if there is one) and its column of `down`, stored side by side.

A few tokens multiply only the active neurons, those with nonzero gate. A zero contributes exactly nothing to a sum, so results are
bit-identical to the product with whole matrices (`linear.py`) as long as everything else matches: a row of `up` is the same dot product,
and a sum over `down` is kept in the same lanes, each neuron added to the lane of its index in ascending order. Sums stay in memory between
batches of neurons, so a window smaller than the active set gives the same bits. Prefill takes every neuron, group by group in ascending
order; a register tile continues from the sums of the previous group.

Kernels take argument blocks: slots of `linear.py` up to FIRST, then those below.
"""

from __future__ import annotations

from numpy import float32

from ..compile import kernel
from ..layout import F32
from ..lazy_numba import inlined
from .arithmetic import dot, expand, gated, normalise, widen
from .bundle_loops import add_scaled, sum_of_four, sum_of_two
from .inner_loops import FEW_ROWS, FEW_STEP, MANY_ROWS, MANY_STEP, TILE_COLUMNS, TILE_ROWS, VECTOR, tile_product
from .intrinsics import f32_at, f64_at, fetch_add, i64_at
from .linear import (
    ACT,
    ADD,
    DEPTH,
    DEPTH_BLOCK,
    EPS,
    FIRST,
    HEADROOM,
    LONG_DEPTH,
    MANY_BLOCK,
    MODE,
    NORM,
    NORM_BIAS,
    NORM_WEIGHT,
    SCRATCH,
    SCRATCH_STRIDE,
    SUMS,
    TOKENS,
    X,
    biased,
)

# Of a bundle: stored type, bytes before its column of `down`, number of values of that column; then the number of neurons.
DTYPE, OFFSET, WIDTH, FFN = range(FIRST, FIRST + 4)
# The neurons of a batch: count, addresses and indices (int64 each). Of a group: its first neuron and the bytes between neurons.
COUNT, ADDRESSES, NEURONS, PITCH = range(FIRST + 4, FIRST + 8)
# Activations [TOKENS, FFN], where gates are replaced by the input of `down`; sums per lane; output; biases (0: none).
HIDDEN, LANES, OUT, OUT_STRIDE, UP_BIAS, DOWN_BIAS, BEGINS, ENDS, PANELS = range(FIRST + 8, FIRST + 17)
SLOTS = FIRST + 17

UP_BLOCK, OUT_BLOCK = 16, 256
MAX_LANES = max(FEW_STEP, MANY_STEP)  # neurons come in multiples of it, since a remainder would be summed in a different order


@kernel()
def active_up(args, worker, counter):
    """HIDDEN[t, n] *= up[n] . x[t] for the neurons of a batch. Blocks are UP_BLOCK neurons."""
    a = i64_at(args)
    tokens, depth, dtype, count = a[TOKENS], a[DEPTH], a[DTYPE], a[COUNT]
    scratch = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    table = scratch + 4 * SUMS
    sums, pointers = f32_at(scratch), i64_at(table)
    addresses, neurons, hidden = i64_at(a[ADDRESSES]), i64_at(a[NEURONS]), f32_at(a[HIDDEN])
    streams = FEW_ROWS if depth < LONG_DEPTH else MANY_ROWS
    x = a[X]
    ready = a[NORM] == 0
    while True:
        begin = fetch_add(counter, 1) * UP_BLOCK
        if begin >= count:
            return
        if not ready:
            x = scratch + 4 * HEADROOM
            eps = float32(f64_at(args)[EPS])
            for t in range(tokens):
                normalise(a[X] + 4 * t * depth, x + 4 * t * depth, depth, a[NORM], a[NORM_WEIGHT], a[NORM_BIAS], eps)
            ready = True
        end = min(begin + UP_BLOCK, count)
        for first in range(begin, end, streams):
            for i in range(streams):
                pointers[i] = addresses[min(first + i, end - 1)]
            for t in range(tokens):
                dot(table, streams, dtype, x + 4 * t * depth, depth, scratch)
                for i in range(min(streams, end - first)):
                    neuron = neurons[first + i]
                    hidden[t * a[FFN] + neuron] *= biased(sums[i], a[UP_BIAS], neuron)


@kernel()
def active_down(args, worker, counter):
    """OUT (+)= sum of HIDDEN[t, n] * down[:, n] over batches of neurons, ascending: the first BEGINS, the last ENDS. Blocks are OUT_BLOCK
    outputs."""
    a = i64_at(args)
    tokens, dtype, count, width = a[TOKENS], a[DTYPE], a[COUNT], a[WIDTH]
    item = 4 if dtype == F32 else 2
    addresses, neurons, hidden = i64_at(a[ADDRESSES]), i64_at(a[NEURONS]), f32_at(a[HIDDEN])
    lanes = FEW_STEP if FEW_ROWS == (FEW_ROWS if a[FFN] < LONG_DEPTH else MANY_ROWS) else MANY_STEP  # chosen as in `dot`
    scratch = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    out = f32_at(a[OUT])
    while True:
        first = fetch_add(counter, 1) * OUT_BLOCK
        if first >= width:
            return
        num_outputs = min(OUT_BLOCK, width - first)
        if a[BEGINS] != 0:
            for row in range(tokens * lanes):
                sums = f32_at(a[LANES] + 4 * (row * width + first))
                for n in range(num_outputs):
                    sums[n] = float32(0.0)
        for i in range(count):
            column, neuron = addresses[i] + a[OFFSET] + first * item, neurons[i]
            for t in range(tokens):
                value = hidden[t * a[FFN] + neuron]
                if value != float32(0.0):
                    add_scaled(column, dtype, value, a[LANES] + 4 * ((t * lanes + neuron % lanes) * width + first), num_outputs // VECTOR)
        if a[ENDS] != 0:
            for t in range(tokens):
                sums = f32_at(a[LANES] + 4 * (t * lanes * width + first))
                for n in range(num_outputs):
                    for lane in range(lanes):
                        f32_at(scratch)[lane] = sums[lane * width + n]
                    value = biased(sum_of_four(scratch) if lanes == 4 * VECTOR else sum_of_two(scratch), a[DOWN_BIAS], first + n)
                    at = t * a[OUT_STRIDE] + first + n
                    out[at] = value + out[at] if a[MODE] == ADD else value


@kernel()
def group_up(args, worker, counter):
    """HIDDEN[t, n] = act(HIDDEN[t, n]) * (up[n] . x[t]) for a group of COUNT neurons from NEURONS on, PITCH bytes apart, starting at
    ADDRESSES.

    X are packed panels. Blocks are MANY_BLOCK neurons; scratch as for `linear.many_columns`.
    """
    a = i64_at(args)
    tokens, depth, dtype, count, act = a[TOKENS], a[DEPTH], a[DTYPE], a[COUNT], a[ACT]
    panels = (tokens + TILE_COLUMNS - 1) // TILE_COLUMNS
    columns = panels * TILE_COLUMNS
    item = 4 if dtype == F32 else 2
    wide = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    sums = wide + 4 * MANY_BLOCK * DEPTH_BLOCK
    hidden, c = f32_at(a[HIDDEN]), f32_at(sums)
    while True:
        first = fetch_add(counter, 1) * MANY_BLOCK
        if first >= count:
            return
        rows = min(MANY_BLOCK, count - first)
        tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
        for start in range(0, depth, DEPTH_BLOCK):
            span = min(DEPTH_BLOCK, depth - start)
            for row in range(rows):
                expand(a[ADDRESSES] + (first + row) * a[PITCH] + start * item, dtype, wide + 4 * row * DEPTH_BLOCK, span)
            _blank(wide, rows, tiles, span)
            for panel in range(panels):
                b = a[X] + 4 * (panel * depth + start) * TILE_COLUMNS
                for tile in range(tiles):
                    tile_product(wide + 4 * tile * TILE_ROWS * DEPTH_BLOCK, 4 * DEPTH_BLOCK, b, 4 * TILE_COLUMNS,
                                 sums + 4 * (tile * TILE_ROWS * columns + panel * TILE_COLUMNS), 4 * columns, span, 1 if start else 0)
        for t in range(tokens):
            for row in range(rows):
                neuron = a[NEURONS] + first + row
                at = t * a[FFN] + neuron
                hidden[at] = gated(hidden[at], biased(c[row * columns + t], a[UP_BIAS], neuron), act)


@inlined()
def _blank(wide, rows, tiles, span):
    """Zero the rows that pad the last tile."""
    for row in range(rows, tiles * TILE_ROWS):
        blank = f32_at(wide + 4 * row * DEPTH_BLOCK)
        for k in range(span):
            blank[k] = float32(0.0)


@kernel()
def pack_group(args, worker, counter):
    """HIDDEN[:, NEURONS : NEURONS + COUNT] as panels [panel][COUNT][TILE_COLUMNS] at PANELS. Blocks are panels."""
    a = i64_at(args)
    tokens, count = a[TOKENS], a[COUNT]
    panels = (tokens + TILE_COLUMNS - 1) // TILE_COLUMNS
    while True:
        panel = fetch_add(counter, 1)
        if panel >= panels:
            return
        panel_tokens = min(TILE_COLUMNS, tokens - panel * TILE_COLUMNS)
        source = f32_at(a[HIDDEN] + 4 * (panel * TILE_COLUMNS * a[FFN] + a[NEURONS]))
        out = f32_at(a[PANELS] + 4 * panel * count * TILE_COLUMNS)
        for k in range(count):
            for t in range(panel_tokens):
                out[k * TILE_COLUMNS + t] = source[t * a[FFN] + k]
            for t in range(panel_tokens, TILE_COLUMNS):
                out[k * TILE_COLUMNS + t] = float32(0.0)


@kernel()
def group_down(args, worker, counter):
    """OUT (+)= HIDDEN @ down.T over groups of neurons, ascending; LANES holds the sums [WIDTH, columns]. Blocks are MANY_BLOCK outputs."""
    a = i64_at(args)
    tokens, dtype, count, width = a[TOKENS], a[DTYPE], a[COUNT], a[WIDTH]
    panels = (tokens + TILE_COLUMNS - 1) // TILE_COLUMNS
    columns = panels * TILE_COLUMNS
    item = 4 if dtype == F32 else 2
    wide = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    transposed, out = f32_at(wide), f32_at(a[OUT])
    while True:
        first = fetch_add(counter, 1) * MANY_BLOCK
        if first >= width:
            return
        rows = min(MANY_BLOCK, width - first)
        tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
        sums = a[LANES] + 4 * first * columns
        for start in range(0, count, DEPTH_BLOCK):
            span = min(DEPTH_BLOCK, count - start)
            for k in range(span):
                column = a[ADDRESSES] + (start + k) * a[PITCH] + a[OFFSET] + first * item
                for row in range(rows):
                    transposed[row * DEPTH_BLOCK + k] = widen(column, dtype, row)
            _blank(wide, rows, tiles, span)
            for panel in range(panels):
                b = a[PANELS] + 4 * (panel * count + start) * TILE_COLUMNS
                for tile in range(tiles):
                    tile_product(wide + 4 * tile * TILE_ROWS * DEPTH_BLOCK, 4 * DEPTH_BLOCK, b, 4 * TILE_COLUMNS,
                                 sums + 4 * (tile * TILE_ROWS * columns + panel * TILE_COLUMNS), 4 * columns, span,
                                 0 if a[BEGINS] != 0 and start == 0 else 1)
        if a[ENDS] != 0:
            c = f32_at(sums)
            for t in range(tokens):
                for row in range(rows):
                    value = biased(c[row * columns + t], a[DOWN_BIAS], first + row)
                    at = t * a[OUT_STRIDE] + first + row
                    out[at] = value + out[at] if a[MODE] == ADD else value
