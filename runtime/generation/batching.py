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

PIECE_S = 0.5  # a prefill chunk may delay the others by about this
LEAST = 64  # tokens of one: of fewer each takes longer, 32 in a pass twice as long as in one of 512
MOST = MAX_DECODE_TOKENS  # tokens per pass: the limit of the decode kernels, and of recorded passes


@dataclass
class PendingToken:
    """A token to decode, and the result: the logits after it, float32 [V], a view valid until the next pass, or the error. `took_s`:
    seconds of its pass."""

    engine: Engine
    token: int
    logits: np.ndarray | None = None
    error: Exception | None = None
    took_s: float = 0.0


class BatchedPasses:
    """Decode passes shared by the sequences of one model. `apart`: why passes are not shared, empty if they are."""

    def __init__(self, engine: Engine) -> None:
        self._model, self._host, self.apart = engine.model, engine.backends["cpu"], why_unbatched(engine)
        self.others: dict[int, list[Engine]] = {}  # of each engine, by identity
        self._known: dict[int, tuple[object, ...]] = {}
        self.is_alone = False  # no other answer is running
        # Splitting is no use where every pass streams weights from disk or to the GPU.
        self._cuts, self._rate = engine.model.pager.stays and "cuda" not in engine.backends, 0.0

    def waits(self, engine: Engine, ids: Sequence[int], cancelled: Callable[[], bool]) -> Iterator[Yield]:
        """Before a prefill: wait for another sequence that is prefilling the same prefix, which is then copied."""
        while is_being_prefilled(engine, self.others[id(engine)], ids) and not cancelled():
            yield Yield()

    def pieces(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Split a prefill of `tokens` into passes without changing its result; yields (length, tokens left). While others wait, a pass
        takes about PIECE_S, and is never so short that it would use the decode kernels."""
        while tokens:
            most = tokens if self.is_alone or not self._cuts else max(LEAST, int(self._rate * PIECE_S))
            piece = -(-tokens // -(-tokens // most))
            tokens -= piece
            yield piece, tokens

    def read(self, tokens: int, seconds: float) -> None:
        """Record that a prefill pass of `tokens` took `seconds`."""
        if tokens >= LEAST // 2:
            self._rate = tokens / max(seconds, 1e-6)

    @property
    def most(self) -> int:
        """The largest number of tokens in one pass."""
        return 1 if self.apart else MOST

    def after(self, engine: Engine, token: int, left: int | None) -> Generator[Yield, None, np.ndarray]:
        """Wait for the pass that decodes `token`; returns the logits after it. An answer that is alone has passes of its own, with
        speculation; `left`: tokens it may still generate (None: no limit)."""
        drafts = engine.speculation
        if drafts is not None and drafts.has_next(engine, token):  # no pass has been run since
            return drafts.after(engine, token, left)
        if drafts is not None and self.is_alone:
            yield Yield()
            if self.is_alone:
                return drafts.after(engine, token, left)
        want = PendingToken(engine, token)
        yield Yield(want)
        engine.passes_s += want.took_s
        if want.error is not None:
            raise want.error
        if want.logits is None:
            raise RuntimeError("an answer went on before its pass")
        return want.logits

    def run(self, wants: Sequence[PendingToken]) -> None:
        """One pass over at most `most` tokens. Their logits must be read before the next pass of any sequence."""
        started = time.perf_counter()
        try:
            self._run(wants)
        except Exception as error:  # the caches of all are in an unknown state
            for want in wants:
                want.error = error
        for want in wants:
            want.took_s = time.perf_counter() - started

    def _run(self, wants: Sequence[PendingToken]) -> None:
        engines = [want.engine for want in wants]
        for engine in engines:
            engine.memory_monitor.look(engine.cache)
        caches = [engine.cache for engine in engines]
        cache = caches[0] if len(caches) == 1 else BatchedCache(caches, self._host, self._known)
        ids = np.array([want.token for want in wants], np.int64)
        x = self._model.forward(ids, cache, scales=scales_of(engines), rope_positions=batch_positions(engines),
                                image_spans=batch_image_views(engines))
        failed = cache.failed if isinstance(cache, BatchedCache) else {}
        logits = self._model.logits(x)
        for row, want in enumerate(wants):
            want.error = failed.get(row)
            if want.error is None:
                want.engine.tokens.append(want.token)
                want.logits = logits[row]


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
    engine.batched_passes = shared = BatchedPasses(engine)
    said = []
    if shared.apart:
        said.append(Fallback(f"answers take turns pass by pass, since {shared.apart}: {sequences} at once are no faster than one by one"))
    if engine.options.strict:
        refuse_fallbacks(said)
    engines = [engine, *(engine.new_sequence() for _ in range(sequences - 1))]
    for each in engines:
        each.extend_prefix = partial(copy_prefix, each, others := [other for other in engines if other is not each])
        shared.others[id(each)] = others
    return engines, said
