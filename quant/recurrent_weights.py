"""Weights of recurrent layers (linear attention, state spaces, convolutions), one record per kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .weight import Linear, LowRank, Norm


@dataclass(frozen=True)
class GatedDelta:
    """Linear attention by a gated delta rule: `conv` [taps, C], `decay` and `dt` [G] (see `kernels/reference_delta.py`), `norm` over a
    head's values; float32."""

    conv: object
    decay: object
    dt: object
    norm: Norm


@dataclass(frozen=True)
class Kda(GatedDelta):
    """Kimi Delta Attention: `dt` [G * dk]; `gate` and `rate` make gates and decays of every channel of what the first products narrow, None
    where these make them at once."""

    gate: Linear | None
    rate: Linear | None


@dataclass(frozen=True)
class Lightning:
    """Linear attention that decays head by head: `decay` [H], what is left behind a token, `norm` over all heads; float32."""

    decay: object
    norm: Norm


@dataclass(frozen=True)
class ShortConv:
    """A gated short convolution: `conv` float32 [taps, C]."""

    conv: object


@dataclass(frozen=True)
class Cca:
    """Convolutions of queries and keys (`kernels/cca_shape.py`), float32: `conv` [first, C] and `bias` [C], `by_head` [C * second * depth]
    and `head_bias` [C], and `temps` [KVH], of keys."""

    conv: object
    bias: object
    by_head: object
    head_bias: object
    temps: object


@dataclass(frozen=True)
class Mamba1:
    """State spaces channel by channel: `conv` [taps, V] and its `bias` [V] or None, `decay` [V * N], `dt` and `skip` [V] (see
    `kernels/reference_mamba1.py`); float32. Of what is convolved `rate` and `keys` make what steps are made of, and B and C; `steps` makes
    them behind `rate_norm`, `b_norm` and `c_norm` are of the others, all None for none."""

    conv: object
    bias: object | None
    decay: object
    dt: object
    skip: object
    rate: Linear
    keys: Linear
    steps: Linear
    rate_norm: Norm | None = None
    b_norm: Norm | None = None
    c_norm: Norm | None = None


@dataclass(frozen=True)
class Mamba2:
    """State spaces: `conv` [taps, C] and its `bias` [C] or None, `decay`, `dt` and `skip` [H] (see `kernels/reference_mamba2.py`), `norm`
    over groups of channels, None for none; float32. `gate_factor` and `step_factor` multiply gates, and steps before `dt` is added."""

    conv: object
    bias: object | None
    decay: object
    dt: object
    skip: object
    norm: Norm | None
    gate_factor: float = 1.0
    step_factor: float = 1.0


@dataclass(frozen=True)
class Rwkv7:
    """RWKV 7: `shift` [6 * D], how far rows for receptances, decays, keys, values, rates and gates go to those of the token before, and
    `channel_shift` [D] that for the layer's second half; `direction`, `remains` and `bonus` [D] (k_k, k_a and r_k, see
    `kernels/reference_rwkv7.py`), `norm` head by head with weights of its own for each; float32. `decay`, `rate`, `share` and `gate` are
    made by two matrices each; the first layer has no shares of its own values."""

    shift: object
    channel_shift: object
    direction: object
    remains: object
    bonus: object
    norm: Norm
    decay: LowRank
    rate: LowRank
    share: LowRank | None
    gate: LowRank


@dataclass(frozen=True)
class NgramWeights:
    """What a layer makes of rows of n-grams (`kernels/reference_ngrams.py`): `key` [S * D, E] and `value` [D, E], taps `conv` [K, S * D],
    and norms of all streams, of keys and of what is convolved, [S * D] each; float32."""

    key: Linear
    value: Linear
    conv: object
    of_streams: Norm
    of_keys: Norm
    behind: Norm
