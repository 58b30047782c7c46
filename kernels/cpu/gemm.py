"""Low-bit weights times many columns (prefill): an int8 GEMM over rows that are expanded once.

`pack_tokens` norms the activations and quantizes them to int8 with a scale per block, as panels for the register tile. `multiply` takes up
to BLOCK_ROWS rows and SPAN inputs at a time: a stripe of them is expanded, stays in the L1 cache while every panel is multiplied, and is
replaced by the next. There are three methods, one per job:

    SCALED   weights are converted to int8 of the row's range; blocks of 128 activations:  y = s * m / 127 * sum_b(x_b * int)
    GROUPED  weights are unchanged; blocks of 32 activations, a sum per group:             y = s * sum_g(x_b * (f_g * int [- m_g * sum_g]))
    STEPPED  a codebook's levels and steps are unchanged; blocks of 128:                   y = s * sum_b(x_b * int), int of step * level *
    code

with s the row's scale, m the largest |f * v| that its scale codes allow, int an exact integer sum, m_g a group's minimum and sum_g that of
its activations. AVX2 multiplies codes of up to four bits as bytes, which makes GROUPED faster there for linear codes (NARROW_CODES) and
STEPPED for codebooks; elsewhere both use SCALED. All add float32 in input order, one chain per output, so results depend on neither the
other tokens nor the threads, and within one method not on the instruction set. Compute-bound. `multiply_exact` is the float32 product with
the exact weights, from the panels of `linear.pack_columns`.
"""

from __future__ import annotations

from numpy import float32, uint32

from ..compile import kernel
from ..layout import NORM_NONE, ONE_SCALE, align
from ..lazy_numba import inlined
from ..tiles import AFFINE, MINIMUM, NIBBLE, OFFSET, SUPER, TILE
from ..tiles import ROWS as TILE_ROWS
from .arithmetic import gate_values, least_of, normed_row
from .gemm_avx2_codebook import stepped_product
from .gemm_dequantize import TILE_SCRATCH_NBYTES, expand_f32, outliers_of
from .gemm_formats import BIAS, BITS, FIELDS, GROUP, OUT, OUT_STRIDE, ROWS, SCHEME, SPARSE, stored_depth
from .gemm_groups import (
    group_product,
    half_group_product,
    half_minimum_product,
    lowered_minimum_product,
    minimum_product,
    narrow_half_product,
    narrow_minimum_product,
    narrow_product,
    shifted_group_product,
)
from .gemm_pack import narrow_pack_panel, pack_panel, stepped_pack_panel
from .gemm_scaled import SCALED_SHIFT, SPAN
from .gemm_stripes import (
    BLOCK_ROWS,
    FACTORS_AT,
    GROUPED,
    NARROW_CODES,
    ROWS_AT,
    SCALED,
    SHIFTS_AT,
    STEPPED,
    STRIPES_NBYTES,
    WIDE_AT,
    expand_stripe,
    prepare_rows,
)
from .gemm_tiles import (
    AS_BYTES,
    HEADER,
    ITEM,
    NARROW_ITEM,
    STRIPE,
    TOKENS,
    block_product,
    finish,
    finish_adding,
    narrow_outlier_sums,
    outlier_sums,
    stepped_outlier_sums,
)
from .inner_loops import TILE_COLUMNS, tile_product
from .inner_loops import TILE_ROWS as FLOAT_ROWS
from .intrinsics import f32_at, f64_at, fetch_add, i64_at, u32_at
from .linear import ADD, DEPTH_BLOCK, GATED, MANY_BLOCK, store_block
from .work_distribution import matrix_of

