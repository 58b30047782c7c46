"""Low-bit weights times many columns with the matrix unit (AMX): the counterpart of `gemm.py`, with two methods, one per job.

    BYTES   SCALED of `gemm.py`, bit for bit: weights as int8 of their row's range, a scale for 128 activations as bytes
    HALVES  all other codes, and weights with outliers: weights as 16 bits of a row's range within a span of inputs, and activations as 16
            bits of a token's range. Products of their bytes are summed, except those of two low bytes; the sums are exact integers within
            a span. Nothing else is rounded, so this is closer to the float32 product than groups with 8-bit activations. Fp8 weights are
            multiplied as float32.

Panels have 32 tokens, or 16 with two bytes each. A span of SPAN inputs of all panels stays in the L2 cache while the rows pass, 32 rows of
it in L1. Sums are added in float32 in input order, so results depend on neither the other tokens nor the threads. Limited by loads and
stores as much as by the matrix unit: 16,384 byte products are one instruction, of two-byte numbers three.
"""

from __future__ import annotations

from numpy import float32, int64

from ..compile import kernel
from ..layout import ONE_SCALE, align
from ..lazy_numba import inlined
from ..tiles import TILE
from .amx import (
    AMX_ROWS,
    BLOCK,
    CONFIG_NBYTES,
    INPUTS,
    STAGE_NBYTES,
    STEP_NBYTES,
    add_halves,
    configure,
    product_of_bytes,
    product_of_halves,
    release,
)
from .amx_expand import FLOATS_NBYTES, PAIR, PAIR_NBYTES, PLANE_NBYTES, SPAN, expand_narrow, expand_wide, tiles_of_stripe
from .amx_int16 import pack_byte_block, pack_token, scale_token
from .arithmetic import least_of, normed_row
from .gemm import (
    AT_ONCE,
    COUNT,
    DEPTH,
    EPS,
    FIRST,
    MATRICES,
    MODE,
    NO_BIAS_AT,
    NORM,
    NORM_BIAS,
    NORM_WEIGHT,
    ONE,
    ONES_AT,
    SCRATCH,
    SCRATCH_STRIDE,
    STRIPES,
    SUMS_AT,
    WAY,
    ZERO,
    X,
    bias_of,
    close,
)
from .gemm_formats import FIELDS, OUT, ROWS, stored_depth
from .gemm_stripes import BLOCK_ROWS, ROWS_AT, SCALED, prepare_rows, up_of
from .gemm_tiles import STRIPE
from .intrinsics import f32_at, f64_at, fetch_add, i64_at
from .linear import GATED
from .work_distribution import matrix_of

BYTES, HALVES = 4, 5  # methods in addition to those of `gemm.py`
PANEL = 2 * AMX_ROWS  # tokens of a panel with one byte per value
# Scratch of a worker, from an offset that depends on the number of tokens: two planes of a stripe or two stripes of bytes, scratch of the
# expansion, sums of one product, tile configuration, factors of a stripe's rows.
PLANES_AT = 0
FLOATS_AT = PLANES_AT + 2 * PLANE_NBYTES
STAGE_AT = FLOATS_AT + FLOATS_NBYTES
CONFIG_AT = STAGE_AT + STAGE_NBYTES
FACTORS_AT = CONFIG_AT + CONFIG_NBYTES
WORKER_NBYTES = FACTORS_AT + 4 * STRIPE


def scratch_nbytes(tokens: int, depth: int) -> int:
    """Bytes of scratch per worker for at most `tokens` tokens of at most `depth` inputs."""
    return align(max(SUMS_AT + 4 * BLOCK_ROWS * align(tokens, PANEL) + WORKER_NBYTES + 64, 4 * align(depth, BLOCK) + 64))


def panels_nbytes(tokens: int, depth: int) -> int:
    """Bytes of the packed activations in the larger of the two ways."""
    in_bytes = align(tokens, PANEL) * align(depth, BLOCK) // BLOCK * (BLOCK + 4)
    return align(max(in_bytes, align(tokens, AMX_ROWS) * (2 * align(depth, INPUTS) + 4)))


