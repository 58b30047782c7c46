"""HQQ (half-quadratic quantization, https://mobiusml.github.io/hqq_blog): scales and zeros that a few large errors hardly move.

Beside the codes stands an estimate of the errors, shrunk towards sparsity (the norm of exponent 0.7), and the grid is fitted to what
remains: in turn, with growing weight on the fit. Starts from `rtn`; a group keeps what has the smaller norm in the end, after scale and
zero were rounded to what is stored. A width alone means the affine format of the size that other methods give it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ... import UsageError
from ..codes import Codes, expand_groups, scale_values
from ..spec import QuantSpec
from ..stats import Stats
from . import rtn

if TYPE_CHECKING:
    from ...kernels.threads import ThreadPool

NEEDS: frozenset[str] = frozenset()
EXPONENT, TURNS = 0.7, 20
WEIGHT, GROWTH = 1.0, 1.1  # of the fit, in units of a group's scale
ROWS_AT_ONCE = 64
SMALLEST = 1e-6
SHORT = {f"{bits}bit": f"affine{bits}:64" for bits in (8, 6, 5, 4, 3, 2)}


def check(spec: QuantSpec) -> None:
    """Raises UsageError for a scheme without a zero and for a spec with outliers."""
    if spec.scheme != "affine":
        raise UsageError(f"hqq optimizes zero points, which {spec} does not have",
                         f"an affine format, such as affine{spec.bits}:64, or --method rtn")
    if spec.outliers:
        raise UsageError(f"hqq cannot make {spec}: it stores no outliers", "--method spqr")


def quantize(rows: np.ndarray, spec: QuantSpec, stats: Stats | None = None, pool: ThreadPool | None = None) -> Codes:
    """Rows float32 [n, K] -> Codes. Raises what `check` does, EffllmError where a weight is NaN or infinite."""
    check(spec)
    start = rtn.quantize(rows, spec, None, pool)
    parts = [_improved(np.ascontiguousarray(rows[begin : begin + ROWS_AT_ONCE], np.float32), spec, _rows(start, begin))
             for begin in range(0, len(rows), ROWS_AT_ONCE)]
    return replace(start, **{name: np.concatenate([getattr(part, name) for part in parts]) for name in ("codes", "scales", "zeros")})


def _rows(codes: Codes, begin: int) -> Codes:
    cut = slice(begin, begin + ROWS_AT_ONCE)
    return Codes(codes.codes[cut], codes.scales[cut], codes.zeros[cut], codes.rows[cut])


def _improved(rows: np.ndarray, spec: QuantSpec, start: Codes) -> Codes:
    n, depth = rows.shape
    groups, top = start.scales.shape[1], (1 << spec.bits) - 1
    inside = np.arange(groups * spec.group).reshape(groups, spec.group) < depth
    # groups of rows of zeros, or too small to tell from zeros, stay as they are
    unit = (start.rows[:, None] * scale_values()[start.scales]).astype(np.float64)
    live = unit > 0
    unit = np.where(live, unit, 1.0)[..., None]
    x = np.pad(rows, ((0, 0), (0, groups * spec.group - depth))).reshape(n, groups, spec.group) / unit  # in units of the first scale
    scale, zero = np.ones((n, groups, 1)), start.zeros[..., None].astype(np.float64)
    weight = WEIGHT
    for _ in range(TURNS):
        q = np.clip(np.rint(x / scale + zero), 0, top)
        kept = x - _shrunk(x - scale * (q - zero), weight)
        zero = np.clip(_mean(q - kept / scale, inside), 0, top)
        v = (q - zero) * inside
        square = (v * v).sum(-1, keepdims=True)
        scale = np.where(square > 0, (kept * v).sum(-1, keepdims=True) / np.maximum(square, SMALLEST), scale)
        scale = np.clip(scale, 0.5, 2.0)
        weight *= GROWTH
    codes = np.clip(np.rint(start.scales * scale[..., 0]), 1, 255)
    ratio = (codes / np.maximum(start.scales, 1))[..., None]
    best = _norm(x, np.ones_like(scale), start.zeros[..., None], top, inside)
    scales, zeros = start.scales.copy(), start.zeros.copy()
    for side in (np.floor, np.ceil):
        rounded = side(zero)
        chosen = _norm(x, ratio, rounded, top, inside)
        better = (chosen < best) & live
        best = np.where(better, chosen, best)
        scales, zeros = np.where(better, codes, scales).astype(np.uint8), np.where(better, rounded[..., 0], zeros).astype(np.uint8)
    factors = expand_groups(start.rows[:, None] * scale_values()[scales], spec, depth)
    q = np.divide(rows, factors, out=np.zeros_like(rows), where=factors > 0)
    made = np.clip(np.rint(q + expand_groups(zeros, spec, depth)), 0, top).astype(np.uint8)
    return Codes(made, scales, zeros, start.rows)


def _shrunk(error: np.ndarray, weight: float) -> np.ndarray:
    """The errors that the norm would rather pay for than the fit."""
    size = np.abs(error)
    return np.sign(error) * np.maximum(size - np.maximum(size, SMALLEST) ** (EXPONENT - 1) / weight, 0)


def _mean(values: np.ndarray, inside: np.ndarray) -> np.ndarray:
    return (values * inside).sum(-1, keepdims=True) / inside.sum(-1, keepdims=True)


def _norm(x: np.ndarray, scale: np.ndarray, zero: np.ndarray, top: int, inside: np.ndarray) -> np.ndarray:
    """Sum of |error| ** EXPONENT per group [n, G]."""
    error = x - scale * (np.clip(np.rint(x / scale + zero), 0, top) - zero)
    return ((np.abs(error) * inside) ** EXPONENT).sum(-1)
