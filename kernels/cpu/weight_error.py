"""How far quantized rows are from the original, in one pass over both: every conversion measures all of its weights.

A row is dequantized into a buffer that stays in the first-level cache, then compared. The sums of a row are float32 in lanes, rows add
up in float64; the meaning is `quant.codes.dequantize`, up to the rounding of sums.
"""

from __future__ import annotations

import numpy as np
from numba import float32

from ..compile import REASSOCIATE, jit


@jit("UniTuple(float64, 2)(float32[:, ::1], uint8[:, ::1], uint8[:, ::1], uint8[:, ::1], float32[::1], float32[::1], float32[::1], int64)",
     REASSOCIATE)
def squared_error(w, codes, scales, zeros, rows, levels, factors, group):
    """Sums over w float32 [N, K] and codes [N, K] with scales [N, G] (codes of `factors`) and rows [N].

    `levels` float32 [256] is what a code means, or has no entry; then zeros [N, G] are subtracted from the codes.
    """
    n, depth = w.shape
    error = squares = 0.0
    values = np.empty(depth, np.float32)
    for i in range(n):
        if len(levels) > 0:
            for k in range(depth):
                values[k] = levels[codes[i, k]]
        for g in range(scales.shape[1]):
            start, stop, factor = g * group, min(depth, (g + 1) * group), rows[i] * factors[scales[i, g]]
            if len(levels) > 0:
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
    return error, squares
