"""Padding of attention heads with torch ops: the counterpart of `cpu/head_widths.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ...quant.weight import Norm, ResidualScale
    from .torch_ops import TorchOps


def pad_heads(ops: TorchOps, y: torch.Tensor, heads: int, wide: int, front: torch.Tensor | None, which: int) -> torch.Tensor:
    """See `BlockOps`."""
    split = y.view(len(y), heads, -1)
    more = wide - split.shape[2]
    before = split.new_zeros(len(y), heads, more) if front is None else front.expand(len(y), heads, more)
    return torch.cat([before, split], 2).flatten(1)


def pair_heads(ops: TorchOps, y: torch.Tensor, heads: int, depth: int) -> torch.Tensor:
    """See `BlockOps`."""
    return y.view(len(y), 2, heads // 2, depth).transpose(1, 2).repeat(1, 2, 1, 1).flatten(1)


def dynamic_mask_heads(ops: TorchOps, y: torch.Tensor, says: torch.Tensor, heads: int, wide: int, rates: torch.Tensor) -> torch.Tensor:
    """See `BlockOps`."""
    y.view(len(y), heads, wide)[..., 0] = torch.exp(rates * torch.nn.functional.softplus(says))
    return y


def scaled_residual(ops: TorchOps, x: torch.Tensor, branch: torch.Tensor | None, own: ResidualScale) -> torch.Tensor:
    """See `BlockOps`."""
    x.mul_(own.scales).add_(own.offsets)
    return x if branch is None else x.add_(own.branch_scales * branch)


def unpad_heads(ops: TorchOps, y: torch.Tensor, heads: int, narrow: int) -> torch.Tensor:
    """See `BlockOps`."""
    return y.view(len(y), heads, -1)[..., -narrow:].flatten(1)


def norm_stream(ops: TorchOps, x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """See `BlockOps`."""
    return x.copy_(ops.stages.normalise(x, norm))