# Slots of the argument block; the matrices follow, as in `gemm_stripes.py`.
X, COUNT, DEPTH, NORM, NORM_WEIGHT, NORM_BIAS, EPS, SCRATCH, SCRATCH_STRIDE, MODE, ACT, WAY, AT_ONCE, MATRICES, FIRST = range(15)
SCALED_BLOCK, GROUPED_BLOCK = 128, TILE  # inputs of an activation that share a scale
SLACK = 64  # bytes after the last panel that may be read
STRIPES = BLOCK_ROWS // STRIPE
MIN_WORKER_BLOCKS = 4  # per worker: with fewer, some workers would wait long for others at the end
OUTLIERS_AT = STRIPES_NBYTES
BIAS_AT = OUTLIERS_AT + 64
ONES_AT = BIAS_AT + 4 * STRIPE
NO_BIAS_AT = ONES_AT + 4 * STRIPE
SUMS_AT = NO_BIAS_AT + 4 * STRIPE  # float32 [stripe][panel][TOKENS][STRIPE], at the end of the scratch
ZERO, ONE = float32(0.0), float32(1.0)


def gemm_scratch(tokens: int, depth: int) -> int:
    """Bytes of scratch per worker for at most `tokens` tokens of at most `depth` inputs (every kernel here)."""
    exact = 4 * MANY_BLOCK * (DEPTH_BLOCK + align(tokens, TILE_COLUMNS)) + TILE_SCRATCH_NBYTES
    rows = TOKENS * (4 * align(depth, SCALED_BLOCK) + 4)
    return align(max(SUMS_AT + 4 * BLOCK_ROWS * align(tokens, TOKENS), rows, exact))


