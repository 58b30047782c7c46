"""AltUp token streams, one of which passes through a layer: block ops, and creating and merging streams; a low-rank (Laurel) branch, and an
MLP with Gaussian top-k gates.

All are jobs over workspace buffers, so a recorded pass can include them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .. import reference_streams as meaning
from ..layout import NORMS, activation_number
from ..reference import gated
from ..registry import Call
from ..workspace import Dims, address
from . import linear, row_ops, streamed_linear
from . import stream_loops as loops

if TYPE_CHECKING:
    from ...quant.weight import AltUp, Linear, LowRank, Norm, PerLayerInput
    from .ops import CpuOps

Observer = Callable[[np.ndarray], None] | None


def plan_workspace(dims: Dims, chunk: int) -> dict[str, int]:
    """Floats of the buffers, none for a model with one stream."""
    if not dims.residual_streams:
        return {}
    return {"streams": chunk * dims.residual_streams * dims.hidden_size, "branches": chunk * (dims.residual_streams - 1) * dims.hidden_size,
            "stream": chunk * dims.hidden_size, "side stream": chunk * dims.hidden_size, "low rank": chunk * dims.low_rank_dim}


def scratch_floats(dims: Dims) -> int:
    """Per worker."""
    return loops.scratch_floats(dims.residual_streams, dims.hidden_size) if dims.residual_streams else 0


def enter_streams(ops: CpuOps, x: np.ndarray, linears: Sequence[Linear], count: int) -> np.ndarray:
    """Streams [T, S * D] from embeddings x [T, D]: these, and each matrix's product with them, rescaled to their magnitude; without
    matrices `count` copies."""
    if not linears:
        out = ops.workspace.take("streams", len(x), count * x.shape[1])
        for i in range(count):
            ops.registry.select(Call("put stream")).candidate.run(ops, out, x, i, False)
        return out
    branches = ops.workspace.take("branches", len(linears), *x.shape)
    ops._run_stage(x, None, list(linears), list(branches), linear.PLAIN, "none")
    out = ops.workspace.take("streams", len(x), (len(linears) + 1) * x.shape[1])
    ops.registry.select(Call("enter streams")).candidate.run(ops, out, branches, x)
    return out


def leave_streams(ops: CpuOps, x: np.ndarray, linears: Sequence[Linear], count: int) -> np.ndarray:
    """[T, D] from streams x [T, S * D]: the mean of the first and of each matrix's product with another, rescaled to its magnitude; without
    matrices the first of `count`."""
    if not linears:
        return first_stream(ops, x, count)
    one = ops.workspace.take("stream", len(x), x.shape[1] // count)
    branches = ops.workspace.take("branches", len(linears), *one.shape)
    take_stream = ops.registry.select(Call("take stream")).candidate.run
    for i, matrix in enumerate(linears):
        take_stream(ops, x, one, i + 1)
        ops._run_stage(one, None, [matrix], [branches[i]], linear.PLAIN, "none")
    ops.registry.select(Call("leave streams")).candidate.run(ops, x, branches, one)
    return one


def first_stream(ops: CpuOps, x: np.ndarray, count: int) -> np.ndarray:
    """See `BlockOps`."""
    one = ops.workspace.take("stream", len(x), x.shape[1] // count)
    ops.registry.select(Call("take stream")).candidate.run(ops, x, one, 0)
    return one


def second_stream(ops: CpuOps, x: np.ndarray, count: int) -> np.ndarray:
    """See `BlockOps`."""
    one = ops.workspace.take("side stream", len(x), x.shape[1] // count)
    ops.registry.select(Call("take stream")).candidate.run(ops, x, one, 1)
    return one


def mean_stream(ops: CpuOps, x: np.ndarray, count: int) -> np.ndarray:
    """The mean [T, D] of streams x [T, S * D], in an array of its own."""
    one, other = ops.workspace.take("stream", len(x), x.shape[1] // count), ops.workspace.take("side stream", len(x), x.shape[1] // count)
    take_stream = ops.registry.select(Call("take stream")).candidate.run
    take_stream(ops, x, one, 0)
    for index in range(1, count):
        take_stream(ops, x, other, index)
        ops.add_scaled(one, other, 1.0)
    return ops.scale_in_place(one, 1 / count)


def put_stream(ops: CpuOps, x: np.ndarray, y: np.ndarray, index: int) -> np.ndarray:
    """See `BlockOps`."""
    ops.registry.select(Call("put stream")).candidate.run(ops, x, y, index, False)
    return x


def add_to_first(ops: CpuOps, x: np.ndarray, y: np.ndarray, matrix: Linear) -> np.ndarray:
    """See `BlockOps`."""
    (branch,) = ops.norm_linear(y, None, (matrix,))
    ops.registry.select(Call("put stream")).candidate.run(ops, x, branch, 0, True)
    return x


def add_low_rank(ops: CpuOps, x: np.ndarray, norm: Norm, low_rank: LowRank, out: np.ndarray) -> np.ndarray:
    """See `BlockOps`."""
    if (outs := ops._run_cached(x, norm, (low_rank.down,), linear.PLAIN, "none")) is None:
        outs = [ops.workspace.take("low rank", len(x), low_rank.down.weight.shape[0])]
        ops._run_stage(x, norm, [low_rank.down], outs, linear.PLAIN, "none")
    return ops.linear_add(outs[0], low_rank.up, out)


def shared_block_mlp(ops: CpuOps, x: np.ndarray, norm: Norm, gate: Linear, up: Linear, down: Linear, act: str, branches: Sequence[LowRank],
                     observer: Observer = None) -> np.ndarray:
    """See `BlockOps`."""
    if (outs := ops._run_cached(x, norm, (gate, up), linear.PLAIN, "none")) is None:
        outs = [ops.workspace.take(name, len(x), gate.weight.shape[0]) for name in ("gate", "up")]
        ops._run_stage(x, norm, [gate, up], outs, linear.PLAIN, "none")
    for low_rank, out in zip(branches, outs, strict=bool(branches)):
        add_low_rank(ops, x, norm, low_rank, out)
    ops.gate(*outs, act)
    if observer is not None:
        observer(outs[0])
    (branch,) = ops.norm_linear(outs[0], None, (down,))
    return branch


def altup_predict(ops: CpuOps, x: np.ndarray, streams: AltUp) -> np.ndarray:
    """See `BlockOps`."""
    active = ops.workspace.take("stream", len(x), x.shape[1] // streams.num_streams)
    ops.registry.select(Call("predict")).candidate.run(ops, x, active, streams)
    return active


def altup_correct(ops: CpuOps, x: np.ndarray, active: np.ndarray, streams: AltUp) -> np.ndarray:
    """See `BlockOps`."""
    ops.registry.select(Call("correct")).candidate.run(ops, x, active, streams)
    return active


def altup_add_input(ops: CpuOps, x: np.ndarray, active: np.ndarray, inputs: PerLayerInput, layer_input: np.ndarray, act: str,
                    observer: Observer = None) -> np.ndarray:
    """See `BlockOps`."""
    if (outs := ops._run_cached(active, None, (inputs.gate,), linear.PLAIN, "none")) is None:
        outs = [ops.workspace.take("gate", len(active), inputs.gate.weight.shape[0])]
        ops._run_stage(active, None, [inputs.gate], outs, linear.PLAIN, "none")
    ops.gate(outs[0], layer_input, act)
    if observer is not None:
        observer(outs[0])
    (branch,) = ops.norm_linear(outs[0], None, (inputs.projection,))
    ops.registry.select(Call("spread")).candidate.run(ops, x, branch, inputs.post_norm)
    return x


def low_rank_branch(ops: CpuOps, x: np.ndarray, norm: Norm, low_rank: LowRank, observer: Observer = None) -> np.ndarray:
    """See `BlockOps`."""
    n = ops.workspace.take("side stream", *x.shape)
    ops.registry.select(Call("scale")).candidate.run(ops, x, n, 1.0)
    row_ops.norm_rows(ops, n, norm)
    if (outs := ops._run_cached(n, None, (low_rank.down,), linear.PLAIN, "none")) is None:
        outs = [ops.workspace.take("low rank", len(x), low_rank.down.weight.shape[0])]
        ops._run_stage(n, None, [low_rank.down], outs, linear.PLAIN, "none")
    if observer is not None:
        observer(outs[0])
    return ops.linear_add(outs[0], low_rank.up, n, low_rank.post_norm)


def add_scaled(ops: CpuOps, x: np.ndarray, y: np.ndarray, factor: float) -> np.ndarray:
    """See `BlockOps`."""
    ops._add_with(ops, y, None, x, factor)
    return x


def cutoff_mlp(ops: CpuOps, x: np.ndarray, norm: Norm, gate: Linear, up: Linear, down: Linear, act: str, deviations: float,
               observer: Observer = None, post_norm: Norm | None = None) -> np.ndarray:
    """See `BlockOps`."""
    if (outs := ops._run_cached(x, norm, (gate, up), linear.PLAIN, "none")) is None:
        outs = [ops.workspace.take(name, len(x), gate.weight.shape[0]) for name in ("gate", "up")]
        if gate.weight.row_parts and up.weight.row_parts and gate.lora is None and up.lora is None:
            streamed_linear.run_pair(ops, x, norm, (gate, up), outs)
        else:
            ops._run_stage(x, norm, [gate, up], outs, linear.PLAIN, "none")
    ops.registry.select(Call("cut", act=act)).candidate.run(ops, *outs, act, deviations)
    if observer is not None:
        observer(outs[0])
    return ops.linear_add(outs[0], down, x, post_norm)


# -- what runs them -----------------------------------------------------------------------------------------------------------------------


def _fill(ops: CpuOps, x: np.ndarray, active: np.ndarray, streams: AltUp, coefficients: np.ndarray) -> None:
    norm = streams.router_norm
    ops.args[: loops.EPS] = (ops.address_of(x), ops.address_of(active), *active.shape[:1], streams.num_streams, active.shape[1],
                             NORMS[norm.kind], address(norm.weight),
                             address(streams.router), address(coefficients), address(streams.output_scale), ops.scratch, ops.scratch_stride)
    ops.reals[loops.EPS] = norm.eps


def predict(ops: CpuOps, x: np.ndarray, active: np.ndarray, streams: AltUp) -> None:
    _fill(ops, x, active, streams, streams.prediction_coefs)
    ops.run(loops.predict, ops.args_address, len(x) > 1, ops.args)


def correct(ops: CpuOps, x: np.ndarray, active: np.ndarray, streams: AltUp) -> None:
    _fill(ops, x, active, streams, streams.correction_coefs)
    ops.run(loops.correct, ops.args_address, len(x) > 1, ops.args)


def spread(ops: CpuOps, x: np.ndarray, branch: np.ndarray, norm: Norm) -> None:
    ops.args[: loops.P_EPS] = (ops.address_of(x), ops.address_of(branch), len(x), x.shape[1] // branch.shape[1], branch.shape[1],
                               NORMS[norm.kind],
                               address(norm.weight))
    ops.reals[loops.P_EPS] = norm.eps
    ops.run(loops.spread, ops.args_address, x.size >= row_ops.MIN_PARALLEL_SIZE, ops.args)


def _between(ops: CpuOps, kernel: object, streams: np.ndarray, branches: np.ndarray | None, one: np.ndarray, which: int = 0,
             array: bool = False) -> None:
    tokens, width = one.shape
    ops.args[: loops.M_KEPT + 1] = (ops.address_of(streams), 0 if branches is None else ops.address_of(branches), ops.address_of(one),
                                    tokens,
                                    streams.shape[1] // width, width, which, array)
    ops.run(kernel, ops.args_address, streams.size >= row_ops.MIN_PARALLEL_SIZE, ops.args)


def enter(ops: CpuOps, streams: np.ndarray, branches: np.ndarray, one: np.ndarray) -> None:
    _between(ops, loops.enter, streams, branches, one)


def leave(ops: CpuOps, streams: np.ndarray, branches: np.ndarray, one: np.ndarray) -> None:
    _between(ops, loops.leave, streams, branches, one)


def take(ops: CpuOps, streams: np.ndarray, one: np.ndarray, which: int) -> None:
    _between(ops, loops.take, streams, None, one, which)


def put(ops: CpuOps, streams: np.ndarray, one: np.ndarray, which: int, branch: bool) -> None:
    _between(ops, loops.put, streams, None, one, which, branch)


def cut(ops: CpuOps, gate: np.ndarray, up: np.ndarray, act: str, deviations: float) -> None:
    ops.args[: loops.C_DEVIATIONS] = ops.address_of(gate), ops.address_of(up), *gate.shape, activation_number(act)
    ops.reals[loops.C_DEVIATIONS] = deviations
    ops.run(loops.cut, ops.args_address, gate.size >= row_ops.MIN_PARALLEL_SIZE, ops.args)


# -- and what they mean, by `reference_streams.py` ----------------------------------------------------------------------------------------


def _router_outputs(rows: np.ndarray, streams: AltUp) -> np.ndarray:
    norm = streams.router_norm
    return meaning.compute_router_outputs(rows, (norm.kind, norm.weight, norm.bias, norm.eps), streams.router)


def _split_streams(x: np.ndarray, one: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1, one.shape[1])


def predict_reference(ops: CpuOps, x: np.ndarray, active: np.ndarray, streams: AltUp) -> None:
    ops.flush()
    split = _split_streams(x, active)
    split[:] = meaning.predict(split, _router_outputs(split[:, 0], streams), streams.prediction_coefs)
    active[:] = split[:, 0]


def correct_reference(ops: CpuOps, x: np.ndarray, active: np.ndarray, streams: AltUp) -> None:
    ops.flush()
    split = _split_streams(x, active)
    split[:] = meaning.correct(split, active, _router_outputs(active, streams), streams.correction_coefs)
    active[:] = split[:, 0] * streams.output_scale


def spread_reference(ops: CpuOps, x: np.ndarray, branch: np.ndarray, norm: Norm) -> None:
    ops.flush()
    branch[:] = meaning.normalise(branch, norm.kind, norm.weight, norm.bias, norm.eps)
    _split_streams(x, branch)[:, 1:] += branch[:, None]


def enter_reference(ops: CpuOps, streams: np.ndarray, branches: np.ndarray, one: np.ndarray) -> None:
    ops.flush()
    _split_streams(streams, one)[:] = meaning.enter_streams(one, branches)


def leave_reference(ops: CpuOps, streams: np.ndarray, branches: np.ndarray, one: np.ndarray) -> None:
    ops.flush()
    one[:] = meaning.leave_streams(_split_streams(streams, one)[:, 0], branches)


def take_reference(ops: CpuOps, streams: np.ndarray, one: np.ndarray, index: int) -> None:
    ops.flush()
    one[:] = _split_streams(streams, one)[:, index]


def put_reference(ops: CpuOps, streams: np.ndarray, one: np.ndarray, index: int, adds: bool) -> None:
    ops.flush()
    stream = _split_streams(streams, one)
    stream[:, index] = stream[:, index] + one if adds else one


def cut_reference(ops: CpuOps, gate: np.ndarray, up: np.ndarray, act: str, deviations: float) -> None:
    ops.flush()
    gate[:] = gated(meaning.gaussian_topk(gate, deviations), up, act)
