"""Products with adapters beside the matrix: y = W x + B (s * A x) for each adapter, s by token.

What a stage's adapters add are two steps, by the kernels of `lora_loops.py`: all that lead into the few numbers of a token, which stay in
a cache, then all that lead out of them, where a gate is applied as well. The first waits for nothing that the matrices make: of a few
tokens it is one job with them. As W's, a row's numbers depend neither on other rows nor on other tokens.

Where one gives rows of W other lengths (DoRA), y becomes more or less of itself before anything is added. Its B has that taken in.

Adapters stay as they are stored, and texts with different choices share a pass: of each adapter it reads and multiplies what its own tokens
have. Where no text has any of them their jobs are left out, where all have all of them as they are nothing is multiplied: the bits are the
same as with zeros and ones. What the jobs read lies where it lay in the last pass, so that a recorded one runs again with other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..layout import NORMS, REPEATED, STORED_TYPES, activation_number
from ..workspace import address
from . import linear
from .lora_loops import FIELDS, GROUP, OUT_FIELDS, OWN_FIRST, RUN, columns_in, columns_out, parts_of

if TYPE_CHECKING:
    from ...quant.lora_layout import LoraMatrix
    from ...quant.weight import Linear, Lora, Norm
    from ..workspace import Dims
    from .ops import CpuOps

MOST = 6  # matrices of a stage
NONE, AS_THEY_ARE, BY_TEXT = range(3)


class AdapterScales:
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
    """Of a worker: what a run of outputs becomes more, and what lies between of a group's tokens, twice."""
    return RUN + 2 * GROUP * dims.lora if dims.lora else 0


def run(ops: CpuOps, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear], outs: Sequence[np.ndarray], mode: int, act: str) -> None:
    """`CpuOps._matrix` for matrices of which some have adapters."""
    plain, is_added = [own.plain for own in linears], ops._way != NONE
    way, by = (mode, act) if mode != linear.GATED or not is_added else (linear.PLAIN, "none")
    if mode == linear.GATED and is_added:
        outs = [outs[0], ops.workspace.take("up", *outs[0].shape)]
    noted = ops.pending
    if ops._remembered(x, norm, plain, way, by, outs[0] if mode == linear.ADD else None) is None:
        ops._matrix(x, norm, plain, outs, way, by)
    if is_added:
        pairs = list(zip(linears, outs, strict=True))
        between = _into(ops, x, norm, [own.lora for own, _ in pairs], noted)
        _out(ops, x, pairs, between, mode, act)


def _into(ops: CpuOps, x: np.ndarray, norm: Norm | None, own: Sequence[Lora | None], noted: int) -> dict[int, list[int]]:
    """What leads into the numbers between; where those of each matrix's adapters lie, by its place in the stage. Of a few tokens it is one
    job with the matrices' own where such a one came behind the `noted` jobs."""
    (tokens, depth), places = x.shape, {}
    parts, fields = parts_of(depth), []
    for i, lora in enumerate(own):
        if lora is None:
            continue
        height, ranks = tokens if tokens > GROUP else parts * tokens, [each.into.shape[0] for each in lora.pairs]
        at = address(ops.workspace.take(_between(i), height, sum(ranks)))
        places[i] = [at + 4 * height * sum(ranks[:place]) for place in range(len(ranks))]
        for each, place in zip(lora.pairs, places[i], strict=True):
            fields += _fields(each.into, each.into.shape[0], place, each.adapter)
    block = _block(ops, x, norm, linear.PLAIN, "none", len(fields) // FIELDS, [parts, *ops._scales_fields, *fields])
    if tokens > GROUP:
        ops.run(columns_in, address(block), True, block)
    else:
        ops.run_beside(columns_in, block, noted)
    return places


def _out(ops: CpuOps, x: np.ndarray, pairs: Sequence[tuple[Linear, np.ndarray]], between: Mapping[int, Sequence[int]], mode: int,
         act: str) -> None:
    """More or less of the products that are there, what leads out of the numbers between, and the gate behind it."""
    tokens, depth = x.shape
    own = [i for i in range(len(pairs)) if i in between or mode == linear.GATED]
    matrices, fields, at = [], [], OWN_FIRST + OUT_FIELDS * len(own)
    for i in own:
        (each, out), added = pairs[i], pairs[i][0].lora.pairs if i in between else ()
        gains = [address(each.lora.gains), len(each.lora.gains), address(each.bias)] if each.is_lengthened else [0, 0, 0]
        matrices += [out.shape[1], ops.at(out), out.strides[0] // 4, len(added), at + len(fields), sum(pair.out.shape[1] for pair in added),
                     *gains]
        for pair, place in zip(added, between.get(i, ()), strict=True):
            fields += _fields(pair.out, pair.out.shape[1], place, pair.adapter)
    head = [1 if tokens > GROUP else parts_of(depth), *ops._scales_fields]
    block = _block(ops, x, None, mode, act, len(own), [*head, *matrices, *fields])
    ops.run(columns_out, address(block), True, block)


def _fields(each: LoraMatrix, rank: int, place: int, adapter: int) -> list[int]:
    return [each.address, STORED_TYPES[each.scheme], rank, place, adapter]


def _block(ops: CpuOps, x: np.ndarray, norm: Norm | None, mode: int, act: str, matrices: int, fields: Sequence[int]) -> np.ndarray:
    tokens, depth = x.shape
    head = [ops.at(x), tokens, depth, 0 if norm is None else NORMS[norm.kind], 0 if norm is None else address(norm.weight),
            0 if norm is None else address(norm.bias), 0, ops.scratch, ops.scratch_stride, mode, activation_number(act), matrices]
    block = np.array([*head, *fields], np.int64)
    if norm is not None:
        block.view(np.float64)[linear.EPS] = norm.eps
    return block


def _between(index: int) -> str:
    return f"lora{index}"
