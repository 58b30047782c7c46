"""bf16 weights times many columns as products of bf16 pairs (AVX-512 BF16): the counterpart of `linear.many_columns`.

Activations are rounded to bf16, each by at most 2**-9 of itself, as they are wherever a model runs in bf16. That halves the instructions
against float32, and weights are multiplied as they are stored. Where nothing averages the errors out (mode FINE: heads and routers), for
few columns, for neuron bundles and with `--exact`, activations stay float32 (`linear.py`).

Panels have 32 tokens, or 16 if no more are left. For up to MAX_IN_PLACE tokens rows are read where they are, and prefetched. For more,
they are copied for a span of inputs, because rows at their own pitch compete for a few sets of the L1 cache in every panel. Every sum
is one chain in the order of inputs: results depend neither on other tokens nor on threads.
"""

from __future__ import annotations

from numpy import float32, int64

from ..compile import kernel
from ..lazy_numba import inlined
from .arithmetic import normed_row
from .bf16_pairs import PAIRS_STEP, half_pair_tile, pair_tile, round_row, transpose_pairs
from .inner_loops import TILE_COLUMNS, TILE_ROWS
from .intrinsics import f64_at, fetch_add, i64_at, u16_at
from .linear import (
    BIAS,
    DEPTH,
    EPS,
    FIELDS,
    FIRST,
    MATRICES,
    MODE,
    NORM,
    NORM_BIAS,
    NORM_WEIGHT,
    OUT,
    OUT_STRIDE,
    ROWS,
    SCRATCH,
    SCRATCH_STRIDE,
    TOKENS,
    WEIGHT,
    X,
    store_block,
)
from .panel_products import FLOAT32, PanelProduct
from .work_distribution import matrix_of

STEP = 2 * PAIRS_STEP  # inputs are padded with zeros to a multiple
BLOCK_ROWS = 96  # a multiple of TILE_ROWS
SPAN = 512  # inputs
PITCH = 2 * SPAN + 64  # bytes between copied rows: neighbors are in other sets of the L1 cache
MAX_IN_PLACE = 128  # tokens up to which rows are multiplied where they are; for more copying them pays


