"""Data-free quantization: the row-by-row search for codes and scales, which dominates quantization time.

Per row: a row scale under which the group with the largest weights gets the largest scale code; the least-squares code of every group under
it; and from these the least-squares row scale, rounded to bfloat16. Grids, whose scale codes are fine, are then searched again under that
scale. A row's result depends on nothing but the row.
"""

from __future__ import annotations

import numpy as np
from numpy import float32, float64, int64, uint32

from ..compile import jit, kernel
from ..lazy_numba import inlined
from ..tiles import CODEBOOK_SCALES
from ..workspace import address
from .intrinsics import bits_to_f32, call_kernel, f32_at, f32_to_bits, fetch_add, i64_at, u8_at
from .quantize_search_loops import FINE, LANES, book_codes, book_error, extent, grid_codes, grid_error

# Slots of the argument block. CODES uint8 [ROWS, DEPTH], SCALES (and ZEROS, 0: none) uint8 [ROWS, groups], ROW_SCALES float32 [ROWS], NaN
# if a row holds NaN or infinity. LOW and HIGH: range of a codebook of COUNT levels, or of a grid (COUNT 0), whose codes have BIAS added. A
# codebook has TABLES (`TABLE_NBYTES`), STEPS float32 [16] and MIN_LEVEL, the smallest magnitude of a level. Scales are tried from NARROWEST
# to WIDEST thousandths of the smallest one that covers a group.
(X, ROWS, DEPTH, GROUP, CODES, SCALES, ZEROS, ROW_SCALES, COUNT, TABLES, STEPS, MIN_LEVEL, LOW, HIGH, BIAS, NARROWEST, WIDEST, SCRATCH,
 STRIDE,
 SLOTS) = range(20)
SCRATCH_NBYTES = 1024
SUMS_AT, CODES_AT, GROUP_AT = 0, 64, 256
FIRST_TRIES, TRIES = 4, 16  # scales of a grid tried per group: before the row scale is known, and after
MAX_STEP, MAX_SCALE = float32(127.0), float32(250.0)
MIN_ROW_SCALE = float32(2.0**-116)  # row scales below count as zero: their inverses would overflow
ZERO, ONE, HALF = float32(0.0), float32(1.0), float32(0.5)

_error_16, _error_8, _error_4 = (book_error(count) for count in (16, 8, 4))
_codes_16, _codes_8, _codes_4 = (book_codes(count) for count in (16, 8, 4))


@inlined()
def _bf16(value):
    """The nearest bfloat16 value."""
    bits = f32_to_bits(value)
    return bits_to_f32((bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) & uint32(0xFFFF0000))


@inlined()
def _group_at(x, start, count, group, scratch):
    """Address of a group's weights: in place, or copied and padded with zeros where the row ends within it."""
    if count == group:
        return x + 4 * start
    source, copy = f32_at(x + 4 * start), f32_at(scratch + GROUP_AT)
    for i in range(group):
        copy[i] = source[i] if i < count else ZERO
    return scratch + GROUP_AT


@inlined()
def _book_step(a, x, need, largest, scale):
    """The index of the best step of a group under a row scale."""
    steps, target = f32_at(a[STEPS]), need / scale
    if largest * float32(2.0) <= float32(a[MIN_LEVEL]) * steps[1] * scale:  # nearer to zero than to any level
        return int64(0)
    narrowest, widest = target * float32(a[NARROWEST]) * float32(0.001), target * float32(a[WIDEST]) * float32(0.001)
    index = int64(1)
    while index < CODEBOOK_SCALES - 1 and steps[index] < narrowest:
        index += 1
    chosen, best, count = index, int64(0), a[COUNT]
    while True:
        inverse = float32(FINE) / (steps[index] * scale)
        if count == 16:
            error = _error_16(x, inverse, a[TABLES])
        elif count == 8:
            error = _error_8(x, inverse, a[TABLES])
        else:
            error = _error_4(x, inverse, a[TABLES])
        error *= int64(steps[index]) * int64(steps[index])
        if best == 0 or error < best - 1:  # stored plus one: 0 means none yet
            chosen, best = index, error + 1
        index += 1
        if index >= CODEBOOK_SCALES or steps[index] > widest:
            return chosen


