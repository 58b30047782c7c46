"""Weights of latent attention (MLA), from a layer's tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...quant.weight import MlaWeights, Norm

if TYPE_CHECKING:
    from .role_source import RoleSource

EPS = 1e-6  # of the latents' norms, unless the family reads it from the config (`ModelConfig.mla_norm_eps`)


def mla_weights(source: RoleSource) -> MlaWeights | None:
    """Latent attention of a layer, None if it has none. The config's multipliers of the latents are folded into their norms."""
    config, roles, linear = source.config, source.roles, source.linear
    if "kv_b" not in roles:
        return None

    def norm(role: str) -> Norm:
        weight, multiplier = source.vector(role), config.multiplier(role)
        if multiplier != 1.0:
            weight = weight * multiplier
        return Norm("rms", weight, None, EPS if config.mla_norm_eps is None else config.mla_norm_eps)

    return MlaWeights(
        q_a=linear("q_a"),
        q_a_norm=norm("q_a_norm") if "q_a" in roles else None,
        q_b=linear("q_b") or linear("q"),
        kv_a=linear("kv_a"),
        kv_a_norm=norm("kv_a_norm") if "kv_a" in roles else None,
        kv_b=linear("kv_b").weight,
    )
