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
    said = {"said": chunk * dims.streams * (2 + dims.streams)}
    if not dims.grouped_width:
        return said if dims.mixes_streams else gated_residuals.plan_workspace(dims, chunk)
    picks = {f"picks{place}": chunk * dims.experts for place in range(dims.table_routed_layers)}
    return {**picks, **said, "grouped": chunk * dims.grouped_width,
            "gave": chunk * dims.grouped_width, "group": chunk * dims.heads * dims.head_dim}


def scratch_floats(dims: Dims) -> int:
    """Per worker."""
    return dims.streams * loops.BLOCK if dims.grouped_width or dims.mixes_streams else 0


def read_streams(ops: CpuOps, x: np.ndarray, hyper: HyperConnection | GatedResidual | StreamMean) -> np.ndarray:
    """See `BlockOps`."""
    if hyper.is_gated:
        return gated_residuals.read(ops, x, hyper)
    if hyper.is_mean:
        return streams.mean_stream(ops, x, hyper.count)
    if (outs := ops._remembered(x, hyper.norm, (hyper.matrix,), linear.PLAIN, "none")) is None:
        outs = [ops.workspace.take("said", len(x), hyper.matrix.weight.shape[0])]
        ops._matrix(x, hyper.norm, [hyper.matrix], outs, linear.PLAIN, "none")
    own = ops.workspace.take("stream", len(x), x.shape[1] // hyper.count)
    ops.registry.select(Call("gather streams")).candidate.run(ops, x, own, outs[0], hyper)
    return own


def write_streams(ops: CpuOps, x: np.ndarray, branch: np.ndarray, hyper: HyperConnection | GatedResidual) -> np.ndarray:
    """See `BlockOps`."""
    if hyper.is_gated:
        return gated_residuals.write(ops, x, branch, hyper)
    said = ops.workspace.take("said", len(x), hyper.matrix.weight.shape[0])
    ops.registry.select(Call("mix streams")).candidate.run(ops, x, branch, said, hyper)
    return x


def grouped_linear(ops: CpuOps, x: np.ndarray, linears: Sequence[Linear]) -> np.ndarray:
    """See `BlockOps`."""
    count = len(linears)
    inside, width = x.shape[1] // count, linears[0].weight.shape[0]
    out = ops.workspace.take("grouped", len(x), count * width)
    own, gave = ops.workspace.take("group", len(x), inside), ops.workspace.take("gave", len(x), width)
    take, put = (ops.registry.select(Call(op)).candidate.run for op in ("take stream", "put stream"))
    for group, each in enumerate(linears):
        take(ops, x, own, group)
        if ops._remembered(own, None, (each,), linear.PLAIN, "none") is None:
            ops._matrix(own, None, [each], [gave], linear.PLAIN, "none")
        put(ops, out, gave, group, False)
    return out


def picked_experts(ops: CpuOps, ids: np.ndarray, picks: Mapping[int, np.ndarray], experts: int) -> dict[int, np.ndarray]:
    """Per-layer score corrections [T, E] for tokens `ids` whose experts are given by a table [V, k]: hugely negative for all others; in
    buffers where jobs of a recorded pass find the next pass's."""
    found = {}
    for place, (layer, table) in enumerate(picks.items()):
        own = found[layer] = ops.workspace.take(f"picks{place}", len(ids), experts)
        own[:] = -np.inf
        np.put_along_axis(own, table[ids], 0.0, axis=1)
    return found


# -- what runs them -----------------------------------------------------------------------------------------------------------------------


def _fill(ops: CpuOps, x: np.ndarray, own: np.ndarray, said: np.ndarray, hyper: HyperConnection) -> None:
    ops.args[: loops.SLOTS] = (ops.at(x), ops.at(own), len(x), hyper.count, own.shape[1], ops.at(said), address(hyper.scale),
                               address(hyper.base), hyper.sinkhorn_iterations, hyper.is_final, 0, ops.scratch, ops.scratch_stride)
    ops.reals[loops.LEAST] = hyper.sinkhorn_eps


def gather(ops: CpuOps, x: np.ndarray, own: np.ndarray, said: np.ndarray, hyper: HyperConnection) -> None:
    _fill(ops, x, own, said, hyper)
    ops.run(loops.gather_streams, ops.where, len(x) > 1, ops.args)


def mix(ops: CpuOps, x: np.ndarray, branch: np.ndarray, said: np.ndarray, hyper: HyperConnection) -> None:
    _fill(ops, x, branch, said, hyper)
    ops.run(loops.mix_streams, ops.where, len(x) > 1, ops.args)


# -- and what they mean, by `reference_hyper_connections.py` -------------------------------------------------------------------------------


def gather_reference(ops: CpuOps, x: np.ndarray, own: np.ndarray, said: np.ndarray, hyper: HyperConnection) -> None:
    ops.flush()
    split = x.reshape(len(x), hyper.count, -1)
    if hyper.is_final:
        own[:] = meaning.left(split, said, hyper.scale, hyper.base, hyper.sinkhorn_eps)
        return
    reads, writes, mixes = meaning.numbers(said, hyper.scale, hyper.base, hyper.count, hyper.sinkhorn_eps, hyper.sinkhorn_iterations)
    own[:] = meaning.gathered(split, reads)
    said[:] = np.concatenate([reads, writes, mixes.reshape(len(x), -1)], 1)


def mix_reference(ops: CpuOps, x: np.ndarray, branch: np.ndarray, said: np.ndarray, hyper: HyperConnection) -> None:
    ops.flush()
    split, count = x.reshape(len(x), hyper.count, -1), hyper.count
    _, writes, mixes = np.split(said, [count, 2 * count], axis=1)
    split[:] = meaning.mixed(split, branch, writes, mixes.reshape(len(x), *((count, count) if hyper.sinkhorn_iterations else (0, 0))))