def panel_nbytes(tokens: int, depth: int, way: int) -> int:
    """Bytes of the packed activations."""
    block, item = SCALED_BLOCK if way in (SCALED, STEPPED) else GROUPED_BLOCK, NARROW_ITEM if way in (NARROW_CODES, STEPPED) else ITEM
    return align(-(-tokens // TOKENS) * (align(depth, SCALED_BLOCK) // block) * (HEADER + block * TOKENS * item) + SLACK)


def method_of(bits: int, scheme: str) -> int:
    """How a format is multiplied: with groups from 5 bits on, and always for minima, tables and powers of two; otherwise in the faster way:
    STEPPED or NARROW_CODES where available, or the row's int8."""
    if bits <= 4 and scheme == "codebook":
        return STEPPED
    if bits <= 4 and scheme not in ("mxfp", "nibble", "nvfp", "table") and AS_BYTES:
        return NARROW_CODES
    return SCALED if bits <= 4 and scheme not in ("minimum", "mxfp", "nibble", "nvfp", "super", "table") else GROUPED


def stripes_at_once(rows: int, mode: int, workers: int) -> int:
    """Stripes of each matrix in one block of work of a job over `rows` rows in all (of pairs, with GATED)."""
    full_width = STRIPES // (2 if mode == GATED else 1)
    return full_width if rows >= MIN_WORKER_BLOCKS * workers * full_width * STRIPE else 1


@inlined()
def _is_narrow(way):
    return way == NARROW_CODES and AS_BYTES


@inlined()
def _is_stepped(way):
    return way == STEPPED and AS_BYTES


@inlined()
def _block_of(way):
    """Inputs per panel block."""
    return SCALED_BLOCK if way == SCALED or _is_stepped(way) else GROUPED_BLOCK


@inlined()
def _block_nbytes(way):
    """Bytes per panel block."""
    return HEADER + _block_of(way) * TOKENS * (NARROW_ITEM if _is_narrow(way) or _is_stepped(way) else ITEM)


@kernel()
def pack_tokens(args, worker, counter):
    """Norm rows of X, quantize them and store them as panels at matrix slot 0's OUT. Blocks are panels."""
    a = i64_at(args)
    tokens, depth = a[COUNT], a[DEPTH]
    eps = float32(f64_at(args)[EPS])
    way = a[WAY]
    block = _block_of(way)
    padded = (depth + SCALED_BLOCK - 1) // SCALED_BLOCK * SCALED_BLOCK
    rows = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    minima = rows + 4 * TOKENS * padded
    factor = -SCALED_SHIFT if way == SCALED else 1  # sums of scaled weights start at the negative shift
    block_nbytes = _block_nbytes(way)
    panels = (tokens + TOKENS - 1) // TOKENS
    while True:
        panel = fetch_add(counter, 1)
        if panel >= panels:
            return
        start = a[FIRST + OUT] + panel * (padded // block) * block_nbytes
        first, kind = panel * TOKENS, a[NORM] % ONE_SCALE
        plain = kind == NORM_NONE and depth == padded and first + TOKENS <= tokens  # then rows are read in place
        origin = a[X] + 4 * first * depth if plain else rows
        for t in range(TOKENS):
            row = origin + 4 * t * padded
            if not plain:
                normed_row(a[X] + 4 * (first + t) * depth, row, depth if first + t < tokens else 0, padded, kind, a[NORM_WEIGHT],
                           a[NORM_BIAS], eps)
            u32_at(minima)[t] = uint32(least_of(row, padded, a[NORM]))
        for index in range(padded // block):
            x, to = origin + 4 * index * block, start + index * block_nbytes
            if _is_stepped(way):
                stepped_pack_panel(x, 4 * padded, block, to, factor, minima)
            elif _is_narrow(way):
                narrow_pack_panel(x, 4 * padded, block, to, factor, minima)
            else:
                pack_panel(x, 4 * padded, block, to, factor, minima)


@inlined()
def _product(a, matrix, way, scratch, panel, sums, span, ahead):
    wide = scratch + WIDE_AT
    if _is_stepped(way):
        stepped_product(wide, panel, sums, span, SCALED_BLOCK, ahead)
        return
    if way == SCALED:
        block_product(wide, panel, sums, span, SCALED_BLOCK, ahead)
        return
    factors, shifts = scratch + FACTORS_AT, scratch + SHIFTS_AT
    stride = 4 * STRIPE if a[matrix + SCHEME] == AFFINE or a[matrix + SCHEME] == OFFSET else 0
    if a[matrix + SCHEME] == NIBBLE:
        half_minimum_product(wide, factors, shifts, 8 * STRIPE, panel, sums, span)
        return
    if _is_narrow(way):
        if a[matrix + SCHEME] == SUPER or a[matrix + SCHEME] == MINIMUM:
            narrow_minimum_product(wide, factors, shifts, 4 * STRIPE, panel, sums, span)
        elif a[matrix + GROUP] == 16:
            narrow_half_product(wide, factors, shifts, stride, panel, sums, span)
        else:
            narrow_product(wide, factors, shifts, stride, panel, sums, span)
    elif a[matrix + SCHEME] == MINIMUM and a[matrix + BITS] == 8:
        lowered_minimum_product(wide, factors, shifts, 4 * STRIPE, panel, sums, span)
    elif a[matrix + SCHEME] == SUPER or a[matrix + SCHEME] == MINIMUM:
        minimum_product(wide, factors, shifts, 4 * STRIPE, panel, sums, span)
    elif a[matrix + GROUP] == 16:
        half_group_product(wide, factors, shifts, stride, panel, sums, span)
    elif stride != 0:
        shifted_group_product(wide, factors, shifts, stride, panel, sums, span)
    else:
        group_product(wide, factors, shifts, stride, panel, sums, span)


@inlined()
def _add_outliers(a, matrix, way, row, sums, panels, panel_nbytes, block, scales, scratch):
    """Add the outliers' contribution to a stripe's sums. Row scales are applied to the sums as well, and replaced by ones."""
    values, factors, extra = f32_at(sums), f32_at(scales), f32_at(scratch + OUTLIERS_AT)
    for t in range(panels * TOKENS):
        for i in range(STRIPE):
            values[t * STRIPE + i] *= factors[i]
    for i in range(STRIPE):
        factors[i] = ONE
    for i in range(min(STRIPE, a[matrix + ROWS] - row)):
        begin, end, positions, weights = outliers_of(a, matrix, (row + i) // TILE_ROWS)
        while begin < end and (u32_at(positions)[begin] >> uint32(28)) < i % TILE_ROWS:
            begin += 1
        last = begin
        while last < end and (u32_at(positions)[last] >> uint32(28)) == i % TILE_ROWS:
            last += 1
        if last > begin:
            for panel in range(panels):
                where, count, x = positions + 4 * begin, last - begin, a[X] + panel * panel_nbytes
                if _is_stepped(way):
                    stepped_outlier_sums(where, weights + 2 * begin, count, x, block, _block_nbytes(way), scratch + OUTLIERS_AT)
                elif _is_narrow(way):
                    narrow_outlier_sums(where, weights + 2 * begin, count, x, block, _block_nbytes(way), scratch + OUTLIERS_AT)
                else:
                    outlier_sums(where, weights + 2 * begin, count, x, block, _block_nbytes(way), scratch + OUTLIERS_AT)
                for t in range(TOKENS):
                    values[(panel * TOKENS + t) * STRIPE + i] += extra[t]


@inlined()
def bias_of(a, matrix, row, scratch):
    """Copy a stripe's bias to BIAS_AT; zero past the last row."""
    bias, rows = f32_at(scratch + BIAS_AT), min(STRIPE, a[matrix + ROWS] - row)
    for i in range(STRIPE):
        bias[i] = f32_at(a[matrix + BIAS])[row + i] if a[matrix + BIAS] != 0 and i < rows else ZERO


@inlined()
def _write(a, matrix, mode, row, sums, scales, bias, first, tokens):
    """y of a stripe for `tokens` tokens from `first` on; `mode` ADD accumulates."""
    rows, stride = min(STRIPE, a[matrix + ROWS] - row), 4 * a[matrix + OUT_STRIDE]
    out = a[matrix + OUT] + 4 * row + first * stride
    if rows == STRIPE:
        if mode == ADD:
            finish_adding(sums, scales, bias, out, stride, tokens)
        else:
            finish(sums, scales, bias, out, stride, tokens)
        return
    finish(sums, scales, bias, sums, 4 * STRIPE, tokens)
    for t in range(tokens):
        values, y = f32_at(sums + 4 * t * STRIPE), f32_at(out + t * stride)
        for i in range(rows):
            y[i] = y[i] + values[i] if mode == ADD else values[i]


@inlined()
def close(a, matrix, mode, row, number, used, sums, sums_nbytes, scratch, first, tokens):
    """Finish the sums of `tokens` tokens from `first` on for stripe `number` of a block that begins at row `row` of its matrix: write y or,
    with GATED, keep the gate for the up matrix, whose stripe comes `used` numbers later and writes both."""
    scales, bias = scratch + ROWS_AT + 4 * number * STRIPE, scratch + BIAS_AT
    if mode != GATED:
        _write(a, matrix, mode, row, sums, scales, bias, first, tokens)
        return
    finish(sums, scales, bias, sums, 4 * STRIPE, tokens)
    if number >= used:
        gate = sums - used * sums_nbytes
        gate_values(gate, sums, tokens * STRIPE, a[ACT])
        _write(a, matrix - FIELDS, mode, row, gate, scratch + ONES_AT, scratch + NO_BIAS_AT, first, tokens)


@kernel()
def multiply(args, worker, counter):
    """y[t, n] for many t from the panels at X. Blocks are AT_ONCE stripes of a matrix, with GATED of the gate and the up matrix.

    A panel's outputs are written after its last products: the stores overlap with the next panel's multiplications.
    """
    a = i64_at(args)
    tokens, depth, mode, way = a[COUNT], a[DEPTH], a[MODE], a[WAY]
    block = _block_of(way)
    block_nbytes = _block_nbytes(way)
    padded = (depth + SCALED_BLOCK - 1) // SCALED_BLOCK * SCALED_BLOCK
    panel_nbytes = padded // block * block_nbytes
    panels = (tokens + TOKENS - 1) // TOKENS
    scratch = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    sums_nbytes = 4 * panels * TOKENS * STRIPE
    both = 2 if mode == GATED else 1
    share = a[AT_ONCE] * STRIPE  # rows of a matrix in a block of work
    for i in range(STRIPE):
        f32_at(scratch + NO_BIAS_AT)[i], f32_at(scratch + ONES_AT)[i] = ZERO, ONE
    while True:
        matrix, index = matrix_of(a, fetch_add(counter, 1), FIRST, a[MATRICES] // both, both * FIELDS, ROWS, share)
        if matrix < 0:
            return
        row = index * share
        used = (min(share, a[matrix + ROWS] - row) + STRIPE - 1) // STRIPE  # number of stripes of each matrix
        for number in range(both * used):
            stripe_matrix = matrix + number // used * FIELDS
            prepare_rows(a, stripe_matrix, stored_depth(a, stripe_matrix, depth), way, row + number % used * STRIPE, scratch, number)
        for i in range(both * used * panels * TOKENS * STRIPE):
            f32_at(scratch + SUMS_AT)[i] = ZERO
        for start in range(0, padded, SPAN):
            last = start + SPAN >= padded
            for number in range(both * used):
                stripe_matrix, first = matrix + number // used * FIELDS, row + number % used * STRIPE
                stored = stored_depth(a, stripe_matrix, depth)
                span = min(SPAN, min(stored, padded) - start)  # stored super-blocks may extend beyond the packed activations
                expand_stripe(a, stripe_matrix, stored, way, first, start, span, scratch, number)
                x, sums = a[X] + start // block * block_nbytes, scratch + SUMS_AT + number * sums_nbytes
                sparse = a[stripe_matrix + SPARSE] != 0
                if last:
                    bias_of(a, stripe_matrix, first, scratch)
                for panel in range(panels):
                    at = sums + panel * 4 * TOKENS * STRIPE
                    _product(a, stripe_matrix, way, scratch, x, at, span, panel_nbytes)
                    x += panel_nbytes
                    if last and not sparse:
                        panel_tokens = min(TOKENS, tokens - panel * TOKENS)
                        close(a, stripe_matrix, mode, first, number, used, at, sums_nbytes, scratch, panel * TOKENS, panel_tokens)
                if last and sparse:
                    _add_outliers(a, stripe_matrix, way, first, sums, panels, panel_nbytes, block, scratch + ROWS_AT + 4 * number * STRIPE,
                                  scratch)
                    close(a, stripe_matrix, mode, first, number, used, sums, sums_nbytes, scratch, 0, tokens)


@kernel()
def multiply_exact(args, worker, counter):
    """y[t, n] in float32, `mode` PLAIN or ADD, from panels [panel][depth][TILE_COLUMNS] at X. Blocks are MANY_BLOCK rows."""
    a = i64_at(args)
    tokens, depth = a[COUNT], a[DEPTH]
    panels = (tokens + TILE_COLUMNS - 1) // TILE_COLUMNS
    columns = panels * TILE_COLUMNS
    wide = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    sums = wide + 4 * MANY_BLOCK * DEPTH_BLOCK
    tile_scratch = sums + 4 * MANY_BLOCK * columns
    while True:
        matrix, block = matrix_of(a, fetch_add(counter, 1), FIRST, a[MATRICES], FIELDS, ROWS, MANY_BLOCK)
        if matrix < 0:
            return
        first = block * MANY_BLOCK
        rows = min(MANY_BLOCK, a[matrix + ROWS] - first)
        strips = (rows + FLOAT_ROWS - 1) // FLOAT_ROWS
        stored = stored_depth(a, matrix, depth)
        for start in range(0, depth, DEPTH_BLOCK):
            span = min(DEPTH_BLOCK, depth - start)
            for row in range(0, rows, TILE_ROWS):
                expand_f32(a, matrix, stored, first + row, start, (span + TILE - 1) // TILE * TILE, tile_scratch,
                           wide + 4 * row * DEPTH_BLOCK, 4 * DEPTH_BLOCK)
            for row in range((rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS, strips * FLOAT_ROWS):
                for k in range(span):
                    f32_at(wide + 4 * row * DEPTH_BLOCK)[k] = ZERO
            for panel in range(panels):
                b = a[X] + 4 * (panel * depth + start) * TILE_COLUMNS
                for strip in range(strips):
                    tile_product(wide + 4 * strip * FLOAT_ROWS * DEPTH_BLOCK, 4 * DEPTH_BLOCK, b, 4 * TILE_COLUMNS,
                                 sums + 4 * (strip * FLOAT_ROWS * columns + panel * TILE_COLUMNS), 4 * columns, span, 1 if start else 0)
        store_block(sums, columns, tokens, first, rows, a[matrix + BIAS], a[matrix + OUT], a[matrix + OUT_STRIDE], a[MODE])