@inlined()
def _book_row(a, x, n, scale, groups, scratch):
    """Search and store every group of a row under a codebook; returns the least-squares row scale."""
    sums, factors, steps = i64_at(scratch + SUMS_AT), f32_at(scratch + SUMS_AT), f32_at(a[STEPS])
    scales, scale_codes = u8_at(a[SCALES] + n * groups), u8_at(scratch + CODES_AT)
    product, square = int64(0), int64(0)
    for g in range(groups):
        start = g * LANES
        count = min(LANES, a[DEPTH] - start)
        at = _group_at(x, start, count, LANES, scratch)
        extent(at, 1, scratch + SUMS_AT)
        low, high = factors[0], factors[1]
        index = _book_step(a, at, _need(a, low, high), max(high, -low), scale)
        inverse = float32(FINE) / (steps[index] * scale) if index > 0 else ZERO
        stored_codes = a[CODES] + n * a[DEPTH] + start
        codes = stored_codes if count == LANES else scratch + CODES_AT
        if a[COUNT] == 16:
            _codes_16(at, inverse, a[TABLES], codes, scratch + SUMS_AT)
        elif a[COUNT] == 8:
            _codes_8(at, inverse, a[TABLES], codes, scratch + SUMS_AT)
        else:
            _codes_4(at, inverse, a[TABLES], codes, scratch + SUMS_AT)
        power = int64(steps[index]) * int64(steps[index])
        product += power * sums[0]
        square += power * sums[1]
        scales[g] = index
        if count < LANES:
            for i in range(count):
                u8_at(stored_codes)[i] = scale_codes[i]
    return float32(float64(scale) * (float64(product) / float64(square))) if square > 0 else ZERO


@inlined()
def _need(a, low, high):
    """The smallest scale under which a codebook or grid covers a group."""
    if a[COUNT] > 0:
        return max(high / float32(a[HIGH]), low / float32(a[LOW]))
    if a[ZEROS] != 0:
        return (max(high, ZERO) - min(low, ZERO)) / float32(a[HIGH] - a[LOW])
    return max(high / (float32(a[HIGH]) + HALF), low / (float32(a[LOW]) - HALF))


@inlined()
def _zero_of(a, low, high, factor):
    """The code that represents 0 for a group from `low` to `high` (with 0 in between) under a scale."""
    if a[ZEROS] == 0:
        return a[BIAS]
    zero = np.floor(float32(a[HIGH] - a[LOW]) * HALF - (low + high) * HALF / factor + HALF)
    return int64(min(max(zero, ZERO), float32(a[HIGH] - a[LOW])))


@inlined()
def _grid_group(a, x, low, high, scale, tries, scratch):
    """The best scale code of a group under a row scale: (code, zero). Leaves its codes and sums in scratch."""
    sums, vectors = scratch + SUMS_AT, a[GROUP] // LANES
    target, span = _need(a, low, high) / scale, a[HIGH] - a[LOW]
    low, high = min(low, ZERO), max(high, ZERO)
    best, chosen, last = float32(np.inf), int64(0), int64(0)
    for candidate in range(tries):
        share = float32(a[WIDEST] * (tries - 1 - candidate) + a[NARROWEST] * candidate) / float32(1000 * (tries - 1))
        code = int64(min(np.floor(target * share + HALF), float32(255.0)))
        if code == last or code == 0:
            continue
        last = code
        zero = _zero_of(a, low, high, float32(code) * scale)
        error = grid_error(x, vectors, ONE / (float32(code) * scale), float32(-zero), float32(span - zero), zero, int64(0), int64(0))
        error *= float32(code) * float32(code)
        if error < best:
            best, chosen = error, code
    factor = float32(max(chosen, 1)) * scale
    zero = _zero_of(a, low, high, factor)
    grid_codes(x, vectors, ONE / factor if chosen > 0 else ZERO, float32(-zero), float32(span - zero), zero, scratch + CODES_AT, sums)
    return chosen, zero


