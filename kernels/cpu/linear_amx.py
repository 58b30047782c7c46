"""bf16 weights times many columns with the matrix unit (AMX): the counterpart of `linear.many_columns`.

The unit multiplies bf16 and accumulates in float32. An activation is split into three bf16 parts, each the rounded remainder of the ones
before, which together hold all of a float32 (infinity becomes NaN). So no product is rounded except in the sums, two inputs at a time, in
order: results depend on neither the other tokens nor the threads. 16 rows, 16 tokens and 32 inputs take three instructions of 16 cycles,
where vectors take 256 cycles.

Panels have 32 tokens; a span of SPAN inputs of all of them is in the L2 cache, weights of 32 rows as pairs of inputs in L1.
"""

from __future__ import annotations

from numpy import float32, int64

from ..compile import cpu_features, kernel
from ..layout import align
from .amx import AMX, AMX_ROWS, CONFIG_NBYTES, STAGE_NBYTES, configure, release
from .amx_bf16 import PARTS, STEP, STEP_NBYTES, float_product, pair_rows, split_token
from .arithmetic import normed_row
from .intrinsics import f32_at, f64_at, fetch_add, i64_at
from .linear import (
    ADD,
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
    biased,
)
from .panel_products import PanelProduct
from .work_distribution import matrix_of

AMX_FLOATS = AMX and "amx-bf16" in cpu_features()
PANEL, PAIR = 2 * AMX_ROWS, 2 * AMX_ROWS  # tokens, rows
BLOCK_ROWS, SPAN = 256, 256  # with fewer rows at a time activations would come from the L3 cache
PAIR_NBYTES = 2 * PAIR * SPAN
# Scratch of a worker: tile configuration, pairs of a block's rows, padding rows of a block, then sums of all panels.
PAIRS_AT = CONFIG_NBYTES
SUMS_AT = PAIRS_AT + BLOCK_ROWS // PAIR * PAIR_NBYTES


def scratch_floats(tokens: int, depth: int) -> int:
    """Floats of scratch per worker for at most `tokens` tokens of at most `depth` inputs; none without AMX."""
    nbytes = align(max(SUMS_AT + 4 * BLOCK_ROWS * align(tokens, PANEL), 4 * align(depth, STEP))) + 64
    return nbytes // 4 if AMX_FLOATS else 0


def panel_floats(tokens: int, depth: int) -> int:
    """Floats of the packed activations; none without AMX."""
    return align(2 * PARTS * align(tokens, PANEL) * align(depth, STEP)) // 4 if AMX_FLOATS else 0


@kernel()
def pack_columns(args, worker, counter):
    """Norm rows of X and store their parts as panels at matrix slot 0's OUT, span by span. Blocks are panels."""
    a = i64_at(args)
    tokens, depth = a[TOKENS], a[DEPTH]
    eps = float32(f64_at(args)[EPS])
    row = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    panels, padded = (tokens + PANEL - 1) // PANEL, (depth + STEP - 1) // STEP * STEP
    while True:
        panel = fetch_add(counter, 1)
        if panel >= panels:
            return
        for t in range(PANEL):
            token = panel * PANEL + t
            normed_row(a[X] + 4 * token * depth, row, depth if token < tokens else 0, padded, a[NORM], a[NORM_WEIGHT], a[NORM_BIAS], eps)
            for start in range(0, padded, SPAN):
                steps = min(SPAN, padded - start) // STEP
                at = a[FIRST + OUT] + (start // STEP * panels + steps * panel) * STEP_NBYTES
                split_token(row + 4 * start, steps, at + t // AMX_ROWS * (AMX_ROWS * 2 * STEP) + t % AMX_ROWS * (2 * STEP))


@kernel()
def multiply(args, worker, counter):
    """y[t, n], `mode` PLAIN or ADD, from the panels at X. Blocks are BLOCK_ROWS rows."""
    a = i64_at(args)
    tokens, depth, mode = a[TOKENS], a[DEPTH], a[MODE]
    panels, padded = (tokens + PANEL - 1) // PANEL, (depth + STEP - 1) // STEP * STEP
    scratch = (a[SCRATCH] + worker * a[SCRATCH_STRIDE] + 63) // 64 * 64
    configure(scratch)
    while True:
        m, block = matrix_of(a, fetch_add(counter, 1), FIRST, a[MATRICES], FIELDS, ROWS, BLOCK_ROWS)
        if m < 0:
            release()
            return
        first = block * BLOCK_ROWS
        rows = min(BLOCK_ROWS, a[m + ROWS] - first)
        for start in range(0, padded, SPAN):
            steps, span = min(SPAN, padded - start) // STEP, min(SPAN, depth - start)
            for pair in range(0, rows, PAIR):
                pairs = scratch + PAIRS_AT + pair // PAIR * PAIR_NBYTES
                for half in range(0, PAIR, AMX_ROWS):
                    row = first + pair + half
                    pair_rows(a[m + WEIGHT] + 2 * (row * depth + start), 2 * depth, max(int64(0), min(AMX_ROWS, a[m + ROWS] - row)), span,
                              pairs + 4 * half)
                for panel in range(panels):
                    x = a[X] + (start // STEP * panels + steps * panel) * STEP_NBYTES
                    sums = scratch + SUMS_AT + (pair // PAIR * panels + panel) * STAGE_NBYTES
                    float_product(x, pairs, steps, sums, 1 if start else 0)
        for t in range(tokens):
            y = f32_at(a[m + OUT] + 4 * t * a[m + OUT_STRIDE])
            for row in range(0, rows, AMX_ROWS):
                tile = t % PANEL // AMX_ROWS * 2 + row % PAIR // AMX_ROWS
                at = (row // PAIR * panels + t // PANEL) * STAGE_NBYTES + tile * (4 * AMX_ROWS * AMX_ROWS)
                sums = f32_at(scratch + SUMS_AT + at + 4 * AMX_ROWS * (t % AMX_ROWS))
                for i in range(min(AMX_ROWS, rows - row)):
                    value = biased(sums[i], a[m + BIAS], first + row + i)
                    y[first + row + i] = y[first + row + i] + value if mode == ADD else value


run_many = PanelProduct(panel_floats, pack_columns, multiply)
