"""What draft layers that read the target's hidden states have in common (MTP, EAGLE-3): their own KV cache and catching up.

For every token the layer takes what the target's pass left of it, joined with the embedding of the next token, and predicts the token after
that. For further drafts its own output takes the state's place. States arrive with every pass (`saw`), drafts are made once the next token
is known.

It need not attend to the whole text, since a wrong draft only costs time: after MOST_TOKENS, and after text whose states were not seen (a
loaded session), it starts over. Where a prompt branches off from the middle of the cached text, the row of the last shared token stays,
though another token follows it now.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ...kernels.cpu.ops import FEW_TOKENS
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
    """The layer's cache for a context, with room for drafts."""
    tokens = min(ctx, MOST_TOKENS) + FEW_TOKENS
    return CacheShape(tokens, 0, min(PAGE, tokens), min(PAGE, tokens))


def layer_cache_nbytes(heads: tuple[int, int], ctx: int, layers: int = 1) -> int:
    """Bytes of that cache for `layers` equal layers. `heads`: KV heads and head dimension."""
    shape = cache_shape(ctx)
    always, page = cache_nbytes([codec(KV)] * layers, [codec(KV).layout(*heads)] * layers, shape)
    return always + shape.pages * page


class StateLayer(Protocol):
    """The interface of a draft layer."""

    @abstractmethod
    def _put(self, x: np.ndarray, out: np.ndarray) -> None:
        """Write what the layer needs of a pass that ended with the states x float32 [T, D], before the final norm, into `out` [T, W]."""

    @abstractmethod
    def _run(self, ids: Sequence[int], states: np.ndarray) -> np.ndarray:
        """Run the layer over tokens and the states [T, W] before them; returns its output [T, W], a view."""

    @abstractmethod
    def _guesses(self, x: np.ndarray, most: int) -> list[int]:
        """Draft `most` tokens, the first from the layer's last output x [1, W]; fewer if scores are NaN, which sets `failed`."""


class StateDrafts(StateLayer):
    """Greedy drafts under the run's penalties, by a layer that `_run` runs. `vocabulary`: rows of the target's embedding; `states`: memory
    float32 [tokens of a pass + FEW_TOKENS, width] for what `_put` keeps of a pass.

    `_ids` are the tokens whose states were seen, after `_base` that were not; for the newest `_waiting` of them the states are kept,
    because the layer has not run over them yet.
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
        """Its weights are loaded with the model's."""
        return iter(())

    def choose_as(self, settings: SamplerSettings, breakers: Breakers | None = None) -> None:
        """Draft what a run with these settings finds likeliest."""
        self._likeliest.choose_as(settings, breakers)

    def reset(self) -> None:
        """Drop the sequence."""
        self._begin([])

    def close(self) -> None:
        """Free its resources."""
        self._cache.close()

    # -- the text --------------------------------------------------------------------------------------------------------------

    def _begin(self, ids: Sequence[int]) -> None:
        """Start over with unseen tokens."""
        self._cache.truncate(0)  # gives slots back
        self._cache.clear()
        self._ids, self._base, self._waiting = list(ids), len(ids), 0

    def _goes_on(self, held: Sequence[int], tokens: int) -> bool:
        """Are the first `tokens` of `held` those that were seen? Judged by the newest of them."""
        first = max(0, tokens - SAME)
        return self._base <= tokens <= len(self._ids) and self._ids[first:tokens] == list(held[first:tokens])

    def _cut(self, tokens: int) -> None:
        """Drop what was seen after `tokens`."""
        gone = len(self._ids) - tokens
        del self._ids[tokens:]
        self._waiting = max(0, self._waiting - gone)
        self._cache.truncate(tokens - self._base - self._waiting)

    def saw(self, held: Sequence[int], start: int, ids: Sequence[int], x: np.ndarray, certain: bool) -> None:
        """A pass of the target over `ids`, after the first `start` tokens of `held`, ended with the hidden states x float32 [T, D]
        before the final norm. `certain`: none of the tokens is a draft."""
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
        """The sequence is now `history`, whose last token was in no pass yet. Runs nothing."""
        self._history = history

    def behind(self, tokens: int) -> int:
        """About how many tokens it must catch up on, for a sequence of `tokens`."""
        return max(1, tokens - len(self._ids) + self._waiting)

    def read(self, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Progress]:
        """It catches up while the target prefills."""
        return iter(())

    # -- guesses ---------------------------------------------------------------------------------------------------------------

    def propose(self, most: int, cancelled: Callable[[], bool] = lambda: False) -> Draft | None:
        """Up to `most` next tokens; None if the last pass was not seen."""
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
        """Run the layer over the oldest waiting states, each with its next token; returns the last output, [1, W], a view."""
        count, left = len(following), self._waiting - len(following)
        self._waiting = left
        x = self._through(following, self._states[:count])
        self._states[:left] = self._states[count : count + left].copy()
        return x

    def _through(self, following: Sequence[int], states: np.ndarray) -> np.ndarray:
        """Run the layer over states [T, W] before those that wait; as `_take`."""
        count, x, room = len(following), states[:0], self._cache.shape.ctx - FEW_TOKENS
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
    """Token ids int64 [T] within the embedding: image tokens have no row."""
    return np.array([0 if token >= FIRST_MEDIA_ID else token for token in ids], np.int64)


def normalised(x: np.ndarray, norm: Norm, out: np.ndarray) -> np.ndarray:
    """Norm of x float32 [T, D] into `out`, few rows at a time: in float64 a wide pass would exceed the planned memory."""
    for first in range(0, len(x), FEW_TOKENS):
        out[first : first + FEW_TOKENS] = normalise(x[first : first + FEW_TOKENS], norm.kind, norm.weight, norm.bias, norm.eps)
    return out
