"""State layout of a layer with n-gram embeddings (Qwen 4).

A token's embedding rows become values for all of its streams, which a dilated convolution (taps `size` tokens apart) takes in. A slot holds
the last inputs of that convolution and the last words, from which the next n-grams are formed:

    x[taps - 1, channels]   then, on a cache line,   int32 words[size - 1], the latest last

A layer has this next to a state of another kind with the same number of slots (`WithNgrams`): one follows the other in memory.
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
        """Tokens spanned by the convolution."""
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
        """The convolution's input and the word itself."""
        return self.channels + 1

    def gpu_workspace_floats(self, tokens: int) -> int:
        """GPU workspace: keys and streams with their norms, values of every stream, convolution inputs and outputs."""
        return (tokens + self.taps) * 9 * self.channels + 3 * tokens * self.width

    def described(self) -> str:
        return f"{self.count} streams of {self.width} channels over {self.taps} tokens"


@dataclass(frozen=True)
class WithNgrams:
    """A layer's state together with its n-gram state; the parts of `StateShape` by which slots are counted and stored."""

    own: StateShape
    ngrams: NgramShape

    @property
    def nbytes(self) -> int:
        return self.own.nbytes + self.ngrams.nbytes

    @property
    def slot_floats(self) -> int:
        return self.own.slot_floats + self.ngrams.slot_floats
