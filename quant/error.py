"""How far a low-bit weight is from the original: sums of squares, and from them the figure that people compare."""

from __future__ import annotations

import math

import numpy as np

from .codes import Codes, scale_values
from .spec import QuantSpec

NO_LEVELS, NO_ZEROS = np.empty(0, np.float32), np.empty((0, 0), np.uint8)


def squared_error(rows: np.ndarray, codes: Codes, spec: QuantSpec) -> tuple[float, float]:
    """(sum of squared errors, sum of squares) of contiguous rows float32 [n, K]. Releases the interpreter lock."""
    from ..kernels.cpu import weight_error

    levels, zeros = NO_LEVELS, codes.zeros
    if spec.scheme == "codebook":
        levels, zeros = np.zeros(256, np.float32), NO_ZEROS
        levels[: len(codes.levels)] = codes.levels
    elif zeros is None:
        zeros = np.full(codes.scales.shape, 1 if spec.scheme == "ternary" else 1 << (spec.bits - 1), np.uint8)
    factors = scale_values(codes.steps)
    error, squares = weight_error.squared_error(rows, codes.codes, codes.scales, zeros, codes.rows, levels, factors, spec.group)
    if codes.sparse is not None:  # the base was measured without its corrections
        r, k, value = codes.sparse.row, codes.sparse.col, codes.sparse.value
        code, group = codes.codes[r, k], k // np.uint32(spec.group)
        base = levels[code] if len(levels) else code.astype(np.float32) - zeros[r, group]
        off = base * factors[codes.scales[r, group]] * codes.rows[r] - rows[r, k]
        error += float((np.square(off + value, dtype=np.float64) - np.square(off, dtype=np.float64)).sum())
    return max(error, 0.0), squares


def error_db(error: float, squares: float) -> float | None:
    """10 log10(error / squares); None where nothing was lost."""
    return 10 * math.log10(error / squares) if error > 0 and squares > 0 else None
