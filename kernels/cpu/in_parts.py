"""Products with matrices that are never in memory as a whole: some rows at a time, each for the time of a lease.

Every output is one sum over the depth, in an order that other rows have no say in, so the bits are those of the whole matrix. What was
noted before a lease runs before the wait for it: the processor works while the disk reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from . import linear, low_bit

if TYPE_CHECKING:
    from ...quant.weight import Linear, Norm, Rows
    from .ops import CpuOps


def run(ops: CpuOps, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear], outs: Sequence[np.ndarray], mode: int, act: str) -> None:
    """`CpuOps._matrix` for matrices of which some, or all, are in parts."""
    if mode == linear.GATED:
        _gated(ops, x, norm, linears, outs[0], act)
        return
    whole = [i for i, each in enumerate(linears) if not each.weight.in_parts]
    if whole:
        ops._matrix(x, norm, [linears[i] for i in whole], [outs[i] for i in whole], mode, act)
    parts = [(i, rows) for i, each in enumerate(linears) for rows in each.weight.in_parts]
    for _, together in groupby(parts, lambda each: each[1].part):
        here = list(together)
        with _leased(ops, here[0][1].lease):
            ops._matrix(x, norm, [_of(linears[i], rows) for i, rows in here], [_columns(outs[i], rows) for i, rows in here], mode, act)


def _gated(ops: CpuOps, x: np.ndarray, norm: Norm | None, pair: Sequence[Linear], out: np.ndarray, act: str) -> None:
    """A gate and what it gates: the same rows of both are one part."""
    first = [_of(each, each.weight.in_parts[0]) for each in pair]
    at_once = (len({low_bit.kind_of(each.weight) for each in first}) == 1 and low_bit.one_way(first)
               and ops._runner(first[0], len(x), act) not in (type(ops)._many, low_bit.run_exact))
    up = None if at_once else ops.workspace.take("up", *out.shape)
    for rows in zip(*(each.weight.in_parts for each in pair), strict=True):
        linears, places = [_of(each, part) for each, part in zip(pair, rows, strict=True)], _columns(out, rows[0])
        with _leased(ops, rows[0].lease):
            if at_once:
                ops._matrix(x, norm, linears, [places], linear.GATED, act)
            else:
                ops._matrix(x, norm, linears, [places, _columns(up, rows[0])], linear.PLAIN, "none")
    if up is not None:
        ops.gate(out, up, act)


class _leased:
    """A lease around noted jobs: those before it run before the wait, its own before its end. A part that stays has none."""

    def __init__(self, ops: CpuOps, lease: AbstractContextManager | None) -> None:
        self._ops, self._lease = ops, lease

    def __enter__(self) -> None:
        if self._lease is not None:
            self._ops.flush()
            self._lease.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._lease is not None:
            try:
                if error[0] is None:
                    self._ops.flush()
            finally:
                self._lease.__exit__(*error)


def _of(each: Linear, rows: Rows) -> Linear:
    """The part of a product."""
    end = rows.first + rows.weight.shape[0]
    return replace(each, weight=rows.weight, bias=None if each.bias is None else each.bias[rows.first : end])


def _columns(out: np.ndarray, rows: Rows) -> np.ndarray:
    """Where the part's outputs go."""
    return out[:, rows.first : rows.first + rows.weight.shape[0]]
