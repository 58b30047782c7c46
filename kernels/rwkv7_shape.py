"""State layout of an RWKV 7 layer: per head a matrix S[head_dim, head_dim], with a row for each value channel.

Both halves of such a layer (time mixing and channel mixing) also read the previous token (token shift). In place of convolution inputs, a
slot therefore has two rows: the normed input of each half for the last token. For rollback, the log of a pass of up to
T = MAX_DECODE_TOKENS tokens holds these rows, [T, 2, channels], and the six inputs of the recurrence, [T, channels] each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .state_shape import StateShape

PARTS = 6  # inputs of the recurrence per token: r, k, v, decays, the removal key and the replacement key


@dataclass(frozen=True)
class Rwkv7Shape(StateShape):
    """Widths of a layer's time mixing."""

    title: ClassVar[str] = "time mixing"
    heads: int
    head_dim: int  # channels per head
    ranks: tuple[int, int, int, int]  # of the low-rank matrices for decays, rates, shares of the first layer's values, and gates
    eps: float = 64e-5  # of the norm of each head's output
    taps: int = 3  # a slot has two rows, like one of a convolution with three taps

    @property
    def values(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        return self.values

    @property
    def projection_widths(self) -> tuple[int, ...]:
        """Receptances, keys and values, the inputs of decays and rates, and gates."""
        return (self.values,) * 6

    @property
    def state_floats(self) -> int:
        return self.values * self.head_dim

    @property
    def log_floats_per_token(self) -> int:
        return (2 + PARTS) * self.values

    def gpu_workspace_floats(self, tokens: int) -> int:
        """GPU workspace: the interpolated rows, projections, inputs of the recurrence and its output."""
        return 26 * tokens * self.values + 6 * self.state_floats

    def described(self) -> str:
        return f"{self.heads} heads of {self.head_dim} x {self.head_dim}"
