"""State layout of Kimi Delta Attention: that of a gated delta rule with a separate decay for every key channel.

For rollback, the log of a pass of up to T = MAX_DECODE_TOKENS tokens holds its convolution inputs and outputs, [T, channels] each, and its
decays and betas [T, keys + heads].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .delta_shape import DeltaShape

CHUNK_TOKENS = 16  # tokens of a prompt that torch processes at once; small, since every channel has a decay for each pair of them


@dataclass(frozen=True)
class KdaShape(DeltaShape):
    """`DeltaShape` with as many key heads as value heads, all of one width, and a decay per key channel."""

    title: ClassVar[str] = "linear attention by channel"
    low_rank_gates: bool = True  # gates and decays are products of two matrices, through a low-rank intermediate; else of one matrix
    decay_bound: float | None = None  # lower bound of the logarithm of a decay; None: unbounded

    @classmethod
    def of(cls, heads: int, head_dim: int, taps: int, low_rank_gates: bool = True, decay_bound: float | None = None) -> KdaShape:
        return cls(heads, heads, head_dim, head_dim, taps, low_rank_gates=low_rank_gates, decay_bound=decay_bound)

    @property
    def projection_widths(self) -> tuple[int, ...]:
        """Projections: convolution inputs, inputs of the output gates and of the decays, and betas."""
        gates, decays = (self.value_dim, self.key_dim) if self.low_rank_gates else (self.values, self.keys)
        return self.channels, gates, decays, self.value_heads

    @property
    def inner_projection_widths(self) -> tuple[int, ...]:
        """Output gates and decays, computed by a second product."""
        return (self.values, self.keys) if self.low_rank_gates else ()

    @property
    def gates(self) -> int:
        return self.keys + self.value_heads

    @property
    def log_floats_per_token(self) -> int:
        return 2 * self.channels + self.gates

    def gpu_workspace_floats(self, tokens: int) -> int:
        """GPU workspace: convolution inputs and outputs, decays, and one chunk with a decay per channel for every pair of its tokens."""
        activations = 6 * tokens * self.channels + 8 * tokens * self.values + 6 * tokens * (self.keys + self.value_heads)
        chunk = self.value_heads * (8 * CHUNK_TOKENS**2 + 8 * CHUNK_TOKENS * (self.key_dim + self.value_dim)
                                    + 4 * CHUNK_TOKENS**2 * self.key_dim)
        return activations + chunk + 5 * self.state_floats

    def described(self) -> str:
        return f"{self.key_heads} heads of {self.key_dim}, each channel with a decay of its own"
