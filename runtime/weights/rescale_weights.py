"""The parameters of residuals whose channels are each multiplied and moved, as ops read them."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ...quant.weight import Rescale

RESCALED = "attn_scale"  # a role of layers whose stream is multiplied channel by channel


def rescale(roles: Collection[str], what: str, vector: Callable[[str], object], ops: object) -> Rescale | None:
    """How a stream meets a branch, or enters the first layer: both are moved before they are multiplied, so what is added is one vector."""
    if f"{what}_scale" not in roles:
        return None
    scales, moved = vector(f"{what}_scale"), vector(f"{what}_offset")
    if f"{what}_branch_scale" not in roles:
        return Rescale(scales, None, ops.put(scales * moved, "f32"))
    factors = vector(f"{what}_branch_scale")
    return Rescale(scales, factors, ops.put(scales * moved + factors * vector(f"{what}_branch_offset"), "f32"))
