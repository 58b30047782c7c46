"""The reasoning budget: after so many reasoning tokens only those that close the reasoning are allowed, then the answer begins.

Between tags that is the closing tag. On channels (gpt-oss) the message is closed and the next one opened; its header may be anything but
reasoning, so the answer or a tool call follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from ..tokenizer import Tokenizer
from ..tokens.reasoning import ChannelFilter

ROLE, ANALYSIS = "assistant", "analysis"  # in headers


class ReasoningTracker(Protocol):
    """A parser that separates reasoning from content."""

    @property
    def is_thinking(self) -> bool:
        """Is the next token reasoning, as far as is known?"""


class ReasoningBudget:
    """Of one answer, `most` of whose tokens may be reasoning, marks not counted. `think` follows the text; `otherwise` is what else says
    which tokens may come, None where any may."""

    def __init__(self, most: int, tokenizer: Tokenizer, think: ReasoningTracker,
                 otherwise: Callable[[np.ndarray], None] | None = None) -> None:
        self._left, self._think, self._otherwise = most, think, otherwise
        self._closing, self._barred = _of_channels(tokenizer) if tokenizer.channels else (_of_tags(tokenizer), {})
        self._coming: list[int] = []  # what closes it and has not come yet
        self._last: int | None = None
        self.reached = False

    def narrow(self, logits: np.ndarray) -> None:
        """Mask logits[V] in place."""
        if not self.reached and self._left <= 0 and self._think.is_thinking:
            self.reached, self._coming = True, [*self._closing]
        if self._coming:
            value = logits[self._coming[0]]
            logits.fill(-np.inf)
            logits[self._coming[0]] = value if np.isfinite(value) else 0
            return
        if self.reached and self._last in self._barred:
            logits[self._barred[self._last]] = -np.inf
        if self._otherwise is not None:
            self._otherwise(logits)

    def took(self, token: int) -> None:
        """Count a token; call before `think` takes it."""
        self._last = token
        if self._coming:
            self._coming.pop(0)
        elif self._think.is_thinking:
            self._left -= 1


def _of_tags(tokenizer: Tokenizer) -> list[int]:
    """The tokens that close reasoning between tags."""
    return [] if tokenizer.think_tags is None else tokenizer.encode(tokenizer.think_tags.close, add_special_tokens=False)


def _of_channels(tokenizer: Tokenizer) -> tuple[list[int], dict[int, int]]:
    """The tokens that close a message and begin the next, and the one that cannot come behind another: a header says so that it is
    reasoning."""
    begun, channel, reasons = (tokenizer.encode(text, add_special_tokens=False) for text in (
        f"{ChannelFilter.END}{ChannelFilter.START}{ROLE}", ChannelFilter.CHANNEL, ANALYSIS))
    return begun, {channel[-1]: reasons[0]}