def method_of(bits: int, scheme: str, outliers: bool) -> int:
    """How a format is multiplied: codes of up to four bits as bytes, where rounding to the row's int8 loses less than they did."""
    return BYTES if bits <= 4 and scheme in ("affine", "block", "codebook", "offset", "symmetric", "ternary") and not outliers else HALVES


@inlined()
def _span(depth, start):
    """Inputs of a span: as many as its last step or block ends with."""
    return min(SPAN, depth - start)


@inlined()
def _bytes_at(base, panels, depth, start, panel):
    """Address of a panel of bytes of a span: its block scales, then its steps."""
    blocks = (_span(depth, start) + BLOCK - 1) // BLOCK
    return base + (start // BLOCK * panels + blocks * panel) * (4 * PANEL + 2 * STEP_NBYTES)


@inlined()
def _halves_at(base, panels, depth, start, panel):
    """Address of a panel's steps of two-byte numbers in a span, after the scales of all panels."""
    steps = (_span(depth, start) + INPUTS - 1) // INPUTS
    return base + 4 * AMX_ROWS * panels + (start // INPUTS * panels + steps * panel) * STEP_NBYTES


@kernel()
def pack_tokens(args, worker, counter):
    """Norm rows of X and store them as panels of a WAY at matrix slot 0's OUT, span by span. Blocks are panels."""
    a = i64_at(args)
    tokens, depth, base = a[COUNT], a[DEPTH], a[FIRST + OUT]
    eps = float32(f64_at(args)[EPS])
    height = PANEL if a[WAY] == BYTES else AMX_ROWS
    row = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    panels, padded = (tokens + height - 1) // height, (depth + BLOCK - 1) // BLOCK * BLOCK
    inverse = row + 4 * padded
    while True:
        panel = fetch_add(counter, 1)
        if panel >= panels:
            return
        for t in range(height):
            token = panel * height + t
            normed_row(a[X] + 4 * token * depth, row, depth if token < tokens else 0, padded, a[NORM] % ONE_SCALE, a[NORM_WEIGHT],
                       a[NORM_BIAS], eps)
            if a[WAY] == BYTES:
                minimum = least_of(row, padded, a[NORM])
                for start in range(0, depth, SPAN):
                    at = _bytes_at(base, panels, depth, start, panel)
                    blocks = (_span(depth, start) + BLOCK - 1) // BLOCK
                    token_at = at + 4 * PANEL * blocks + t // AMX_ROWS * (AMX_ROWS * INPUTS) + t % AMX_ROWS * INPUTS
                    for i in range(blocks):
                        pack_byte_block(row + 4 * (start + i * BLOCK), at + 4 * (PANEL * i + t), token_at + i * (2 * STEP_NBYTES), minimum)
                continue
            scale_token(row, (depth + INPUTS - 1) // INPUTS * INPUTS, base + 4 * token, inverse)
            for start in range(0, depth, SPAN):
                at = _halves_at(base, panels, depth, start, panel)
                pack_token(row + 4 * start, (_span(depth, start) + INPUTS - 1) // INPUTS * INPUTS, inverse, at + INPUTS * t)


@inlined()
def _clear(sums, count):
    for i in range(count):
        f32_at(sums)[i] = ZERO


@kernel()
def multiply(args, worker, counter):
    """y[t, n] for many t from the panels at X. Blocks are AT_ONCE stripes of a matrix, with GATED of the gate and the up matrix.

    While a stripe of bytes is multiplied the next one is expanded, a few tiles per panel, so that the matrix unit and the vector units
    overlap.
    """
    a = i64_at(args)
    tokens, depth, mode, in_bytes = a[COUNT], a[DEPTH], a[MODE], a[WAY] == BYTES
    height = PANEL if in_bytes else AMX_ROWS
    panels, padded = (tokens + height - 1) // height, (depth + TILE - 1) // TILE * TILE
    scratch = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    sums_nbytes = 4 * panels * height * STRIPE
    worker_scratch = (scratch + SUMS_AT + STRIPES * sums_nbytes + 63) // 64 * 64
    both = 2 if mode == GATED else 1
    share = a[AT_ONCE] * STRIPE  # rows of a matrix in a block of work
    for i in range(STRIPE):
        f32_at(scratch + NO_BIAS_AT)[i], f32_at(scratch + ONES_AT)[i] = ZERO, ONE
    configure(worker_scratch + CONFIG_AT)
    while True:
        matrix, index = matrix_of(a, fetch_add(counter, 1), FIRST, a[MATRICES] // both, both * FIELDS, ROWS, share)
        if matrix < 0:
            release()
            return
        row = index * share
        used = (min(share, a[matrix + ROWS] - row) + STRIPE - 1) // STRIPE  # number of stripes of each matrix
        for number in range(both * used):
            one = matrix + number // used * FIELDS
            if in_bytes:
                prepare_rows(a, one, stored_depth(a, one, depth), SCALED, row + number % used * STRIPE, scratch, number)
            else:
                for i in range(STRIPE):  # factors of rows are applied per span
                    f32_at(scratch + ROWS_AT + 4 * number * STRIPE)[i] = ONE
        ready, stripes = int64(0), (padded + SPAN - 1) // SPAN * both * used
        for stripe in range(stripes):
            number, start = stripe % (both * used), stripe // (both * used) * SPAN
            one, first = matrix + number // used * FIELDS, row + number % used * STRIPE
            last, span, stored = start + SPAN >= padded, _span(padded, start), stored_depth(a, one, depth)
            rows, weights = min(STRIPE, a[one + ROWS] - first), worker_scratch + PLANES_AT
            number_2, start_2 = (stripe + 1) % (both * used), (stripe + 1) // (both * used) * SPAN
            two, first_2, tiles_2, span_2 = matrix + number_2 // used * FIELDS, row + number_2 % used * STRIPE, int64(0), int64(0)
            stored_2, weights_2, up_2 = stored_depth(a, two, depth), weights + (stripe + 1) % 2 * PLANE_NBYTES, int64(0)
            if in_bytes:
                weights += stripe % 2 * PLANE_NBYTES
                for tile in range(ready, tiles_of_stripe(a, one, first, span)):
                    expand_narrow(a, one, stored, first, start, span, tile, up_of(a, one), scratch, number, weights)
                if stripe + 1 < stripes:
                    span_2, up_2 = _span(padded, start_2), up_of(a, two)
                    tiles_2 = tiles_of_stripe(a, two, first_2, span_2)
            else:
                expand_wide(a, one, stored, first, start, _span(depth, start), scratch, worker_scratch + FLOATS_AT,
                            worker_scratch + FACTORS_AT, weights)
            if last:
                bias_of(a, one, first, scratch)
            ready, num_steps, step = int64(0), (rows + PAIR - 1) // PAIR * panels, 0
            for pair in range(0, rows, PAIR):
                pair_at = weights + pair // PAIR * PAIR_NBYTES
                for panel in range(panels):
                    at = scratch + SUMS_AT + number * sums_nbytes + panel * 4 * height * STRIPE
                    if start == 0 and pair == 0:
                        _clear(at, height * STRIPE)
                    if in_bytes:
                        blocks, x = (span + BLOCK - 1) // BLOCK, _bytes_at(a[X], panels, depth, start, panel)
                        product_of_bytes(pair_at, x, x + 4 * PANEL * blocks, blocks, worker_scratch + STAGE_AT, at + 4 * pair, 4 * STRIPE)
                        step += 1
                        while ready * num_steps < tiles_2 * step:
                            expand_narrow(a, two, stored_2, first_2, start_2, span_2, ready, up_2, scratch, number_2, weights_2)
                            ready += 1
                    else:
                        x = _halves_at(a[X], panels, depth, start, panel)
                        product_of_halves(pair_at, PLANE_NBYTES, x, (span + INPUTS - 1) // INPUTS, worker_scratch + STAGE_AT)
                        add_halves(worker_scratch + STAGE_AT, a[X] + 4 * AMX_ROWS * panel, worker_scratch + FACTORS_AT + 4 * pair,
                                   at + 4 * pair, 4 * STRIPE)
                    if last and pair + PAIR >= rows:
                        close(a, one, mode, first, number, used, at, sums_nbytes, scratch, panel * height,
                              min(height, tokens - panel * height))