def scratch_floats(tokens: int, depth: int) -> int:
    """Floats of scratch per worker for at most `tokens` tokens of at most `depth` inputs."""
    columns, padded = -(-tokens // TILE_COLUMNS) * TILE_COLUMNS, -(-depth // STEP) * STEP
    return max(BLOCK_ROWS * (PITCH // 4 + columns), padded + TILE_COLUMNS * padded // 2)


def panel_floats(tokens: int, depth: int) -> int:
    """Floats of the packed activations."""
    return -(-tokens // TILE_COLUMNS) * TILE_COLUMNS * (-(-depth // STEP) * STEP) // 2


@kernel()
def pack_columns(args, worker, counter):
    """Norm and round rows of X, as panels [pair of inputs][32 tokens] at matrix slot 0's OUT. Blocks are panels."""
    a = i64_at(args)
    tokens, depth = a[TOKENS], a[DEPTH]
    eps = float32(f64_at(args)[EPS])
    padded = (depth + STEP - 1) // STEP * STEP
    row = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    rounded = row + 4 * padded
    panels = (tokens + TILE_COLUMNS - 1) // TILE_COLUMNS
    while True:
        panel = fetch_add(counter, 1)
        if panel >= panels:
            return
        for t in range(TILE_COLUMNS):
            token = panel * TILE_COLUMNS + t
            normed_row(a[X] + 4 * token * depth, row, depth if token < tokens else 0, padded, a[NORM], a[NORM_WEIGHT], a[NORM_BIAS], eps)
            round_row(row, padded // STEP, rounded + 2 * t * padded)
        out = a[FIRST + OUT] + 2 * panel * padded * TILE_COLUMNS
        width = 2 * PAIRS_STEP if tokens - panel * TILE_COLUMNS > PAIRS_STEP else PAIRS_STEP
        for half in range(0, width, PAIRS_STEP):
            transpose_pairs(rounded + 2 * half * padded, 2 * padded, padded // STEP, out + 4 * half, 4 * width)


@inlined()
def _multiply_span(weights, pitch, rows, start, count, x, tokens, padded, sums, columns):
    """C[rows, columns] (+)= W[rows, count] times the inputs from `start` on of all panels; accumulates unless `start` is 0.

    weights: address of the first row's input `start`, rows `pitch` bytes apart; `rows` a multiple of TILE_ROWS, `count` of STEP. x:
    address of the panels, of `padded` inputs. sums: address of C.
    """
    steps, jump = count // STEP, TILE_ROWS * pitch - 2 * count
    for token in range(0, tokens, TILE_COLUMNS):
        is_half = tokens - token <= PAIRS_STEP
        panel = x + 2 * (token * padded + start * (PAIRS_STEP if is_half else TILE_COLUMNS))
        for row in range(0, rows, TILE_ROWS):
            c = sums + 4 * (row * columns + token)
            if is_half:
                half_pair_tile(weights + row * pitch, pitch, panel, c, 4 * columns, steps, 1 if start else 0, jump)
            else:
                pair_tile(weights + row * pitch, pitch, panel, c, 4 * columns, steps, 1 if start else 0, jump)


@inlined()
def _multiply_copied(weights, depth, rows, first, copies, x, tokens, padded, sums, columns):
    """`_multiply_span` of all inputs of `rows` rows from `first` on, copied span by span and padded with zeros to whole tiles.

    weights: address of the first row. copies: address of bf16 [BLOCK_ROWS, PITCH / 2].
    """
    tiled = (rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    for start in range(first, padded, SPAN):
        count = min(SPAN, padded - start)
        for row in range(tiled):
            source, copy = u16_at(weights + 2 * (row * depth + start)), u16_at(copies + row * PITCH)
            valid = min(count, depth - start) if row < rows else int64(0)
            for k in range(valid):
                copy[k] = source[k]
            for k in range(valid, count):
                copy[k] = 0
        _multiply_span(copies, PITCH, tiled, start, count, x, tokens, padded, sums, columns)


@kernel()
def multiply(args, worker, counter):
    """y[t, n], `mode` PLAIN or ADD, from the panels at X. Blocks are BLOCK_ROWS rows.

    Scratch: copied rows [BLOCK_ROWS, PITCH bytes], C[BLOCK_ROWS, columns].
    """
    a = i64_at(args)
    tokens, depth, mode, matrices = a[TOKENS], a[DEPTH], a[MODE], a[MATRICES]
    padded, whole = (depth + STEP - 1) // STEP * STEP, depth // STEP * STEP
    columns = (tokens + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    copies = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    sums = copies + BLOCK_ROWS * PITCH
    while True:
        m, block = matrix_of(a, fetch_add(counter, 1), FIRST, matrices, FIELDS, ROWS, BLOCK_ROWS)
        if m < 0:
            return
        first = block * BLOCK_ROWS
        rows, weights = min(BLOCK_ROWS, a[m + ROWS] - first), a[m + WEIGHT] + 2 * first * depth
        tiled = rows // TILE_ROWS * TILE_ROWS if tokens <= MAX_IN_PLACE else int64(0)  # rows multiplied where they are
        longest = max(int64(STEP), whole) if tokens <= TILE_COLUMNS else int64(SPAN)  # of several panels, a span stays in caches
        for start in range(0, whole if tiled > 0 else int64(0), longest):
            _multiply_span(weights + 2 * start, 2 * depth, tiled, start, min(longest, whole - start), a[X], tokens, padded, sums, columns)
        if tiled > 0 and whole < depth:
            _multiply_copied(weights, depth, tiled, whole, copies, a[X], tokens, padded, sums, columns)
        if tiled < rows:
            _multiply_copied(weights + 2 * tiled * depth, depth, rows - tiled, int64(0), copies, a[X], tokens, padded,
                             sums + 4 * tiled * columns, columns)
        store_block(sums, columns, tokens, first, rows, a[m + BIAS], a[m + OUT], a[m + OUT_STRIDE], mode)


run_many = PanelProduct(panel_floats, pack_columns, multiply, fine=FLOAT32)
