"""Quantization error of a weight: sums of squares, and their ratio in dB."""

from __future__ import annotations

import math

import numpy as np

from .codes import Codes, scale_values
from .spec import QuantSpec


def squared_error(rows: np.ndarray, codes: Codes, spec: QuantSpec) -> tuple[float, float]:
    """(sum of squared errors, sum of squares) of contiguous rows float32 [n, K]. Releases the interpreter lock."""
    from ..kernels.cpu import weight_error
    from ..kernels.workspace import address

    levels, zeros = None, codes.zeros
    if spec.scheme == "codebook":
        levels, zeros = np.zeros(256, np.float32), None
        levels[: len(codes.levels)] = codes.levels
    elif zeros is None:
        zeros = np.full(codes.scales.shape, 1 if spec.scheme == "ternary" else 1 << (spec.bits - 1), np.uint8)
    factors = scale_values(codes.steps)
    values, sums = np.empty(rows.shape[1], np.float32), np.empty(2)
    arrays = (rows, codes.codes, codes.scales, zeros, codes.rows, levels, factors)
    kinds = (np.float32, np.uint8, np.uint8, np.uint8, np.float32, np.float32, np.float32)
    if any(each is not None and (each.dtype != kind or not each.flags.c_contiguous) for each, kind in zip(arrays, kinds)):
        raise TypeError("rows or codes of another type, or not contiguous")
    block = np.array([*map(address, arrays), address(values), address(sums), *rows.shape, spec.group], np.int64)
    weight_error.squared_error(address(block))
    error, squares = (float(each) for each in sums)
    if codes.sparse is not None:  # the base was measured without its corrections
        r, k, value = codes.sparse.row, codes.sparse.col, codes.sparse.value
        code, group = codes.codes[r, k], k // np.uint32(spec.group)
        base = levels[code] if levels is not None else code.astype(np.float32) - zeros[r, group]
        off = base * factors[codes.scales[r, group]] * codes.rows[r] - rows[r, k]
        error += float((np.square(off + value, dtype=np.float64) - np.square(off, dtype=np.float64)).sum())
    return max(error, 0.0), squares


def error_db(error: float, squares: float) -> float | None:
    """10 log10(error / squares); None where nothing was lost."""
    return 10 * math.log10(error / squares) if error > 0 and squares > 0 else None
