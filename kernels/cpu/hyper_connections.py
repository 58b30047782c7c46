"""Hyper-connections on the CPU: ops that read and mix a token's streams, and grouped matrices, one per group of heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .. import reference_hyper_connections as meaning
from ..registry import Call
from ..workspace import Dims, address
from . import gated_residuals, linear, streams
from . import hyper_connection_loops as loops

if TYPE_CHECKING:
    from ...quant.compressed_attention_weights import GatedResidual, HyperConnection, StreamMean
    from ...quant.weight import Linear
    from .ops import CpuOps


def plan_workspace(dims: Dims, chunk: int) -> dict[str, int]:
    """Floats of the buffers, none for a model without hyper-connections."""
    logits = {"stream logits": chunk * dims.residual_streams * (2 + dims.residual_streams)}
    if not dims.output_group_width:
        return logits if dims.has_hyper_connections else gated_residuals.plan_workspace(dims, chunk)
    picks = {f"picks{index}": chunk * dims.num_experts for index in range(dims.num_hash_routed_layers)}
    return {**picks, **logits, "grouped": chunk * dims.output_group_width,
            "gave": chunk * dims.output_group_width, "group": chunk * dims.num_attention_heads * dims.head_dim}


def scratch_floats(dims: Dims) -> int:
    """Per worker."""
    return dims.residual_streams * loops.BLOCK if dims.output_group_width or dims.has_hyper_connections else 0


def read_streams(ops: CpuOps, x: np.ndarray, hyper: HyperConnection | GatedResidual | StreamMean) -> np.ndarray:
    """See `BlockOps`."""
    if hyper.is_gated:
        return gated_residuals.read(ops, x, hyper)
    if hyper.is_mean:
        return streams.mean_stream(ops, x, hyper.num_streams)
    if (outs := ops._run_cached(x, hyper.norm, (hyper.proj,), linear.PLAIN, "none")) is None:
        outs = [ops.workspace.take("stream logits", len(x), hyper.proj.weight.shape[0])]
        ops._run_stage(x, hyper.norm, [hyper.proj], outs, linear.PLAIN, "none")
    branch_input = ops.workspace.take("stream", len(x), x.shape[1] // hyper.num_streams)
    ops.registry.select(Call("gather streams")).candidate.run(ops, x, branch_input, outs[0], hyper)
    return branch_input


def write_streams(ops: CpuOps, x: np.ndarray, branch: np.ndarray, hyper: HyperConnection | GatedResidual) -> np.ndarray:
    """See `BlockOps`."""
    if hyper.is_gated:
        return gated_residuals.write(ops, x, branch, hyper)
    logits = ops.workspace.take("stream logits", len(x), hyper.proj.weight.shape[0])
    ops.registry.select(Call("mix streams")).candidate.run(ops, x, branch, logits, hyper)
    return x


def grouped_linear(ops: CpuOps, x: np.ndarray, linears: Sequence[Linear]) -> np.ndarray:
    """See `BlockOps`."""
    count = len(linears)
    inside, width = x.shape[1] // count, linears[0].weight.shape[0]
    out = ops.workspace.take("grouped", len(x), count * width)
    group_input, group_output = ops.workspace.take("group", len(x), inside), ops.workspace.take("gave", len(x), width)
    take, put = (ops.registry.select(Call(op)).candidate.run for op in ("take stream", "put stream"))
    for group, matrix in enumerate(linears):
        take(ops, x, group_input, group)
        if ops._run_cached(group_input, None, (matrix,), linear.PLAIN, "none") is None:
            ops._run_stage(group_input, None, [matrix], [group_output], linear.PLAIN, "none")
        put(ops, out, group_output, group, False)
    return out


def picked_experts(ops: CpuOps, ids: np.ndarray, picks: Mapping[int, np.ndarray], experts: int) -> dict[int, np.ndarray]:
    """Per-layer score corrections [T, E] for tokens `ids` whose experts are given by a table [V, k]: hugely negative for all others; in
    buffers where jobs of a recorded pass find the next pass's."""
    picked = {}
    for index, (layer, table) in enumerate(picks.items()):
        rows = picked[layer] = ops.workspace.take(f"picks{index}", len(ids), experts)
        rows[:] = -np.inf
        np.put_along_axis(rows, table[ids], 0.0, axis=1)
    return picked


# -- what runs them -----------------------------------------------------------------------------------------------------------------------


def _fill(ops: CpuOps, x: np.ndarray, branch: np.ndarray, logits: np.ndarray, hyper: HyperConnection) -> None:
    ops.args[: loops.SLOTS] = (ops.address_of(x), ops.address_of(branch), len(x), hyper.num_streams, branch.shape[1],
                               ops.address_of(logits), address(hyper.scale),
                               address(hyper.base), hyper.sinkhorn_iterations, hyper.is_final, 0, ops.scratch, ops.scratch_stride)
    ops.reals[loops.EPSILON] = hyper.sinkhorn_eps


def gather(ops: CpuOps, x: np.ndarray, branch: np.ndarray, logits: np.ndarray, hyper: HyperConnection) -> None:
    _fill(ops, x, branch, logits, hyper)
    ops.run(loops.gather_streams, ops.args_address, len(x) > 1, ops.args)


def mix(ops: CpuOps, x: np.ndarray, branch: np.ndarray, logits: np.ndarray, hyper: HyperConnection) -> None:
    _fill(ops, x, branch, logits, hyper)
    ops.run(loops.mix_streams, ops.args_address, len(x) > 1, ops.args)


# -- and what they mean, by `reference_hyper_connections.py` -------------------------------------------------------------------------------


def gather_reference(ops: CpuOps, x: np.ndarray, branch: np.ndarray, logits: np.ndarray, hyper: HyperConnection) -> None:
    ops.flush()
    split = x.reshape(len(x), hyper.num_streams, -1)
    if hyper.is_final:
        branch[:] = meaning.left(split, logits, hyper.scale, hyper.base, hyper.sinkhorn_eps)
        return
    reads, writes, mixes = meaning.numbers(logits, hyper.scale, hyper.base, hyper.num_streams, hyper.sinkhorn_eps,
                                           hyper.sinkhorn_iterations)
    branch[:] = meaning.gathered(split, reads)
    logits[:] = np.concatenate([reads, writes, mixes.reshape(len(x), -1)], 1)


def mix_reference(ops: CpuOps, x: np.ndarray, branch: np.ndarray, logits: np.ndarray, hyper: HyperConnection) -> None:
    ops.flush()
    split, count = x.reshape(len(x), hyper.num_streams, -1), hyper.num_streams
    _, writes, mixes = np.split(logits, [count, 2 * count], axis=1)
    split[:] = meaning.mixed(split, branch, writes, mixes.reshape(len(x), *((count, count) if hyper.sinkhorn_iterations else (0, 0))))
