"""Products with adapters beside the matrix: y = W x + B (s * A x), s by token and by the adapter that a number between is of.

What a stage's adapters add are two jobs behind the one of its matrices, by the kernels of `lora_loops.py`: all that lead into the few
numbers of a token, which stay in a cache, then all that lead out of them, where a gate is applied as well. As W's, a row's numbers depend
neither on other rows nor on other tokens.

Where one gives rows of W other lengths (DoRA) there is a job between: y becomes more or less of itself. Its B has that taken in.

Adapters stay as they are stored, behind one another, and texts with different choices share a pass. Where no text has any of them their
jobs are left out, where all have all of them as they are nothing is multiplied: the bits are the same as with zeros and ones. What the jobs
read lies where it lay in the last pass, so that a recorded one runs again with other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..layout import ACTIVATIONS, NORMS, REPEATED, STORED_TYPES
from ..workspace import address
from . import linear
from .lora_loops import GROUP, OUT_FIELDS, RUN, columns_in, columns_out, lengthened, parts_of

if TYPE_CHECKING:
    from ...quant.weight import Linear, Lora, Norm
    from ..compile import Kernel
    from ..workspace import Dims
    from .ops import CpuOps

MOST = 6  # matrices of a stage
NONE, AS_THEY_ARE, BY_TEXT = range(3)


class Scales:
    """How much of each adapter the texts of a pass have, as the backend holds it, and which way all of them go."""

    forget: Callable[[], None]
    _way = NONE
    _held: np.ndarray | None = None
    _scales: np.ndarray | None = None

    def adapt(self, scales: np.ndarray | None) -> None:
        """Before a pass: how much of each adapter its texts have, float32 [1, adapters] for a pass of one text, or a row for each token,
        REPEATED of them at most; None for nothing of any."""
        way = NONE if scales is None or not scales.any() else AS_THEY_ARE if (scales == 1).all() else BY_TEXT
        if way != self._way:
            self._way = way
            self.forget()  # passes that were recorded are of other jobs
        if way == BY_TEXT:
            if self._held is None:
                self._held = np.zeros((REPEATED, scales.shape[1]), np.float32)
            self._scales = self._held[: len(scales)]
            self._scales[:] = scales

    @property
    def is_adapted(self) -> bool:
        """Has a text of this pass any of an adapter?"""
        return self._way != NONE

    @property
    def _scales_fields(self) -> list[int]:
        """For a kernel: where the scales lie, 0 for nothing to multiply, and floats from one token's to the next one's, 0 where all tokens
        have the same."""
        if self._way != BY_TEXT:
            return [0, 0]
        return [address(self._scales), 0 if len(self._scales) == 1 else self._scales.shape[1]]


def plan_workspace(dims: Dims, chunk: int) -> dict[str, int]:
    """Floats of what lies between A and B."""
    if not dims.lora:
        return {}
    tokens = max(chunk, GROUP * parts_of(max(dims.hidden, dims.ffn, dims.multiplied)))
    return {_between(i): tokens * dims.lora for i in range(MOST)}


def scratch_floats(dims: Dims) -> int:
    """Of a worker: what lies between of a group's tokens, twice, or what a run of outputs becomes more."""
    return max(2 * GROUP * dims.lora, RUN) if dims.lora else 0


def run(ops: CpuOps, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear], outs: Sequence[np.ndarray], mode: int, act: str) -> None:
    """`CpuOps._matrix` for matrices of which some have adapters."""
    plain, is_added = [own.plain for own in linears], ops._way != NONE
    way, by = (mode, act) if mode == linear.ADD or not is_added else (linear.PLAIN, "none")
    if mode == linear.GATED and is_added:
        outs = [outs[0], ops.workspace.take("up", *outs[0].shape)]
    if ops._remembered(x, norm, plain, way, by, outs[0] if mode == linear.ADD else None) is None:
        ops._matrix(x, norm, plain, outs, way, by)
    if is_added:
        _lengthen(ops, x, linears, outs)
        _add(ops, x, norm, [(own.lora, out) for own, out in zip(linears, outs, strict=True)], mode, act)


def _lengthen(ops: CpuOps, x: np.ndarray, linears: Sequence[Linear], outs: Sequence[np.ndarray]) -> None:
    """More or less of the products that are there, as far as adapters give rows of matrices other lengths."""
    own = [(each, out) for each, out in zip(linears, outs, strict=True) if each.is_lengthened]
    fields = ops._scales_fields
    for each, out in own:
        gains, bias = each.lora.gains, each.bias
        fields += [address(gains), len(gains), 0 if bias is None else address(bias), gains.shape[1], ops.at(out), out.strides[0] // 4]
    if own:
        _run(ops, lengthened, x, None, linear.PLAIN, "none", len(own), fields)


def _add(ops: CpuOps, x: np.ndarray, norm: Norm | None, pairs: Sequence[tuple[Lora | None, np.ndarray]], mode: int, act: str) -> None:
    """What adapters add to outputs that are there, and the gate behind it."""
    (tokens, depth), adapted = x.shape, [(lora, out) for lora, out in pairs if lora is not None]
    parts = parts_of(depth)
    own = [lora.into.weight for lora, _ in adapted]
    between = [ops.workspace.take(_between(i), tokens if tokens > GROUP else parts * tokens, each.shape[0]) for i, each in enumerate(own)]
    at = {id(lora): address(thin) for (lora, _), thin in zip(adapted, between, strict=True)}
    first = [parts, 0]
    for (lora, _), each in zip(adapted, own, strict=True):
        first += [each.address, STORED_TYPES[each.spec.scheme], each.shape[0], at[id(lora)]]
    _run(ops, columns_in, x, norm, linear.PLAIN, "none", len(adapted), first)
    then = ops._scales_fields
    for lora, out in pairs if mode == linear.GATED else adapted:
        thin = [0] * 6
        if lora is not None:
            each = lora.out.weight
            thin = [each.address, STORED_TYPES[each.spec.scheme], each.shape[1], at[id(lora)], 1 if tokens > GROUP else parts,
                    address(lora.of)]
        then += [*thin, out.shape[1], ops.at(out), out.strides[0] // 4]
    _run(ops, columns_out, x, None, mode, act, len(then) // OUT_FIELDS, then)


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
