"""State layout of a Mamba layer: a state S[values, depth], in which every number of a channel has its own decay.

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
    """Widths of a Mamba mixer (in config.json: intermediate_size, state_size, time_step_rank, conv_kernel)."""

    title: ClassVar[str] = "state spaces"
    width: int  # channels
    depth: int  # state size per channel
    rank: int  # width of the low-rank input of the time steps
    taps: int  # of the convolution
    biased: bool = True  # the convolution has a bias
    normed: bool = False  # the inputs of steps, B and C are normed

    @property
    def values(self) -> int:
        return self.width

    @property
    def channels(self) -> int:
        return self.width

    @property
    def projection_widths(self) -> tuple[int, ...]:
        """Projections: convolution inputs and output gates."""
        return self.width, self.width

    @property
    def inner_projection_widths(self) -> tuple[int, ...]:
        """The projections of the convolution's output: the low-rank input of the steps; B and C; then the steps."""
        return self.rank, 2 * self.depth, self.width

    @property
    def gates(self) -> int:
        return self.width + 2 * self.depth

    @property
    def state_floats(self) -> int:
        return self.width * self.depth

    @property
    def log_floats_per_token(self) -> int:
        return 2 * self.width + self.gates

    def gpu_workspace_floats(self, tokens: int) -> int:
        """GPU workspace: convolution inputs and outputs, steps, and the states and decays of one chunk."""
        activations = tokens * (12 * self.width + 8 * self.depth + 2 * self.rank)
        return activations + (6 * CHUNK_TOKENS + 5) * self.state_floats

    def described(self) -> str:
        return f"{self.width} channels, each in {self.depth} numbers"
