"""Parameters of gated residuals and of n-gram layers, as blocks and ops read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...quant.compressed_attention_weights import GatedResidual
from ...quant.recurrent_weights import NgramWeights
from ...quant.weight import Norm

if TYPE_CHECKING:
    from .role_source import RoleSource

AROUND, LEAVES = ("attn_mix", "mlp_mix"), "leave_mix"  # role prefixes of a layer's branches, and of the final merge
KIND = "rms+1"  # of norms, which are stored minus one


def _norm(found: RoleSource, role: str) -> Norm:
    return Norm(KIND, found.vector(role), None, found.config.norm_eps)


def residual(found: RoleSource, role: str) -> GatedResidual:
    """The gates where a branch, or the merge after the last layer, meets the streams."""
    return GatedResidual(found.config.residual_streams, _norm(found, f"{role}.mix_norm"),
                    *(found.linear(f"{role}.mix_{part}") for part in ("down", "up", "in")))


def residuals_around(found: RoleSource) -> tuple[GatedResidual, ...] | None:
    """The gated residuals of both branches of a layer, if it has them."""
    return tuple(residual(found, role) for role in AROUND) if found.config.residual_gate_rank else None


def ngram_weights(found: RoleSource) -> NgramWeights | None:
    """The n-gram parameters of a layer; convolution taps are stored tap-major."""
    if "ngram_key" not in found.roles:
        return None
    taps = found.values("ngram_conv").reshape(-1, found.config.ngrams.shape.kernel)
    return NgramWeights(found.linear("ngram_key"), found.linear("ngram_value"), found.put(taps.T),
                  *(_norm(found, f"ngram_{name}_norm") for name in ("query", "key", "conv")))
