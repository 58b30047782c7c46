"""Products with an adapter beside the matrix: y = W x + B (A x).

What a stage's adapters add are two jobs behind the one of its matrices, by the kernels of `lora_loops.py`: all that lead into the few
numbers of a token, which stay in a cache, then all that lead out of them, where a gate is applied as well. As W's, a row's numbers depend
neither on other rows nor on other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..layout import ACTIVATIONS, NORMS, STORED_TYPES
from ..workspace import address
from . import linear
from .lora_loops import GROUP, columns_in, columns_out, parts_of

if TYPE_CHECKING:
    from ...quant.weight import Linear, Lora, Norm
    from ..compile import Kernel
    from ..workspace import Dims
    from .ops import CpuOps

MOST = 6  # matrices of a stage


def plan_workspace(dims: Dims, chunk: int) -> dict[str, int]:
    """Floats of what lies between A and B."""
    if not dims.lora:
        return {}
    tokens = max(chunk, GROUP * parts_of(max(dims.hidden, dims.ffn, dims.multiplied)))
    return {_between(i): tokens * dims.lora for i in range(MOST)}


def scratch_floats(dims: Dims) -> int:
    """Of a worker: what lies between of a group's tokens, twice."""
    return 2 * GROUP * dims.lora


def run(ops: CpuOps, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear], outs: Sequence[np.ndarray], mode: int, act: str) -> None:
    """`CpuOps._matrix` for matrices of which some have an adapter."""
    each_own = mode if mode == linear.ADD else linear.PLAIN
    if mode == linear.GATED:
        outs = [outs[0], ops.workspace.take("up", *outs[0].shape)]
    plain = [own.plain for own in linears]
    if ops._remembered(x, norm, plain, each_own, "none", outs[0] if mode == linear.ADD else None) is None:
        ops._matrix(x, norm, plain, outs, each_own, "none")
    _add(ops, x, norm, [(own.lora, out) for own, out in zip(linears, outs, strict=True)], mode, act)


def _add(ops: CpuOps, x: np.ndarray, norm: Norm | None, pairs: Sequence[tuple[Lora | None, np.ndarray]], mode: int, act: str) -> None:
    """What adapters add to outputs that are there, and the gate behind it."""
    (tokens, depth), adapted = x.shape, [(lora, out) for lora, out in pairs if lora is not None]
    parts = parts_of(depth)
    own = [lora.into.weight for lora, _ in adapted]
    between = [ops.workspace.take(_between(i), tokens if tokens > GROUP else parts * tokens, each.shape[0]) for i, each in enumerate(own)]
    at = {id(lora): address(thin) for (lora, _), thin in zip(adapted, between, strict=True)}
    first = [parts]
    for (lora, _), each in zip(adapted, own, strict=True):
        first += [each.address, STORED_TYPES[each.spec.scheme], each.shape[0], at[id(lora)]]
    _run(ops, columns_in, x, norm, linear.PLAIN, "none", len(adapted), first)
    then = []
    for lora, out in pairs if mode == linear.GATED else adapted:
        thin = [0, 0, 0, 0, 0]
        if lora is not None:
            each = lora.out.weight
            thin = [each.address, STORED_TYPES[each.spec.scheme], each.shape[1], at[id(lora)], 1 if tokens > GROUP else parts]
        then += [*thin, out.shape[1], ops.at(out), out.strides[0] // 4]
    _run(ops, columns_out, x, None, mode, act, len(then) // 8, then)


def _run(ops: CpuOps, kernel: Kernel, x: np.ndarray, norm: Norm | None, mode: int, act: str, matrices: int, fields: Sequence[int]) -> None:
    tokens, depth = x.shape
    head = [ops.at(x), tokens, depth, 0 if norm is None else NORMS[norm.kind], 0 if norm is None else address(norm.weight),
            0 if norm is None else address(norm.bias), 0, ops.scratch, ops.scratch_stride, mode, ACTIVATIONS[act], matrices]
    block = np.array([*head, *fields], np.int64)
    if norm is not None:
        block.view(np.float64)[linear.EPS] = norm.eps
    ops.run(kernel, address(block), True, block)


def _between(index: int) -> str:
    return f"lora{index}"
