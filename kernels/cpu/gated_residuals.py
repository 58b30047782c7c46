"""Gated residuals on the CPU: ops that read and write a token's streams (`gated_residual_loops.py`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .. import reference_gated_residuals as meaning
from ..layout import NORMS
from ..registry import Call
from ..workspace import Dims, address
from . import gated_residual_loops as loops
from . import linear
from .row_ops import MIN_PARALLEL_SIZE

if TYPE_CHECKING:
    from ...quant.compressed_attention_weights import GatedResidual
    from ...quant.weight import Norm
    from .ops import CpuOps


def plan_workspace(dims: Dims, chunk: int) -> dict[str, int]:
    """Floats of the buffers, none for a model without gated residuals."""
    if not dims.residual_gate_rank:
        return {}
    stream_floats = chunk * dims.residual_streams * dims.hidden_size
    buffers = {f"ngram rows {index}": chunk * dims.ngrams.rows for index in range(dims.num_ngram_layers)}
    return {"normed streams": stream_floats, "stream gates": stream_floats, "low mix": chunk * dims.residual_gate_rank,
            "stream logits": chunk * dims.residual_streams, **buffers, **({"ngram keys": stream_floats} if buffers else {})}


def read(ops: CpuOps, x: np.ndarray, residual: GatedResidual) -> np.ndarray:
    """A branch's input from x [T, S * D], or the output of the last layer, [T, D]; the write weights of the streams are kept until `write`.
    """
    take, count = ops.workspace.take, residual.num_streams
    normed = take("normed streams", *x.shape)
    ops.registry.select(Call("norm streams")).candidate.run(ops, x, normed, residual.norm, count)
    linears = (residual.down,) if residual.inject is None else (residual.down, residual.inject)
    if (outs := ops._run_cached(normed, None, linears, linear.PLAIN, "none")) is None:
        outs = [take("low mix", len(x), residual.down.weight.shape[0]), take("stream logits", len(x), count)][: len(linears)]
        ops._run_stage(normed, None, list(linears), outs, linear.PLAIN, "none")
    low = ops.scale_in_place(outs[0], 1 / count)
    ops.gate(low, None, "silu")
    if (gates := ops._run_cached(low, None, (residual.up,), linear.PLAIN, "none")) is None:
        gates = [take("stream gates", *x.shape)]
        ops._run_stage(low, None, [residual.up], gates, linear.PLAIN, "none")
    branch_input = take("stream", len(x), x.shape[1] // count)
    ops.registry.select(Call("read streams")).candidate.run(ops, normed, gates[0], branch_input, count)
    return branch_input


def write(ops: CpuOps, x: np.ndarray, branch: np.ndarray, residual: GatedResidual) -> np.ndarray:
    """x after a branch's output [T, D] has been added, in place."""
    logits = ops.workspace.take("stream logits", len(x), residual.num_streams)
    ops.registry.select(Call("write streams")).candidate.run(ops, x, branch, logits)
    return x


# -- what runs them -----------------------------------------------------------------------------------------------------------------------


def _run(ops: CpuOps, kernel: object, x: np.ndarray | None, normed: np.ndarray | None, gates: np.ndarray | None, branch: np.ndarray | None,
         logits: np.ndarray | None, count: int, norm: Norm | None = None) -> None:
    shaped = x if normed is None else normed
    addresses = (0 if array is None else ops.address_of(array) for array in (x, normed, gates, branch, logits))
    kind, weight = (0, 0) if norm is None else (NORMS[norm.kind], address(norm.weight))
    ops.args[: loops.EPS] = *addresses, len(shaped), count, shaped.shape[1] // count, kind, weight
    ops.reals[loops.EPS] = 0.0 if norm is None else norm.eps
    ops.run(kernel, ops.args_address, shaped.size >= MIN_PARALLEL_SIZE, ops.args)


def norm_streams(ops: CpuOps, x: np.ndarray, normed: np.ndarray, norm: Norm, count: int) -> None:
    _run(ops, loops.norm_streams, x, normed, None, None, None, count, norm)


def read_streams(ops: CpuOps, normed: np.ndarray, gates: np.ndarray, branch: np.ndarray, count: int) -> None:
    _run(ops, loops.read_streams, None, normed, gates, branch, None, count)


def write_streams(ops: CpuOps, x: np.ndarray, branch: np.ndarray, logits: np.ndarray) -> None:
    _run(ops, loops.write_streams, x, None, None, branch, logits, logits.shape[1])


# -- and what they mean, by `reference_gated_residuals.py` ---------------------------------------------------------------------------------


def norm_streams_reference(ops: CpuOps, x: np.ndarray, normed: np.ndarray, norm: Norm, count: int) -> None:
    ops.flush()
    normed[:] = meaning.normed(x.reshape(len(x), count, -1), norm.weight, norm.eps, norm.kind).reshape(x.shape)


def read_streams_reference(ops: CpuOps, normed: np.ndarray, opened: np.ndarray, branch: np.ndarray, count: int) -> None:
    ops.flush()
    branch[:] = meaning.read(normed.reshape(len(normed), count, -1), opened)


def write_streams_reference(ops: CpuOps, x: np.ndarray, branch: np.ndarray, logits: np.ndarray) -> None:
    ops.flush()
    x[:] = meaning.written(x.reshape(len(x), logits.shape[1], -1), branch, logits).reshape(x.shape)
