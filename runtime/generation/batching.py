"""Several sequences of one model: an engine per slot, and decode passes that batch one token of each.

Weights are read once per pass of a few tokens, so four answers at once take little longer than one. Where a pass cannot be shared (layers
on a GPU, a KV policy that watches attention), each sequence has its own pass in turn; answers still stream concurrently.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.layout import MAX_DECODE_TOKENS
from ...offload.notes import Fallback, refuse_fallbacks
from ...quant.kv import codec
from ..adapters.adapter_selection import scales_of
from ..events import Yield
from ..images.multimodal import batch_image_views, batch_positions
from ..kv.batched_cache import BatchedCache
from ..sessions.shared_prefix import copy_prefix, is_being_prefilled

if TYPE_CHECKING:
    from ..engine import Engine

CHUNK_S = 0.5  # a prefill chunk may delay the others by about this
MIN_CHUNK_TOKENS = 64  # fewer cost more each: in a pass of 32, a token takes twice as long as in one of 512
MAX_PASS_TOKENS = MAX_DECODE_TOKENS  # tokens per pass: the limit of the decode kernels, and of recorded passes


@dataclass
class PendingToken:
    """A token to decode, and its result: `logits` or `error`."""

    engine: Engine
    token: int
    # Logits after the token, float32 [V]: a view that is valid until the next pass.
    logits: np.ndarray | None = None
    error: Exception | None = None
    pass_s: float = 0.0  # seconds of its pass


class BatchedPasses:
    """Decode passes shared by the sequences of one model. `unbatched_reason`: why passes are not shared, empty if they are."""

    def __init__(self, engine: Engine) -> None:
        self._model, self._cpu, self.unbatched_reason = engine.model, engine.backends["cpu"], why_unbatched(engine)
        self.other_engines: dict[int, list[Engine]] = {}  # id(engine) -> the engines of the other slots
        self._batch_plans: dict[int, tuple[object, ...]] = {}
        self.is_single = False  # no other answer is running
        # Where every pass streams weights from disk or to the GPU, splitting a prefill would stream them once more per chunk.
        self._splits_prefills = engine.model.pager.stays and "cuda" not in engine.backends
        self._prefill_tps = 0.0

    def wait_for_shared_prefix(self, engine: Engine, ids: Sequence[int], cancelled: Callable[[], bool]) -> Iterator[Yield]:
        """Before a prefill: wait for another sequence that is prefilling the same prefix, which is then copied."""
        while is_being_prefilled(engine, self.other_engines[id(engine)], ids) and not cancelled():
            yield Yield()

    def prefill_chunks(self, tokens_left: int) -> Iterator[tuple[int, int]]:
        """Split a prefill into passes, without changing its result; yields (length, tokens left after it).

        While others wait, a pass takes about CHUNK_S; it is never so short that it would use the decode kernels.
        """
        while tokens_left:
            max_chunk = tokens_left if self.is_single or not self._splits_prefills else max(MIN_CHUNK_TOKENS,
                                                                                            int(self._prefill_tps * CHUNK_S))
            chunk = -(-tokens_left // -(-tokens_left // max_chunk))
            tokens_left -= chunk
            yield chunk, tokens_left

    def record_prefill(self, tokens: int, seconds: float) -> None:
        """Record that a prefill pass of `tokens` took `seconds`."""
        if tokens >= MIN_CHUNK_TOKENS // 2:
            self._prefill_tps = tokens / max(seconds, 1e-6)

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens in one pass."""
        return 1 if self.unbatched_reason else MAX_PASS_TOKENS

    def decode(self, engine: Engine, token: int, tokens_left: int | None) -> Generator[Yield, None, np.ndarray]:
        """Wait for the pass that decodes `token`; returns the logits after it.

        A sequence that runs alone has passes of its own, with speculation. `tokens_left`: how many it may still generate (None: no limit).
        """
        speculation = engine.speculation
        if speculation is not None and speculation.has_next(engine, token):  # verified already: no pass is needed
            return speculation.next_logits(engine, token, tokens_left)
        if speculation is not None and self.is_single:
            yield Yield()
            if self.is_single:
                return speculation.next_logits(engine, token, tokens_left)
        pending = PendingToken(engine, token)
        yield Yield(pending)
        engine.passes_s += pending.pass_s
        if pending.error is not None:
            raise pending.error
        if pending.logits is None:
            raise RuntimeError("an answer went on before its pass")
        return pending.logits

    def run(self, batch: Sequence[PendingToken]) -> None:
        """One pass over at most `max_tokens` tokens. Their logits must be read before the next pass of any sequence."""
        started = time.perf_counter()
        try:
            self._run(batch)
        except Exception as error:  # the caches of all are in an unknown state
            for pending in batch:
                pending.error = error
        for pending in batch:
            pending.pass_s = time.perf_counter() - started

    def _run(self, batch: Sequence[PendingToken]) -> None:
        engines = [pending.engine for pending in batch]
        for engine in engines:
            engine.memory_monitor.look(engine.cache)
        caches = [engine.cache for engine in engines]
        cache = caches[0] if len(caches) == 1 else BatchedCache(caches, self._cpu, self._batch_plans)
        ids = np.array([pending.token for pending in batch], np.int64)
        states = self._model.forward(ids, cache, scales=scales_of(engines), rope_positions=batch_positions(engines),
                                     image_spans=batch_image_views(engines))
        failed = cache.failed if isinstance(cache, BatchedCache) else {}
        logits = self._model.logits(states)
        for row, pending in enumerate(batch):
            pending.error = failed.get(row)
            if pending.error is None:
                pending.engine.tokens.append(pending.token)
                pending.logits = logits[row]


def why_unbatched(engine: Engine) -> str:
    """Why this engine's sequences cannot share a pass; empty if they can."""
    placement = engine.placement
    if "cuda" in placement.devices:
        return "layers are on the GPU"
    if codec(engine.options.kv).policy:
        return f"--kv {engine.options.kv} watches attention"
    return ""


def open_sequences(engine: Engine, sequences: int) -> tuple[list[Engine], list[Fallback]]:
    """Engines for `sequences` slots, the given one first, and notices. Closing the first closes the others' caches too. Raises
    UsageError with `strict` if passes cannot be shared."""
    if sequences == 1:
        return [engine], []
    engine.batched_passes = passes = BatchedPasses(engine)
    fallbacks = []
    if passes.unbatched_reason:
        fallbacks.append(Fallback(f"answers take turns pass by pass, since {passes.unbatched_reason}: "
                                  f"{sequences} at once are no faster than one by one"))
    if engine.options.strict:
        refuse_fallbacks(fallbacks)
    engines = [engine, *(engine.new_sequence() for _ in range(sequences - 1))]
    for slot_engine in engines:
        slot_engine.extend_prefix = partial(copy_prefix, slot_engine,
                                            other_engines := [other for other in engines if other is not slot_engine])
        passes.other_engines[id(slot_engine)] = other_engines
    return engines, fallbacks
