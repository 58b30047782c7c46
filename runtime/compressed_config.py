"""Config of compressed attention (`kernels/compressed_shape.py`) with hyper-connections (`kernels/reference_hyper_connections.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..kernels.compressed_shape import CompressedShape
    from ..kernels.indexer_shape import IndexShape


@dataclass(frozen=True)
class CompressedAttentionConfig:
    """Attention over a window, and beyond it over keys made of several tokens each."""

    shapes: tuple[CompressedShape | None, ...]  # by layer; None: the layer sees only its window
    query_rank: int  # width of the latent that queries are made from
    output_groups: int  # groups of heads whose attention output goes through a matrix of its own
    output_group_rank: int  # width of that matrix's output
    sinkhorn_iterations: int  # of the matrix that mixes the residual streams: normalizations by rows and columns
    sinkhorn_eps: float  # is added to the sums that these divide by


def keys_nbytes(shape: CompressedShape | None, index: IndexShape | None, stored: int, tokens: int) -> int:
    """Bytes that so many tokens add beside a layer's pages: compressed keys and index keys."""
    return tokens * sum(each.token_nbytes(stored) for each in (shape, index) if each is not None)
