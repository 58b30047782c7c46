"""State layout of a gated delta rule: per value head a matrix S[value_dim, key_dim] mapping keys to values.

For rollback, the log of a pass of up to T = MAX_DECODE_TOKENS tokens holds its convolution inputs and outputs, [T, channels] each, and its
decays and betas [T, 2, value_heads].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .state_shape import CHUNK_TOKENS, StateShape


@dataclass(frozen=True)
class DeltaShape(StateShape):
    """Heads and convolution of a layer with a gated delta rule."""

    title: ClassVar[str] = "linear attention"
    key_heads: int  # of queries too
    value_heads: int
    key_dim: int  # channels per key head
    value_dim: int  # channels per value head
    taps: int  # of the convolution over queries, keys and values
    tiled: bool = False  # value heads cycle through the key heads, as in GGUF files; else those that share a key head are adjacent
    beta_scale: float = 1.0  # factor of betas
    sigmoid_gate: bool = False  # the activation of output gates is sigmoid instead of SiLU

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Queries, keys and values of a token, in this order."""
        return 2 * self.keys + self.values

    @property
    def projection_widths(self) -> tuple[int, ...]:
        """Projections: convolution inputs, output gates, betas and decays."""
        return self.channels, self.values, self.value_heads, self.value_heads

    @property
    def gates(self) -> int:
        return 2 * self.value_heads

    @property
    def state_floats(self) -> int:
        return self.value_heads * self.value_dim * self.key_dim

    @property
    def log_floats_per_token(self) -> int:
        return 2 * (self.channels + self.value_heads)

    def gpu_workspace_floats(self, tokens: int) -> int:
        """GPU workspace: convolution inputs and outputs, key heads repeated for every value head, and one chunk."""
        heads = tokens * self.value_heads
        activations = 6 * tokens * self.channels + 8 * heads * self.key_dim + 8 * tokens * self.values + 8 * heads
        chunk = self.value_heads * (8 * CHUNK_TOKENS**2 + 8 * CHUNK_TOKENS * (self.key_dim + self.value_dim))
        return activations + chunk + 5 * self.state_floats

    def described(self) -> str:
        return f"{self.key_heads} key heads of {self.key_dim} and {self.value_heads} value heads of {self.value_dim}"
