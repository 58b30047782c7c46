"""Widths of multi-head latent attention (MLA; DeepSeek-AI 2024, arXiv:2405.04434). Pure arithmetic, no arrays.

All heads share one latent vector per token, from which each derives its keys and values with its own matrix. Those matrices are absorbed
into the queries and the attention output, so that the latents themselves are cached, as the keys of a single head:

    key    [rope | rank]   the rotated channels, then the normed latent; a value is its last `rank` channels
    query  [rope | rank]   of every head; the rotated channels, then the others times the head's key matrix

`kv_b` [heads * (nope + value), rank] holds, per head, `nope` rows that produce keys and then `value` rows that produce values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LatentShape:
    """`rank`: channels of the latent. Per head: `nope` key channels without and `rope` with rotary positions, `value` value channels.
    `query_rank`: width of the latent that queries are made from, None if they are made from the residual stream."""

    rank: int
    nope: int
    rope: int
    value: int
    query_rank: int | None = None

    @property
    def key(self) -> int:
        """Cached channels per token."""
        return self.rope + self.rank

    @property
    def query(self) -> int:
        """Channels of a head's query before absorption into the latent space."""
        return self.nope + self.rope

    @property
    def made(self) -> int:
        """Rows of `kv_b` per head."""
        return self.nope + self.value


def widest(shapes: Sequence[LatentShape]) -> LatentShape:
    """A shape with room for the tokens of layers of any of these shapes."""
    ranks = [shape.query_rank for shape in shapes if shape.query_rank is not None]
    widths = (max(getattr(shape, name) for shape in shapes) for name in ("rank", "nope", "rope", "value"))
    return LatentShape(*widths, max(ranks, default=None))
