"""Layout of compressed attention keys (DeepSeek-AI 2026, V4), each built from several tokens, and of keys still being accumulated. Pure
arithmetic, no arrays.

Every `tokens_per_key` consecutive tokens yield one key, which is the value too: per channel, the average of the tokens' rows under a
softmax over per-token logits plus a bias for the token's place in the key. With `overlaps`, a key also covers as many tokens before its
own, for which each token provides a second row, stored in front of the one for its own key.

A key is complete once its last token is known. Until then the state holds an online softmax per channel: running maximum, sum of
exponentials, and weighted sum. With overlap there are two keys in progress, the one completed next and the one after it:

    state   most[width]  sum[width]  weighed[width]   of the next key, with overlap of the second too; then those of the index

Completed keys are stored row by row, by number; keys scored by an indexer are stored as `indexer_shape.py` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .layout import STORED_BYTES
from .state_shape import StateShape


@dataclass(frozen=True)
class CompressedShape(StateShape):
    """Widths of a layer's compressed keys, and of the state of those that are incomplete."""

    title: ClassVar[str] = "compressed keys"
    rollback_slots: ClassVar[int] = 6
    taps: ClassVar[int] = 1
    width: int  # channels of a key
    tokens_per_key: int
    overlaps: bool  # a key covers the tokens of the one before it too
    rope: int  # last channels of a key, which are rotated
    index_dim: int  # channels of the index key beside it; 0: none
    window: int  # tokens that are seen one by one
    leading_products: tuple[int, ...]  # widths of the layer's other projections in front of those of the keys
    trailing_products: tuple[int, ...]  # ... and behind them
    state_size: int  # floats of a state, equal in all layers of a model

    @property
    def rows_per_token(self) -> int:
        """Rows per token, stored one after the other."""
        return 2 if self.overlaps else 1

    @property
    def own_floats(self) -> int:
        """Of a state of this layer."""
        return 3 * self.rows_per_token * (self.width + self.index_dim)

    @property
    def channels(self) -> int:
        return 0

    @property
    def values(self) -> int:
        return 0

    @property
    def pooled_products(self) -> tuple[int, ...]:
        """Widths of a token's projections: rows and their softmax logits, for the keys and for the index keys."""
        return (*[self.rows_per_token * self.width] * 2, *([self.rows_per_token * self.index_dim] * 2 if self.index_dim else ()))

    @property
    def products(self) -> tuple[int, ...]:
        return (*self.leading_products, *self.pooled_products, *self.trailing_products)

    @property
    def state_floats(self) -> int:
        return self.state_size

    @property
    def recent(self) -> int:
        """Also holds the start and the number of tokens of the pass, as two int64."""
        return sum(self.pooled_products) + 4

    def gpu_workspace_floats(self, tokens: int) -> int:
        """GPU workspace: projections and, for those that form keys, their logits padded to whole keys, exponentials and sums."""
        return (tokens + 2 * self.tokens_per_key) * (sum(self.products) + 6 * sum(self.pooled_products)) + 12 * self.own_floats

    def described(self) -> str:
        return f"a key of {self.width} channels for {self.tokens_per_key} tokens"

    def token_nbytes(self, stored: int) -> int:
        """Bytes of keys per token."""
        return self.width * STORED_BYTES[stored] // self.tokens_per_key

    def keys(self, tokens: int) -> int:
        """Keys completed by this many tokens."""
        return tokens // self.tokens_per_key

    def keys_nbytes(self, ctx: int, stored: int) -> int:
        """Bytes of one layer's keys for a context of `ctx` tokens."""
        return -(-ctx // self.tokens_per_key) * self.width * STORED_BYTES[stored]
