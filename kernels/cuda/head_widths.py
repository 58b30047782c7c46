"""Padding of attention heads with torch ops: the counterpart of `cpu/head_widths.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ...quant.weight import Norm, ResidualScale
    from .torch_ops import TorchOps


def pad_heads(ops: TorchOps, y: torch.Tensor, heads: int, padded_dim: int, prefix: torch.Tensor | None, operand: int) -> torch.Tensor:
    """See `BlockOps`."""
    split = y.view(len(y), heads, -1)
    more = padded_dim - split.shape[2]
    before = split.new_zeros(len(y), heads, more) if prefix is None else prefix.expand(len(y), heads, more)
    return torch.cat([before, split], 2).flatten(1)


def pair_heads(ops: TorchOps, y: torch.Tensor, heads: int, depth: int) -> torch.Tensor:
    """See `BlockOps`."""
    return y.view(len(y), 2, heads // 2, depth).transpose(1, 2).repeat(1, 2, 1, 1).flatten(1)


def dynamic_mask_heads(ops: TorchOps, y: torch.Tensor, logits: torch.Tensor, heads: int, head_dim: int,
                       rates: torch.Tensor) -> torch.Tensor:
    """See `BlockOps`."""
    y.view(len(y), heads, head_dim)[..., 0] = torch.exp(rates * torch.nn.functional.softplus(logits))
    return y


def scaled_residual(ops: TorchOps, x: torch.Tensor, branch: torch.Tensor | None, scale: ResidualScale) -> torch.Tensor:
    """See `BlockOps`."""
    x.mul_(scale.scales).add_(scale.offsets)
    return x if branch is None else x.add_(scale.branch_scales * branch)


def unpad_heads(ops: TorchOps, y: torch.Tensor, heads: int, head_dim: int) -> torch.Tensor:
    """See `BlockOps`."""
    return y.view(len(y), heads, -1)[..., -head_dim:].flatten(1)


def norm_stream(ops: TorchOps, x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """See `BlockOps`."""
    return x.copy_(ops.stages.normalise(x, norm))
