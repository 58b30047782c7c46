"""Drafts by a layer that reads the states of the model it drafts for, with keys and values of its own: what such layers have in common.

The layer takes, of every token, what a pass of the model left of it, joined with the embedding of the token that follows; what comes out
is a guess of the token behind that one. For a further guess what the layer made takes the state's place. States come with every pass
(`saw`), the guess is made when the next token is known, and the layer has keys and values of its own, beside the model's cache.

What it attends to need not be all of the text, since a wrong guess costs time alone: after MOST_TOKENS, and behind a text whose states were
not seen (a session that was read from a file), it begins anew. Where a prompt goes on from the middle of what is held, the row of the last
token that both share stays as it is, though another token follows it now.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ...kernels.cpu.ops import FEW
from ...kernels.layout import PAGE
from ...kernels.reference import normalise
from ...quant.kv import codec
from ..images.media import FIRST_MEDIA_ID
from ..kv.cache_builder import build_cache
from ..kv.cache_shape import CacheShape, cache_nbytes
from .draft_length import DraftCosts
from .draft_model import KIND
from .drafts import SAME, Draft
from .greedy_choice import GreedyChoice

if TYPE_CHECKING:
    from ...quant.weight import Norm
    from ..events import Progress
    from ..kv.cache_shape import AttnSpec
    from ..sampler import SamplerSettings
    from ..sampling.dry import Breakers

MOST_TOKENS = 8192  # that the layer attends to
KV = "16bit"


def cache_shape(ctx: int) -> CacheShape:
    """The layer's cache in a context, with room for guesses."""
    tokens = min(ctx, MOST_TOKENS) + FEW
    return CacheShape(tokens, 0, min(PAGE, tokens), min(PAGE, tokens))


def layer_cache_nbytes(heads: tuple[int, int], ctx: int, layers: int = 1) -> int:
    """Bytes of that cache, of so many layers that are alike. `heads`: key-value heads and their size."""
    shape = cache_shape(ctx)
    always, page = cache_nbytes([codec(KV)] * layers, [codec(KV).layout(*heads)] * layers, shape)
    return always + shape.pages * page


class StateLayer(Protocol):
    """What a layer is."""

    @abstractmethod
    def _put(self, x: np.ndarray, out: np.ndarray) -> None:
        """What the layer takes of a pass that ended with the states x float32 [T, D], before the last norm, into `out` [T, W]."""

    @abstractmethod
    def _run(self, ids: Sequence[int], states: np.ndarray) -> np.ndarray:
        """The layer over tokens and the states [T, W] of those before them: what it makes of them, [T, W], a view."""

    @abstractmethod
    def _guesses(self, x: np.ndarray, most: int) -> list[int]:
        """So many tokens, of which the first is found in x [1, W], what the layer made last; fewer where its scores are no numbers, which
        `failed` says then."""


