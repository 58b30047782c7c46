"""Base class of draft layers that read the target's hidden states (MTP, EAGLE-3): their own KV cache, and catching up.

For every token the layer takes the target's hidden state, joined with the embedding of the next token, and predicts the token after that.
For further drafts its own output takes the state's place. States arrive with every pass (`add_hidden_states`); a draft is made once the
next token is known.

It need not attend to the whole text, since a wrong draft only costs time: after MAX_TOKENS, and after text whose states it did not get (a
loaded session), it starts over. Where a prompt branches off in the middle of the cached text, the row of the last shared token stays,
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
from .draft_model import MODEL_DRAFT
from .drafts import CHECKED_TOKENS, Draft
from .greedy_choice import GreedyChoice

if TYPE_CHECKING:
    from ...quant.weight import Norm
    from ..events import Progress
    from ..kv.cache_shape import AttnSpec
    from ..sampler import SamplerSettings
    from ..sampling.dry import Breakers

MAX_TOKENS = 8192  # that the layer attends to
KV = "16bit"


def cache_shape(ctx: int) -> CacheShape:
    """The layer's cache for a context, with room for drafts."""
    tokens = min(ctx, MAX_TOKENS) + FEW_TOKENS
    return CacheShape(tokens, 0, min(PAGE, tokens), min(PAGE, tokens))


def layer_cache_nbytes(heads: tuple[int, int], ctx: int, layers: int = 1) -> int:
    """Bytes of that cache for `layers` equal layers. `heads`: number of KV heads and head dimension."""
    shape = cache_shape(ctx)
    always, page = cache_nbytes([codec(KV)] * layers, [codec(KV).layout(*heads)] * layers, shape)
    return always + shape.pages * page


class StateLayer(Protocol):
    """The interface of a draft layer."""

    @abstractmethod
    def _store_states(self, x: np.ndarray, out: np.ndarray) -> None:
        """Write what the layer needs of the hidden states x float32 [T, D] of a pass, before the final norm, into `out` [T, W]."""

    @abstractmethod
    def _forward(self, ids: Sequence[int], states: np.ndarray) -> np.ndarray:
        """Run the layer over tokens and the states [T, W] before them; returns its output [T, W], a view."""

    @abstractmethod
    def _draft_tokens(self, x: np.ndarray, count: int) -> list[int]:
        """Draft `count` tokens, the first from the layer's last output x [1, W]; fewer if scores are NaN, which sets `failed`."""


