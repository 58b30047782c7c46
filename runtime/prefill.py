"""Prefill: reuse of the cached prefix, and the passes for the rest of a prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from .. import UsageError
from ..kernels.layout import PAGE
from ..offload.direct_io import Interrupted
from ..quant.kv import codec
from .events import Notice, Progress
from .prefill_chunks import MIN_SHIFT_CTX, context_overflow, join_chunks, reusable_tokens, same_as_uncached

if TYPE_CHECKING:
    from .cache import KVCache
    from .config import ModelConfig
    from .generation.batching import BatchedPasses
    from .model import Model
    from .prepare import EngineOptions, Prepared
    from .speculate import Speculation


class Prefill:
    """Mixin of `Engine` that runs prompts.

    Of the last prompt, `num_cached_tokens` were in the cache and `num_prefilled_tokens` were run. See `Engine` for the other attributes.
    """

    config: ModelConfig
    options: EngineOptions
    prepared: Prepared
    model: Model
    cache: KVCache
    n_ctx: int
    tokens: list[int]
    num_fresh_tokens: int
    pending_prompt: list[int]
    num_cached_tokens: int
    num_prefilled_tokens: int
    truncated: bool
    prefill_s: float
    batched_passes: BatchedPasses | None
    speculation: Speculation | None
    extend_prefix: Callable[[list[int], int], tuple[int, list[str]]]
    check_prompt: Callable[[Sequence[int]], None]
    keep_images_whole: Callable[[Iterator[int]], Iterator[int]]
    bidirectional: bool
    split_at_images: Callable[[Iterable[tuple[int, int]]], Iterator[tuple[int, int]]]
    reads_bidirectionally: Callable[[Sequence[int]], bool]
    _forward: Callable[..., np.ndarray]
    _logits: np.ndarray | None

    def prefill(self, ids: Sequence[int]) -> Iterator[Progress | Notice]:
        """Make `ids` the sequence, running only what is not cached. Afterwards the next token can be sampled.

        If `cancelled` while waiting for the disk, it ends early and nothing can be sampled; `generate` does the same. Raises UsageError
        for an empty prompt and ContextOverflow, naming both numbers, for one that leaves no room for an answer.
        """
        self.truncated = False
        yield from self._prefill(ids)
        if self.speculation is not None and self._logits is not None:
            started = time.perf_counter()
            try:
                yield from self.speculation.read(self)
            finally:
                self.prefill_s += time.perf_counter() - started

    def _prefill(self, ids: Sequence[int]) -> Iterator[Progress | Notice]:
        ids = list(ids)
        if not ids:
            raise UsageError("the prompt is empty", "give a prompt, or -f FILE")
        self.check_prompt(ids)
        if len(ids) >= self.n_ctx:
            if self.options.overflow != "shift" or self.n_ctx < MIN_SHIFT_CTX:
                raise context_overflow(len(ids), self.n_ctx, self.config.context_length)
            ids = self._shortened(ids)
        num_cached, notices = self._reuse_cache(ids)
        self.tokens, self.pending_prompt = ids[:num_cached], ids
        self.num_cached_tokens, self.num_prefilled_tokens = num_cached, 0
        self.num_fresh_tokens = min(self.num_fresh_tokens, num_cached)
        yield from map(Notice, notices)
        started = time.perf_counter()
        try:
            for count, num_deferred, is_fresh in self._pieces(len(ids) - num_cached):
                end = len(self.tokens) + count
                states = self._forward(ids[end - count : end], prompt=True, commit=not num_deferred,
                                       num_states=self._num_states_needed(end == len(ids)))
                self.num_prefilled_tokens = len(self.tokens) - num_cached
                if is_fresh and not num_deferred:
                    self.num_fresh_tokens = len(self.tokens)
                if len(self.tokens) == len(ids):
                    self._logits = self.model.logits(states[-1:])[0]
                if self.speculation is not None:  # last: it may overwrite the states
                    self.speculation.add_hidden_states(ids, len(self.tokens) - count, self.tokens[-count:], states, verified=True)
                if len(self.tokens) < len(ids):
                    rate = self.num_prefilled_tokens / max(time.perf_counter() - started, 1e-9)
                    yield Progress("reading the prompt", len(self.tokens), len(ids), "tokens", rate=rate)
        except Interrupted:
            self._logits = None
        finally:
            self.pending_prompt = []
        self.prefill_s += time.perf_counter() - started

    def _reuse_cache(self, ids: list[int]) -> tuple[int, list[str]]:
        """Cut the cache back to what the prompt `ids` can reuse, or extend it with pages from elsewhere; returns (tokens, notices)."""
        if self.reads_bidirectionally(ids):
            return self.cache.truncate(0), []
        reusable = reusable_tokens(self.cache, self.tokens, ids, self.num_fresh_tokens, self.prepared.chunk)
        return self.extend_prefix(ids, self.cache.truncate(reusable))

    def _num_states_needed(self, ends_prompt: bool) -> int | None:
        """How many of a pass's last hidden states are needed, None for all: the last one at the end of a prompt, and those that drafts
        read."""
        draft_rows = 0 if self.speculation is None else self.speculation.num_hidden_states
        return None if draft_rows is None else max(draft_rows, int(ends_prompt))

    def _pieces(self, tokens: int) -> Iterator[tuple[int, int, bool]]:
        """The passes for `tokens` more of a prompt: (length, tokens of the same chunks that are left for later passes (0 unless other
        sequences wait), whether the cache is then as after an uncached prefill)."""
        for pass_tokens in self.keep_images_whole(self._passes(tokens)):
            is_fresh = (self.num_fresh_tokens == len(self.tokens)
                        and same_as_uncached(self.cache, pass_tokens, self.prepared.chunk, self.model.copied_from))
            is_alone = self.batched_passes is None or self.bidirectional
            for piece, num_deferred in self.split_at_images([(pass_tokens, 0)] if is_alone
                                                            else self.batched_passes.prefill_chunks(pass_tokens)):
                yield piece, num_deferred, is_fresh

    def _passes(self, tokens: int, pages: int | None = None) -> Iterator[int]:
        """Lengths of the passes for `tokens` more: single chunks, or several joined where that does not change results
        (`prefill_chunks.py`). `pages`: the length of a chunk, if not the planned one; such chunks are joined only if wider passes were
        planned."""
        pages_per_chunk, max_tokens = self.prepared.chunk // PAGE, self.cache.shape.chunk
        chunks = self.cache.pieces(tokens, pages or pages_per_chunk)
        is_unpacked = pages is None and not codec(self.options.kv).is_packed
        return join_chunks(chunks, max_tokens) if is_unpacked or max_tokens > self.prepared.chunk else chunks

    def _shortened(self, ids: list[int]) -> list[int]:
        """The sinks and the newest half of the context, for --overflow shift."""
        self.truncated, sinks = True, min(self.cache.shape.sinks, self.n_ctx // 4)
        return ids[:sinks] + ids[len(ids) - (self.n_ctx // 2 - sinks) :]
