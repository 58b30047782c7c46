"""AltUp token streams, one of which passes through a layer, with torch ops: the counterpart of `cpu/streams.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ...quant.weight import AltUp, Linear, LowRank, Norm, PerLayerInput
    from .torch_ops import TorchOps

See = Callable[[torch.Tensor], None] | None


def altup_predict(ops: TorchOps, x: torch.Tensor, streams: AltUp) -> torch.Tensor:
    """See `BlockOps`."""
    split = x.view(len(x), streams.num_streams, -1)
    shares = _shares(ops, split[:, 0].contiguous(), streams, streams.prediction_coefs).view(-1, streams.num_streams, streams.num_streams)
    split.add_(torch.bmm(shares, split))
    return split[:, 0].clone()


def altup_correct(ops: TorchOps, x: torch.Tensor, own: torch.Tensor, streams: AltUp) -> torch.Tensor:
    """See `BlockOps`."""
    split, shares = x.view(len(x), streams.num_streams, -1), _shares(ops, own, streams, streams.correction_coefs)
    split.addcmul_(shares[..., None] + 1, (own - split[:, 0])[:, None])
    return torch.mul(split[:, 0], streams.output_scale, out=own)


def _shares(ops: TorchOps, rows: torch.Tensor, streams: AltUp, coefficients: torch.Tensor) -> torch.Tensor:
    router_outputs = torch.tanh(ops.stages.normalise(rows, streams.router_norm) @ streams.router.T / rows.shape[1])
    return router_outputs @ coefficients.T


def altup_add_input(ops: TorchOps, x: torch.Tensor, own: torch.Tensor, inputs: PerLayerInput, given: torch.Tensor, act: str,
                    see: See = None) -> torch.Tensor:
    """See `BlockOps`."""
    hidden = ops.stages.gated(ops._linear(own, inputs.gate), given, act)
    if see is not None:
        see(hidden)
    branch = ops.stages.normalise(ops._linear(hidden, inputs.projection), inputs.post_norm)
    x.view(len(x), -1, branch.shape[1])[:, 1:].add_(branch[:, None])
    return x


def low_rank_branch(ops: TorchOps, x: torch.Tensor, norm: Norm, low: LowRank, see: See = None) -> torch.Tensor:
    """See `BlockOps`."""
    n = ops.stages.normalise(x, norm)
    hidden = ops._linear(n, low.down)
    if see is not None:
        see(hidden)
    return n + ops.stages.normalise(ops._linear(hidden, low.up), low.post_norm)


def add_scaled(ops: TorchOps, x: torch.Tensor, y: torch.Tensor, factor: float) -> torch.Tensor:
    """See `BlockOps`."""
    return x.add_(y, alpha=factor)


def first_stream(ops: TorchOps, x: torch.Tensor, count: int) -> torch.Tensor:
    """See `BlockOps`."""
    return x.view(len(x), count, -1)[:, 0].clone()


def second_stream(ops: TorchOps, x: torch.Tensor, count: int) -> torch.Tensor:
    """See `BlockOps`."""
    return x.view(len(x), count, -1)[:, 1].clone()


def put_stream(ops: TorchOps, x: torch.Tensor, y: torch.Tensor, which: int) -> torch.Tensor:
    """See `BlockOps`."""
    x.view(len(x), -1, y.shape[1])[:, which].copy_(y)
    return x


def add_to_first(ops: TorchOps, x: torch.Tensor, y: torch.Tensor, each: Linear) -> torch.Tensor:
    """See `BlockOps`."""
    branch = ops._linear(y, each)
    x[:, : branch.shape[1]].add_(branch)
    return x


def add_low_rank(ops: TorchOps, x: torch.Tensor, norm: Norm, low: LowRank, out: torch.Tensor) -> torch.Tensor:
    """See `BlockOps`."""
    return out.add_(ops._linear(ops._linear(ops.stages.normalise(x, norm), low.down), low.up))


def shared_block_mlp(ops: TorchOps, x: torch.Tensor, norm: Norm, gate: Linear, up: Linear, down: Linear, act: str, own: Sequence[LowRank],
                     see: See = None) -> torch.Tensor:
    """See `BlockOps`."""
    n = ops.stages.normalise(x, norm)
    products = [ops._linear(n, matrix) for matrix in (gate, up)]
    for low, out in zip(own, products, strict=bool(own)):
        out.add_(ops._linear(ops._linear(n, low.down), low.up))
    hidden = ops.stages.gated(*products, act)
    if see is not None:
        see(hidden)
    return ops._linear(hidden, down)


def cutoff_mlp(ops: TorchOps, x: torch.Tensor, norm: Norm, gate: Linear, up: Linear, down: Linear, act: str, deviations: float,
               see: See = None, after: Norm | None = None) -> torch.Tensor:
    """See `BlockOps`."""
    n = ops.stages.normalise(x, norm)
    gates = ops._linear(n, gate)
    deviation, mean = torch.std_mean(gates, -1, correction=0, keepdim=True)
    hidden = ops.stages.gated(gates.sub_(mean + deviations * deviation).relu_(), ops._linear(n, up), act)
    return ops._down(hidden, down, x, see, after, 1.0)
