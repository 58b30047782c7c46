"""Ops that read and write a token's streams by per-token weights, with torch ops: the counterparts of `cpu/hyper_connections.py` and
`cpu/gated_residuals.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from ...quant.compressed_attention_weights import GatedResidual, HyperConnection
    from ...quant.weight import Norm
    from .torch_ops import TorchOps


def read_streams(ops: TorchOps, x: torch.Tensor, hyper: HyperConnection | GatedResidual) -> torch.Tensor:
    """See `BlockOps`."""
    if hyper.is_gated:
        return _gated(ops, x, hyper)
    reads, *ops.write_weights = _numbers(ops._linear(ops.stages.normalise(x, hyper.norm), hyper.proj), hyper)
    return torch.bmm(reads[:, None], x.unflatten(1, (hyper.num_streams, -1)))[:, 0]


def write_streams(ops: TorchOps, x: torch.Tensor, branch: torch.Tensor, hyper: HyperConnection | GatedResidual) -> torch.Tensor:
    """See `BlockOps`."""
    split, (writes, *others) = x.view(len(x), hyper.num_streams, -1), ops.write_weights
    if not others:
        split.addcmul_(writes[..., None], branch[:, None])
    else:
        split.copy_(torch.baddbmm(writes[..., None] * branch[:, None], others[0].mT, split))
    return x


def _numbers(logits: torch.Tensor, hyper: HyperConnection) -> tuple[torch.Tensor, ...]:
    """`reference_hyper_connections.numbers` on tensors, without the mixing matrix if streams are not mixed."""
    count, epsilon = hyper.num_streams, hyper.sinkhorn_eps
    sizes = (count, count, count**2) if hyper.sinkhorn_iterations else (count, count)
    reads, writes, *mixes = (part * hyper.scale[index] + base for index, (part, base) in enumerate(zip(
        *(values.split(sizes, -1) for values in (logits, hyper.base)), strict=True)))
    reads, writes = torch.sigmoid(reads) + epsilon, 2 * torch.sigmoid(writes)
    if not mixes:
        return reads, writes + epsilon
    shares = mixes[0].unflatten(1, (count, count)).softmax(-1) + epsilon
    shares = shares / (shares.sum(-2, keepdim=True) + epsilon)
    for _ in range(hyper.sinkhorn_iterations - 1):
        shares = shares / (shares.sum(-1, keepdim=True) + epsilon)
        shares = shares / (shares.sum(-2, keepdim=True) + epsilon)
    return reads, writes, shares


def _gated(ops: TorchOps, x: torch.Tensor, residual: GatedResidual) -> torch.Tensor:
    """The gated mean of the streams; the write weights are kept until the branch's output is added."""
    count = residual.num_streams
    normed = normed_streams(x, residual.norm, count)
    flat = normed.flatten(1)
    ops.write_weights = (2 * torch.sigmoid(ops._linear(flat, residual.inject) / count),)
    low = functional.silu(ops._linear(flat, residual.down) / count)
    return torch.sigmoid(ops._linear(low, residual.up)).view_as(normed).mul_(normed).mean(1)


def normed_streams(x: torch.Tensor, norm: Norm, count: int) -> torch.Tensor:
    """Every stream of x [T, S * D] under its own norm, weights stored minus one, [T, S, D]."""
    split = x.unflatten(1, (count, -1))
    scale = torch.rsqrt(split.square().mean(-1, keepdim=True) + norm.eps)
    return (split * scale).mul_(norm.weight.view(count, -1) + 1)
