"""Quantization error of weight rows, in one pass over both versions: every conversion measures all of its weights.

A row is dequantized into a buffer that stays in the L1 cache, then compared. A row's sums are float32 in lanes, rows are added in float64;
the definition is `quant.codes.dequantize`, up to rounding of sums.
"""

from __future__ import annotations

import numpy as np
from numpy import float32

from ..compile import REASSOCIATE, jit
from ..lazy_numba import carray
from .intrinsics import f32_at, f64_at, i64_at, u8_at

# Slots of the argument block: W float32 [ROWS, DEPTH]; CODES uint8 of the same shape; SCALES uint8 [ROWS, GROUPS], indices into FACTORS
# float32; ROW_SCALES float32 [ROWS]. LEVELS float32 [256]: value of a code, or 0: then ZEROS uint8 [ROWS, GROUPS] are subtracted from the
# codes. VALUES float32 [DEPTH]: scratch. SUMS float64 [2]: the results.
W, CODES, SCALES, ZEROS, ROW_SCALES, LEVELS, FACTORS, VALUES, SUMS, ROWS, DEPTH, GROUP = range(12)


@jit("void(int64)", REASSOCIATE)
def squared_error(args):
    """Sums of squared errors and of squares."""
    a = i64_at(args)
    n, depth, group = a[ROWS], a[DEPTH], a[GROUP]
    groups = (depth + group - 1) // group
    w, codes = carray(f32_at(a[W]), (n, depth)), carray(u8_at(a[CODES]), (n, depth))
    scales, zeros, rows = carray(u8_at(a[SCALES]), (n, groups)), carray(u8_at(a[ZEROS]), (n, groups)), carray(f32_at(a[ROW_SCALES]), n)
    levels, factors, values, booked = f32_at(a[LEVELS]), f32_at(a[FACTORS]), carray(f32_at(a[VALUES]), depth), a[LEVELS] != 0
    error = squares = 0.0
    for i in range(n):
        if booked:
            for k in range(depth):
                values[k] = levels[codes[i, k]]
        for g in range(groups):
            start, stop, factor = g * group, min(depth, (g + 1) * group), rows[i] * factors[scales[i, g]]
            if booked:
                for k in range(start, stop):
                    values[k] *= factor
            else:
                zero = float32(zeros[i, g])
                for k in range(start, stop):
                    values[k] = (float32(codes[i, k]) - zero) * factor
        row_error = row_squares = float32(0)
        for k in range(depth):
            off = values[k] - w[i, k]
            row_error += off * off
            row_squares += w[i, k] * w[i, k]
        error += np.float64(row_error)
        squares += np.float64(row_squares)
    f64_at(a[SUMS])[0], f64_at(a[SUMS])[1] = error, squares
