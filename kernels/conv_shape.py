"""State layout of a gated short convolution: only its last inputs. A pass of few tokens keeps the inputs of each for rollback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .state_shape import StateShape


@dataclass(frozen=True)
class ConvShape(StateShape):
    """Width and taps of a layer's convolution. Slots are small, so several are kept as rollback points."""

    title: ClassVar[str] = "short convolution"
    rollback_slots: ClassVar[int] = 14
    width: int  # channels, each convolved on its own
    taps: int  # tokens per output

    @property
    def channels(self) -> int:
        return self.width

    @property
    def values(self) -> int:
        return self.width

    @property
    def projection_widths(self) -> tuple[int, ...]:
        """One projection: input gates, output gates, and the values to convolve."""
        return (3 * self.width,)

    @property
    def log_floats_per_token(self) -> int:
        return self.width

    def gpu_workspace_floats(self, tokens: int) -> int:
        """GPU workspace: gates and inputs, their products appended to the previous ones, and two sums."""
        return 12 * (tokens + self.taps) * self.width

    def described(self) -> str:
        return f"{self.width} channels over {self.taps} tokens"
