"""The state of a gated delta rule: for every value head a matrix S[value_dim, key_dim] that maps keys to values.

Of a pass of few tokens inputs of the convolution and its results are kept, [REPEATED, channels] each, and decay and beta
[REPEATED, 2, value_heads].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .state_shape import STRETCH, StateShape


@dataclass(frozen=True)
class DeltaShape(StateShape):
    """Heads of keys (and queries) and of values, the width of one of each, and the taps of the convolution over all of them.

    Heads of values that read the keys of one head lie side by side; `tiled`: once around all heads of keys instead, again and again, as
    GGUF files have them. `writes`: what betas are multiplied by. `sigmoid`: gates of what is read are sigmoids alone.
    """

    title: ClassVar[str] = "linear attention"
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    tiled: bool = False
    writes: float = 1.0
    sigmoid: bool = False

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Queries, keys and values of a token, in this order."""
        return 2 * self.keys + self.values

    @property
    def products(self) -> tuple[int, ...]:
        """What is convolved, the gates of what is read, and of betas and decays."""
        return self.channels, self.values, self.value_heads, self.value_heads

    @property
    def gates(self) -> int:
        return 2 * self.value_heads

    @property
    def state_floats(self) -> int:
        return self.value_heads * self.value_dim * self.key_dim

    @property
    def recent(self) -> int:
        return 2 * (self.channels + self.value_heads)

    def card_floats(self, tokens: int) -> int:
        """What is convolved, before and after, heads of keys for every head of values, and a stretch."""
        heads = tokens * self.value_heads
        made = 6 * tokens * self.channels + 8 * heads * self.key_dim + 8 * tokens * self.values + 8 * heads
        stretch = self.value_heads * (8 * STRETCH**2 + 8 * STRETCH * (self.key_dim + self.value_dim))
        return made + stretch + 5 * self.state_floats

    def described(self) -> str:
        return f"{self.key_heads} key heads of {self.key_dim} and {self.value_heads} value heads of {self.value_dim}"
