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
    """Widths of the latent and of a head (in config.json: kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, q_lora_rank)."""

    rank: int  # channels of the latent
    nope: int  # key channels per head without rotary positions
    rope: int  # key channels with rotary positions, shared by all heads
    value: int  # value channels per head
    query_rank: int | None = None  # channels of the latent of queries; None: queries are projected from the residual stream

    @property
    def key(self) -> int:
        """Cached channels per token."""
        return self.rope + self.rank

    @property
    def query(self) -> int:
        """Channels of a head's query before absorption into the latent space."""
        return self.nope + self.rope

    @property
    def kv_b_rows(self) -> int:
        """Rows of `kv_b` per head."""
        return self.nope + self.value


def widest(shapes: Sequence[LatentShape]) -> LatentShape:
    """The largest width of each kind: a shape for buffers that layers of all these shapes share."""
    ranks = [shape.query_rank for shape in shapes if shape.query_rank is not None]
    widths = (max(getattr(shape, name) for shape in shapes) for name in ("rank", "nope", "rope", "value"))
    return LatentShape(*widths, max(ranks, default=None))
