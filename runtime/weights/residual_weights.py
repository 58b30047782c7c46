"""Weights of gated residuals and of n-gram embeddings, from a layer's tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...quant.compressed_attention_weights import GatedResidual
from ...quant.recurrent_weights import NgramWeights
from ...quant.weight import Norm

if TYPE_CHECKING:
    from .role_source import RoleSource

BRANCH_MIXES, FINAL_MIX = ("attn_mix", "mlp_mix"), "leave_mix"  # role prefixes of a layer's branches, and of the final merge
NORM_KIND = "rms+1"


def _norm(source: RoleSource, role: str) -> Norm:
    return Norm(NORM_KIND, source.vector(role), None, source.config.norm_eps)


def gated_residual(source: RoleSource, role: str) -> GatedResidual:
    """The gates of a branch, or of the merge after the last layer."""
    down, up, inject = (source.linear(f"{role}.mix_{matrix}") for matrix in ("down", "up", "in"))
    return GatedResidual(source.config.residual_streams, _norm(source, f"{role}.mix_norm"), down, up, inject)


def layer_gated_residuals(source: RoleSource) -> tuple[GatedResidual, ...] | None:
    """The gated residuals of both branches of a layer, if it has them."""
    return tuple(gated_residual(source, role) for role in BRANCH_MIXES) if source.config.residual_gate_rank else None


def ngram_weights(source: RoleSource) -> NgramWeights | None:
    """The n-gram embeddings of a layer, if it has them."""
    if "ngram_key" not in source.roles:
        return None
    taps = source.values("ngram_conv").reshape(-1, source.config.ngrams.shape.kernel)
    norms = (_norm(source, f"ngram_{name}_norm") for name in ("query", "key", "conv"))
    return NgramWeights(source.linear("ngram_key"), source.linear("ngram_value"), source.put(taps.T), *norms)
