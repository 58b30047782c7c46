"""State layout of lightning attention: per head a matrix S[head_dim, head_dim], with a row for each value channel.

This is linear attention with one constant decay per head. For rollback, the log of a pass of up to T = MAX_DECODE_TOKENS tokens holds
queries, keys and values before and after their activation, [T, channels] each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .state_shape import CHUNK_TOKENS, StateShape


@dataclass(frozen=True)
class LightningShape(StateShape):
    """Heads of a layer with lightning attention."""

    title: ClassVar[str] = "linear attention"
    heads: int
    head_dim: int  # channels per head of queries, keys and values alike
    taps: int = 1  # there is no convolution: the activation counts as one tap

    @property
    def values(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Values, keys and queries of a token, in this order."""
        return 3 * self.values

    @property
    def projection_widths(self) -> tuple[int, ...]:
        """Projections: activation inputs and output gates."""
        return self.channels, self.values

    @property
    def state_floats(self) -> int:
        return self.values * self.head_dim

    @property
    def log_floats_per_token(self) -> int:
        return 2 * self.channels

    def gpu_workspace_floats(self, tokens: int) -> int:
        """GPU workspace: activation inputs, values, keys and queries of all heads, and one chunk."""
        chunk = self.heads * (8 * CHUNK_TOKENS**2 + 16 * CHUNK_TOKENS * self.head_dim)
        return 20 * tokens * self.values + chunk + 5 * self.state_floats

    def described(self) -> str:
        return f"{self.heads} heads of {self.head_dim} x {self.head_dim}"
