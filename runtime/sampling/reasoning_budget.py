"""The reasoning budget: when it is used up, only the tokens that close the reasoning are allowed, then the answer begins.

Between tags that is the closing tag. On channels (gpt-oss) the message is closed and the next one opened; its header may be anything but
reasoning, so the answer or a tool call follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from ..tokenizer import Tokenizer
from ..tokens.reasoning import ChannelFilter

ROLE, ANALYSIS = "assistant", "analysis"  # words of a message header


class ReasoningTracker(Protocol):
    """A parser that separates reasoning from content."""

    @property
    def is_thinking(self) -> bool:
        """Whether the next token is reasoning, as far as is known."""


class ReasoningBudget:
    """The reasoning budget of one answer.

    max_tokens: of reasoning, its tags not counted.
    tracker: says whether the next token is reasoning.
    next_mask: another mask of the logits (a constraint), which applies outside the closing tokens; None if there is none.
    """

    def __init__(self, max_tokens: int, tokenizer: Tokenizer, tracker: ReasoningTracker,
                 next_mask: Callable[[np.ndarray], None] | None = None) -> None:
        self._left, self._tracker, self._next_mask = max_tokens, tracker, next_mask
        self._closing, self._banned_after = _channel_tokens(tokenizer) if tokenizer.channels else (_tag_tokens(tokenizer), {})
        self._pending: list[int] = []  # closing tokens still to be forced
        self._last: int | None = None
        self.is_exhausted = False

    def mask_logits(self, logits: np.ndarray) -> None:
        """Mask logits[V] in place."""
        if not self.is_exhausted and self._left <= 0 and self._tracker.is_thinking:
            self.is_exhausted, self._pending = True, [*self._closing]
        if self._pending:
            value = logits[self._pending[0]]
            logits.fill(-np.inf)
            logits[self._pending[0]] = value if np.isfinite(value) else 0
            return
        if self.is_exhausted and self._last in self._banned_after:
            logits[self._banned_after[self._last]] = -np.inf
        if self._next_mask is not None:
            self._next_mask(logits)

    def accept(self, token: int) -> None:
        """Count a token; call before the tracker gets it."""
        self._last = token
        if self._pending:
            self._pending.pop(0)
        elif self._tracker.is_thinking:
            self._left -= 1


def _tag_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens that close reasoning between tags."""
    return [] if tokenizer.think_tags is None else tokenizer.encode(tokenizer.think_tags.close, add_special_tokens=False)


def _channel_tokens(tokenizer: Tokenizer) -> tuple[list[int], dict[int, int]]:
    """(tokens that close a message and open the next, the token banned after another one: in a header it would open reasoning)."""
    closing, channel, analysis = (tokenizer.encode(text, add_special_tokens=False) for text in (
        f"{ChannelFilter.END}{ChannelFilter.START}{ROLE}", ChannelFilter.CHANNEL, ANALYSIS))
    return closing, {channel[-1]: analysis[0]}
