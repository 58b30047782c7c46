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
from .prefill_chunks import SHORTEST, context_overflow, join_chunks, reusable_tokens, same_as_uncached

if TYPE_CHECKING:
    from .cache import KVCache
    from .config import ModelConfig
    from .generation.batching import BatchedPasses
    from .model import Model
    from .prepare import EngineOptions, Prepared
    from .speculate import Speculation


class Prefill:
    """Mixin of `Engine`. `reading`: the prompt during prefill; `reused` and `read`: tokens of the last prompt that were cached, and that
    were run; `truncated`: its middle was dropped."""

    config: ModelConfig
    options: EngineOptions
    prepared: Prepared
    model: Model
    cache: KVCache
    n_ctx: int
    tokens: list[int]
    anew: int
    reading: list[int]
    reused: int
    read: int
    truncated: bool
    prefill_s: float
    shares: BatchedPasses | None
    speculation: Speculation | None
    recall: Callable[[list[int], int], tuple[int, list[str]]]
    demand_prompt: Callable[[Sequence[int]], None]
    keep_images_whole: Callable[[Iterator[int]], Iterator[int]]
    bidirectional: bool
    split_at_images: Callable[[Iterable[tuple[int, int]]], Iterator[tuple[int, int]]]
    reads_bidirectionally: Callable[[Sequence[int]], bool]
    _forward: Callable[..., np.ndarray]
    _logits: np.ndarray | None

    def prefill(self, ids: Sequence[int]) -> Iterator[Progress | Notice]:
        """Make `ids` the sequence, running only what is not cached. Afterwards the next token can be sampled.

        Raises UsageError for an empty prompt and ContextOverflow, naming both numbers, for one that leaves no room for an answer. Ends
        early, and nothing can be sampled, if `cancelled` while waiting for the disk; so does `generate`.
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
        self.demand_prompt(ids)
        if len(ids) >= self.n_ctx:
            if self.options.overflow != "shift" or self.n_ctx < SHORTEST:
                raise context_overflow(len(ids), self.n_ctx, self.config.context_length)
            ids = self._shortened(ids)
        held = 0 if self.reads_bidirectionally(ids) else reusable_tokens(self.cache, self.tokens, ids, self.anew, self.prepared.chunk)
        held, said = (self.cache.truncate(0), []) if self.reads_bidirectionally(ids) else self.recall(ids, self.cache.truncate(held))
        self.tokens, self.reused, self.read, self.anew, self.reading = ids[:held], held, 0, min(self.anew, held), ids
        yield from map(Notice, said)
        started = time.perf_counter()
        try:
            for piece, left, anew in self._pieces(len(ids) - held):
                end = len(self.tokens) + piece
                x = self._forward(ids[end - piece : end], prompt=True, seal=not left, wanted=self._wanted(end == len(ids)))
                self.read, self.anew = len(self.tokens) - held, len(self.tokens) if anew and not left else self.anew
                if len(self.tokens) == len(ids):
                    self._logits = self.model.logits(x[-1:])[0]
                if self.speculation is not None:  # last: what it does with the states may take their place
                    self.speculation.saw(ids, len(self.tokens) - piece, self.tokens[-piece:], x, certain=True)
                if len(self.tokens) < len(ids):
                    rate = self.read / max(time.perf_counter() - started, 1e-9)  # what was in the cache was not read
                    yield Progress("reading the prompt", len(self.tokens), len(ids), "tokens", rate=rate)
        except Interrupted:
            self._logits = None
        finally:
            self.reading = []
        self.prefill_s += time.perf_counter() - started

    def _wanted(self, ends: bool) -> int | None:
        """How many of a pass's last hidden states are needed, None for all: one if the prompt `ends` with it, and those that drafts
        read."""
        drafts = 0 if self.speculation is None else self.speculation.reads
        return None if drafts is None else max(drafts, int(ends))

    def _pieces(self, tokens: int) -> Iterator[tuple[int, int, bool]]:
        """Passes for `tokens` more of a prompt: length, tokens of its chunks left for the next pass (0 unless others wait), and whether
        the cache then is as after an uncached prefill."""
        for whole in self.keep_images_whole(self._passes(tokens)):
            anew = self.anew == len(self.tokens) and same_as_uncached(self.cache, whole, self.prepared.chunk, self.model.copied_from)
            for piece, left in self.split_at_images([(whole, 0)] if self.shares is None or self.bidirectional
                                                    else self.shares.pieces(whole)):
                yield piece, left, anew

    def _passes(self, tokens: int, pages: int | None = None) -> Iterator[int]:
        """Lengths of the passes for `tokens` more: the chunks, or several at once where that changes nothing (`prefill_chunks.py`). With
        `pages` the chunks are that long, and are joined only where wider passes were planned."""
        grid, most = self.prepared.chunk // PAGE, self.cache.shape.chunk
        chunks = self.cache.pieces(tokens, pages or grid)
        free = pages is None and not codec(self.options.kv).is_packed
        return join_chunks(chunks, most) if free or most > self.prepared.chunk else chunks

    def _shortened(self, ids: list[int]) -> list[int]:
        """The sinks and the newest half of the context, for --overflow shift."""
        self.truncated, sinks = True, min(self.cache.shape.sinks, self.n_ctx // 4)
        return ids[:sinks] + ids[len(ids) - (self.n_ctx // 2 - sinks) :]
