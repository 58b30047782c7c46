"""The parameters of residuals whose channels are each multiplied and moved, and of attention that is a difference, as ops read them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ...quant.weight import Rescale
from ..families.diffllama import share_of
from ..tensors import as_float32

if TYPE_CHECKING:
    from ..tensors import ModelTensor

RESCALED = "attn_scale"  # a role of layers whose stream is multiplied channel by channel


def rescale(roles: Collection[str], what: str, vector: Callable[[str], object]) -> Rescale | None:
    """How a stream meets a branch, or enters the first layer: both are moved before they are multiplied, so what is added is one vector."""
    if f"{what}_scale" not in roles:
        return None
    if f"{what}_offset" not in roles:
        scales = vector(f"{what}_scale")
        return Rescale(scales, scales * 0 + 1, scales * 0)
    scales, moved = vector(f"{what}_scale"), vector(f"{what}_offset")
    if f"{what}_branch_scale" not in roles:
        return Rescale(scales, None, scales * moved)
    factors = vector(f"{what}_branch_scale")
    return Rescale(scales, factors, scales * moved + factors * vector(f"{what}_branch_offset"))


def difference(roles: Mapping[str, ModelTensor], raw: Mapping[str, np.ndarray], layer: int) -> float:
    """How much a layer takes away of what the second half of its heads attends to."""
    first, second = (np.exp(np.dot(*(as_float32(roles[f"lambda_{side}{number}"], raw) for side in "qk"))) for number in (1, 2))
    return float(first - second + share_of(layer))
