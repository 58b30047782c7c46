"""The engine: one sequence of token ids through one model. It yields small frozen steps and knows nothing of text or terminals.

`open_engine` compiles missing kernels, plans (`prepare.py`), loads the weights and returns an Engine. The KV cache is kept between prompts:
only what follows the common prefix is prefilled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .. import EffllmError
from ..kernels.layout import PAGE
from ..kernels.threads import ThreadPool
from ..offload.direct_io import Interrupted, ReadStats
from ..offload.notes import Fallback, refuse_fallbacks
from ..offload.page_stream import PagesLost
from ..quant.kv import codec
from .adapters.adapter_selection import AdapterSelection, scales_of
from .adapters.dora import resolve_lengths
from .cache import KVCache
from .events import Notice, Progress, Yield
from .images.multimodal import MultimodalInputs
from .kv.cache_builder import build_cache
from .kv.cache_shape import layer_specs
from .kv.kv_spill import disk_tier
from .measuring.scoring import Scoring
from .model import Model
from .planning.compile_kernels import check_before_compiling, compile_needed
from .planning.devices import backends_of
from .planning.memory_pressure import MemoryMonitor
from .planning.needed_kernels import folder_kinds
from .planning.plan_request import LOGIT_ROWS
from .prefill import Prefill
from .prepare import EngineOptions, Prepared, prepare, refuse_beyond_machine, worker_count
from .sampler import Sampler, require_finite
from .sparse.neuron_bundles import SPARSE, is_bundled
from .speculate import speculation
from .workspace_dims import dims

if TYPE_CHECKING:
    from .generation.batching import BatchedPasses
    from .sampling.logprobs import TokenLogprobs


@dataclass(frozen=True)
class Step:
    """One generated token. `finish` is None while more can follow, else stop, length or context; `logprobs` its log-probabilities, if
    requested."""

    token: int
    finish: str | None
    logprobs: TokenLogprobs | None = None


def open_engine(folder: Path, options: EngineOptions | None = None) -> Iterator[Progress | Notice | Engine]:
    """Yield events, then the Engine. Nothing is silent: each decision that was not requested is a Notice."""
    options = options or EngineOptions()
    kinds = folder_kinds(folder, options)
    check_before_compiling(kinds, lambda: prepare(folder, options, rehearsal=True))
    yield from open_prepared(lambda: prepare(folder, options), kinds)


def open_prepared(prepare_late: Callable[[], Prepared], kinds: Sequence[str]) -> Iterator[Progress | Notice | Engine]:
    """`open_engine` with another way to plan: `prepare_late` is called after kernels of these kinds are compiled, so that it sees the
    memory that is left."""
    from ..kernels import warm
    from .weights import lookup_layout

    started = time.monotonic()
    yield from compile_needed(kinds)
    prepared = prepare_late()
    with ExitStack() as unless_made:
        for opened in (prepared, prepared.speculating.draft):
            if opened is not None:
                unless_made.callback(opened.store.close)
        refuse_beyond_machine(prepared)
        if warm.cache_folder() is None:
            said = Fallback("compiled kernels cannot be cached, and are compiled in each run: their folder is not writable (effllm doctor "
                            "names it)")
            if prepared.options.strict:
                refuse_fallbacks([said])
            yield Notice(said)
        yield from (Notice(text) for text in prepared.notices)
        engine = Engine((yield from resolve_lengths(prepared)))
        unless_made.pop_all()
    try:
        yield from lookup_layout.measure(prepared, engine.model.tensors)
        for done, total in engine.model.load():
            yield Progress("loading", done, total, "bytes")
        if engine.speculation is not None:
            yield from engine.speculation.load()
        yield from lookup_layout.apply_layout(engine.model, prepared)
    except BaseException:
        engine.close()
        raise
    engine.load_s = time.monotonic() - started
    yield from (Notice(text) for text in engine.announcements())
    yield engine


class Engine(Prefill, Scoring, AdapterSelection, MultimodalInputs):
    """One model and one sequence. `tokens` are the ids in the KV cache. Made by `open_engine`."""

    def __init__(self, prepared: Prepared, backends: dict[str, object] | None = None) -> None:
        config, options, shape = prepared.config, prepared.options, prepared.shape
        self.prepared, self.config, self.options = prepared, config, options
        self.placement, self.n_ctx, self.choice = prepared.placement, prepared.placement.ctx, prepared.adapted.scales
        kv = codec(options.kv)
        widths = dims(config, self.n_ctx, shape.chunk, LOGIT_ROWS, kv.is_packed, is_bundled(prepared.container),
                      self.placement.kv_pages is not None or bool(kv.policy), prepared.speculating.mtp, prepared.adapted.rank,
                      len(prepared.speculating.reads.between))
        self.cancelled: Callable[[], bool] = lambda: False  # asked while the disk is waited for
        self.borrows = True  # pages that another sequence has read
        # is given a prompt and how many of its tokens are held, and may put more into the cache; returns how many then are, and notices
        self.recall: Callable[[list[int], int], tuple[int, list[str]]] = lambda ids, held: (held, [])
        self.shares: BatchedPasses | None = None  # passes shared with other sequences, which do not end when one is cancelled
        streams = prepared.streams and replace(prepared.streams, cancelled=lambda: self.shares is None and self.cancelled())
        with ExitStack() as unless_made:  # an engine that is not made leaves no thread and no file
            if backends is None:
                unless_made.callback((pool := ThreadPool(worker_count(options))).close)
                backends = backends_of(self.placement.devices, widths, pool, options.exact, prepared.gpu,
                                       prepared.config.hidden_act in SPARSE)
            self.backends = backends
            self.model = Model(config, prepared.store, self.placement.devices, self.backends, self.n_ctx,
                               mmap=options.load == "mmap", container=prepared.container, streams=streams,
                               copied_from=self.placement.copied_from, predictors=prepared.predictors,
                               head_on_gpu=self.placement.gpu.head_bytes > 0, mtp=prepared.speculating.mtp, adapted=prepared.adapted,
                               between=prepared.speculating.reads.between)
            unless_made.callback(self.model.close)
            self.cache = self.new_cache()
            unless_made.callback(self.cache.close)
            self.speculation = speculation(prepared, self.model, self.cache)
            unless_made.pop_all()
        self.watch = MemoryMonitor(mapped=options.load == "mmap", shed=self.model.pager.shed)
        self.tokens: list[int] = []
        self.anew = 0  # so many of them, from the first, are held just as one prompt read into an empty cache would leave them
        self.reading: list[int] = []  # the prompt, while it is read
        self.truncated = False
        self.reused = self.read = 0  # tokens of the last prompt that the cache already held, and tokens that were run
        self.load_s = self.prefill_s = self.decode_s = self.passes_s = 0.0  # decode_s: passes_s, and the time for sampling and drafting
        self._logits: np.ndarray | None = None

    def another(self) -> Engine:
        """Another sequence of the same model, with a KV cache of its own that the caller closes."""
        other = copy(self)
        other.cache, other.cancelled = self.new_cache(), lambda: False
        other.speculation = self.speculation and self.speculation.another()
        other.hold([])
        return other

    def new_cache(self) -> KVCache:
        """An empty KV cache for this model, codec and context, on the backends of its layers."""
        return build_cache([self.backends[device] for device in self.placement.devices], layer_specs(self.config), codec(self.options.kv),
                          self.prepared.shape, self.prepared.codecs, disk_tier(self.prepared, lambda: self.cancelled()))

    def announcements(self) -> list[str]:
        """Fallbacks since the last call. Raises UsageError with `strict` if one is a slower kernel."""
        lines = [*self.model.announcements(),
                 *(Fallback(line) for backend in self.backends.values() for line in backend.registry.announcements()),
                 *(() if self.speculation is None else self.speculation.announcements())]
        if self.options.strict:
            refuse_fallbacks(lines)
        return lines + self.model.pager.announcements() + self.cache.pool.announcements() + self.watch.announcements()

    @property
    def disk_nbytes(self) -> int:
        """Bytes read from disk so far: weights and pages of the KV cache."""
        return self.model.pager.disk_nbytes + self.cache.pool.traffic.nbytes

    @property
    def disk_wait_s(self) -> float:
        """Seconds that passes have waited for the disk."""
        return self.model.pager.wait_s + self.cache.pool.traffic.wait_s

    @property
    def disk_traffic(self) -> ReadStats:
        """Bytes and seconds of the disk so far."""
        return ReadStats(nbytes=self.disk_nbytes, wait_s=self.disk_wait_s, busy_s=self.model.pager.busy_s + self.cache.pool.traffic.busy_s)

    def reset(self) -> None:
        """Drop the sequence."""
        if (cpu := self.backends.get("cpu")) is not None:
            cpu.pool.settle()  # a pass that Ctrl-C ended may have left threads at work
        if self.speculation is not None:
            self.speculation.reset()
        self.cache.clear()
        self.hold([])

    def hold(self, tokens: Sequence[int], anew: int = 0) -> None:
        """The cache was filled from outside with these tokens; the first `anew` are as an uncached prefill would leave them."""
        self.tokens, self.anew, self._logits, self.truncated = list(tokens), anew, None, False

    def close(self) -> None:
        if self.speculation is not None:
            self.speculation.close()
        for backend in self.backends.values():
            backend.close()  # before what it may still read: a job that Ctrl-C left open ends here
        self.model.close()
        self.cache.close()

    # -- passes ----------------------------------------------------------------------------------------------------------------

    def _forward(self, ids: Sequence[int], prompt: bool = False, seal: bool = True, wanted: int | None = None) -> np.ndarray:
        self.watch.look(self.cache)
        started = time.perf_counter()
        plain, seen = self.seen(ids)
        with self.keeping_what_is_whole():
            x = self.model.forward(plain, self.cache, commit=seal, prompt=prompt, scales=scales_of([self]), wanted=wanted,
                                   **seen)
            if not seal:
                self.cache.commit(seal=False)
        self.tokens.extend(ids)
        if self.shares is not None and prompt:
            self.shares.read(len(ids), time.perf_counter() - started)
        return x

    @contextmanager
    def keeping_what_is_whole(self) -> Iterator[None]:
        """Context manager for reading and writing cache pages. If the disk loses some, only the intact part of the sequence counts as
        held, and the next prompt prefills the rest. The error is raised nonetheless."""
        try:
            yield
        except (EffllmError, Interrupted) as error:
            if isinstance(error, PagesLost):
                self.cache.truncate(self.cache.shape.sinks + PAGE * self.cache.pool.first)
            if (held := self.cache.n) < len(self.tokens):
                self.hold(self.tokens[:held], min(self.anew, held))
            raise

    # -- answer ----------------------------------------------------------------------------------------------------------------

    def generate(self, sampler: Sampler, max_tokens: int | None, stop_ids: frozenset[int],
                 ignore_eos: bool = False, may_shift: bool = True) -> Iterator[Step | Yield]:
        """Sample until a stop token, `max_tokens` or the end of the context (unless both the run and `may_shift` allow shifting). A
        step's token is only run when the next step is requested; with shared passes a `Yield` comes before each."""
        if self._logits is None:
            raise RuntimeError("generate before prefill")
        if self.speculation is not None:
            self.speculation.choose_as(sampler.settings, sampler.breakers)
        made = 0
        while max_tokens is None or made < max_tokens:
            started = time.perf_counter()
            token = self._sample(sampler)
            made += 1
            finish = "stop" if token in stop_ids and not ignore_eos else "length" if made == max_tokens else None
            if finish is None and len(self.tokens) + 1 >= self.n_ctx:
                if may_shift and self.options.overflow == "shift":
                    before = self.prefill_s, self.reused, self.read
                    yield from self._turn()
                    with self._a_pass():
                        for _ in self._prefill(self._shortened(self.tokens)):
                            yield from self._turn()
                    # it counts as decode: the person waits in the middle of an answer, and the prompt is what it was
                    self.prefill_s, self.reused, self.read = before
                else:
                    finish = "context"
            self.decode_s += time.perf_counter() - started
            yield Step(token, finish, sampler.token_logprobs)
            if finish:
                return
            started = time.perf_counter()
            try:
                self._logits = yield from self._after(token, None if max_tokens is None else max_tokens - made)
            except Interrupted:
                self._logits = None
            finally:  # as a pass is, so that what ended early is in both or in none
                self.decode_s += time.perf_counter() - started
            if self._logits is None:
                return

    def _turn(self) -> Iterator[Yield]:
        """Before a prefill chunk: yield to other sequences, if there are any."""
        if self.shares is not None:
            yield Yield()

    def _after(self, token: int, left: int | None) -> Generator[Yield, None, np.ndarray]:
        """Hold `token`; returns the logits after it. `left`: tokens that may still be generated (None: no limit)."""
        if self.shares is not None:
            return (yield from self.shares.after(self, token, left))
        if self.speculation is not None:
            return self.speculation.after(self, token, left)
        with self._a_pass():
            return self.model.logits(self._forward([token]))[0]

    @contextmanager
    def _a_pass(self) -> Iterator[None]:
        """Context manager that adds to `passes_s`: a pass and holding its tokens (which packs pages, and may wait for the disk), errors
        included."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.passes_s += time.perf_counter() - started

    def run_ahead(self, ids: Sequence[int]) -> np.ndarray:
        """Run `ids` after what is held without holding them; logits float32 [len(ids), V], a view. `take` then holds them one by one."""
        with self._a_pass():
            self.watch.look(self.cache)
            plain, seen = self.seen(ids)
            with self.keeping_what_is_whole():
                x = self.model.forward(plain, self.cache, commit=False, scales=scales_of([self]), **seen)
            logits = self.model.logits(x)
            if self.speculation is not None:  # last: what it does with the states may take their place
                self.speculation.saw(self.tokens, len(self.tokens), ids, x, certain=False)
            return logits

    def take(self, token: int) -> None:
        """Hold the next token of the last `run_ahead`."""
        with self._a_pass():
            self.cache.commit(1)
        self.tokens.append(token)

    def _sample(self, sampler: Sampler) -> int:
        with self._explained(self._logits):
            return sampler.sample(self._logits, self.tokens)

    def demand_finite(self, logits: np.ndarray) -> None:
        """Raises EffllmError for logits float32 [n, V] with NaN or infinity."""
        if not all(np.isfinite(row).all() for row in logits):  # row by row: all at once takes another quarter of the memory of the logits
            with self._explained(logits):
                require_finite(math.nan if np.isnan(logits).any() else math.inf)

    @contextmanager
    def _explained(self, logits: np.ndarray) -> Iterator[None]:
        """The error about non-finite `logits`, naming the tensor that causes them."""
        try:
            yield
        except EffllmError as error:
            if np.isnan(logits).any() and (name := self.model.find_nan()):
                raise type(error)(f"tensor {name} holds NaN or infinity: the checkpoint is damaged", error.hint) from error
            raise
