"""The state of a gated short convolution: nothing but the last inputs of it, of which a pass of few tokens keeps all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .state_shape import StateShape


@dataclass(frozen=True)
class ConvShape(StateShape):
    """`width` channels, each convolved over `taps` tokens. A slot is small, so more of them are kept as ways back."""

    title: ClassVar[str] = "short convolution"
    ways_back: ClassVar[int] = 14
    width: int
    taps: int

    @property
    def channels(self) -> int:
        return self.width

    @property
    def values(self) -> int:
        return self.width

    @property
    def products(self) -> tuple[int, ...]:
        """In one: the gates of what goes in, those of what comes out, and what is convolved."""
        return (3 * self.width,)

    @property
    def recent(self) -> int:
        return self.width

    def card_floats(self, tokens: int) -> int:
        """Gates and inputs, their products behind those that came before, and two sums."""
        return 12 * (tokens + self.taps) * self.width

    def described(self) -> str:
        return f"{self.width} channels over {self.taps} tokens"
