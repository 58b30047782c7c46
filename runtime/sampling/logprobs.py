"""How likely the model itself took a token for: logarithms of a softmax over its own logits, before biases, penalties, filters or a
temperature, as OpenAI's and llama.cpp's servers tell them by default."""

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
    """A token with the natural logarithm of its probability, None for one that stands before all others, and the likeliest tokens with
    theirs, in order."""

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


def token_logprobs(logits: np.ndarray, token: int, top: int) -> TokenLogprobs:
    """Of `token` and the `top` likeliest by float32 logits[V], in float64. Equal ones come by their number."""
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
    """The tokens of an answer on their way through the filters of its text: each leaves with the piece that holds its first letter. What no
    piece holds (the end of a text, a stop string, a call of a tool, tags around reasoning) is dropped."""

    def __init__(self) -> None:
        self._waiting: list[tuple[TokenLogprobs, int, str | None]] = []  # with the letters before it, and its kind where that is known
        self._ready: list[tuple[TokenLogprobs, str | None]] = []
        self._made = self._out = 0  # letters that tokens made, and that are through the stop strings

    def took(self, token: TokenLogprobs, text: str, kind: str | None) -> None:
        """A token came, which completed `text`; `kind` is answer or thinking, None where that is not decided."""
        self._waiting.append((token, self._made, kind))
        self._made += len(text)

    def events(self, parts: Sequence[Part | tuple[str, Call]], letters: int) -> Iterator[TextDelta | Call]:
        """Parts of the text, behind `letters` more that are through the stop strings, with the tokens that they are of."""
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
