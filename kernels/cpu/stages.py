"""Matrix stages: turns what a block's ops request into one job, or a few, of the kernel selected for each kind of weight.

A stage is an optional norm and the matrices that read its output; its mode tells how the products are stored (`linear.py`). In decode a
stage is called with the same objects for every token, so its job is cached. Up to FEW_TOKENS tokens use the memory-bound kernels, more use
the tiled ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from .. import reference
from ..compile import Kernel
from ..layout import NORMS, activation_number
from ..registry import Call, Registry
from ..threads import ThreadPool
from ..workspace import Workspace, address
from . import linear, lora, low_bit, packed, streamed_linear
from .jobs import Jobs
from .row_ops import MIN_PARALLEL_SIZE

if TYPE_CHECKING:  # records of the layer above; kernels read their fields and never create one
    from ...quant.weight import Linear, Norm

FEW_TOKENS = 8
MAX_CACHED_JOBS = 4096
LOW_BIT = "low-bit matrix"


@dataclass(frozen=True)
class _Job:
    """A prepared argument block and everything it points to, kept alive by it."""

    x: np.ndarray
    norm: Norm | None
    linears: tuple[Linear, ...]
    outs: list[np.ndarray]
    act: str
    block: np.ndarray
    parallel: bool
    kernel: Kernel

    @cached_property
    def block_address(self) -> int:
        return address(self.block)


class MatrixStages(Jobs):
    """The matrix stages of one model, over one workspace."""

    def __init__(self, pool: ThreadPool, registry: Registry, workspace: Workspace) -> None:
        super().__init__(pool)
        self.registry, self.workspace = registry, workspace
        self.args = np.zeros(low_bit.BLOCK_SIZE, np.int64)
        self.reals = self.args.view(np.float64)
        self.args_address, self.address_of = address(self.args), workspace.address
        # Scratch of worker w is at `scratch` + `scratch_stride` * w.
        self.scratch = address(workspace.take("scratch", 1))
        self.scratch_stride = 4 * (workspace.floats["scratch"] // pool.workers // 16 * 16)
        self._runners: dict[tuple[str, bool, str], Callable] = {}
        self._cached_jobs: dict[tuple[int, int, int, int], _Job] = {}

    def _run_cached(self, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear], mode: int, act: str,
                    residual: np.ndarray | None = None) -> list[np.ndarray] | None:
        """Run the job cached for these objects and return its outputs; None if there is none.

        In decode a stage has the same input, weights and outputs for every token, and preparing it again would cost more than dispatching
        it: between two kernels the weights evict the interpreter's own data from the caches.
        """
        job = self._cached_jobs.get((id(x), id(linears[0]), mode, id(residual)))
        if job is None or job.norm is not norm or job.linears[-1] is not linears[-1] or len(job.linears) != len(linears) or job.act != act:
            return None  # matrices of a stage may have run separately if others are streamed in parts
        self.keep_alive(job.block)
        self.run(job.kernel, job.block_address, job.parallel)
        return job.outs

    def _run_stage(self, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear], outs: list[np.ndarray], mode: int, act: str,
                   columns: int = 0) -> None:
        """Run a stage as one job, or as a job per kind of weight if there are several; `columns`: treat as if there were this many tokens.
        """
        if any(matrix.lora for matrix in linears):
            lora.run(self, x, norm, linears, outs, mode, act)
            return
        if any(matrix.weight.row_parts for matrix in linears):
            streamed_linear.run(self, x, norm, linears, outs, mode, act)
            return
        kinds = [low_bit.kind_of(matrix.weight) for matrix in linears]
        if len(set(kinds)) > 1 or (mode == linear.GATED and not low_bit.can_share_job(linears)):
            self._run_by_kind(x, norm, linears, outs, mode, act, kinds, columns)
        else:
            run = (low_bit.run_fine if mode == linear.FINE and kinds[0] != low_bit.RAW
                   else self._select_kernel(linears[0], columns or len(x), act))
            run(self, x, norm, linears, outs, mode, act)

    def _select_kernel(self, matrix: Linear, columns: int, act: str) -> Callable:
        """The function that multiplies a matrix like `matrix` with this many tokens."""
        kind, spec = low_bit.kind_of(matrix.weight), matrix.weight.spec
        limit = packed.MAX_COLUMNS if kind else FEW_TOKENS
        key = (kind, spec.scheme, columns <= limit, act)
        if key not in self._runners:
            call = Call(LOW_BIT if kind else "matrix", spec.scheme, min(columns, limit + 1), act, spec.bits, kind == low_bit.LOOKED_UP)
            self._runners[key] = self.registry.select(call).candidate.run
        return self._runners[key]

    def _run_by_kind(self, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear], outs: list[np.ndarray], mode: int, act: str,
                     kinds: Sequence[int], columns: int) -> None:
        if mode != linear.GATED:
            for kind in dict.fromkeys(kinds):
                chosen = [i for i, other in enumerate(kinds) if other == kind]
                self._run_stage(x, norm, [linears[i] for i in chosen], [outs[i] for i in chosen], mode, act, columns)
            return
        gate, up = outs[0], self.workspace.take("up", *outs[0].shape)
        self._run_stage(x, norm, linears[:1], [gate], linear.PLAIN, act, columns)
        self._run_stage(x, norm, linears[1:], [up], linear.PLAIN, act, columns)
        self.gate(gate, up, act)

    def gate(self, gate: np.ndarray, up: np.ndarray | None, act: str) -> None:
        """gate = act(gate) * up, or act(gate)."""
        self.registry.select(Call("activate", act=act)).candidate.run(self, gate, up, act)

    def fill(self, x: int, tokens: int, depth: int, norm: Norm | None, mode: int, act: str, linears: Sequence[Linear],
              outs: Sequence[np.ndarray]) -> None:
        """Fill in the argument block of the matrix kernels."""
        kind = 0 if norm is None else NORMS[norm.kind]
        block = [x, tokens, depth, kind, 0 if norm is None else address(norm.weight), 0 if norm is None else address(norm.bias), 0,
                 self.scratch, self.scratch_stride, mode, activation_number(act), len(linears)]
        for i, matrix in enumerate(linears):
            out = outs[min(i, len(outs) - 1)]
            block += [*matrix.kernel_args, self.address_of(out), out.strides[0] // 4]
        self.args[: len(block)] = block
        if norm is not None:
            self.reals[linear.EPS] = norm.eps

    def few_columns(self, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear], outs: list[np.ndarray], mode: int, act: str) -> None:
        tokens, depth = x.shape
        self.fill(self.address_of(x), tokens, depth, norm, mode, act, linears, outs)
        self.run_and_cache(linear.few_columns, x, norm, linears, outs, mode, act)

    def run_and_cache(self, kernel: Kernel, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear], outs: list[np.ndarray],
                      mode: int, act: str) -> None:
        parallel = x.size * sum(matrix.weight.shape[0] for matrix in linears) >= MIN_PARALLEL_SIZE
        self.run(kernel, self.args_address, parallel, self.args)
        if self.workspace.holds(x) and all(map(self.workspace.holds, outs)):
            if len(self._cached_jobs) >= MAX_CACHED_JOBS:
                self._cached_jobs.clear()
            residual = outs[0] if mode == linear.ADD else None
            job = _Job(x, norm, tuple(linears), outs, act, self.args.copy(), parallel, kernel)
            self._cached_jobs[id(x), id(linears[0]), mode, id(residual)] = job

    def by_reference(self, x: np.ndarray, norm: Norm | None, linears: Sequence[Linear], outs: list[np.ndarray], mode: int,
                     act: str) -> None:
        self.flush()
        n = x if norm is None else reference.normalise(x, norm.kind, norm.weight, norm.bias, norm.eps)
        results = [reference.linear(n, matrix.weight.to_f32(), matrix.bias) for matrix in linears]
        if mode == linear.GATED:
            outs[0][:] = reference.gated(*results, act)
        elif mode == linear.ADD:
            outs[0] += results[0].astype(np.float32)
        else:
            for out, result in zip(outs, results):
                out[:] = result
