"""State layout of a Mamba layer: per channel `depth` numbers, each with its own decay, S[values, depth].

For rollback, the log of a pass of up to T = MAX_DECODE_TOKENS tokens holds its convolution inputs and outputs, [T, values] each, and steps,
B and C [T, values + 2 * depth].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .state_shape import StateShape

CHUNK_TOKENS = 32  # tokens of a prompt that torch processes at once, with a state for each of them


@dataclass(frozen=True)
class Mamba1Shape(StateShape):
    """`values` channels; `rank` numbers of which their steps are made, and `taps` of their convolution, which may be `biased`. `normed`:
    what steps, B and C are made of is."""

    title: ClassVar[str] = "state spaces"
    width: int
    depth: int
    rank: int
    taps: int
    biased: bool = True
    normed: bool = False

    @property
    def values(self) -> int:
        return self.width

    @property
    def channels(self) -> int:
        return self.width

    @property
    def products(self) -> tuple[int, ...]:
        """Projections: convolution inputs and output gates."""
        return self.width, self.width

    @property
    def widened(self) -> tuple[int, ...]:
        """From the convolution's output: the low-rank input of the steps, B and C; then the steps."""
        return self.rank, 2 * self.depth, self.width

    @property
    def gates(self) -> int:
        return self.width + 2 * self.depth

    @property
    def state_floats(self) -> int:
        return self.width * self.depth

    @property
    def recent(self) -> int:
        return 2 * self.width + self.gates

    def gpu_workspace_floats(self, tokens: int) -> int:
        """GPU workspace: convolution inputs and outputs, steps, and the states and decays of one chunk."""
        activations = tokens * (12 * self.width + 8 * self.depth + 2 * self.rank)
        return activations + (6 * CHUNK_TOKENS + 5) * self.state_floats

    def described(self) -> str:
        return f"{self.width} channels, each in {self.depth} numbers"
