"""Layout of a lightning indexer (DeepSeek-AI 2025, V3.2): a small attention whose scores select which earlier tokens the main attention
sees. Defines the widths and the key storage. Pure arithmetic, no arrays.

Every token, or every `tokens_per_key` tokens, has one key of `width` numbers, stored by position: block b holds the keys from PAGE * b on
as [width, PAGE], so that one query element multiplies many keys at once. Index keys are never packed, sealed or moved.

Selection is in units of `block_size` consecutive tokens. Each query selects its own `top_k` units, in ascending order.

Keys of several tokens may be `pooled`, the mean of them (Qwen 4, QSA). A unit is then these tokens. Tokens after the last complete unit
have no key yet and are always visible: they form one extra unit at the end of every selection. Behind the key blocks lie the tokens'
contributions to their means, [tokens, row], from which an incomplete key is rebuilt when a text is truncated. With `weighted_pooling` (GLM
5.3) a row holds the values and one logit per channel; a softmax of the logits over the tokens gives the weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from .layout import PAGE, STORED_BYTES


@dataclass(frozen=True)
class IndexShape:
    """Widths of an indexer and the units in which it selects."""

    heads: int  # index query heads
    width: int  # channels of an index key
    rope: int  # rotated channels of an index key
    top_k: int  # units that a query selects
    block_size: int = 1  # tokens per unit
    # True: each head selects for one key-value head, scoring a unit by its best token. False: one selection for all heads, by the sum over
    # heads of positive scores, each times a weight that the token provides.
    per_head: bool = False
    local_blocks: int = 0  # units that are always selected: that of the token and those just before it
    tokens_per_key: int = 1  # above 1, a unit is a key, or with `pooled` the tokens of a key; a key is visible once its last token is
    pooled: bool = False  # a key is the mean of its tokens' rows
    weighted_pooling: bool = False  # the mean is weighted by a softmax of logits that the tokens provide

    @property
    def groups(self) -> int:
        """Selections per token."""
        return self.heads if self.per_head else 1

    @property
    def pool_row(self) -> int:
        """Numbers that a token contributes to a mean."""
        return self.width * (1 + self.weighted_pooling)

    @property
    def selected(self) -> int:
        """Units in a selection, including the one without a key."""
        return self.top_k + self.pooled

    @property
    def unit_tokens(self) -> int:
        """Tokens per unit, or compressed keys where those are attended to instead."""
        return self.tokens_per_key if self.pooled else self.block_size

    @property
    def dense_tokens(self) -> int:
        """Number of leading tokens of a text that every query still sees completely."""
        return self.top_k * self.block_size if self.tokens_per_key == 1 else (self.top_k + 1) * self.tokens_per_key - 1

    def units(self, tokens: int) -> int:
        """Units covering this many tokens."""
        return -(-tokens // self.unit_tokens)

    def keys(self, tokens: int) -> int:
        """Keys allocated for this many tokens."""
        return -(-tokens // self.tokens_per_key)

    def token_nbytes(self, stored: int) -> int:
        """Bytes of one token's key, or of its share of one, plus its contribution to a mean."""
        return self.scored_nbytes(stored) + self.pooled * self.pool_row * STORED_BYTES[stored]

    def scored_nbytes(self, stored: int) -> int:
        """Bytes of one token's key, or of its share of one: the part that later tokens read."""
        return self.width * STORED_BYTES[stored] // self.tokens_per_key

    def nbytes(self, ctx: int, stored: int) -> int:
        """Bytes of one layer's keys for a context, and of the rows that means are built from."""
        return -(-self.keys(ctx) // PAGE) * self.block_nbytes(stored) * (1
                                                                         + self.pooled * self.tokens_per_key * (1 + self.weighted_pooling))

    def block_nbytes(self, stored: int) -> int:
        """Bytes of PAGE keys."""
        return PAGE * self.width * STORED_BYTES[stored]
