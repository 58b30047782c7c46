"""GPTQ (arXiv 2210.17323): codes that preserve the outputs on calibration text, not the weights.

Scales and zeros are those of `rtn`, fixed before the first code is chosen, so inputs may be visited in order of power without a group
index. Each input's code compensates the errors of earlier ones. Sweeps over all codes follow, re-choosing each given all others, and
each group's scale: every step lowers the error of the outputs, e H eT.

Rows are independent. Sums are in float64, so that a code does not depend on how BLAS blocks the rows. The product of one input with a
block's is a few ten thousand multiplications: splitting it over BLAS threads costs more in synchronization than it saves.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ... import UsageError
from ...kernels.blas import one_thread
from ..codes import Codes, Sparse, bf16, scale_values
from ..spec import QuantSpec
from ..stats import Stats
from . import checked, rtn

NEEDS = frozenset({"hessian"})
BLOCK = 64  # inputs between two large products
SWEEPS = 2
PRODUCTS = 0.5 + SWEEPS  # multiplications of a weight for each input of its row, in float64: half of them are fed back, a sweep takes all
TINY = 1e-300


def check(spec: QuantSpec) -> None:
    """Raises UsageError for a spec with outliers."""
    if spec.outliers:
        raise UsageError(f"gptq cannot make {spec}: it stores no outliers", "--method spqr")


def quantize(rows: np.ndarray, spec: QuantSpec, stats: Stats | None = None, pool: object = None) -> Codes:
    """float32 rows [n, K] of a tensor -> Codes. Raises UsageError without a Hessian and for a spec that keeps outliers."""
    if stats is None or stats.hessian is None:
        raise UsageError("gptq needs calibration text", "give --calib FILE, or --method rtn")
    check(spec)
    rows = checked(rows)
    return searched(rows, spec, rtn.quantize(rows, spec, None, pool), stats)


def searched(rows: np.ndarray, spec: QuantSpec, start: Codes, stats: Stats, free: np.ndarray | None = None) -> Codes:
    """`start` with better codes and scales. Weights of `free`, bool [n, K], are kept beside their codes (`Codes.sparse`)."""
    search = Search(rows, spec, start, stats, free)
    search.feed_back()
    for _ in range(SWEEPS):
        search.sweep()
    return search.result()


class Search:
    """Codes and scales of a block of rows. Arrays lie by input, [K, n], because inputs are visited one by one; `scale` float64 [G, n]
    is row * f.

    Weights of `free`, bool [n, K], may take any value: what bfloat16 holds of the rest beside their code is in `extra` [K, n].
    """

    def __init__(self, rows: np.ndarray, spec: QuantSpec, start: Codes, stats: Stats, free: np.ndarray | None = None) -> None:
        self.spec, self.start, self.stats = spec, start, stats
        self.weights = np.ascontiguousarray(rows.T, np.float64)
        self.codes, self.scales = np.ascontiguousarray(start.codes.T), np.ascontiguousarray(start.scales.T)
        self.row = start.rows.astype(np.float64)
        self._factors = scale_values(start.steps).astype(np.float64)
        self._ascending = np.argsort(self._factors, kind="stable").astype(np.uint8)
        ascending = self._factors[self._ascending]
        self._between = (ascending[1:] + ascending[:-1]) / 2
        if spec.scheme == "codebook":
            self._levels = start.levels.astype(np.float64)
            self._thresholds = (self._levels[1:] + self._levels[:-1]) / 2
        self._most = 2 if spec.scheme == "ternary" else (1 << spec.bits) - 1
        self.zeros = None if start.zeros is None else start.zeros.T.astype(np.float64)
        self.scale = self.row * self._factors[self.scales]
        self.free = None if free is None else np.ascontiguousarray(free.T)
        self.extra = None if free is None else np.zeros_like(self.weights)

    def feed_back(self) -> None:
        """One pass in the order of power, each input making up for the errors of those before it."""
        order, feedback = self.stats.order, self.stats.feedback
        errors = np.zeros_like(self.weights)  # in that order
        for begin in range(0, len(order), BLOCK):
            end = min(len(order), begin + BLOCK)
            asked = feedback[:begin, begin:end].T.astype(np.float64) @ errors[:begin]
            within = np.ascontiguousarray(feedback[begin:end, begin:end].T, np.float64)
            with one_thread():
                for at, column in enumerate(order[begin:end]):
                    weights = self.weights[column]
                    wanted = weights + asked[at] + within[at, :at] @ errors[begin : begin + at]
                    errors[begin + at] = weights - self._choose(column, wanted)

    def sweep(self) -> None:
        """Each group's scale and each code again, given all others: the exact minimum along one coordinate at a time."""
        hessian, group, depth = self.stats.damped, self.spec.group, len(self.weights)
        errors = self.weights - self._dequantized()
        span = max(BLOCK, group)
        for begin in range(0, depth, span):
            end = min(depth, begin + span)
            gradient = hessian[begin:end].astype(np.float64) @ errors
            within = hessian[begin:end, begin:end].astype(np.float64)
            moved = np.zeros_like(gradient)  # of what the weights mean, since the gradient was taken
            with one_thread():
                for first in range(0, end - begin, group):
                    last = min(end - begin, first + group)
                    values = self._bound(begin + first, begin + last)
                    power = np.einsum("kn,kn->n", within[first:last, first:last] @ values, values)
                    pull = np.einsum("kn,kn->n", gradient[first:last] - within[first:last] @ moved, values)
                    moved[first:last] = values * self._rescale((begin + first) // group, pull / np.maximum(power, TINY))
                for at, column in enumerate(range(begin, end)):
                    before = self._meaning(column)
                    after = self._choose(column, before + (gradient[at] - within[at] @ moved) / within[at, at])
                    moved[at] += after - before
            errors[begin:end] -= moved

    def result(self) -> Codes:
        sparse = None
        if self.free is not None:
            row, col = np.nonzero(self.free.T)
            sparse = Sparse(row.astype(np.uint32), col.astype(np.uint32), self.extra[col, row].astype(np.float32))
        return replace(self.start, codes=np.ascontiguousarray(self.codes.T), scales=np.ascontiguousarray(self.scales.T), sparse=sparse)

    def _zero(self, group: int) -> np.ndarray | float:
        """The code that means zero: of each row for an affine weight, else one for all."""
        if self.zeros is not None:
            return self.zeros[group]
        return 1.0 if self.spec.scheme == "ternary" else float(1 << (self.spec.bits - 1))

    def _value(self, column: int) -> np.ndarray:
        """v(code) of one input, float64 [n]."""
        if self.spec.scheme == "codebook":
            return self._levels[self.codes[column]]
        return self.codes[column] - self._zero(column // self.spec.group)

    def _values(self, begin: int, end: int) -> np.ndarray:
        return np.stack([self._value(column) for column in range(begin, end)])

    def _bound(self, begin: int, end: int) -> np.ndarray:
        """v(code) of what the scale decides: of weights that are free, zero."""
        values = self._values(begin, end)
        return values if self.free is None else np.where(self.free[begin:end], 0.0, values)

    def _meaning(self, column: int) -> np.ndarray:
        """What the codes of one input mean, float64 [n]."""
        meaning = self._value(column) * self.scale[column // self.spec.group]
        return meaning if self.free is None else meaning + self.extra[column]

    def _dequantized(self) -> np.ndarray:
        return np.stack([self._meaning(column) for column in range(len(self.weights))])

    def _choose(self, column: int, wanted: np.ndarray) -> np.ndarray:
        """Take the codes nearest to `wanted`; returns what they mean, float64 [n]."""
        scale = self.scale[column // self.spec.group]
        steps = np.divide(wanted, scale, out=np.zeros_like(wanted), where=scale != 0)
        if self.spec.scheme == "codebook":
            self.codes[column] = np.searchsorted(self._thresholds, steps)
        else:
            self.codes[column] = np.clip(np.rint(steps) + self._zero(column // self.spec.group), 0, self._most)
        if self.free is not None:
            rest = wanted - self._value(column) * scale
            self.extra[column] = np.where(self.free[column], bf16(rest.astype(np.float32)), 0.0)
        return self._meaning(column)

    def _rescale(self, group: int, change: np.ndarray) -> np.ndarray:
        """Move a group's scales by about `change` [n], as near as a scale code comes; returns what they moved by."""
        before = self.scale[group].copy()
        wanted = np.divide(before + change, self.row, out=self._factors[self.scales[group]], where=self.row != 0)
        self.scales[group] = self._ascending[np.searchsorted(self._between, wanted)]
        self.scale[group] = self.row * self._factors[self.scales[group]]
        moved = self.scale[group] - before
        if self.free is not None:  # what is free keeps its value; it is rounded when its input is next
            part = slice(group * self.spec.group, (group + 1) * self.spec.group)
            self.extra[part] -= np.where(self.free[part], self._values(part.start, min(part.stop, len(self.weights))) * moved, 0.0)
        return moved
