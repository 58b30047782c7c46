"""The state of a layer of lightning attention: for every head a matrix S[head_dim, head_dim], a row for each channel of its values.

It is linear attention whose decay is one number a head, the same for every token. Of a pass of few tokens what is written and read is
kept, before its activation and behind it, [REPEATED, channels] each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .state_shape import STRETCH, StateShape


@dataclass(frozen=True)
class LightningShape(StateShape):
    """Heads and the width of one, of values, keys and queries alike. Nothing is convolved: the activation has one tap."""

    title: ClassVar[str] = "linear attention"
    heads: int
    head_dim: int
    taps: int = 1

    @property
    def values(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Values, keys and queries of a token, in this order."""
        return 3 * self.values

    @property
    def products(self) -> tuple[int, ...]:
        """What is activated, and the gates of what is read."""
        return self.channels, self.values

    @property
    def state_floats(self) -> int:
        return self.values * self.head_dim

    @property
    def recent(self) -> int:
        return 2 * self.channels

    def card_floats(self, tokens: int) -> int:
        """What is activated, values, keys and queries of all heads, and a stretch."""
        stretch = self.heads * (8 * STRETCH**2 + 16 * STRETCH * self.head_dim)
        return 20 * tokens * self.values + stretch + 5 * self.state_floats

    def described(self) -> str:
        return f"{self.heads} heads of {self.head_dim} x {self.head_dim}"
