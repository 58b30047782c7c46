"""AltUp token streams, one of which passes through a layer, with torch ops: the counterpart of `cpu/streams.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ...quant.weight import AltUp, Linear, LowRank, Norm, PerLayerInput
    from .torch_ops import TorchOps

Observer = Callable[[torch.Tensor], None] | None


def altup_predict(ops: TorchOps, x: torch.Tensor, streams: AltUp) -> torch.Tensor:
    """See `BlockOps`."""
    split = x.view(len(x), streams.num_streams, -1)
    shares = _shares(ops, split[:, 0].contiguous(), streams, streams.prediction_coefs).view(-1, streams.num_streams, streams.num_streams)
    split.add_(torch.bmm(shares, split))
    return split[:, 0].clone()


def altup_correct(ops: TorchOps, x: torch.Tensor, active: torch.Tensor, streams: AltUp) -> torch.Tensor:
    """See `BlockOps`."""
    split, shares = x.view(len(x), streams.num_streams, -1), _shares(ops, active, streams, streams.correction_coefs)
    split.addcmul_(shares[..., None] + 1, (active - split[:, 0])[:, None])
    return torch.mul(split[:, 0], streams.output_scale, out=active)


def _shares(ops: TorchOps, rows: torch.Tensor, streams: AltUp, coefficients: torch.Tensor) -> torch.Tensor:
    router_outputs = torch.tanh(ops.stages.normalise(rows, streams.router_norm) @ streams.router.T / rows.shape[1])
    return router_outputs @ coefficients.T


def altup_add_input(ops: TorchOps, x: torch.Tensor, active: torch.Tensor, inputs: PerLayerInput, layer_input: torch.Tensor, act: str,
                    observer: Observer = None) -> torch.Tensor:
    """See `BlockOps`."""
    hidden = ops.stages.gated(ops._linear(active, inputs.gate), layer_input, act)
    if observer is not None:
        observer(hidden)
    branch = ops.stages.normalise(ops._linear(hidden, inputs.projection), inputs.post_norm)
    x.view(len(x), -1, branch.shape[1])[:, 1:].add_(branch[:, None])
    return x


def low_rank_branch(ops: TorchOps, x: torch.Tensor, norm: Norm, low_rank: LowRank, observer: Observer = None) -> torch.Tensor:
    """See `BlockOps`."""
    n = ops.stages.normalise(x, norm)
    hidden = ops._linear(n, low_rank.down)
    if observer is not None:
        observer(hidden)
    return n + ops.stages.normalise(ops._linear(hidden, low_rank.up), low_rank.post_norm)


def add_scaled(ops: TorchOps, x: torch.Tensor, y: torch.Tensor, factor: float) -> torch.Tensor:
    """See `BlockOps`."""
    return x.add_(y, alpha=factor)


def first_stream(ops: TorchOps, x: torch.Tensor, count: int) -> torch.Tensor:
    """See `BlockOps`."""
    return x.view(len(x), count, -1)[:, 0].clone()


def second_stream(ops: TorchOps, x: torch.Tensor, count: int) -> torch.Tensor:
    """See `BlockOps`."""
    return x.view(len(x), count, -1)[:, 1].clone()


def put_stream(ops: TorchOps, x: torch.Tensor, y: torch.Tensor, index: int) -> torch.Tensor:
    """See `BlockOps`."""
    x.view(len(x), -1, y.shape[1])[:, index].copy_(y)
    return x


def add_to_first(ops: TorchOps, x: torch.Tensor, y: torch.Tensor, matrix: Linear) -> torch.Tensor:
    """See `BlockOps`."""
    branch = ops._linear(y, matrix)
    x[:, : branch.shape[1]].add_(branch)
    return x


def add_low_rank(ops: TorchOps, x: torch.Tensor, norm: Norm, low_rank: LowRank, out: torch.Tensor) -> torch.Tensor:
    """See `BlockOps`."""
    return out.add_(ops._linear(ops._linear(ops.stages.normalise(x, norm), low_rank.down), low_rank.up))


def shared_block_mlp(ops: TorchOps, x: torch.Tensor, norm: Norm, gate: Linear, up: Linear, down: Linear, act: str,
                     branches: Sequence[LowRank], observer: Observer = None) -> torch.Tensor:
    """See `BlockOps`."""
    n = ops.stages.normalise(x, norm)
    products = [ops._linear(n, matrix) for matrix in (gate, up)]
    for low_rank, out in zip(branches, products, strict=bool(branches)):
        out.add_(ops._linear(ops._linear(n, low_rank.down), low_rank.up))
    hidden = ops.stages.gated(*products, act)
    if observer is not None:
        observer(hidden)
    return ops._linear(hidden, down)


def cutoff_mlp(ops: TorchOps, x: torch.Tensor, norm: Norm, gate: Linear, up: Linear, down: Linear, act: str, deviations: float,
               observer: Observer = None, post_norm: Norm | None = None) -> torch.Tensor:
    """See `BlockOps`."""
    n = ops.stages.normalise(x, norm)
    gates = ops._linear(n, gate)
    deviation, mean = torch.std_mean(gates, -1, correction=0, keepdim=True)
    hidden = ops.stages.gated(gates.sub_(mean + deviations * deviation).relu_(), ops._linear(n, up), act)
    return ops._down(hidden, down, x, observer, post_norm, 1.0)