@inlined()
def _grid_row(a, x, n, scale, groups, tries, scratch):
    """Search and store every group of a row under a grid; returns the least-squares row scale."""
    factors, scale_codes = f32_at(scratch + SUMS_AT), u8_at(scratch + CODES_AT)
    scales = u8_at(a[SCALES] + n * groups)
    product, square = float64(0.0), float64(0.0)
    for g in range(groups):
        start = g * a[GROUP]
        count = min(a[GROUP], a[DEPTH] - start)
        at = _group_at(x, start, count, a[GROUP], scratch)
        extent(at, a[GROUP] // LANES, scratch + SUMS_AT)
        code, zero = _grid_group(a, at, factors[0], factors[1], scale, tries, scratch)
        power = float64(code) * float64(code)
        product += power * float64(factors[0])
        square += power * float64(factors[1])
        scales[g] = code
        if a[ZEROS] != 0:
            u8_at(a[ZEROS] + n * groups)[g] = zero
        stored_codes = u8_at(a[CODES] + n * a[DEPTH] + start)
        for i in range(count):
            stored_codes[i] = scale_codes[i]
    return float32(float64(scale) * (product / square)) if square > 0.0 else ZERO


@inlined()
def _first_scale(a, x, groups, scratch):
    """The initial row scale: 0 for a row of zeros, NaN if the row is not finite."""
    factors, odd, largest = f32_at(scratch + SUMS_AT), ZERO, ZERO
    for g in range(groups):
        start = g * a[GROUP]
        at = _group_at(x, start, min(a[GROUP], a[DEPTH] - start), a[GROUP], scratch)
        extent(at, a[GROUP] // LANES, scratch + SUMS_AT)
        odd += factors[2]
        largest = max(largest, _need(a, factors[0], factors[1]))
    if odd != ZERO:
        return float32(np.nan)
    return largest / (MAX_STEP if a[COUNT] > 0 else MAX_SCALE)


@kernel()
def search_rows(args, worker, counter):
    """Codes, scales and row scales of every row. Blocks are rows."""
    a = i64_at(args)
    scratch = a[SCRATCH] + worker * a[STRIDE]
    groups = (a[DEPTH] + a[GROUP] - 1) // a[GROUP]
    while True:
        n = fetch_add(counter, 1)
        if n >= a[ROWS]:
            return
        x = a[X] + 4 * n * a[DEPTH]
        scale = _bf16(_first_scale(a, x, groups, scratch))
        if scale < MIN_ROW_SCALE:  # the search for zeros, which yields the codes of zero
            scale = ZERO
            if a[COUNT] > 0:
                _book_row(a, x, n, ONE, groups, scratch)
            else:
                _grid_row(a, x, n, ONE, groups, FIRST_TRIES, scratch)
        elif scale >= MIN_ROW_SCALE and a[COUNT] > 0:
            scale = _bf16(_book_row(a, x, n, scale, groups, scratch))
        elif scale >= MIN_ROW_SCALE:
            refined_scale = _bf16(_grid_row(a, x, n, scale, groups, FIRST_TRIES, scratch))
            scale = refined_scale if refined_scale < MIN_ROW_SCALE else _bf16(_grid_row(a, x, n, refined_scale, groups, TRIES, scratch))
        f32_at(a[ROW_SCALES])[n] = scale


def run_alone(args: np.ndarray) -> None:
    """`search_rows` on the calling thread, without a pool."""
    counter = np.zeros(1, np.int64)  # kept alive while the kernel runs
    call_alone(search_rows.address, address(args), address(counter))


@jit("void(int64, int64, int64)")
def call_alone(function, args, counter):
    call_kernel(function, args, 0, counter)
