"""Layout of compressed attention keys (DeepSeek-AI 2026, V4), each built from several tokens, and of keys still being accumulated. Pure
arithmetic, no arrays.

Every `tokens_per_key` consecutive tokens yield one key, which is the value too: per channel, the average of the tokens' rows under a
softmax over per-token logits plus a bias for the token's place in the key. With `overlaps`, a key also covers as many tokens before its
own, for which each token provides a second row, stored in front of the one for its own key.

A key is complete once its last token is known. Until then the state holds an online softmax per channel: running maximum, sum of
exponentials, and weighted sum. With overlap there are two keys in progress, the one completed next and the one after it:

    state   maximum[width]  sum[width]  weighted_sum[width]   of the next key, with overlap also of the second; then those of the index

Completed keys are stored row by row, by number; the layout of keys that an indexer scores is in `indexer_shape.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .layout import STORED_BYTES
from .state_shape import StateShape


@dataclass(frozen=True)
class CompressedShape(StateShape):
    """Widths of a layer's compressed keys, and of the state of incomplete ones."""

    title: ClassVar[str] = "compressed keys"
    rollback_slots: ClassVar[int] = 6
    taps: ClassVar[int] = 1
    width: int  # channels of a key
    tokens_per_key: int
    overlaps: bool  # a key also covers the tokens of the previous one
    rope: int  # rotated channels, the last ones of a key
    index_dim: int  # channels of the indexer's key for the same tokens; 0: the layer has no indexer
    window: int  # latest tokens, which are attended to uncompressed
    leading_products: tuple[int, ...]  # widths of the layer's other projections that precede those of the keys
    trailing_products: tuple[int, ...]  # widths of those that follow them
    state_size: int  # floats of a state, the same in all layers of a model

    @property
    def rows_per_token(self) -> int:
        """Rows that a token provides, stored one after the other: one per key that covers it."""
        return 2 if self.overlaps else 1

    @property
    def layer_state_floats(self) -> int:
        """Floats used of a state of this layer, at most `state_size`."""
        return 3 * self.rows_per_token * (self.width + self.index_dim)

    @property
    def channels(self) -> int:
        return 0

    @property
    def values(self) -> int:
        return 0

    @property
    def pooled_projection_widths(self) -> tuple[int, ...]:
        """Widths of a token's projections: rows and their softmax logits, for the keys and for the index keys."""
        return (*[self.rows_per_token * self.width] * 2, *([self.rows_per_token * self.index_dim] * 2 if self.index_dim else ()))

    @property
    def projection_widths(self) -> tuple[int, ...]:
        return (*self.leading_products, *self.pooled_projection_widths, *self.trailing_products)

    @property
    def state_floats(self) -> int:
        return self.state_size

    @property
    def log_floats_per_token(self) -> int:
        """Also holds the start and the number of tokens of the pass, as two int64."""
        return sum(self.pooled_projection_widths) + 4

    def gpu_workspace_floats(self, tokens: int) -> int:
        """GPU workspace: projections and, for those that form keys, their logits padded to whole keys, exponentials and sums."""
        floats_per_token = sum(self.projection_widths) + 6 * sum(self.pooled_projection_widths)
        return (tokens + 2 * self.tokens_per_key) * floats_per_token + 12 * self.layer_state_floats

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
