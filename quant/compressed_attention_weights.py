"""Weights of attention with compressed keys (one key for several tokens), and of hyper-connections that mix a token's residual streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from .weight import Linear, Norm


@dataclass(frozen=True)
class HyperConnection:
    """How a branch meets the `count` streams of a token, S (`kernels/reference_hyper_connections.py`): a `matrix` [S * (2 + S), S * D] that
    reads all of them under a `norm`, `base` [S * (2 + S)] and `scale` [3]; where what `leaves` the last layer is read S rows, S and 1.
    Without `rounds` streams are not mixed with one another: 2 * S rows, 2 * S and 2."""

    count: int
    norm: Norm
    matrix: Linear
    base: object
    scale: object
    sinkhorn_iterations: int
    sinkhorn_eps: float
    is_final: bool
    is_gated: ClassVar[bool] = False
    is_mean: ClassVar[bool] = False


@dataclass(frozen=True)
class GatedResidual:
    """How a branch meets the `count` streams of a token, S, where a gate for every channel says what it reads of them
    (`kernels/reference_gated_residuals.py`): a `norm` of weights [S * D], `down` [R, S * D] and `up` [S * D, R] make gates, and `inject`
    [S, S * D] what each stream gets of the branch, None where what leaves the last layer is read."""

    count: int
    norm: Norm
    down: Linear
    up: Linear
    inject: Linear | None
    is_gated: ClassVar[bool] = True
    is_mean: ClassVar[bool] = False


@dataclass(frozen=True)
class StreamMean:
    """The final hidden state is the mean of `count` streams."""

    count: int
    is_gated: ClassVar[bool] = False
    is_mean: ClassVar[bool] = True


@dataclass(frozen=True)
class Compressor:
    """What makes keys of several tokens (`kernels/compressed_shape.py`): `products`, rows and weights, of keys and of those of an index,
    biases [rate, parts * width] and norms of both, None where there is no index."""

    products: tuple[Linear, ...]
    bias: object
    norm: Norm
    index_bias: object | None
    index_norm: Norm | None


@dataclass(frozen=True)
class CompressedAttention:
    """Attention with such keys: queries from `q_down`, its norm and `q`, normed head by head by `heads_norm`; what is attended to goes
    through a matrix for each of `groups` of heads. `compressor`: None in a layer that sees a window alone."""

    q_down: Linear
    q_norm: Norm
    q: Linear
    heads_norm: Norm
    groups: tuple[Linear, ...]
    compressor: Compressor | None
    around_attention: HyperConnection
    around_mlp: HyperConnection
