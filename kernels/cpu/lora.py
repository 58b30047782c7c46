"""LoRA products on the CPU, next to the base matrix: y = W x + B (s * A x) for each adapter, with s per token.

A stage's adapters take two steps, with the kernels in `lora_loops.py`: all A products into the rank-sized intermediates, which stay in
cache, then all B products, where a gate is applied as well. The first does not depend on the base products: for few tokens both are one
job. As for W, a row's result depends neither on other rows nor on other tokens.

If an adapter changes the lengths of W's rows (DoRA), y is rescaled before anything is added, and its B includes that factor.

Adapters stay in their stored type, and texts with different adapters share a pass: only the tokens that use an adapter are multiplied by
it. If no text uses any, the adapter jobs are skipped; if all use all unscaled, no scaling is applied: the bits are the same as with zeros
and ones. Job inputs stay at fixed addresses, so a recorded pass can be replayed with other scales.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..layout import MAX_DECODE_TOKENS, NORMS, STORED_TYPES, activation_number
from ..workspace import address
from . import linear
from .lora_loops import FIELDS, GROUP, OUT_FIELDS, OWN_FIRST, RUN, columns_in, columns_out, parts_of

if TYPE_CHECKING:
    from ...quant.lora_layout import LoraMatrix
    from ...quant.weight import Linear, Lora, Norm
    from ..workspace import Dims
    from .ops import CpuOps

MAX_MATRICES = 6  # per stage
NONE, UNSCALED, PER_TOKEN = range(3)


class AdapterScales:
    """The adapter scales of a pass's texts, as the backend holds them, and which mode they imply."""

    forget: Callable[[], None]
    _scaling = NONE
    _token_scales: np.ndarray | None = None
    _scales: np.ndarray | None = None

    def adapt(self, scales: np.ndarray | None) -> None:
        """Set the adapter scales before a pass: float32 [1, adapters] for one text, or a row for each of up to MAX_DECODE_TOKENS; None if
        no adapter is used."""
        scaling = NONE if scales is None or not scales.any() else UNSCALED if (scales == 1).all() else PER_TOKEN
        if scaling != self._scaling:
            self._scaling = scaling
            self.forget()  # recorded passes have other jobs
        if scaling == PER_TOKEN:
            if self._token_scales is None:
                self._token_scales = np.zeros((MAX_DECODE_TOKENS, scales.shape[1]), np.float32)
            self._scales = self._token_scales[: len(scales)]
            self._scales[:] = scales

    @property
    def is_adapted(self) -> bool:
        """Does a text of this pass use any adapter?"""
        return self._scaling != NONE

    @property
    def _scales_fields(self) -> list[int]:
        """For a kernel: the address of the scales, 0 if nothing is to be multiplied, and the stride between tokens in floats, 0 if all are
        equal."""
        if self._scaling != PER_TOKEN:
            return [0, 0]
        return [address(self._scales), 0 if len(self._scales) == 1 else self._scales.shape[1]]


def plan_workspace(dims: Dims, chunk: int) -> dict[str, int]:
    """Floats of the intermediates between A and B."""
    if not dims.max_lora_rank:
        return {}
    tokens = max(chunk, GROUP * parts_of(max(dims.hidden_size, dims.intermediate_size, dims.projection_input_width)))
    return {_between(i): tokens * dims.max_lora_rank for i in range(MAX_MATRICES)}


def scratch_floats(dims: Dims) -> int:
    """Per worker: the growth of a run of outputs, and twice the intermediates of a group's tokens."""
    return RUN + 2 * GROUP * dims.max_lora_rank if dims.max_lora_rank else 0


