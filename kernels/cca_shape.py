"""State layout of compressed convolutional attention (Zyphra 2025, arXiv:2510.04476, as in ZAYA1): the last inputs of two convolutions over
queries and keys, and the half of each token's values that is delayed by one token. Pure arithmetic, no arrays.

A token's projection is [q | k | delayed | current]. Queries and keys are convolved per channel over `first` tokens, then per head (mixing
all channels of a head) over `second` tokens. Each query then adds half of its own input and half of its key head's; each key adds the mean
of these sums over its query heads. Both are L2-normalized to the square root of the head width, and keys are scaled by a per-head factor.
The first half of the values is `current`, the second half is the previous token's `delayed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .state_shape import StateShape


@dataclass(frozen=True)
class CcaShape(StateShape):
    """Heads and convolutions of a layer. Slots are small, so several are kept as rollback points."""

    title: ClassVar[str] = "convolutions of queries and keys"
    rollback_slots: ClassVar[int] = 14
    heads: int  # query heads
    kv_heads: int  # key heads, and value heads
    depth: int  # channels per head
    first: int  # taps of the convolution per channel
    second: int  # taps of the convolution per head

    @property
    def taps(self) -> int:
        """Tokens that one output depends on: the current one and those in the slot."""
        return self.first + self.second - 1

    @property
    def qk_channels(self) -> int:
        """Channels of queries and keys together."""
        return (self.heads + self.kv_heads) * self.depth

    @property
    def half_value_channels(self) -> int:
        """Value channels taken from the current token, and as many from the previous one."""
        return self.kv_heads * self.depth // 2

    @property
    def channels(self) -> int:
        """What a slot keeps per token: the channels that are convolved and the delayed half of the values."""
        return self.qk_channels + self.half_value_channels

    @property
    def values(self) -> int:
        return self.heads * self.depth

    @property
    def projection_widths(self) -> tuple[int, ...]:
        return (self.channels + self.half_value_channels,)

    @property
    def log_floats_per_token(self) -> int:
        return self.channels

    def gpu_workspace_floats(self, tokens: int) -> int:
        """GPU workspace: inputs and outputs of both convolutions, the residual sums, and the resulting queries, keys and values."""
        return (tokens + self.taps) * 9 * self.channels + self.qk_channels * self.depth * self.second

    def described(self) -> str:
        return f"{self.qk_channels} channels over {self.taps} tokens, and values of the token before"
