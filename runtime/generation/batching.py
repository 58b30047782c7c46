"""Several sequences through one model, as a server writes answers at once: an engine for each, and passes that have a token of all.

Weights are read once for a pass of a few tokens, whosever they are, so four answers at once take little longer than one. Where a model
keeps what one pass cannot be told of apart (layers on a GPU, a policy that watches attention), the sequences take turns, a pass each:
their answers still come side by side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.layout import REPEATED
from ...offload.notes import Fallback, refuse_fallbacks
from ...quant.kv import codec
from ..adapters.adapter_selection import scales_of
from ..events import Yield
from ..images.multimodal import batch_image_views, batch_positions
from ..kv.batched_cache import BatchedCache
from ..sessions.shared_prefix import copy_prefix, is_being_prefilled

if TYPE_CHECKING:
    from ..engine import Engine

PIECE_S = 0.5  # that others wait for a piece of a prompt, about
LEAST = 64  # tokens of one: of fewer each takes longer, 32 in a pass twice as long as in one of 512
MOST = REPEATED  # tokens of a pass at most: as many as any kernel takes as tokens of an answer, and as passes that come again have


@dataclass
class PendingToken:
    """A token that a sequence wants to hold, and what came of it: the logits behind it, float32 [V], a view that the next pass takes back,
    or why there are none. `took_s`: seconds of its pass."""

    engine: Engine
    token: int
    logits: np.ndarray | None = None
    error: Exception | None = None
    took_s: float = 0.0


class BatchedPasses:
    """Passes for sequences of one model. `apart`: why each has passes of its own, empty where they are shared."""

    def __init__(self, engine: Engine) -> None:
        self._model, self._host, self.apart = engine.model, engine.backends["cpu"], why_unbatched(engine)
        self.others: dict[int, list[Engine]] = {}  # of each engine, by identity
        self._known: dict[int, tuple[object, ...]] = {}
        self.is_alone = False  # no other waits for the one that goes on
        # Every pass would read weights from the disk, or copy them to a card, again.
        self._cuts, self._rate = engine.model.pager.stays and "cuda" not in engine.backends, 0.0

    def waits(self, engine: Engine, ids: Sequence[int], cancelled: Callable[[], bool]) -> Iterator[Yield]:
        """Before a prompt is read: let another sequence go on that reads its beginning, which is copied then."""
        while is_being_prefilled(engine, self.others[id(engine)], ids) and not cancelled():
            yield Yield()

    def pieces(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Lengths of the passes over so many tokens of a prompt, which change nothing of it, each with how many are left: where others
        wait, as many as take PIECE_S, and never as few as are multiplied like tokens of an answer."""
        while tokens:
            most = tokens if self.is_alone or not self._cuts else max(LEAST, int(self._rate * PIECE_S))
            piece = -(-tokens // -(-tokens // most))
            tokens -= piece
            yield piece, tokens

    def read(self, tokens: int, seconds: float) -> None:
        """A pass over so many tokens of a prompt took so long."""
        if tokens >= LEAST // 2:
            self._rate = tokens / max(seconds, 1e-6)

    @property
    def most(self) -> int:
        """Tokens that one pass takes."""
        return 1 if self.apart else MOST

    def after(self, engine: Engine, token: int, left: int | None) -> Generator[Yield, None, np.ndarray]:
        """Wait for the pass that holds `token`; returns the logits behind it. An answer that nobody waits beside has passes of its own, of
        drafts too; `left`: tokens that it may still ask for (None: no limit)."""
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
        """One pass for `most` wants or fewer. Their logits must be read before the next pass, of whomever."""
        started = time.perf_counter()
        try:
            self._run(wants)
        except Exception as error:  # none of them knows what its cache holds
            for want in wants:
                want.error = error
        for want in wants:
            want.took_s = time.perf_counter() - started

    def _run(self, wants: Sequence[PendingToken]) -> None:
        engines = [want.engine for want in wants]
        for engine in engines:
            engine.watch.look(engine.cache)
        caches = [engine.cache for engine in engines]
        cache = caches[0] if len(caches) == 1 else BatchedCache(caches, self._host, self._known)
        ids = np.array([want.token for want in wants], np.int64)
        x = self._model.forward(ids, cache, scales=scales_of(engines), turned=batch_positions(engines), looks=batch_image_views(engines))
        failed = cache.failed if isinstance(cache, BatchedCache) else {}
        logits = self._model.logits(x)
        for row, want in enumerate(wants):
            want.error = failed.get(row)
            if want.error is None:
                want.engine.tokens.append(want.token)
                want.logits = logits[row]


def why_unbatched(engine: Engine) -> str:
    """Why sequences of this engine's model cannot share a pass; empty where they can."""
    placement = engine.placement
    if "cuda" in placement.devices:
        return "layers are on the GPU"
    if codec(engine.options.kv).policy:
        return f"--kv {engine.options.kv} watches attention"
    return ""


def open_sequences(engine: Engine, sequences: int) -> tuple[list[Engine], list[Fallback]]:
    """Engines for so many sequences, the given one the first, and what is to be said of it. Whoever closes that one closes the caches of
    the others too. Raises UsageError with `strict` where they would take turns."""
    if sequences == 1:
        return [engine], []
    engine.shares = shared = BatchedPasses(engine)
    said = []
    if shared.apart:
        said.append(Fallback(f"answers take turns, a pass each, since {shared.apart}: {sequences} at once are no quicker than one by one"))
    if engine.options.strict:
        refuse_fallbacks(said)
    engines = [engine, *(engine.another() for _ in range(sequences - 1))]
    for each in engines:
        each.recall = partial(copy_prefix, each, others := [other for other in engines if other is not each])
        shared.others[id(each)] = others
    return engines, said
