"""Weights of recurrent layers (linear attention, state-space models, convolutions), from a layer's tensors: one function per kind.

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

CONV_INPUTS = ("state_in.values", "state_in.b", "state_in.c")  # of state-space convolutions, as `ModelConfig.multipliers` names them
LAYER_SLOPE_EPS = 1e-5  # keeps the decay slopes of lightning attention's last layer above zero, in both of its uses


@dataclass(frozen=True)
class StateWeights:
    """A recurrent layer's weights."""

    projections: tuple[Linear, ...]  # read the layer's input; in the order of `StateShape.projection_widths`
    out_proj: Linear  # reads the kernels' output
    params: object  # everything else, a record of `quant/recurrent_weights.py`


def channel_multipliers(config: ModelConfig) -> np.ndarray:
    """Multipliers of a state-space convolution by channel, float32: of values, B and C."""
    shape = config.recurrent
    widths = shape.values, *[shape.groups * shape.depth] * 2
    return np.repeat(np.array([config.multiplier(role) for role in CONV_INPUTS], np.float32), widths)


def conv(source: RoleSource) -> object:
    """Convolution taps as [taps, channels]; checkpoints store them the other way round."""
    taps = source.values("state_conv").reshape(-1, source.config.recurrent.taps)
    if source.config.multipliers:
        taps = taps * channel_multipliers(source.config)[:, None]
    return source.put(taps.T)


def _decay(source: RoleSource) -> object:
    """Decays, which checkpoints store as logarithms."""
    return source.put(np.exp(source.values("state_decay")))


def _eps(source: RoleSource) -> float:
    return source.config.recurrent_norm_eps or source.config.norm_eps


def delta(source: RoleSource) -> StateWeights:
    """Gated delta rule."""
    norm = Norm("rms", source.vector("state_norm"), None, _eps(source))
    params = GatedDelta(conv(source), _decay(source), source.vector("state_dt"), norm)
    projections = tuple(map(source.linear, ("state_in", "state_gate", "state_beta", "state_rate")))
    return StateWeights(projections, source.linear("state_out"), params)


def kda(source: RoleSource) -> StateWeights:
    """Kimi delta attention: a gated delta rule whose gates and decays may be low-rank projections."""
    weights = delta(source)
    conv_inputs, gate, beta, decay = weights.projections
    gate_up = decay_up = None
    if source.config.recurrent.low_rank_gates:
        gate_up, decay_up = source.linear("state_gate_wide"), source.linear("state_rate_wide")
    params = Kda(**vars(weights.params), gate_up=gate_up, decay_up=decay_up)
    return StateWeights((conv_inputs, gate, decay, beta), weights.out_proj, params)


def lightning(source: RoleSource) -> StateWeights:
    """Lightning attention. Decays are not stored: they follow from the numbers of head and layer."""
    config, heads = source.config, np.arange(1, source.config.recurrent.heads + 1)
    layer_slope = 1 - source.layer / (config.num_hidden_layers - 1 + LAYER_SLOPE_EPS) + LAYER_SLOPE_EPS
    slopes = 0.5 ** (8 * heads / len(heads)) * layer_slope
    norm = Norm("rms", source.vector("state_norm"), None, config.recurrent_norm_eps)
    params = Lightning(source.put(np.exp(-slopes).astype(np.float32)), norm)
    return StateWeights(tuple(map(source.linear, ("state_in", "state_gate"))), source.linear("state_out"), params)


def short_conv(source: RoleSource) -> StateWeights:
    """A gated short convolution."""
    return StateWeights((source.linear("state_in"),), source.linear("state_out"), ShortConv(conv(source)))


def cca(source: RoleSource) -> StateWeights:
    """Compressed convolutional attention, whose output projection is that of ordinary attention."""
    shape = source.config.recurrent
    taps = source.values("state_conv").reshape(shape.qk_channels, shape.first)
    head_taps = source.values("state_heads").reshape(shape.qk_channels, shape.depth, shape.second).swapaxes(1, 2)
    params = Cca(source.put(taps.T), source.vector("state_conv_bias"), source.put(head_taps.reshape(-1)),
                 source.vector("state_heads_bias"), source.vector("state_temps"))
    return StateWeights((source.linear("state_in"),), source.linear("o"), params)


def mamba1(source: RoleSource) -> StateWeights:
    """Mamba. Norms without a tensor have no weight."""
    shape = source.config.recurrent

    def norm(role: str, size: int) -> Norm | None:
        if not shape.normed:
            return None
        weight = source.vector(role) if role in source.roles else source.put(np.ones(size, np.float32))
        return Norm("rms", weight, None, _eps(source))

    params = Mamba1(
        conv=conv(source),
        conv_bias=source.vector("state_conv_bias"),
        decay=_decay(source),
        dt_bias=source.vector("state_dt"),
        skip=source.vector("state_skip"),
        dt_down=source.linear("state_rate"),
        bc_proj=source.linear("state_keys"),
        dt_up=source.linear("state_rate_wide"),
        dt_norm=norm("state_rate_norm", shape.rank),
        b_norm=norm("state_b_norm", shape.depth),
        c_norm=norm("state_c_norm", shape.depth),
    )
    return StateWeights(tuple(map(source.linear, ("state_in", "state_gate"))), source.linear("state_out"), params)


def mamba2(source: RoleSource) -> StateWeights:
    """Mamba 2."""
    config = source.config
    params = Mamba2(
        conv=conv(source),
        conv_bias=source.vector("state_conv_bias"),
        decay=_decay(source),
        dt_bias=source.vector("state_dt"),
        skip=source.vector("state_skip"),
        norm=Norm("rms", source.vector("state_norm"), None, _eps(source)) if config.recurrent.normed else None,
        gate_multiplier=config.multiplier("state_gate"),
        dt_multiplier=config.multiplier("state_rate"),
    )
    return StateWeights(tuple(map(source.linear, ("state_in", "state_gate", "state_rate"))), source.linear("state_out"), params)


def rwkv7(source: RoleSource) -> StateWeights:
    """RWKV 7. The first layer has no value residual."""
    w_lora, a_lora, v_lora, g_lora = (source.low_rank(f"state_{letter}_in", f"state_{letter}_out") for letter in "wavg")
    params = Rwkv7(
        time_shift=source.put(np.concatenate([source.values(f"shift_{letter}") for letter in "rwkvag"])),
        channel_shift=source.vector("shift_up"),
        k_k=source.vector("state_direction"),
        k_a=source.vector("state_remains"),
        r_k=source.vector("state_bonus"),
        norm=Norm("layer", source.vector("state_norm"), source.vector("state_norm_bias"), source.config.recurrent.eps),
        w_lora=w_lora,
        a_lora=a_lora,
        v_lora=v_lora,
        g_lora=g_lora,
    )
    return StateWeights(tuple(map(source.linear, ("state_r", "state_k", "state_v"))), source.linear("state_out"), params)


KINDS = {CcaShape: cca, ConvShape: short_conv, DeltaShape: delta, KdaShape: kda, LightningShape: lightning, Mamba1Shape: mamba1,
         Mamba2Shape: mamba2, Rwkv7Shape: rwkv7}


def state_weights(source: RoleSource) -> StateWeights | None:
    """The weights of a layer with a recurrent state, None for any other layer."""
    return KINDS[type(source.config.recurrent)](source) if {"state_heads", "state_out"} & source.roles.keys() else None
