"""The widths of an indexer (DeepSeek-AI 2025, V3.2): a small attention whose scores choose which earlier tokens the real one sees. The one
definition, and the layout of what it remembers. Pure arithmetic, no array is touched here.

Of every token, or of every `rate` tokens, one key of `width` numbers is kept, by position alone: block b holds the keys PAGE * b and on,
[width, PAGE], so that a number of a query meets those of many at once. They are never packed, sealed or moved.

Tokens are chosen in units of `grain` side by side. Each query's own choice are `chosen` units, in rising order.

Keys of `rate` tokens may be `means` of theirs (Qwen 4, QSA). Then a unit is these tokens, and those behind the last whole unit, which have
no key yet, are seen whatever is chosen: they are one unit more of every choice, the last. Behind the blocks lie what tokens give to their
means, [tokens, row], row by row: a key that is not whole yet is made of them, wherever a text is cut. Where means are `weighed` (GLM 5.3),
a row is what the mean is of and what the token says of each channel, of which a softmax over the tokens makes weights.
"""

from __future__ import annotations

from dataclasses import dataclass

from .layout import PAGE, STORED_BYTES


@dataclass(frozen=True)
class IndexShape:
    """`heads`: of index queries. `chosen`: units that a token sees; `grain`: tokens of one. `rope`: how many channels turn with positions.
    `each`: every head chooses for a head of keys and values of its own, a unit by its best token; otherwise one choice is made for all, by
    the sum over heads of what is above zero, each times a weight of the token's. `near`: units that are chosen whatever they score, the
    token's own and those before it. `rate`: tokens of a key, which is seen once its last one is there; then a unit is a
    key, or where these are `means` the tokens of one, which may be `weighed`."""

    heads: int
    width: int
    rope: int
    chosen: int
    grain: int = 1
    each: bool = False
    near: int = 0
    rate: int = 1
    means: bool = False
    weighed: bool = False

    @property
    def groups(self) -> int:
        """Choices of a token."""
        return self.heads if self.each else 1

    @property
    def row(self) -> int:
        """Numbers that a token gives to a mean."""
        return self.width * (1 + self.weighed)

    @property
    def listed(self) -> int:
        """Units of a choice, with the one that has no key yet."""
        return self.chosen + self.means

    @property
    def spread(self) -> int:
        """Tokens, or keys of several that are seen in their place, of a unit."""
        return self.rate if self.means else self.grain

    @property
    def whole(self) -> int:
        """The tokens of a text up to which every one sees all before it."""
        return self.chosen * self.grain if self.rate == 1 else (self.chosen + 1) * self.rate - 1

    def units(self, tokens: int) -> int:
        """Units in which so many tokens lie."""
        return -(-tokens // self.spread)

    def keys(self, tokens: int) -> int:
        """Keys that so many tokens have room for."""
        return -(-tokens // self.rate)

    def token_nbytes(self, stored: int) -> int:
        """Bytes of the key of a token, or of its part of one, and of what it gives to a mean."""
        return self.scored_nbytes(stored) + self.means * self.row * STORED_BYTES[stored]

    def scored_nbytes(self, stored: int) -> int:
        """Bytes of the key of a token, or of its part of one: what later tokens read."""
        return self.width * STORED_BYTES[stored] // self.rate

    def nbytes(self, ctx: int, stored: int) -> int:
        """Bytes of one layer's keys for a context, and of what means are made of."""
        return -(-self.keys(ctx) // PAGE) * self.block_nbytes(stored) * (1 + self.means * self.rate * (1 + self.weighed))

    def block_nbytes(self, stored: int) -> int:
        """Bytes of PAGE keys."""
        return PAGE * self.width * STORED_BYTES[stored]
