"""Products with an adapter beside the matrix: y = W x + B (A x), by the kernels of any other matrix.

A and B are thin, so each is a job of its own behind the one of W: what is written between them is r numbers of a token, in a cache. A gate
and what it gates each get theirs before the gate is applied. As W's, a row's numbers depend neither on other rows nor on other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from . import linear

if TYPE_CHECKING:
    from ...quant.weight import Linear, Norm
    from ..workspace import Dims
    from .ops import CpuOps

MOST = 6  # matrices of a stage


def plan_workspace(dims: Dims, chunk: int) -> dict[str, int]:
    """Floats of what lies between A and B."""
    return {_between(i): chunk * dims.lora for i in range(MOST if dims.lora else 0)}


def run(ops: CpuOps, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear], outs: Sequence[np.ndarray], mode: int, act: str) -> None:
    """`CpuOps._matrix` for matrices of which some have an adapter."""
    each_own = mode if mode == linear.ADD else linear.PLAIN
    if mode == linear.GATED:
        outs = [outs[0], ops.workspace.take("up", *outs[0].shape)]
    adapted = [(own.lora, out) for own, out in zip(linears, outs, strict=True) if own.lora is not None]
    between = [ops.workspace.take(_between(i), len(x), own.into.weight.shape[0]) for i, (own, _) in enumerate(adapted)]
    with ops.one_input():
        _product(ops, x, norm, [own.plain for own in linears], outs, each_own)
        _product(ops, x, norm, [own.into for own, _ in adapted], between, linear.PLAIN)
    for (own, out), thin in zip(adapted, between, strict=True):
        _product(ops, thin, None, [own.out], [out], linear.ADD)
    if mode == linear.GATED:
        ops.gate(*outs, act)


def _product(ops: CpuOps, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear], outs: Sequence[np.ndarray], mode: int) -> None:
    if ops._remembered(x, norm, linears, mode, "none", outs[0] if mode == linear.ADD else None) is None:
        ops._matrix(x, norm, linears, outs, mode, "none")


def _between(index: int) -> str:
    return f"lora{index}"
