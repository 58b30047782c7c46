"""Matrix products with streamed weights: the matrix is never entirely in memory, only some rows at a time, each under a lease.

Every output is one sum over the inputs in an order that does not depend on other rows, so results are bit-identical to the whole matrix.
Jobs collected before a lease has to be waited for run first: the processor works while the disk reads. Rows that have arrived are
multiplied as one job, since threads wait for each other between jobs, and Python for all. The input is packed once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from . import linear, linear_amx, low_bit

if TYPE_CHECKING:
    from ...quant.weight import Lease, Linear, Norm, RowPart
    from .ops import CpuOps

_Product = tuple["RowPart", "Linear", np.ndarray]  # rows of a matrix, the product with them, where their outputs go


def run(ops: CpuOps, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear], outs: Sequence[np.ndarray], mode: int, act: str) -> None:
    """`CpuOps._matrix` for matrices of which some, or all, are streamed."""
    with ops.shared_input():
        if mode == linear.GATED:
            _gated(ops, x, norm, linears, outs[0], act)
            return
        whole = [i for i, each in enumerate(linears) if not each.weight.in_parts]
        if whole:
            ops._matrix(x, norm, [linears[i] for i in whole], [outs[i] for i in whole], mode, act)
        products = [product for each, out in zip(linears, outs, strict=True) for product in _products(each, out)]
        parts = (list(part) for _, part in groupby(products, lambda product: product[0].part))
        _run_as_loaded(ops, x, norm, parts, low_bit.MOST_MATRICES, mode, act)


def run_pair(ops: CpuOps, x: np.ndarray, norm: Norm | None, pair: Sequence[Linear], outs: Sequence[np.ndarray]) -> None:
    """Products with a gate and an up matrix whose gate is modified in between: the same rows of both are one part."""
    with ops.shared_input():
        parts = map(list, zip(*map(_products, pair, outs), strict=True))
        _run_as_loaded(ops, x, norm, parts, low_bit.MOST_MATRICES, linear.PLAIN, "none")


def _gated(ops: CpuOps, x: np.ndarray, norm: Norm | None, pair: Sequence[Linear], out: np.ndarray, act: str) -> None:
    """A gate and its up matrix: the same rows of both are one part."""
    first = [each.parts[0][1] for each in pair]
    runner = ops._runner(first[0], len(x), act)
    at_once = (len({low_bit.kind_of(each.weight) for each in first}) == 1 and low_bit.one_way(first)
               and runner not in (type(ops).many_columns, linear_amx.run_many, low_bit.run_exact))
    up = out if at_once else ops.workspace.take("up", *out.shape)
    parts = map(list, zip(_products(pair[0], out), _products(pair[1], up), strict=True))
    if at_once:  # one of the kernels that gate what they multiply takes several pairs
        _run_as_loaded(ops, x, norm, parts, low_bit.MOST_MATRICES if runner is low_bit.run_many else 2, linear.GATED, act)
    else:
        _run_as_loaded(ops, x, norm, parts, low_bit.MOST_MATRICES, linear.PLAIN, "none")
        ops.gate(out, up, act)


def _products(each: Linear, out: np.ndarray) -> list[_Product]:
    return [(rows, product, out[:, rows.first : rows.first + rows.weight.shape[0]]) for rows, product in each.parts]


def _run_as_loaded(ops: CpuOps, x: np.ndarray, norm: Norm | None, parts: Iterable[list[_Product]], most: int, mode: int, act: str) -> None:
    """The products of all parts in order, merging those already loaded into jobs of at most `most` matrices."""
    waiting: list[_Product] = []

    def note() -> None:
        ops._matrix(x, norm, [each for _, each, _ in waiting], [out for *_, out in waiting], mode, act)
        waiting.clear()

    with _Leases(ops) as leases:
        for part in parts:
            lease = part[0][0].lease
            has_come = lease is None or leases.join(lease)
            if waiting and (not has_come or len(waiting) + len(part) > most):
                note()
            if not has_come:
                leases.wait(lease)
            waiting += part
        note()


class _Leases:
    """Leases of the parts that pending jobs read, held until the jobs have run. Resident parts have none."""

    def __init__(self, ops: CpuOps) -> None:
        self._ops = ops
        self._held: list[Lease] = []

    def join(self, lease: Lease) -> bool:
        """Hold another lease if that does not block."""
        if not lease.join():
            return False
        self._held.append(lease)
        return True

    def wait(self, lease: Lease) -> None:
        """Hold this lease and no other; pending jobs run before the wait."""
        self._ops.flush()
        self._give_back()
        lease.__enter__()
        self._held.append(lease)

    def _give_back(self, *error: object) -> None:
        held, self._held = self._held, []
        for lease in held:
            lease.__exit__(*error)

    def __enter__(self) -> _Leases:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if self._held and error[0] is None:
                self._ops.flush()
        finally:
            self._give_back(*error)