def run(ops: CpuOps, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear], outs: Sequence[np.ndarray], mode: int, act: str) -> None:
    """`CpuOps._run_stage` if some of the matrices have adapters."""
    plain, is_added = [matrix.without_lora for matrix in linears], ops._scaling != NONE
    plain_mode, plain_act = (mode, act) if mode != linear.GATED or not is_added else (linear.PLAIN, "none")
    if mode == linear.GATED and is_added:
        outs = [outs[0], ops.workspace.take("up", *outs[0].shape)]
    pending_before = ops.pending
    if ops._run_cached(x, norm, plain, plain_mode, plain_act, outs[0] if mode == linear.ADD else None) is None:
        ops._run_stage(x, norm, plain, outs, plain_mode, plain_act)
    if is_added:
        pairs = list(zip(linears, outs, strict=True))
        between = _into_products(ops, x, norm, [matrix.lora for matrix, _ in pairs], pending_before)
        _out_products(ops, x, pairs, between, mode, act)


def _into_products(ops: CpuOps, x: np.ndarray, norm: Norm | None, adapters: Sequence[Lora | None],
                   pending_before: int) -> dict[int, list[int]]:
    """The A products; returns where each matrix's intermediates are, by its place in the stage. For few tokens merged with the base
    products into one job, if one was added after the first `pending_before`."""
    (tokens, depth), products_at = x.shape, {}
    parts, fields = parts_of(depth), []
    for i, lora in enumerate(adapters):
        if lora is None:
            continue
        height, ranks = tokens if tokens > GROUP else parts * tokens, [pair.into.shape[0] for pair in lora.pairs]
        at = address(ops.workspace.take(_between(i), height, sum(ranks)))
        products_at[i] = [at + 4 * height * sum(ranks[:index]) for index in range(len(ranks))]
        for pair, index in zip(lora.pairs, products_at[i], strict=True):
            fields += _fields(pair.into, pair.into.shape[0], index, pair.adapter)
    block = _block(ops, x, norm, linear.PLAIN, "none", len(fields) // FIELDS, [parts, *ops._scales_fields, *fields])
    if tokens > GROUP:
        ops.run(columns_in, address(block), True, block)
    else:
        ops.run_merged(columns_in, block, pending_before)
    return products_at


def _out_products(ops: CpuOps, x: np.ndarray, pairs: Sequence[tuple[Linear, np.ndarray]], between: Mapping[int, Sequence[int]], mode: int,
                  act: str) -> None:
    """Rescale existing products (DoRA), add the B products, then apply the gate."""
    tokens, depth = x.shape
    indices = [i for i in range(len(pairs)) if i in between or mode == linear.GATED]
    matrices, fields, at = [], [], OWN_FIRST + OUT_FIELDS * len(indices)
    for i in indices:
        (matrix, out), added = pairs[i], pairs[i][0].lora.pairs if i in between else ()
        gains = [address(matrix.lora.dora_gains), len(matrix.lora.dora_gains), address(matrix.bias)] if matrix.has_dora else [0, 0, 0]
        matrices += [out.shape[1], ops.address_of(out), out.strides[0] // 4, len(added), at + len(fields),
                     sum(pair.out.shape[1] for pair in added),
                     *gains]
        for pair, product_at in zip(added, between.get(i, ()), strict=True):
            fields += _fields(pair.out, pair.out.shape[1], product_at, pair.adapter)
    head = [1 if tokens > GROUP else parts_of(depth), *ops._scales_fields]
    block = _block(ops, x, None, mode, act, len(indices), [*head, *matrices, *fields])
    ops.run(columns_out, address(block), True, block)


def _fields(pair: LoraMatrix, rank: int, product_at: int, adapter: int) -> list[int]:
    return [pair.address, STORED_TYPES[pair.scheme], rank, product_at, adapter]


def _block(ops: CpuOps, x: np.ndarray, norm: Norm | None, mode: int, act: str, matrices: int, fields: Sequence[int]) -> np.ndarray:
    tokens, depth = x.shape
    head = [ops.address_of(x), tokens, depth, 0 if norm is None else NORMS[norm.kind], 0 if norm is None else address(norm.weight),
            0 if norm is None else address(norm.bias), 0, ops.scratch, ops.scratch_stride, mode, activation_number(act), matrices]
    block = np.array([*head, *fields], np.int64)
    if norm is not None:
        block.view(np.float64)[linear.EPS] = norm.eps
    return block


def _between(index: int) -> str:
    return f"lora{index}"