class StateDrafts(StateLayer):
    """Greedy guesses under the penalties of the run, of a layer that `_run` runs. `vocabulary`: rows of the model's table; `states`: memory
    float32 [tokens of a pass + FEW, width] for what `_put` keeps of a pass.

    `_ids` are the tokens whose states were seen, behind `_base` tokens that were not; of the newest `_waiting` of them the states are kept,
    because the layer has not taken them yet, for want of the token that follows or because nobody asked.
    """

    reads = None
    failed = ""  # of a layer of the model's own nothing can fail that does not fail in the model

    def __init__(self, host: object, specs: Sequence[AttnSpec], ctx: int, vocabulary: int, states: np.ndarray) -> None:
        self._host, self._states = host, states
        self._cache, self._most = build_cache([host] * len(specs), specs, codec(KV), cache_shape(ctx)), min(ctx, MOST_TOKENS)
        self._likeliest = GreedyChoice(vocabulary)
        self._history: Sequence[int] = []
        self.costs = DraftCosts()
        self._begin([])

    def load(self) -> Iterator[Progress]:
        """Its weights come with the model's."""
        return iter(())

    def choose_as(self, settings: SamplerSettings, breakers: Breakers | None = None) -> None:
        """Guess what a run with these settings finds likeliest."""
        self._likeliest.choose_as(settings, breakers)

    def reset(self) -> None:
        """Forget the sequence."""
        self._begin([])

    def close(self) -> None:
        """Give back what is not memory."""
        self._cache.close()

    # -- the text --------------------------------------------------------------------------------------------------------------

    def _begin(self, ids: Sequence[int]) -> None:
        """Nothing is known of the text but its tokens."""
        self._cache.truncate(0)  # gives slots back
        self._cache.clear()
        self._ids, self._base, self._waiting = list(ids), len(ids), 0

    def _goes_on(self, held: Sequence[int], tokens: int) -> bool:
        """Are the first `tokens` of `held` those that were seen? Judged by the newest of them."""
        first = max(0, tokens - SAME)
        return self._base <= tokens <= len(self._ids) and self._ids[first:tokens] == list(held[first:tokens])

    def _cut(self, tokens: int) -> None:
        """Forget what was seen behind so many tokens of the text."""
        gone = len(self._ids) - tokens
        del self._ids[tokens:]
        self._waiting = max(0, self._waiting - gone)
        self._cache.truncate(tokens - self._base - self._waiting)

    def saw(self, held: Sequence[int], start: int, ids: Sequence[int], x: np.ndarray, certain: bool) -> None:
        """A pass of the model over `ids`, behind the first `start` tokens of `held`, ended with the states x float32 [T, D], before the
        last norm. `certain`: none of them is a guess."""
        if not self._goes_on(held, start):
            self._begin(held[:start])
        self._cut(start)
        certainly = self._waiting  # the first of `ids` follows the newest of them
        oldest = self._states[: certainly - 1].copy() if certainly > 1 and certainly + len(ids) > len(self._states) else self._states[:0]
        if len(oldest):
            self._states[0] = self._states[certainly - 1]
            self._waiting = certainly = 1
        self._put(x, self._states[self._waiting : self._waiting + len(ids)])
        if len(oldest):  # no sooner, since what the layer makes takes the place of x
            self._through(self._ids[-len(oldest) :], oldest)
        self._ids += ids
        self._waiting += len(ids)
        count = self._waiting - 1 if certain else certainly if certainly >= PAGE else 0
        if count:
            started, first = time.perf_counter(), len(self._ids) - self._waiting + 1
            self._take(self._ids[first : first + count])
            self.costs.read(count, time.perf_counter() - started)

    def follow(self, history: Sequence[int]) -> None:
        """The sequence is `history` now, of which the last token was in no pass yet. Nothing is run."""
        self._history = history

    def behind(self, tokens: int) -> int:
        """How many of a sequence of so many tokens the layer would take before its next guess, about."""
        return max(1, tokens - len(self._ids) + self._waiting)

    def read(self, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Progress]:
        """A prompt is taken as the model reads it."""
        return iter(())

    # -- guesses ---------------------------------------------------------------------------------------------------------------

    def propose(self, most: int, cancelled: Callable[[], bool] = lambda: False) -> Draft | None:
        """Up to `most` tokens behind what is followed; None where the last pass over that was not seen."""
        known = len(self._history) - 1
        if most < 1 or not self._goes_on(self._history, known):
            return None
        self._cut(known)
        if not self._waiting:
            return None
        count, started = self._waiting, time.perf_counter()
        x = self._take([*self._ids[len(self._ids) - count + 1 :], self._history[-1]])
        read, held = time.perf_counter(), self._cache.n
        drafted = self._guesses(x, most)
        self._cache.truncate(held)
        self.costs.guessed(len(drafted), time.perf_counter() - read, count, read - started)
        return Draft(tuple(drafted), KIND) if drafted else None

    def _take(self, following: Sequence[int]) -> np.ndarray:
        """The oldest states that wait go through the layer, each with the token that follows it; returns what comes of the last one,
        [1, W], a view."""
        count, left = len(following), self._waiting - len(following)
        self._waiting = left
        x = self._through(following, self._states[:count])
        self._states[:left] = self._states[count : count + left].copy()
        return x

    def _through(self, following: Sequence[int], states: np.ndarray) -> np.ndarray:
        """The layer over states [T, W] that came before those that wait, each with the token that follows it; as `_take`."""
        count, x, room = len(following), states[:0], self._cache.shape.ctx - FEW
        begin = max(0, count - room)
        if self._cache.n + count > room:
            self._cache.truncate(0)
            self._cache.clear()
            self._base = len(self._ids) - self._waiting - count + begin
        for first in range(begin, count, PAGE):
            end = min(first + PAGE, count)
            x = self._run(following[first:end], states[first:end])
        return x[-1:]


def known_tokens(ids: Sequence[int]) -> np.ndarray:
    """Tokens int64 [T] of which a table has rows: a guess may know nothing of a picture's."""
    return np.array([0 if token >= FIRST_MEDIA_ID else token for token in ids], np.int64)


def normalised(x: np.ndarray, norm: Norm, out: np.ndarray) -> np.ndarray:
    """x float32 [T, D], normed, in `out`, few rows at once: of a wide pass in float64 they would take more than all that is planned."""
    for first in range(0, len(x), FEW):
        out[first : first + FEW] = normalise(x[first : first + FEW], norm.kind, norm.weight, norm.bias, norm.eps)
    return out
