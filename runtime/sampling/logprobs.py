"""Log-probabilities of tokens: log-softmax of the model's own logits, before biases, penalties, filters and temperature, as OpenAI's and
llama.cpp's servers report by default."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..events import Call, TextDelta

if TYPE_CHECKING:
    from ..tokens.reasoning import Part

BLOCK = 64  # tokens
MIN_LOGPROB = -9999.0  # OpenAI's API reports this for a token of probability 0


class TokenLogprobs(NamedTuple):
    """A token with its log-probability and the most likely alternatives.

    logprob: None for the first token of a text.
    top: (token, logprob) pairs, most likely first.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: np.ndarray, token: int, top: int) -> TokenLogprobs:
    """Log-probabilities, computed in float64, of `token` and the `top` most likely tokens of float32 logits[V]. Ties are ordered by id."""
    largest = float(logits.max())
    log_total = math.log(np.exp(logits.astype(np.float64) - largest).sum()) + largest
    candidates = _candidates(logits, top)
    best = candidates[np.argsort(-logits[candidates], kind="stable")][:top]
    return TokenLogprobs(token, max(MIN_LOGPROB, float(logits[token]) - log_total),
                         tuple((int(other), max(MIN_LOGPROB, float(logits[other]) - log_total)) for other in best))


def _candidates(logits: np.ndarray, top: int) -> np.ndarray:
    """Token ids in ascending order that include the `top` most likely: all logits that reach the `top`-th largest block maximum."""
    if not top:
        return np.empty(0, np.int64)
    block_max = np.maximum.reduceat(logits, np.arange(0, len(logits), BLOCK))
    return np.flatnonzero(logits >= np.partition(block_max, -top)[-top]) if top < len(block_max) else np.arange(len(logits))


class LogprobTrail:
    """Matches tokens to emitted text: a token leaves with the chunk that has its first character. Tokens without emitted text (the end
    of the text, a stop string, a tool call, reasoning tags) are dropped."""

    def __init__(self) -> None:
        self._pending: list[tuple[TokenLogprobs, int, str | None]] = []  # with the characters before it, and its kind if known
        self._ready: list[tuple[TokenLogprobs, str | None]] = []
        self._num_generated = self._num_emitted = 0  # characters, before and after the filter of stop strings

    def add(self, token: TokenLogprobs, text: str, kind: str | None) -> None:
        """A token completed `text`; `kind` is answer or thinking, None while that is undecided."""
        self._pending.append((token, self._num_generated, kind))
        self._num_generated += len(text)

    def events(self, parts: Sequence[Part | tuple[str, Call]], num_chars: int) -> Iterator[TextDelta | Call]:
        """The parts as events with their tokens; `num_chars` more characters have passed the stop strings."""
        self._num_emitted += num_chars
        while self._pending and self._pending[0][1] < self._num_emitted:
            token, _, kind = self._pending.pop(0)
            self._ready.append((token, kind))
        for kind, part in parts:
            if isinstance(part, Call):
                self._ready = [(token, other) for token, other in self._ready if other == "thinking"]
                yield part
            else:
                matching = tuple(token for token, other in self._ready if other in (kind, None))
                self._ready = [(token, other) for token, other in self._ready if other not in (kind, None)]
                yield TextDelta(part, kind, matching)
