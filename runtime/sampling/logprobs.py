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
LEAST = -9999.0  # what OpenAI's API says of a token that has no chance


class TokenLogprobs(NamedTuple):
    """A token with its log-probability, None for the first of a text, and the top alternatives with theirs."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: np.ndarray, token: int, top: int) -> TokenLogprobs:
    """For `token` and the `top` likeliest of float32 logits[V], in float64. Ties are ordered by token id."""
    largest = float(logits.max())
    log_total = math.log(np.exp(logits.astype(np.float64) - largest).sum()) + largest
    near = _near_the_top(logits, top)
    near = near[np.argsort(-logits[near], kind="stable")][:top]
    return TokenLogprobs(token, max(LEAST, float(logits[token]) - log_total),
                         tuple((int(each), max(LEAST, float(logits[each]) - log_total)) for each in near))


def _near_the_top(logits: np.ndarray, top: int) -> np.ndarray:
    """Tokens in order, among them the `top` likeliest: so many blocks have a largest that is no less than the bound."""
    if not top:
        return np.empty(0, np.int64)
    largest = np.maximum.reduceat(logits, np.arange(0, len(logits), BLOCK))
    return np.flatnonzero(logits >= np.partition(largest, -top)[-top]) if top < len(largest) else np.arange(len(logits))


class LogprobTrail:
    """Matches tokens to emitted text: a token leaves with the chunk that has its first character. Tokens without emitted text (the end
    of the text, a stop string, a tool call, reasoning tags) are dropped."""

    def __init__(self) -> None:
        self._waiting: list[tuple[TokenLogprobs, int, str | None]] = []  # with the letters before it, and its kind where that is known
        self._ready: list[tuple[TokenLogprobs, str | None]] = []
        self._made = self._out = 0  # letters that tokens made, and that are through the stop strings

    def took(self, token: TokenLogprobs, text: str, kind: str | None) -> None:
        """A token completed `text`; `kind` is answer or thinking, None while that is undecided."""
        self._waiting.append((token, self._made, kind))
        self._made += len(text)

    def events(self, parts: Sequence[Part | tuple[str, Call]], letters: int) -> Iterator[TextDelta | Call]:
        """The parts as events with their tokens; `letters` more characters have passed the stop strings."""
        self._out += letters
        while self._waiting and self._waiting[0][1] < self._out:
            token, _, kind = self._waiting.pop(0)
            self._ready.append((token, kind))
        for kind, part in parts:
            if isinstance(part, Call):
                self._ready = [each for each in self._ready if each[1] == "thinking"]
                yield part
            else:
                own = tuple(token for token, of in self._ready if of in (kind, None))
                self._ready = [each for each in self._ready if each[1] not in (kind, None)]
                yield TextDelta(part, kind, own)
