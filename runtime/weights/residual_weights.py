"""The parameters of gated residuals, and of what layers make of n-grams, as blocks and ops read them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from ...quant.state_weights import Ngrams
from ...quant.weight import Linear, Norm
from ...quant.wide_weights import Residual

if TYPE_CHECKING:
    import numpy as np

    from ..config import ModelConfig

AROUND, LEAVES = ("attn_mix", "mlp_mix"), "leave_mix"  # what roles begin with of a layer's branches, and of what leaves the last layer
KIND = "rms+1"  # of norms, which are stored less one

Roles, Make, Vector = Collection[str], Callable[[str], Linear], Callable[[str], object]


def residual(config: ModelConfig, role: str, roles: Roles, linear: Make, vector: Vector) -> Residual:
    """How a branch, or what leaves the last layer, meets the streams; `linear` and `vector` make a role's matrix and vector."""
    norm = Norm(KIND, vector(f"{role}.mix_norm"), None, config.norm_eps)
    inject = linear(f"{role}.mix_in") if f"{role}.mix_in" in roles else None
    return Residual(config.streams, norm, linear(f"{role}.mix_down"), linear(f"{role}.mix_up"), inject)


def residuals_around(config: ModelConfig, roles: Roles, linear: Make, vector: Vector) -> tuple[Residual, Residual] | None:
    """How both branches of a layer meet the streams, where gates say so."""
    return tuple(residual(config, role, roles, linear, vector) for role in AROUND) if config.mix_rank else None


def ngram_weights(config: ModelConfig, roles: Roles, linear: Make, vector: Vector, put: Callable[[np.ndarray], object]) -> Ngrams | None:
    """What a layer makes of n-grams; taps go tap by tap along the channels there."""
    if "ngram_key" not in roles:
        return None
    norms = (Norm(KIND, vector(f"ngram_{name}_norm"), None, config.norm_eps) for name in ("query", "key", "conv"))
    taps = vector("ngram_conv").reshape(-1, config.ngrams.shape.kernel)
    return Ngrams(linear("ngram_key"), linear("ngram_value"), put(taps), *norms)
