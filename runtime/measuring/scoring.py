"""Scoring passes over a whole text: the logits, or hidden states, of every position."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ... import ContextOverflow
from ...kernels.layout import PAGE
from ..adapters.adapter_selection import scales_of
from ..images.media import check_token_ids
from ..kv.bidirectional import require_text_generation
from ..kv.varlen_cache import VarlenCache
from ..planning.plan_request import LOGIT_ROWS
from ..prefill_chunks import common_prefix

if TYPE_CHECKING:
    from ..cache import KVCache
    from ..images.media import MediaCache
    from ..model import Model
    from ..planning.memory_pressure import MemoryMonitor
    from ..prepare import Prepared


class Scoring:
    """Mixin of `Engine` for measurements and embeddings."""

    model: Model
    cache: KVCache
    prepared: Prepared
    memory_monitor: MemoryMonitor
    tokens: list[int]
    num_fresh_tokens: int
    n_ctx: int
    media: MediaCache | None

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Raises UsageError for a prompt that this model cannot continue."""
        require_text_generation(self.model.config)
        check_token_ids(ids, self.model.config.prompt_vocab_size, self.media)

    def forward_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Run `ids` after the tokens in the cache; logits float32 [len(ids), V], a view."""
        return self.model.logits(self._forward(ids))

    def score(self, ids: Sequence[int], pages: int | None = None, num_cached: int = 0,
              by_token: bool = False) -> Iterator[tuple[int, np.ndarray]]:
        """Run `ids` from an empty cache; yields (position, logits float32 [n, V]) for every position. Logits are views: copy to keep them.

        `pages`: pages per chunk, None for the engine's chunk size.
        `num_cached`: logits of this many first positions are not needed, so that positions already in the cache are not run again.
        `by_token`: run and yield one token at a time, as decoding does.
        """
        require_text_generation(self.model.config)
        if not 0 < len(ids) <= self.n_ctx:
            raise ContextOverflow(f"{len(ids)} tokens to score in a context of {self.n_ctx}")
        num_kept = self.cache.truncate(min(common_prefix(self.tokens, ids), num_cached, self.cache.resumable)) if num_cached else 0
        if num_kept:
            self.set_tokens(ids[:num_kept], min(self.num_fresh_tokens, num_kept))
        else:
            self.reset()
        for num_tokens in self._passes(len(ids) - num_kept, pages or self.prepared.chunk // PAGE):
            start = len(self.tokens)
            if by_token or self.cache.pool.picks:  # sparse KV reads pick pages only while decoding
                for row in range(start, start + num_tokens):
                    yield row, self.forward_logits(ids[row : row + 1])
                continue
            x = self._forward(ids[start : start + num_tokens])
            for row in range(0, num_tokens, LOGIT_ROWS):
                yield start + row, self.model.logits(x[row : row + LOGIT_ROWS])

    def first_reader(self, by_token: bool = False) -> int:
        """The first position that reads a packed page if `score` runs page by page, or by token; 0 if the cache packs nothing."""
        return self.cache.shape.first_reader(by_token or self.cache.pool.picks) if self.cache.is_packed else 0

    def states(self, ids: Sequence[int], pages: int | None = None, num_last: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Run `ids` as `score` does; yields (position, last hidden states float32 [n, D]) per pass, views. Convert them to logits at most
        LOGIT_ROWS rows at a time.

        `num_last`: only the states of this many last tokens are needed, so that the others skip the last layers; None for all.
        """
        self.reset()
        is_bidirectional = self.model.config.bidirectional
        for num_tokens in (len(ids),) if is_bidirectional else self._passes(len(ids), pages or self.prepared.chunk // PAGE):
            end = len(self.tokens) + num_tokens
            x = self._forward(ids[end - num_tokens : end], prompt=True, num_states=num_last if num_last is None or end == len(ids) else 0)
            yield end - len(x), x

    def fits_one_pass(self, tokens: int) -> bool:
        """Whether a text of this length is one pass from an empty cache, so that `batched_states` may batch it."""
        self.reset()
        return self.model.config.bidirectional or next(self._passes(tokens, self.prepared.chunk // PAGE)) == tokens

    def batched_states(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """The last hidden states float32 [n, D] of several texts in one batched pass; views. Requires `supports_varlen`."""
        self.reset()
        self.memory_monitor.look(self.cache)
        cache = VarlenCache(self.cache, self.model.config, [len(text) for text in texts])
        x = self.model.forward(np.concatenate([np.array(text, np.int64) for text in texts]), cache, commit=False, prompt=True,
                               scales=scales_of([self]))
        return [x[rows] for rows, _, _ in cache.parts]
