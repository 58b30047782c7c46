"""The widths of latent attention (DeepSeek-AI 2024, arXiv:2405.04434): the one definition. Pure arithmetic, no array is touched here.

All heads read one latent vector a token, from which each makes its keys and values by a matrix of its own. Those matrices are taken to the
other side, to the queries and to what is attended to, so that the latents themselves are what is cached, as the keys of one head:

    key    [rope | rank]   the rotated channels, then the normed latent; a value is its last `rank` channels
    query  [rope | rank]   of every head; the rotated channels, then the others times the head's matrix of keys

`kv_b` [heads * (nope + value), rank] holds of every head `nope` rows that make keys and then `value` rows that make values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LatentShape:
    """`rank`: channels of the latent; of a head `nope` channels of a key without and `rope` with rotary positions, and `value` of a value.
    `query_rank`: of what queries are made from, None where that is the residual stream."""

    rank: int
    nope: int
    rope: int
    value: int
    query_rank: int | None = None

    @property
    def key(self) -> int:
        """Channels of what is cached."""
        return self.rope + self.rank

    @property
    def query(self) -> int:
        """Channels of a head's query before it is taken to the latent."""
        return self.nope + self.rope

    @property
    def made(self) -> int:
        """Rows of `kv_b` of a head."""
        return self.nope + self.value


def widest(shapes: Sequence[LatentShape]) -> LatentShape:
    """What has room for what layers of any of these shapes make of a token."""
    ranks = [shape.query_rank for shape in shapes if shape.query_rank is not None]
    widths = (max(getattr(shape, name) for shape in shapes) for name in ("rank", "nope", "rope", "value"))
    return LatentShape(*widths, max(ranks, default=None))
