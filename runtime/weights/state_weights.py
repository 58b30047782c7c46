"""Parameters of recurrent layers (linear attention, state-space models, convolutions), as their kernels read them: one function per kind.

Roles are shared by all kinds wherever the parameters are (see `families`), so nothing else needs to know a layer's kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.cca_shape import CcaShape
from ...kernels.conv_shape import ConvShape
from ...kernels.delta_shape import DeltaShape
from ...kernels.kda_shape import KdaShape
from ...kernels.lightning_shape import LightningShape
from ...kernels.mamba1_shape import Mamba1Shape
from ...kernels.mamba2_shape import Mamba2Shape
from ...kernels.rwkv7_shape import Rwkv7Shape
from ...quant.recurrent_weights import Cca, GatedDelta, Kda, Lightning, Mamba1, Mamba2, Rwkv7, ShortConv
from ...quant.weight import Linear, Norm

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .role_source import RoleSource


PARTS = ("state_in.values", "state_in.b", "state_in.c")  # inputs of state-space convolutions, as named in multipliers

SMALL = 1e-5  # keeps decays of lightning attention's last layer above zero, in both of its uses


@dataclass(frozen=True)
class StateWeights:
    """`products`: matrices that read the layer's input, in the order in which its kernels take the results; `out` reads the kernels'
    output. `own`: everything else, a record of `quant/recurrent_weights.py`."""

    products: tuple[Linear, ...]
    out: Linear
    own: object


def channel_factors(config: ModelConfig) -> np.ndarray:
    """Per-channel multipliers of a state-space convolution, float32: values, B and C."""
    own = config.recurrent
    parts = own.values, *[own.groups * own.depth] * 2
    return np.repeat(np.array([config.multiplier(role) for role in PARTS], np.float32), parts)


def conv(found: RoleSource) -> object:
    """Convolution taps, stored tap-major."""
    taps = found.values("state_conv").reshape(-1, found.config.recurrent.taps)
    return found.put((taps * channel_factors(found.config)[:, None] if found.config.multipliers else taps).T)


def delta(found: RoleSource) -> StateWeights:
    """Gated delta rule. Decays are stored as logarithms."""
    norm = Norm("rms", found.vector("state_norm"), None, found.config.recurrent_norm_eps or found.config.norm_eps)
    own = GatedDelta(conv(found), found.put(np.exp(found.values("state_decay"))), found.vector("state_dt"), norm)
    return StateWeights(tuple(map(found.linear, ("state_in", "state_gate", "state_beta", "state_rate"))), found.linear("state_out"), own)


def kda(found: RoleSource) -> StateWeights:
    """Kimi delta attention: as `delta`; gates and decays may come from low-rank products."""
    made = delta(found)
    inputs, gate, beta, rate = made.products
    wide = map(found.linear, ("state_gate_wide", "state_rate_wide")) if found.config.recurrent.low_rank_gates else (None, None)
    wide = Kda(**vars(made.own), **dict(zip(("gate", "rate"), wide, strict=True)))
    return StateWeights((inputs, gate, rate, beta), made.out, wide)


def lightning(found: RoleSource) -> StateWeights:
    """Lightning attention. Decays are not stored: they follow from the numbers of head and layer."""
    config, heads = found.config, np.arange(1, found.config.recurrent.heads + 1)
    slopes = 0.5 ** (8 * heads / len(heads)) * (1 - found.layer / (config.num_hidden_layers - 1 + SMALL) + SMALL)
    own = Lightning(found.put(np.exp(-slopes).astype(np.float32)), Norm("rms", found.vector("state_norm"), None, config.recurrent_norm_eps))
    return StateWeights(tuple(map(found.linear, ("state_in", "state_gate"))), found.linear("state_out"), own)


def short_conv(found: RoleSource) -> StateWeights:
    """A gated short convolution: a product, taps, and another product."""
    return StateWeights((found.linear("state_in"),), found.linear("state_out"), ShortConv(conv(found)))


def cca(found: RoleSource) -> StateWeights:
    """Convolutional attention: one product reads the input; attention output goes through o."""
    own, heads = found.config.recurrent, found.values("state_heads")
    taps = found.values("state_conv").reshape(own.convolved, own.first)
    by_head = heads.reshape(own.convolved, own.depth, own.second).swapaxes(1, 2)
    weights = Cca(found.put(taps.T), found.vector("state_conv_bias"), found.put(by_head.reshape(-1)), found.vector("state_heads_bias"),
                  found.vector("state_temps"))
    return StateWeights((found.linear("state_in"),), found.linear("o"), weights)


def mamba1(found: RoleSource) -> StateWeights:
    """Decays are stored as logarithms; norms without a tensor have no weight."""
    own, eps = found.config.recurrent, found.config.recurrent_norm_eps or found.config.norm_eps

    def norm(role: str, size: int) -> Norm | None:
        weight = found.vector(role) if role in found.roles else found.put(np.ones(size, np.float32))
        return Norm("rms", weight, None, eps) if own.normed else None

    norms = norm("state_rate_norm", own.rank), norm("state_b_norm", own.depth), norm("state_c_norm", own.depth)
    weights = Mamba1(conv(found), found.vector("state_conv_bias"), found.put(np.exp(found.values("state_decay"))),
                     *map(found.vector, ("state_dt", "state_skip")), *map(found.linear, ("state_rate", "state_keys", "state_rate_wide")),
                     *norms)
    return StateWeights(tuple(map(found.linear, ("state_in", "state_gate"))), found.linear("state_out"), weights)


def mamba2(found: RoleSource) -> StateWeights:
    """Decays are stored as logarithms."""
    eps = found.config.recurrent_norm_eps or found.config.norm_eps
    norm = Norm("rms", found.vector("state_norm"), None, eps) if found.config.recurrent.normed else None
    own = Mamba2(conv(found), found.vector("state_conv_bias"), found.put(np.exp(found.values("state_decay"))), found.vector("state_dt"),
                 found.vector("state_skip"), norm, found.config.multiplier("state_gate"), found.config.multiplier("state_rate"))
    return StateWeights(tuple(map(found.linear, ("state_in", "state_gate", "state_rate"))), found.linear("state_out"), own)


def rwkv7(found: RoleSource) -> StateWeights:
    """Parameters are used as stored; the first layer has no value residual."""
    norm = Norm("layer", found.vector("state_norm"), found.vector("state_norm_bias"), found.config.recurrent.eps)
    low = (found.low_rank(f"state_{letter}_in", f"state_{letter}_out") for letter in "wavg")
    shift = found.put(np.concatenate([found.values(f"shift_{letter}") for letter in "rwkvag"]))
    own = Rwkv7(shift, *map(found.vector, ("shift_up", "state_direction", "state_remains", "state_bonus")), norm, *low)
    return StateWeights(tuple(map(found.linear, ("state_r", "state_k", "state_v"))), found.linear("state_out"), own)


KINDS = {CcaShape: cca, ConvShape: short_conv, DeltaShape: delta, KdaShape: kda, LightningShape: lightning, Mamba1Shape: mamba1,
         Mamba2Shape: mamba2, Rwkv7Shape: rwkv7}


def state_weights(found: RoleSource) -> StateWeights | None:
    """Of a layer with a state."""
    return KINDS[type(found.config.recurrent)](found) if {"state_heads", "state_out"} & found.roles.keys() else None
