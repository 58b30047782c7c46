"""The parameters of latent attention, as blocks and ops read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ...quant.weight import Latent, Linear, Norm

if TYPE_CHECKING:
    from ..tensors import ModelTensor

EPS = 1e-6  # of the norms between the matrices, whatever a config says of the others


def latent_weights(roles: Mapping[str, ModelTensor], linear: Callable[[str], Linear | None],
                   vector: Callable[[str], object]) -> Latent | None:
    """Of a layer's tensors by role, where it has such; `linear` and `vector` make a role's matrix and vector on a backend."""
    if "kv_a" not in roles:
        return None
    q_norm = Norm("rms", vector("q_a_norm"), None, EPS) if "q_a" in roles else None
    kv_norm = Norm("rms", vector("kv_a_norm"), None, EPS)
    return Latent(linear("q_a"), q_norm, linear("q_b") or linear("q"), linear("kv_a"), kv_norm, linear("kv_b").weight)
