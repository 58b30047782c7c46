"""Models whose layers see, beyond a window, keys that are made of several tokens (`kernels/compressed_shape.py`), and mix several streams
of a token by numbers of its own (`kernels/reference_hyper_connections.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..kernels.compressed_shape import CompressedShape
    from ..kernels.indexer_shape import IndexShape


@dataclass(frozen=True)
class CompressedAttentionConfig:
    """`shapes`: by layer the keys that it makes, None where it sees a window alone. `query_rank`: of what queries are made from. What is
    attended to goes through a matrix for each of `groups` of heads first, to `group_rank` numbers each. `rounds`: of dividing by rows and
    columns of what mixes streams, and `least`, which is added to what is divided by."""

    shapes: tuple[CompressedShape | None, ...]
    query_rank: int
    output_groups: int
    output_group_rank: int
    sinkhorn_iterations: int
    sinkhorn_eps: float


def keys_nbytes(shape: CompressedShape | None, index: IndexShape | None, stored: int, tokens: int) -> int:
    """Bytes of what so many tokens leave beside a layer's pages: keys of several of them, and those by which tokens or keys are chosen."""
    return tokens * sum(each.token_nbytes(stored) for each in (shape, index) if each is not None)
