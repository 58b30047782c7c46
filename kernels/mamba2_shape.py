"""State layout of a Mamba 2 layer: per head a matrix S[head_dim, depth], with a row for each channel.

For rollback, the log of a pass of up to T = MAX_DECODE_TOKENS tokens holds its convolution inputs and outputs, [T, channels] each, and
decays and steps [T, 2, heads].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .state_shape import CHUNK_TOKENS, StateShape


@dataclass(frozen=True)
class Mamba2Shape(StateShape):
    """Widths of a Mamba 2 mixer (in config.json: num_heads, head_dim, n_groups, state_size, conv_kernel)."""

    title: ClassVar[str] = "state spaces"
    heads: int
    head_dim: int  # channels per head
    groups: int  # neighbouring heads of a group share B and C
    depth: int  # state size per channel
    taps: int  # of the convolution over values, B and C
    biased: bool = True  # the convolution has a bias
    normed: bool = True  # the output is normed, group by group

    @property
    def values(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Values, B and C of a token, in this order."""
        return self.values + 2 * self.groups * self.depth

    @property
    def projection_widths(self) -> tuple[int, ...]:
        """Projections: convolution inputs, output gates, and steps."""
        return self.channels, self.values, self.heads

    @property
    def gates(self) -> int:
        return 2 * self.heads

    @property
    def state_floats(self) -> int:
        return self.values * self.depth

    @property
    def log_floats_per_token(self) -> int:
        return 2 * (self.channels + self.heads)

    def gpu_workspace_floats(self, tokens: int) -> int:
        """GPU workspace: convolution inputs and outputs, B and C repeated for every head, and one chunk."""
        activations = 6 * tokens * self.channels + 4 * tokens * self.heads * self.depth + 8 * tokens * self.values + 8 * tokens * self.heads
        chunk = self.heads * (8 * CHUNK_TOKENS**2 + 8 * CHUNK_TOKENS * (self.depth + self.head_dim))
        return activations + chunk + 5 * self.state_floats

    def described(self) -> str:
        return f"{self.heads} heads of {self.head_dim}, each channel in {self.depth} numbers"
