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

from . import linear, low_bit
from .panel_products import PanelProduct

if TYPE_CHECKING:
    from ...quant.weight import Lease, Linear, Norm, RowPart
    from .ops import CpuOps

_Product = tuple["RowPart", "Linear", np.ndarray]  # (rows of a matrix, the product with them, where their outputs go)


def run(ops: CpuOps, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear], outs: Sequence[np.ndarray], mode: int, act: str) -> None:
    """`CpuOps._run_stage` if some or all of the matrices are streamed."""
    with ops.shared_input():
        if mode == linear.GATED:
            _gated(ops, x, norm, linears, outs[0], act)
            return
        resident = [i for i, matrix in enumerate(linears) if not matrix.weight.row_parts]
        if resident:
            ops._run_stage(x, norm, [linears[i] for i in resident], [outs[i] for i in resident], mode, act)
        products = [product for matrix, out in zip(linears, outs, strict=True) for product in _products(matrix, out)]
        parts = (list(part) for _, part in groupby(products, lambda product: product[0].part_index))
        _run_as_loaded(ops, x, norm, parts, low_bit.MAX_MATRICES, mode, act)


def run_pair(ops: CpuOps, x: np.ndarray, norm: Norm | None, pair: Sequence[Linear], outs: Sequence[np.ndarray]) -> None:
    """Products with a gate and an up matrix whose gate is modified in between: the same rows of both are one part."""
    with ops.shared_input():
        parts = map(list, zip(*map(_products, pair, outs), strict=True))
        _run_as_loaded(ops, x, norm, parts, low_bit.MAX_MATRICES, linear.PLAIN, "none")


def _gated(ops: CpuOps, x: np.ndarray, norm: Norm | None, pair: Sequence[Linear], out: np.ndarray, act: str) -> None:
    """A gate and its up matrix: the same rows of both are one part."""
    first = [matrix.part_linears[0][1] for matrix in pair]
    runner = ops._select_kernel(first[0], len(x), act)
    at_once = (len({low_bit.kind_of(matrix.weight) for matrix in first}) == 1 and low_bit.can_share_job(first)
               and not isinstance(runner, PanelProduct))
    up = out if at_once else ops.workspace.take("up", *out.shape)
    parts = map(list, zip(_products(pair[0], out), _products(pair[1], up), strict=True))
    if at_once:  # kernels that apply gates take several pairs at once
        _run_as_loaded(ops, x, norm, parts, low_bit.MAX_MATRICES if runner is low_bit.run_many else 2, linear.GATED, act)
    else:
        _run_as_loaded(ops, x, norm, parts, low_bit.MAX_MATRICES, linear.PLAIN, "none")
        ops.gate(out, up, act)


def _products(matrix: Linear, out: np.ndarray) -> list[_Product]:
    return [(rows, product, out[:, rows.first_row : rows.first_row + rows.weight.shape[0]]) for rows, product in matrix.part_linears]


def _run_as_loaded(ops: CpuOps, x: np.ndarray, norm: Norm | None, parts: Iterable[list[_Product]], limit: int, mode: int, act: str) -> None:
    """The products of all parts in order, merging those already loaded into jobs of at most `limit` matrices."""
    waiting: list[_Product] = []

    def note() -> None:
        ops._run_stage(x, norm, [matrix for _, matrix, _ in waiting], [out for *_, out in waiting], mode, act)
        waiting.clear()

    with _Leases(ops) as leases:
        for part in parts:
            lease = part[0][0].lease
            has_come = lease is None or leases.join(lease)
            if waiting and (not has_come or len(waiting) + len(part) > limit):
                note()
            if not has_come:
                leases.wait(lease)
            waiting += part
        note()


class _Leases:
    """Leases of the parts that pending jobs read, held until the jobs have run. Resident parts have none."""

    def __init__(self, ops: CpuOps) -> None:
        self._ops = ops
        self._leases: list[Lease] = []

    def join(self, lease: Lease) -> bool:
        """Hold another lease if that does not block."""
        if not lease.join():
            return False
        self._leases.append(lease)
        return True

    def wait(self, lease: Lease) -> None:
        """Hold this lease and no other; pending jobs run before the wait."""
        self._ops.flush()
        self._give_back()
        lease.__enter__()
        self._leases.append(lease)

    def _give_back(self, *error: object) -> None:
        leases, self._leases = self._leases, []
        for lease in leases:
            lease.__exit__(*error)

    def __enter__(self) -> _Leases:
        return self

    def __exit__(self, *error: object) -> None:
        try:
            if self._leases and error[0] is None:
                self._ops.flush()
        finally:
            self._give_back(*error)
