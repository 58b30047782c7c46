"""Weights of recurrent layers (linear attention, state-space models, convolutions), one record per kind.

Vectors and taps are float32 arrays of the backend. Convolutions are causal and depthwise; taps are stored [taps, channels], the last one
for the token itself. Matrices that read the layer's input are in `StateWeights.projections` (runtime/weights/state_weights.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .weight import Linear, LowRank, Norm


@dataclass(frozen=True)
class GatedDelta:
    """Gated delta rule (`kernels/reference_delta.py`) with G value heads: a head decays by exp(-decay * softplus(a + dt_bias))."""

    conv: object  # [taps, C], over queries, keys and values
    decay: object  # [G], exp(A_log)
    dt_bias: object  # [G]
    norm: Norm  # over a head's values, before the output gate


@dataclass(frozen=True)
class Kda(GatedDelta):
    """Kimi Delta Attention: a gated delta rule with a decay for every key channel; `dt_bias` is [G * dk].

    The second matrices of low-rank gates and decays; None where one matrix computes them.
    """

    gate_up: Linear | None
    decay_up: Linear | None


@dataclass(frozen=True)
class Lightning:
    """Lightning attention (`kernels/reference_lightning.py`) with H heads."""

    decay: object  # [H], the factor by which a head's state decays per token
    norm: Norm  # over all heads


@dataclass(frozen=True)
class ShortConv:
    """A gated short convolution."""

    conv: object  # [taps, C]


@dataclass(frozen=True)
class Cca:
    """Compressed convolutional attention (`kernels/cca_shape.py`): two convolutions over the C channels of queries and keys."""

    conv: object  # [first, C], per channel
    conv_bias: object  # [C]
    head_conv: object  # [C * second * depth], from all channels of a head
    head_conv_bias: object  # [C]
    key_temperatures: object  # [KVH], factors of normalized keys


@dataclass(frozen=True)
class Mamba1:
    """Mamba (`kernels/reference_mamba1.py`) with V channels and N state values per channel.

    The step of a channel is softplus(dt_up(dt_down(x)) + dt_bias), where x is the output of the convolution.
    """

    conv: object  # [taps, V]
    conv_bias: object | None  # [V]
    decay: object  # [V * N], exp(A_log)
    dt_bias: object  # [V]
    skip: object  # [V], called D in the paper
    dt_down: Linear  # [rank, V]
    bc_proj: Linear  # [2 * N, V], makes B and C of x
    dt_up: Linear  # [V, rank]
    dt_norm: Norm | None = None  # between dt_down and dt_up; None: no norm
    b_norm: Norm | None = None
    c_norm: Norm | None = None


@dataclass(frozen=True)
class Mamba2:
    """Mamba 2 (`kernels/reference_mamba2.py`) with H heads: the step of a head is softplus(dt_multiplier * dt + dt_bias)."""

    conv: object  # [taps, C], over values, B and C
    conv_bias: object | None  # [C]
    decay: object  # [H], exp(A_log)
    dt_bias: object  # [H]
    skip: object  # [H], called D in the paper
    norm: Norm | None  # over groups of channels, after the output gate; None: no norm
    gate_multiplier: float = 1.0  # of output gates, before their activation
    dt_multiplier: float = 1.0


@dataclass(frozen=True)
class Rwkv7:
    """RWKV 7 (`kernels/reference_rwkv7.py`) with D channels; k_k, k_a, r_k and the branches w, a, v, g are named as in the paper."""

    time_shift: object  # [6 * D], shares of the previous token's row in the inputs of r, w, k, v, a and g
    channel_shift: object  # [D], the same for the channel mix (the layer's second half)
    k_k: object  # [D], direction of removal keys, relative to keys
    k_a: object  # [D], how far the rate `a` scales a key
    r_k: object  # [D], weight of the bonus term
    norm: Norm  # head by head, with weights for every channel
    w_lora: LowRank  # decays
    a_lora: LowRank  # in-context learning rates
    v_lora: LowRank | None  # share of the first layer's values; None in that layer
    g_lora: LowRank  # output gates


@dataclass(frozen=True)
class NgramWeights:
    """N-gram embeddings of a layer (`kernels/reference_ngrams.py`): E embedding values, S streams of width D."""

    key: Linear  # [S * D, E]
    value: Linear  # [D, E]
    conv: object  # [taps, S * D]
    query_norm: Norm  # [S * D], of the streams, before they are compared with the keys
    key_norm: Norm  # [S * D]
    conv_norm: Norm  # [S * D], of the input of the convolution
