"""Parameters of per-channel scaled and shifted residuals, and of differential attention, as ops read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...quant.weight import ResidualScale
from ..families.diffllama import share_of

if TYPE_CHECKING:
    from .role_source import RoleSource

RESCALED = "attn_scale"  # a role of layers whose stream is multiplied channel by channel


def rescale(found: RoleSource, what: str) -> ResidualScale | None:
    """Scale and shift where a stream meets a branch, or enters the first layer; the shift comes first, so it is folded into a single added
    vector."""
    scales, moved, factors = (found.vector(f"{what}_{each}") for each in ("scale", "offset", "branch_scale"))
    if scales is None:
        return None
    if moved is None:
        return ResidualScale(scales, scales * 0 + 1, scales * 0)
    if factors is None:
        return ResidualScale(scales, None, scales * moved)
    return ResidualScale(scales, factors, scales * moved + factors * found.vector(f"{what}_branch_offset"))


def difference(found: RoleSource) -> float:
    """The weight with which differential attention subtracts the second half of the heads."""
    first, second = (np.exp(np.dot(*(found.values(f"lambda_{side}{number}") for side in "qk"))) for number in (1, 2))
    return float(first - second + share_of(found.layer))
