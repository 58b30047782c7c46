"""Learned per-channel scales of the residual stream, and the lambda of differential attention, from a layer's tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...quant.weight import ResidualScale
from ..families.diffllama import share_of

if TYPE_CHECKING:
    from .role_source import RoleSource

RESIDUAL_SCALE_ROLE = "attn_scale"  # present in layers with residual scales


def residual_scale(source: RoleSource, prefix: str) -> ResidualScale | None:
    """Scales and offsets where the stream takes in a branch, or enters the first layer; None if it has none.

    Checkpoints add an offset before they scale; both offsets are folded into the one that is added afterwards.
    """
    scales, offset, branch_scales = (source.vector(f"{prefix}_{name}") for name in ("scale", "offset", "branch_scale"))
    if scales is None:
        return None
    if offset is None:
        return ResidualScale(scales, scales * 0 + 1, scales * 0)
    if branch_scales is None:
        return ResidualScale(scales, None, scales * offset)
    return ResidualScale(scales, branch_scales, scales * offset + branch_scales * source.vector(f"{prefix}_branch_offset"))


def differential_lambda(source: RoleSource) -> float:
    """The share of the second half of the heads that differential attention subtracts from the first."""
    first, second = (np.exp(np.dot(*(source.values(f"lambda_{side}{number}") for side in "qk"))) for number in (1, 2))
    return float(first - second + share_of(source.layer))
