"""Parameters of latent attention (MLA), as blocks and ops read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...quant.weight import Latent, Norm

if TYPE_CHECKING:
    from .role_source import RoleSource

EPS = 1e-6  # of the norms between the matrices, independent of the config except in a few families


def latent_weights(found: RoleSource) -> Latent | None:
    """Of a layer with latent attention. The config's multipliers of both latents are folded into their norms."""
    config, roles, linear = found.config, found.roles, found.linear
    if "kv_b" not in roles:
        return None

    def norm(role: str) -> Norm:
        weight, factor = found.vector(role), config.multiplier(role)
        return Norm("rms", weight if factor == 1.0 else weight * factor, None, EPS if config.mla_norm_eps is None else config.mla_norm_eps)

    q_norm, kv_norm = norm("q_a_norm") if "q_a" in roles else None, norm("kv_a_norm") if "kv_a" in roles else None
    return Latent(linear("q_a"), q_norm, linear("q_b") or linear("q"), linear("kv_a"), kv_norm, linear("kv_b").weight)
