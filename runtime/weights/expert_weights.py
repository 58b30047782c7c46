"""Weights of a mixture-of-experts layer, from its tensors."""

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


def mixture_weights(source: RoleSource, post_norm: Norm, paging: Paging | None) -> MixtureWeights:
    """The mixture of a layer, whose router and experts read the output of `post_norm` unless they have norms of their own.

    With `paging`, experts stay on disk. Of a layer without experts only the shared expert and the router's MLP can be present.
    """
    config, moe = source.config, source.config.moe
    router, correction = source.linear("router"), source.vector("correction")
    if router is None:
        return MixtureWeights(None, correction, (), _shared_expert(source), None, _router_mlp(source), None, None)
    if correction is None and moe.correction_bias:  # group selection needs one: all zeros
        correction = source.put(np.zeros(moe.num_experts, np.float32))
    parallel = _parallel_experts(source, post_norm) if moe.parallel_to_mlp else None
    if paging is None:
        experts = _experts(source)
    else:
        reads_residual_stream = not (config.router_mlp_dim or config.gated_norm_rank or moe.latent_dim)
        experts = paging.layer(source.layer, source.roles, lambda role: source.vector(f"{role}_bias"),
                               parallel.router_norm if parallel else post_norm, router if reads_residual_stream else None,
                               lambda logits: ranks(logits, moe.routing, correction))
    vision = None
    if f"{VISION_PREFIX}router" in source.roles:
        vision = source.linear(f"{VISION_PREFIX}router"), _experts(source, VISION_PREFIX), source.vector(f"{VISION_PREFIX}correction")
    latent_projections = source.low_rank("experts_in", "experts_out")
    return MixtureWeights(router, correction, experts, _shared_expert(source), parallel, _router_mlp(source), vision, latent_projections)


def _experts(source: RoleSource, prefix: str = "") -> tuple[Expert, ...]:
    return tuple(Expert(*(source.linear(prefix + role) for role in expert_roles(number)))
                 for number in range(source.config.moe.num_experts))


def _parallel_experts(source: RoleSource, post_norm: Norm) -> ParallelExperts:
    """What experts beside an MLP have besides their matrices. Without norms of their own, they read what the MLP reads."""
    config, moe = source.config, source.config.moe
    if "router_scale" in source.roles:
        router_scale = source.values("router_scale") * np.float32(config.hidden_size**-0.5)
        return ParallelExperts(source.constant_norm(config.hidden_size, router_scale), source.norm("expert_norm"),
                               source.norm("experts_after"), source.norm("mlp_after"), source.vector("expert_scales"))
    norm = Norm("none") if config.gated_norm_rank or moe.latent_dim else post_norm  # none: the block has already applied it
    scales = np.repeat(np.float32([1, not moe.zero_experts_drop]), [moe.num_experts, moe.zero_experts])
    return ParallelExperts(norm, norm, None, None, source.put(scales))


def _shared_expert(source: RoleSource) -> SharedExpert | None:
    if SHARED_EXPERT_ROLES[1] not in source.roles:
        return None
    multiplier = source.config.residual_multiplier * source.config.multiplier(SHARED_EXPERT_ROLES[2])
    return SharedExpert(*map(source.linear, SHARED_EXPERT_ROLES), multiplier, source.config.expert_act(source.layer, shared=True))


def _router_mlp(source: RoleSource) -> RouterMlp | None:
    if "router_in" not in source.roles:
        return None
    return RouterMlp(source.linear("router_in"), source.vector("router_share"), source.norm("router_norm"), source.linear("router_first"),
                     source.linear("router_second"))
