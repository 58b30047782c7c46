"""Weights of compressed attention (keys made of several tokens each), and of what mixes a token's residual streams.

S is the number of residual streams and D the width of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from .weight import Linear, Norm


@dataclass(frozen=True)
class HyperConnection:
    """How a branch reads and writes the residual streams (`kernels/reference_hyper_connections.py`).

    A projection of all streams gives N numbers per token: S read weights, S write weights and, unless `sinkhorn_iterations` is 0, an S x S
    mixing matrix, so N = S * (2 + S) or 2 * S. After the last layer (`is_final`) there are only the S read weights.
    """

    num_streams: int
    norm: Norm  # of all streams together, [S * D]
    proj: Linear  # [N, S * D]
    base: object  # [N], added to the scaled projection
    scale: object  # a factor for each kind of number: [3], [2] without mixing, [1] after the last layer
    sinkhorn_iterations: int
    sinkhorn_eps: float  # is added to divisors
    is_final: bool
    is_gated: ClassVar[bool] = False
    is_mean: ClassVar[bool] = False


@dataclass(frozen=True)
class GatedResidual:
    """How a branch reads the residual streams through a gate for every channel (`kernels/reference_gated_residuals.py`)."""

    num_streams: int
    norm: Norm  # of each stream, weights [S * D]
    down: Linear  # [R, S * D], low-rank part of the gates
    up: Linear  # [S * D, R]
    inject: Linear | None  # [S, S * D], weights with which the streams receive the branch's output; None after the last layer
    is_gated: ClassVar[bool] = True
    is_mean: ClassVar[bool] = False


@dataclass(frozen=True)
class StreamMean:
    """The final hidden state is the mean of the streams."""

    num_streams: int
    is_gated: ClassVar[bool] = False
    is_mean: ClassVar[bool] = True


@dataclass(frozen=True)
class Compressor:
    """Makes keys of several tokens each (`kernels/compressed_shape.py`)."""

    projections: tuple[Linear, ...]  # rows and their softmax logits, for the keys and, with an indexer, for the index keys
    bias: object  # [tokens_per_key, rows_per_token * width], added to logits by a token's place in its key
    norm: Norm  # of keys
    index_bias: object | None  # the same for index keys; None without an indexer
    index_norm: Norm | None


@dataclass(frozen=True)
class CompressedAttention:
    """Attention over compressed keys, with the hyper-connections of both branches of its layer."""

    q_a: Linear
    q_a_norm: Norm
    q_b: Linear
    q_b_norm: Norm  # of each head, without weights of its own
    output_groups: tuple[Linear, ...]  # a matrix for each group of heads of the attention output
    compressor: Compressor | None  # None: the layer sees only its window
    attn_hyper_connection: HyperConnection
    mlp_hyper_connection: HyperConnection