class StateDrafts(StateLayer):
    """Greedy drafts under the run's penalties, by a layer that `_forward` runs.

    vocab_size: rows of the target's embedding.
    states: float32 [tokens of a pass + FEW_TOKENS, width], memory for pending states.

    `_ids` are all tokens of the sequence, the first `_num_unseen` without states. The states of the newest `_num_pending` are kept in
    `_states`, because the layer has not run over them yet.
    """

    num_hidden_states = None
    failed = ""  # a layer of the model itself cannot fail unless the model does

    def __init__(self, host: object, specs: Sequence[AttnSpec], ctx: int, vocab_size: int, states: np.ndarray) -> None:
        self._host, self._states = host, states
        self._cache = build_cache([host] * len(specs), specs, codec(KV), cache_shape(ctx))
        self._greedy = GreedyChoice(vocab_size)
        self._history: Sequence[int] = []
        self.costs = DraftCosts()
        self._restart([])

    def load(self) -> Iterator[Progress]:
        """Nothing to do: its weights are loaded with the model's."""
        return iter(())

    def set_sampling(self, settings: SamplerSettings, breakers: Breakers | None = None) -> None:
        """Draft the most likely tokens of a run with these settings."""
        self._greedy.set_sampling(settings, breakers)

    def reset(self) -> None:
        """Drop the sequence."""
        self._restart([])

    def close(self) -> None:
        """Free its resources."""
        self._cache.close()

    # -- hidden states ---------------------------------------------------------------------------------------------------------

    def _restart(self, ids: Sequence[int]) -> None:
        """Start over, after tokens without states."""
        self._cache.truncate(0)  # frees its slots
        self._cache.clear()
        self._ids, self._num_unseen, self._num_pending = list(ids), len(ids), 0

    def _continues(self, tokens: Sequence[int], count: int) -> bool:
        """Whether the first `count` of `tokens` are those of `_ids`, by the newest of them."""
        first = max(0, count - CHECKED_TOKENS)
        return self._num_unseen <= count <= len(self._ids) and self._ids[first:count] == list(tokens[first:count])

    def _truncate(self, count: int) -> None:
        """Keep the first `count` tokens."""
        dropped = len(self._ids) - count
        del self._ids[count:]
        self._num_pending = max(0, self._num_pending - dropped)
        self._cache.truncate(count - self._num_unseen - self._num_pending)

    def add_hidden_states(self, tokens: Sequence[int], start: int, ids: Sequence[int], x: np.ndarray, verified: bool) -> None:
        """See `ModelDrafts.add_hidden_states`."""
        if not self._continues(tokens, start):
            self._restart(tokens[:start])
        self._truncate(start)
        final = self._num_pending  # pending states whose next tokens are final: `ids` begins with that of the newest
        overflows = final > 1 and final + len(ids) > len(self._states)
        oldest = self._states[: final - 1].copy() if overflows else self._states[:0]
        if len(oldest):
            self._states[0] = self._states[final - 1]
            self._num_pending = final = 1
        self._store_states(x, self._states[self._num_pending : self._num_pending + len(ids)])
        if len(oldest):  # only now, because the layer's output overwrites x
            self._run_layer(self._ids[-len(oldest) :], oldest)
        self._ids += ids
        self._num_pending += len(ids)
        count = self._num_pending - 1 if verified else final if final >= PAGE else 0
        if count:
            started, first = time.perf_counter(), len(self._ids) - self._num_pending + 1
            self._consume(self._ids[first : first + count])
            self.costs.record_prefill(count, time.perf_counter() - started)

    def follow(self, history: Sequence[int]) -> None:
        """The sequence is now `history`, whose last token was in no pass yet. Runs nothing."""
        self._history = history

    def tokens_behind(self, tokens: int) -> int:
        """About how many tokens it must catch up on, for a sequence of `tokens`."""
        return max(1, tokens - len(self._ids) + self._num_pending)

    def read(self, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Progress]:
        """Nothing to do: it catches up while the target prefills."""
        return iter(())

    # -- drafts ----------------------------------------------------------------------------------------------------------------

    def propose(self, limit: int, cancelled: Callable[[], bool] = lambda: False) -> Draft | None:
        """Up to `limit` next tokens; None without the states of the last pass."""
        known = len(self._history) - 1
        if limit < 1 or not self._continues(self._history, known):
            return None
        self._truncate(known)
        if not self._num_pending:
            return None
        count, started = self._num_pending, time.perf_counter()
        x = self._consume([*self._ids[len(self._ids) - count + 1 :], self._history[-1]])
        caught_up_at, cached = time.perf_counter(), self._cache.n
        drafted = self._draft_tokens(x, limit)
        self._cache.truncate(cached)
        self.costs.record_draft(len(drafted), time.perf_counter() - caught_up_at, count, caught_up_at - started)
        return Draft(tuple(drafted), MODEL_DRAFT) if drafted else None

    def _consume(self, next_ids: Sequence[int]) -> np.ndarray:
        """Run the layer over the oldest pending states, each with its next token; returns the last output, [1, W], a view."""
        count, left = len(next_ids), self._num_pending - len(next_ids)
        self._num_pending = left
        x = self._run_layer(next_ids, self._states[:count])
        self._states[:left] = self._states[count : count + left].copy()
        return x

    def _run_layer(self, next_ids: Sequence[int], states: np.ndarray) -> np.ndarray:
        """Run the layer over states [T, W] before the pending ones, each with its next token; as `_consume`. Restarts a full cache."""
        count, x, capacity = len(next_ids), states[:0], self._cache.shape.ctx - FEW_TOKENS
        begin = max(0, count - capacity)
        if self._cache.n + count > capacity:
            self._cache.truncate(0)
            self._cache.clear()
            self._num_unseen = len(self._ids) - self._num_pending - count + begin
        for first in range(begin, count, PAGE):
            end = min(first + PAGE, count)
            x = self._forward(next_ids[first:end], states[first:end])
        return x[-1:]


def embedding_ids(ids: Sequence[int]) -> np.ndarray:
    """Token ids int64 [T] within the embedding: image tokens, which have no row, become 0."""
    return np.array([0 if token >= FIRST_MEDIA_ID else token for token in ids], np.int64)


def normalize_rows(x: np.ndarray, norm: Norm, out: np.ndarray) -> np.ndarray:
    """Norm of x float32 [T, D] into `out`, few rows at a time: in float64 a long pass would exceed the planned memory."""
    for first in range(0, len(x), FEW_TOKENS):
        out[first : first + FEW_TOKENS] = normalise(x[first : first + FEW_TOKENS], norm.kind, norm.weight, norm.bias, norm.eps)
    return out
