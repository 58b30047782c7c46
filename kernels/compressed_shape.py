"""The widths of keys that are made of several tokens (DeepSeek-AI 2026, V4): the one definition, and the layout of what is on the way to
one. Pure arithmetic, no array is touched here.

Of every `rate` tokens that lie side by side one key is made, which is the value too: channel by channel the mean of what each token gives,
weighed by a softmax over numbers that the tokens say and a bias of each one's place. Where they overlap a key is made of the `rate` tokens
before as well, for which every token gives a second row, in front of the one for its own key.

A key is known once its last token is. Until then it is what a state holds, channel by channel: the largest number so far, the sum of the
exponentials below it and the sum of what they weigh. Of keys that overlap there are two on the way, the one that is closed next and the
one behind it:

    state   most[width]  sum[width]  weighed[width]   of the next key, of overlapping ones of the second too; then those of the index

Keys lie row by row, by number; those that an indexer scores as `indexer_shape.py` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .layout import STORED_BYTES
from .state_shape import StateShape


@dataclass(frozen=True)
class CompressedShape(StateShape):
    """`width`: channels of a key, of which the last `rope` turn; `rate`: tokens of one; `index`: channels of the key beside it by which it
    is chosen, 0 for none. `window`: tokens that are seen one by one. `first`: widths of a layer's first products that are none of these, in
    front of them, and `behind` the one behind. `room`: floats of a state, alike in all layers of a model."""

    title: ClassVar[str] = "compressed keys"
    ways_back: ClassVar[int] = 6
    taps: ClassVar[int] = 1
    width: int
    rate: int
    overlaps: bool
    rope: int
    index: int
    window: int
    first: tuple[int, ...]
    behind: tuple[int, ...]
    room: int

    @property
    def parts(self) -> int:
        """Rows of a token, which are one behind the other."""
        return 2 if self.overlaps else 1

    @property
    def own_floats(self) -> int:
        """Of a state of this layer."""
        return 3 * self.parts * (self.width + self.index)

    @property
    def channels(self) -> int:
        return 0

    @property
    def values(self) -> int:
        return 0

    @property
    def series(self) -> tuple[int, ...]:
        """Widths of the products that a token gives: rows and their weights, of keys and of those of the index."""
        return (*[self.parts * self.width] * 2, *([self.parts * self.index] * 2 if self.index else ()))

    @property
    def products(self) -> tuple[int, ...]:
        return (*self.first, *self.series, *self.behind)

    @property
    def state_floats(self) -> int:
        return self.room

    @property
    def recent(self) -> int:
        """Also where the pass began and how many tokens it had, as two int64."""
        return sum(self.series) + 4

    def card_floats(self, tokens: int) -> int:
        """Products, and of those that become keys what they weigh, padded to whole keys, its powers and their sums."""
        return (tokens + 2 * self.rate) * (sum(self.products) + 6 * sum(self.series)) + 12 * self.own_floats

    def described(self) -> str:
        return f"a key of {self.width} channels for {self.rate} tokens"

    def token_nbytes(self, stored: int) -> int:
        """Bytes of the keys of a token."""
        return self.width * STORED_BYTES[stored] // self.rate

    def keys(self, tokens: int) -> int:
        """Keys that so many tokens have closed."""
        return tokens // self.rate

    def keys_nbytes(self, ctx: int, stored: int) -> int:
        """Bytes of one layer's keys for a context."""
        return -(-ctx // self.rate) * self.width * STORED_BYTES[stored]
