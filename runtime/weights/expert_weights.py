"""Parameters of a mixture-of-experts layer, as blocks and ops read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.reference_moe import ranks
from ...quant.weight import Expert, Norm, ParallelExperts, RouterMlp, SharedExpert
from ..families import SHARED_EXPERT_ROLES, VISION_PREFIX, expert_roles

if TYPE_CHECKING:
    from ...quant.weight import Linear, LowRank
    from .paged_experts import LayerExperts, Paging
    from .role_source import RoleSource


@dataclass(frozen=True)
class MixtureWeights:
    """The fields of `LayerWeights` that a mixture of experts fills."""

    router: Linear | None
    correction_bias: object | None
    experts: tuple[Expert, ...] | LayerExperts
    shared_expert: SharedExpert | None
    parallel_experts: ParallelExperts | None
    router_mlp: RouterMlp | None
    vision_experts: tuple[Linear, tuple[Expert, ...], object | None] | None
    latent_projections: LowRank | None


def mixture_weights(found: RoleSource, post_norm: Norm, paging: Paging | None) -> MixtureWeights:
    """For a layer whose MLP would read the output of `post_norm`; experts handled by `paging` stay on disk."""
    config, own = found.config, found.config.moe
    router, correction = found.linear("router"), found.vector("correction")
    if router is None:
        return MixtureWeights(None, correction, (), _shared(found), None, _path(found), None, None)
    if correction is None and own.correction_bias:  # all zeros, since group selection needs one
        correction = found.put(np.zeros(own.num_experts, np.float32))
    apart = _apart(found, post_norm) if own.parallel_to_mlp else None
    if paging is None:
        experts = _experts(found)
    else:
        experts = paging.layer(found.layer, found.roles, lambda role: found.vector(f"{role}_bias"),
                               apart.router_norm if apart else post_norm,
                               None if config.router_mlp_dim or config.gated_norm_rank or own.latent_dim else router,
                               lambda logits: ranks(logits, own.routing, correction))
    seen = None
    if f"{VISION_PREFIX}router" in found.roles:
        seen = found.linear(f"{VISION_PREFIX}router"), _experts(found, VISION_PREFIX), found.vector(f"{VISION_PREFIX}correction")
    between = found.low_rank("experts_in", "experts_out")
    return MixtureWeights(router, correction, experts, _shared(found), apart, _path(found), seen, between)


def _experts(found: RoleSource, whose: str = "") -> tuple[Expert, ...]:
    return tuple(Expert(*(found.linear(whose + role) for role in expert_roles(e))) for e in range(found.config.moe.num_experts))


def _apart(found: RoleSource, post_norm: Norm) -> ParallelExperts:
    """A branch without parameters of its own reads what the MLP would, and only idle experts contribute nothing."""
    config, own = found.config, found.config.moe
    if "router_scale" in found.roles:
        router_norm = found.ones(config.hidden_size, found.values("router_scale") * np.float32(config.hidden_size**-0.5))
        return ParallelExperts(router_norm, found.norm("expert_norm"), found.norm("experts_after"), found.norm("mlp_after"),
                     found.vector("expert_scales"))
    read = Norm("none") if config.gated_norm_rank or own.latent_dim else post_norm  # from a norm computed beforehand
    return ParallelExperts(read, read, None, None,
                           found.put(np.repeat(np.float32([1, not own.zero_experts_drop]), [own.num_experts, own.zero_experts])))


def _shared(found: RoleSource) -> SharedExpert | None:
    if SHARED_EXPERT_ROLES[1] not in found.roles:
        return None
    factor = found.config.residual_multiplier * found.config.multiplier(SHARED_EXPERT_ROLES[2])
    return SharedExpert(*map(found.linear, SHARED_EXPERT_ROLES), factor, found.config.expert_act(found.layer, shared=True))


def _path(found: RoleSource) -> RouterMlp | None:
    if "router_in" not in found.roles:
        return None
    return RouterMlp(found.linear("router_in"), found.vector("router_share"), found.norm("router_norm"), found.linear("router_first"),
                      found.linear("router_second"))
