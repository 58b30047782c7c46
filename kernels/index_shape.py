"""The widths of an indexer (DeepSeek-AI 2025, V3.2): a small attention whose scores choose which earlier tokens the real one sees. The one
definition, and the layout of what it remembers. Pure arithmetic, no array is touched here.

Of every token one key of `width` numbers is kept, by position alone: block b holds the keys of tokens PAGE * b and on, [width, PAGE], so
that a number of a query meets those of many tokens at once. They are never packed, sealed or moved.

Tokens are chosen in units of `grain` side by side. Each query's own choice are `chosen` units, in rising order.
"""

from __future__ import annotations

from dataclasses import dataclass

from .layout import PAGE, STORED_BYTES


@dataclass(frozen=True)
class IndexShape:
    """`heads`: of index queries. `chosen`: units that a token sees; `grain`: tokens of one. `rope`: how many channels turn with positions.
    `each`: every head chooses for a head of keys and values of its own, a unit by its best token; otherwise one choice is made for all, by
    the sum over heads of what is above zero, each times a weight of the token's. `near`: units that are chosen whatever they score, the
    token's own and those before it."""

    heads: int
    width: int
    rope: int
    chosen: int
    grain: int = 1
    each: bool = False
    near: int = 0

    @property
    def groups(self) -> int:
        """Choices of a token."""
        return self.heads if self.each else 1

    @property
    def whole(self) -> int:
        """The tokens of a text up to which every one sees all before it."""
        return self.chosen * self.grain

    def units(self, tokens: int) -> int:
        """Units in which so many tokens lie."""
        return -(-tokens // self.grain)

    def token_nbytes(self, stored: int) -> int:
        """Bytes of the key of a token."""
        return self.width * STORED_BYTES[stored]

    def nbytes(self, ctx: int, stored: int) -> int:
        """Bytes of one layer's keys for a context."""
        return -(-ctx // PAGE) * self.block_nbytes(stored)

    def block_nbytes(self, stored: int) -> int:
        """Bytes of the keys of PAGE tokens."""
        return PAGE * self.token_nbytes(stored)
