"""The state of compressed convolutional attention (Zyphra 2025, arXiv:2510.04476, as in ZAYA1): the last inputs of two convolutions over
queries and keys, and what half of a token's values wait for. Pure arithmetic, no array is touched here.

A token's product is [q | k | delayed | current]. Queries and keys of every channel are convolved over `first` tokens, and then by head, all
channels of a head together, over `second` tokens. To what comes of a query half of its own and of its head of keys is added, and to a key
the mean of that over its queries; both are then as long as the root of their width, keys times a number of their head. Of values the first
half is `current`, and the second what the token before had as `delayed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .state_shape import StateShape


@dataclass(frozen=True)
class CcaShape(StateShape):
    """`heads` of queries and `kv_heads` of keys and of values, `depth` wide. A slot is small, so more of them are kept as ways back."""

    title: ClassVar[str] = "convolutions of queries and keys"
    ways_back: ClassVar[int] = 14
    heads: int
    kv_heads: int
    depth: int
    first: int
    second: int

    @property
    def taps(self) -> int:
        """Tokens that go into one: a token's own and those that slots keep."""
        return self.first + self.second - 1

    @property
    def convolved(self) -> int:
        """Channels of queries and keys."""
        return (self.heads + self.kv_heads) * self.depth

    @property
    def half(self) -> int:
        """Channels of values that are a token's own, and as many that are not."""
        return self.kv_heads * self.depth // 2

    @property
    def channels(self) -> int:
        return self.convolved + self.half

    @property
    def values(self) -> int:
        return self.heads * self.depth

    @property
    def products(self) -> tuple[int, ...]:
        return (self.channels + self.half,)

    @property
    def recent(self) -> int:
        return self.channels

    def card_floats(self, tokens: int) -> int:
        """What is convolved, once and twice with what is added to it, and what of it becomes queries, keys and values."""
        return (tokens + self.taps) * 9 * self.channels + self.convolved * self.depth * self.second

    def described(self) -> str:
        return f"{self.convolved} channels over {self.taps} tokens, and values of the token before"
