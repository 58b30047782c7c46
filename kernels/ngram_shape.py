"""What a layer remembers that is given rows of n-grams (Qwen 4): the one definition. Pure arithmetic, no array is touched here.

A token's rows become values for all of its streams, which a convolution over tokens `size` apart takes in. So a slot holds the last inputs
of that convolution, and the last words, of which the next n-grams are made:

    x[taps - 1, channels]   then, on a cache line,   int32 words[size - 1], the latest last

A layer has this beside a state of another kind, whose slots are the same in number (`WithNgrams`): in memory one lies behind the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .state_shape import StateShape


@dataclass(frozen=True)
class NgramShape(StateShape):
    """`count` streams of `width` channels, convolved by `kernel` taps that are `size` tokens apart; `size`: words of the longest n-gram;
    `rows`: numbers of a token's rows together."""

    title: ClassVar[str] = "n-grams"
    count: int
    width: int
    kernel: int
    size: int
    rows: int

    @property
    def taps(self) -> int:
        """Tokens that the convolution reaches over."""
        return (self.kernel - 1) * self.size + 1

    @property
    def channels(self) -> int:
        return self.count * self.width

    @property
    def values(self) -> int:
        return self.channels

    @property
    def products(self) -> tuple[int, ...]:
        """Keys of all streams, and the values that they share."""
        return self.channels, self.width

    @property
    def state_floats(self) -> int:
        return self.size - 1

    @property
    def recent(self) -> int:
        """What was convolved, and the word itself."""
        return self.channels + 1

    def card_floats(self, tokens: int) -> int:
        """Keys and streams with their norms, values of every stream, what is convolved, before and after."""
        return (tokens + self.taps) * 9 * self.channels + 3 * tokens * self.width

    def described(self) -> str:
        return f"{self.count} streams of {self.width} channels over {self.taps} tokens"


@dataclass(frozen=True)
class WithNgrams:
    """A state with what n-grams leave beside it, in one layer; of `StateShape` what slots are counted and kept by."""

    own: StateShape
    ngrams: NgramShape

    @property
    def nbytes(self) -> int:
        return self.own.nbytes + self.ngrams.nbytes

    @property
    def slot_floats(self) -> int:
        return self.own.slot_floats + self.ngrams.slot_floats
