"""State layout of a layer with n-gram embeddings (Qwen 4).

A token's rows of the n-gram tables become values for all of its streams, which pass through a dilated convolution (taps `size` tokens
apart). A slot holds the last inputs of that convolution and the last token ids, from which the next n-grams are formed:

    x[taps - 1, channels]   then, on a cache line,   int32 token_ids[size - 1], the latest last

A layer has this in addition to a state of another kind with the same number of slots (`WithNgrams`); it follows that state in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .state_shape import StateShape


@dataclass(frozen=True)
class NgramShape(StateShape):
    """Streams, n-grams and convolution of a layer."""

    title: ClassVar[str] = "n-grams"
    count: int  # residual streams
    width: int  # channels per stream
    kernel: int  # taps of the convolution
    size: int  # tokens of the longest n-gram, and the dilation of the convolution
    rows: int  # total width of a token's rows of the n-gram tables

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
    def projection_widths(self) -> tuple[int, ...]:
        """Projections: keys of all streams, and the values that the streams share."""
        return self.channels, self.width

    @property
    def state_floats(self) -> int:
        return self.size - 1

    @property
    def log_floats_per_token(self) -> int:
        """The convolution's input and the token id."""
        return self.channels + 1

    def gpu_workspace_floats(self, tokens: int) -> int:
        """GPU workspace: keys and streams with their norms, values of every stream, convolution inputs and outputs."""
        return (tokens + self.taps) * 9 * self.channels + 3 * tokens * self.width

    def described(self) -> str:
        return f"{self.count} streams of {self.width} channels over {self.taps} tokens"


@dataclass(frozen=True)
class WithNgrams:
    """A layer's state together with its n-gram state. Has only those members of `StateShape` that size the storage."""

    base: StateShape
    ngrams: NgramShape

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + self.ngrams.nbytes

    @property
    def slot_floats(self) -> int:
        return self.base.slot_floats + self.ngrams.slot_floats
