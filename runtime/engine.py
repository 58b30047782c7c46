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
    """One generated token."""

    token: int
    finish: str | None  # stop, length or context; None while more can follow
    logprobs: TokenLogprobs | None = None  # log-probabilities, if requested


def open_engine(folder: Path, options: EngineOptions | None = None) -> Iterator[Progress | Notice | Engine]:
    """Load a model: yields events, then the Engine. Each decision that was not requested is announced as a Notice."""
    options = options or EngineOptions()
    kinds = folder_kinds(folder, options)
    check_before_compiling(kinds, lambda: prepare(folder, options, dry_run=True))
    yield from open_prepared(lambda: prepare(folder, options), kinds)


def open_prepared(prepare_late: Callable[[], Prepared], kinds: Sequence[str]) -> Iterator[Progress | Notice | Engine]:
    """`open_engine` with another way to plan.

    `kinds`: kernels to compile first. `prepare_late` is called after that, so that it sees the memory that is left."""
    from ..kernels import warm
    from .weights import lookup_layout

    started = time.monotonic()
    yield from compile_needed(kinds)
    prepared = prepare_late()
    with ExitStack() as on_failure:
        for opened in (prepared, prepared.speculation.draft):
            if opened is not None:
                on_failure.callback(opened.store.close)
        refuse_beyond_machine(prepared)
        if warm.cache_folder() is None:
            warning = Fallback("compiled kernels cannot be cached, and are compiled in each run: their folder is not writable (effllm "
                               "doctor names it)")
            if prepared.options.strict:
                refuse_fallbacks([warning])
            yield Notice(warning)
        yield from (Notice(text) for text in prepared.notices)
        engine = Engine((yield from resolve_lengths(prepared)))
        on_failure.pop_all()
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
    """One model and one sequence, as returned by `open_engine`.

    `tokens`: the ids in the KV cache; the first `num_fresh_tokens` are there exactly as one prefill into an empty cache leaves them.
    `pending_prompt`: the prompt, during its prefill. `truncated`: the middle of the prompt was dropped.
    `cancelled`: polled while waiting for the disk. `batched_passes`: runs passes together with those of other sequences, if there are any;
    a shared pass does not end when one of them is cancelled. `may_share_prefix`: pages of other sequences may be copied.
    `extend_prefix`: takes a prompt and how many of its tokens are cached, and may restore more; returns the new count, and notices.
    """

    def __init__(self, prepared: Prepared, backends: dict[str, object] | None = None) -> None:
        config, options, shape = prepared.config, prepared.options, prepared.shape
        self.prepared, self.config, self.options = prepared, config, options
        self.placement, self.n_ctx, self.adapter_scales = prepared.placement, prepared.placement.ctx, prepared.adapters.scales
        kv = codec(options.kv)
        workspace_dims = dims(config, self.n_ctx, shape.chunk, LOGIT_ROWS, kv.is_packed, is_bundled(prepared.container),
                      self.placement.kv_pages is not None or bool(kv.policy), prepared.speculation.mtp, prepared.adapters.rank,
                      len(prepared.speculation.inputs.aux_layers))
        self.cancelled: Callable[[], bool] = lambda: False
        self.may_share_prefix = True
        self.extend_prefix: Callable[[list[int], int], tuple[int, list[str]]] = lambda ids, num_cached: (num_cached, [])
        self.batched_passes: BatchedPasses | None = None
        streaming = prepared.streaming and replace(prepared.streaming, cancelled=lambda: self.batched_passes is None and self.cancelled())
        with ExitStack() as on_failure:  # a failed start leaves no thread and no file
            if backends is None:
                on_failure.callback((pool := ThreadPool(worker_count(options))).close)
                backends = backends_of(self.placement.devices, workspace_dims, pool, options.exact, prepared.gpu,
                                       prepared.config.hidden_act in SPARSE)
            self.backends = backends
            self.model = Model(config, prepared.store, self.placement.devices, self.backends, self.n_ctx,
                               mmap=options.load == "mmap", container=prepared.container, streaming=streaming,
                               copied_from=self.placement.copied_from, predictors=prepared.predictors,
                               head_on_gpu=self.placement.gpu.head_bytes > 0, mtp=prepared.speculation.mtp, adapters=prepared.adapters,
                               between_layers=prepared.speculation.inputs.aux_layers)
            on_failure.callback(self.model.close)
            self.cache = self.new_cache()
            on_failure.callback(self.cache.close)
            self.speculation = speculation(prepared, self.model, self.cache)
            on_failure.pop_all()
        self.memory_monitor = MemoryMonitor(mapped=options.load == "mmap", shed=self.model.pager.shed)
        self.tokens: list[int] = []
        self.num_fresh_tokens = 0
        self.pending_prompt: list[int] = []
        self.truncated = False
        self.num_cached_tokens = self.num_prefilled_tokens = 0  # of the last prompt: tokens that the cache held, and tokens that were run
        self.load_s = self.prefill_s = self.decode_s = 0.0
        self.passes_s = 0.0  # the part of decode_s that passes take, without sampling and drafting
        self._logits: np.ndarray | None = None

    def new_sequence(self) -> Engine:
        """An engine for another sequence of the same model, with a KV cache of its own that the caller closes."""
        other = copy(self)
        other.cache, other.cancelled = self.new_cache(), lambda: False
        other.speculation = self.speculation and self.speculation.fork()
        other.set_tokens([])
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
        return lines + self.model.pager.announcements() + self.cache.pool.announcements() + self.memory_monitor.announcements()

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
        """Forget the sequence: an empty cache."""
        if (cpu := self.backends.get("cpu")) is not None:
            cpu.pool.settle()  # after Ctrl-C in a pass, threads may still be running
        if self.speculation is not None:
            self.speculation.reset()
        self.cache.clear()
        self.set_tokens([])

    def set_tokens(self, tokens: Sequence[int], num_fresh_tokens: int = 0) -> None:
        """Declare the tokens in a cache that was filled from outside; the first `num_fresh_tokens` as an uncached prefill leaves them."""
        self.tokens, self.num_fresh_tokens, self._logits, self.truncated = list(tokens), num_fresh_tokens, None, False

    def close(self) -> None:
        if self.speculation is not None:
            self.speculation.close()
        for backend in self.backends.values():
            backend.close()  # first: a job that Ctrl-C left running ends here, and it reads weights and cache
        self.model.close()
        self.cache.close()

    # -- passes ----------------------------------------------------------------------------------------------------------------

    def _forward(self, ids: Sequence[int], prompt: bool = False, commit: bool = True, num_states: int | None = None) -> np.ndarray:
        self.memory_monitor.look(self.cache)
        started = time.perf_counter()
        text_ids, media = self.forward_inputs(ids)
        with self.keeping_intact_prefix():
            states = self.model.forward(text_ids, self.cache, commit=commit, prompt=prompt, scales=scales_of([self]), num_states=num_states,
                                   **media)
            if not commit:
                self.cache.commit(seal=False)
        self.tokens.extend(ids)
        if self.batched_passes is not None and prompt:
            self.batched_passes.record_prefill(len(ids), time.perf_counter() - started)
        return states

    @contextmanager
    def keeping_intact_prefix(self) -> Iterator[None]:
        """Context manager for reading and writing cache pages. If pages on disk are lost, `tokens` shrinks to the intact part of the
        sequence, and the next prompt prefills the rest. The error is raised nonetheless."""
        try:
            yield
        except (EffllmError, Interrupted) as error:
            if isinstance(error, PagesLost):
                self.cache.truncate(self.cache.shape.sinks + PAGE * self.cache.pool.first)
            if (num_cached := self.cache.n) < len(self.tokens):
                self.set_tokens(self.tokens[:num_cached], min(self.num_fresh_tokens, num_cached))
            raise

    # -- answer ----------------------------------------------------------------------------------------------------------------

    def generate(self, sampler: Sampler, max_tokens: int | None, stop_ids: frozenset[int],
                 ignore_eos: bool = False, may_shift: bool = True) -> Iterator[Step | Yield]:
        """Sample until a stop token, `max_tokens` or the end of the context, unless the run and `may_shift` both allow shifting.

        A step's token is run only when the next step is requested. With batched passes a `Yield` comes before each."""
        if self._logits is None:
            raise RuntimeError("generate before prefill")
        if self.speculation is not None:
            self.speculation.set_sampling(sampler.settings, sampler.breakers)
        count = 0
        while max_tokens is None or count < max_tokens:
            started = time.perf_counter()
            token = self._sample(sampler)
            count += 1
            finish = "stop" if token in stop_ids and not ignore_eos else "length" if count == max_tokens else None
            if finish is None and len(self.tokens) + 1 >= self.n_ctx:
                if may_shift and self.options.overflow == "shift":
                    before = self.prefill_s, self.num_cached_tokens, self.num_prefilled_tokens
                    yield from self._yield_turn()
                    with self._timed_pass():
                        for _ in self._prefill(self._shortened(self.tokens)):
                            yield from self._yield_turn()
                    # Shifting counts as decode: it interrupts an answer, and the statistics of the prompt stay.
                    self.prefill_s, self.num_cached_tokens, self.num_prefilled_tokens = before
                else:
                    finish = "context"
            self.decode_s += time.perf_counter() - started
            yield Step(token, finish, sampler.token_logprobs)
            if finish:
                return
            started = time.perf_counter()
            try:
                self._logits = yield from self._next_logits(token, None if max_tokens is None else max_tokens - count)
            except Interrupted:
                self._logits = None
            finally:  # an interrupted pass counts in decode_s as in passes_s
                self.decode_s += time.perf_counter() - started
            if self._logits is None:
                return

    def _yield_turn(self) -> Iterator[Yield]:
        """Before a prefill chunk: yield to other sequences, if there are any."""
        if self.batched_passes is not None:
            yield Yield()

    def _next_logits(self, token: int, num_left: int | None) -> Generator[Yield, None, np.ndarray]:
        """Run `token`; returns the logits after it, float32 [V]. `num_left`: tokens that may still be generated (None: no limit)."""
        if self.batched_passes is not None:
            return (yield from self.batched_passes.decode(self, token, num_left))
        if self.speculation is not None:
            return self.speculation.next_logits(self, token, num_left)
        with self._timed_pass():
            return self.model.logits(self._forward([token]))[0]

    @contextmanager
    def _timed_pass(self) -> Iterator[None]:
        """Context manager that adds to `passes_s` the time of a pass and of committing its tokens (which packs pages, and may wait for the
        disk), also if it fails."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.passes_s += time.perf_counter() - started

    def run_draft(self, ids: Sequence[int]) -> np.ndarray:
        """Run drafted `ids` without committing them; logits float32 [len(ids), V], a view. `accept_token` commits them one by one."""
        with self._timed_pass():
            self.memory_monitor.look(self.cache)
            text_ids, media = self.forward_inputs(ids)
            with self.keeping_intact_prefix():
                states = self.model.forward(text_ids, self.cache, commit=False, scales=scales_of([self]), **media)
            logits = self.model.logits(states)
            if self.speculation is not None:  # last: it may overwrite the states
                self.speculation.add_hidden_states(self.tokens, len(self.tokens), ids, states, verified=False)
            return logits

    def accept_token(self, token: int) -> None:
        """Commit the next token of the last `run_draft`."""
        with self._timed_pass():
            self.cache.commit(1)
        self.tokens.append(token)

    def _sample(self, sampler: Sampler) -> int:
        with self._explaining_non_finite(self._logits):
            return sampler.sample(self._logits, self.tokens)

    def require_finite_logits(self, logits: np.ndarray) -> None:
        """Raises EffllmError for logits float32 [n, V] with NaN or infinity."""
        if not all(np.isfinite(row).all() for row in logits):  # row by row, since the boolean array of all rows would be large
            with self._explaining_non_finite(logits):
                require_finite(math.nan if np.isnan(logits).any() else math.inf)

    @contextmanager
    def _explaining_non_finite(self, logits: np.ndarray) -> Iterator[None]:
        """Context manager that makes an error about non-finite `logits` name the tensor that causes them."""
        try:
            yield
        except EffllmError as error:
            if np.isnan(logits).any() and (name := self.model.find_nan()):
                raise type(error)(f"tensor {name} holds NaN or infinity: the checkpoint is damaged", error.hint) from error
            raise
