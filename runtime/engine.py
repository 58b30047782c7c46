"""The engine: one sequence of token ids through one model. It yields small frozen steps and knows nothing of text or terminals.

`prepare` reads headers only and plans; `open_engine` compiles what is cold, reads the weights and hands over an Engine. The cache is
kept between prompts: a prompt that begins with what is held prefills only the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .. import ContextOverflow, EffllmError, UsageError
from ..kernels.layout import PAGE
from ..kernels.workspace import Dims
from ..offload import hardware
from ..offload.checkpoint import TensorStore
from ..offload.memory import anonymous
from ..offload.pages import PagePool
from ..offload.plan import BlockBytes, Budget, Demand, Placement, plan
from ..offload.size import parse_size
from ..quant.kv import codec
from .cache import CacheShape, KVCache, cache_nbytes
from .config import ModelConfig, read_config
from .events import Notice, Progress
from .model import Model, attention_specs, check_tensors, dims
from .policy.keep import Keep
from .sampler import Sampler

LOGIT_ROWS = 32  # rows of logits made at once when a text is scored
RESERVE = 64 << 20  # what the machine keeps for itself when no budget is given


@dataclass(frozen=True)
class EngineOptions:
    """How to run. `ctx` None: the smaller of the model's and what fits. Sizes like "6G". `overflow`: error, or shift (forget the middle)."""

    device: str = "auto"
    threads: int | None = None
    ctx: int | None = None
    kv: str = "16bit"
    kv_sink: int = 64
    kv_window: int = 128
    ram: str | None = None
    vram: str | None = None
    gpu_layers: int | None = None
    load: str = "ram"
    strict: bool = False
    force: bool = False
    overflow: str = "error"
    chunk: int = 512

    def __post_init__(self) -> None:
        choices = {"device": ("auto", "cpu", "cuda"), "load": ("ram", "mmap"), "overflow": ("error", "shift")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise UsageError(f"--{name} {getattr(self, name)!r} is not known", f"use {' or '.join(allowed)}")
        for name, least in (("threads", 1), ("ctx", 1), ("kv_sink", 0), ("kv_window", 0), ("gpu_layers", 0), ("chunk", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"--{name.replace('_', '-')} {value} is too small", f"at least {least}")
        codec(self.kv)


@dataclass(frozen=True)
class Prepared:
    """What is known before a byte of weights is read."""

    folder: Path | None
    config: ModelConfig
    store: TensorStore
    placement: Placement
    shape: CacheShape
    options: EngineOptions
    notices: tuple[str, ...]


@dataclass(frozen=True)
class Step:
    """One generated token. `finish` is None while more can follow, else stop, length or context."""

    token: int
    finish: str | None


def prepare(folder: Path, options: EngineOptions) -> Prepared:
    """Read headers, check them against the config, plan. Raises DoesNotFit with the numbers when no plan exists."""
    return prepare_with(folder, read_config(folder, strict=options.strict), TensorStore.open(folder), options)


def prepare_with(folder: Path | None, config: ModelConfig, store: TensorStore, options: EngineOptions) -> Prepared:
    """`prepare` for a config and a store at hand."""
    from ..kernels.cpu.ops import plan_workspace

    tensors = check_tensors(config, store)
    notices = list(config.warnings)
    device = _device(options, notices)
    sinks = CacheShape(1, options.kv_sink).sinks
    if options.kv_sink > PAGE:
        notices.append(f"--kv-sink {options.kv_sink}: at most {PAGE} sinks, using {PAGE}")
    chunk = max(PAGE, options.chunk // PAGE * PAGE)
    layout = codec(options.kv).layout(config.num_key_value_heads, config.head_dim)
    workers = options.threads or hardware.cpu_threads()
    wanted = options.ctx
    if wanted is not None and wanted > config.max_position_embeddings and not options.force:
        raise UsageError(f"-c {wanted} is more than the {config.max_position_embeddings} positions that the model was made for",
                         "a smaller -c, or --force to try")

    def shape_for(ctx: int) -> CacheShape:
        return CacheShape(ctx, sinks, options.kv_window, min(chunk, -(-ctx // PAGE) * PAGE))

    def workspace(ctx: int) -> int:
        return 4 * sum(plan_workspace(dims(config, ctx, shape_for(ctx).chunk, LOGIT_ROWS), workers).values())

    fixed, per_page = cache_nbytes(config.num_hidden_layers, layout, shape_for(wanted or config.max_position_embeddings))
    demand = Demand(
        baseline=hardware.rss(), workspace=workspace(wanted or config.max_position_embeddings),
        weights=tuple(BlockBytes(str(key), sum(info.nbytes for info in roles.values())) for key, roles in tensors.items()),
        kv_bytes_per_token=per_page // PAGE, kv_fixed=fixed, layers=config.num_hidden_layers)
    ram = parse_size(options.ram) if options.ram else max(0, hardware.memory_available() + hardware.rss() - RESERVE)
    budget = Budget(ram=ram, vram=_vram(options) if device == "cuda" else 0)
    placement = plan(demand, budget, max(config.max_position_embeddings, wanted or 0), wanted,
                     options.device if device == "cuda" else "cpu", options.gpu_layers if device == "cuda" else None)
    return Prepared(folder, config, store, placement, shape_for(placement.ctx), options, tuple(notices) + placement.notes)


def _device(options: EngineOptions, notices: list[str]) -> str:
    """cpu or cuda. auto takes a GPU only where there is one and torch is installed."""
    if options.device == "cpu":
        return "cpu"
    from importlib.util import find_spec

    driver = Path("/dev/nvidiactl").exists()
    torch = find_spec("torch") is not None
    if options.device == "auto":
        if driver and not torch:
            notices.append("a GPU is here but torch is not installed: running on the CPU (pip install 'effllm[cuda]')")
        if not (driver and torch):
            return "cpu"
    if not torch:
        raise UsageError("--device cuda needs torch, which is not installed", "pip install 'effllm[cuda]'")
    from ..kernels.cuda.torch_ops import cuda_available

    if cuda_available():
        return "cuda"
    if options.device == "cuda":
        raise UsageError("--device cuda: torch finds no GPU here", "--device cpu")
    return "cpu"


def _vram(options: EngineOptions) -> int:
    """Bytes of GPU memory to use: as asked, never more than there is."""
    from ..kernels.cuda.torch_ops import free_memory

    return min(parse_size(options.vram), free_memory()) if options.vram else free_memory()


def open_engine(folder: Path, options: EngineOptions | None = None) -> Iterator[Progress | Notice | Engine]:
    """Yield what happens on the way, then the Engine. Nothing is silent: each decision that was not asked for is a Notice."""
    options = options or EngineOptions()
    yield from open_prepared(lambda: prepare(folder, options))


def open_prepared(prepare_late: Callable[[], Prepared]) -> Iterator[Progress | Notice | Engine]:
    """`open_engine` for a plan made otherwise; it is made after the kernels are compiled, so that it sees the memory that is left."""
    from ..kernels import warm

    started = time.monotonic()
    if warm.is_cold():
        for done, total in warm.warm():
            yield Progress("compiling kernels (first run only)", done, total, "kernels")
    prepared = prepare_late()
    yield from (Notice(text) for text in prepared.notices)
    engine = Engine(prepared)
    try:
        for done, total in engine.model.load():
            yield Progress("loading", done, total, "bytes")
    except BaseException:
        engine.close()
        raise
    engine.load_s = time.monotonic() - started
    yield from (Notice(text) for text in engine.announcements())
    yield engine


def _backends(devices: Sequence[str], widths: Dims, workers: int) -> dict[str, object]:
    from ..kernels.cpu.ops import CpuOps
    from ..kernels.threads import ThreadPool

    backends: dict[str, object] = {"cpu": CpuOps(ThreadPool(workers), widths)}
    if "cuda" in devices:
        from ..kernels.cuda.torch_ops import TorchOps

        backends["cuda"] = TorchOps("cuda")
    return backends


class Engine:
    """One model and one sequence. `tokens` are the ids that the cache holds. Made by `open_engine`."""

    def __init__(self, prepared: Prepared, backends: dict[str, object] | None = None) -> None:
        config, options, shape = prepared.config, prepared.options, prepared.shape
        self.prepared, self.config, self.options, self.placement, self.n_ctx = prepared, config, options, prepared.placement, prepared.placement.ctx
        widths = dims(config, self.n_ctx, shape.chunk, LOGIT_ROWS)
        self.backends = backends or _backends(self.placement.devices, widths, options.threads or hardware.cpu_threads())
        self.model = Model(config, prepared.store, self.placement.devices, self.backends, self.n_ctx, mmap=options.load == "mmap")
        kv = codec(options.kv)
        layout = kv.layout(config.num_key_value_heads, config.head_dim)
        pool = PagePool(config.num_hidden_layers, shape.pages, layout.layer_page_nbytes)
        layers = [self.backends[device].kv_layer(layout, anonymous(shape.slots * layout.layer_page_nbytes), pool.extent(i), spec.scale, spec.window,
                                                 spec.softcap)
                  for i, (device, spec) in enumerate(zip(self.placement.devices, attention_specs(config)))]
        self.cache = KVCache(layers, kv, Keep(), shape, layout)
        self.tokens: list[int] = []
        self.truncated = False
        self.load_s = 0.0
        self.prefill_s = self.decode_s = 0.0
        self._logits: np.ndarray | None = None

    def announcements(self) -> list[str]:
        """Fallbacks that have been chosen since the last call."""
        return [line for backend in self.backends.values() for line in backend.registry.announcements()]

    def reset(self) -> None:
        """Forget the sequence."""
        self.cache.clear()
        self.tokens, self._logits, self.truncated = [], None, False

    def close(self) -> None:
        self.model.close()
        for backend in self.backends.values():
            backend.close()

    # -- prompt ----------------------------------------------------------------------------------------------------------------

    def prefill(self, ids: Sequence[int]) -> Iterator[Progress]:
        """Make `ids` the sequence, running only what is not held already. Afterwards the next token can be sampled.

        Raises UsageError for an empty prompt and ContextOverflow, naming both numbers, for one that leaves no room for an answer.
        """
        ids = list(ids)
        if not ids:
            raise UsageError("the prompt is empty", "give a prompt, or -f FILE")
        if bad := [token for token in ids if not 0 <= token < self.config.vocab_size]:
            raise UsageError(f"token id {bad[0]} is outside the vocabulary of {self.config.vocab_size}", "the tokenizer is of another model")
        if len(ids) >= self.n_ctx:
            if self.options.overflow != "shift":
                raise ContextOverflow(f"the prompt has {len(ids)} tokens and the context holds {self.n_ctx}",
                                      "shorten it, raise -c, or --overflow shift to drop the middle")
            ids = self._shortened(ids)
        held = _common_prefix(self.tokens, ids)
        held = self.cache.truncate(min(held, len(ids) - 1))
        self.tokens = ids[:held]
        started = time.perf_counter()
        for piece in self.cache.pieces(len(ids) - held):
            x = self._forward(ids[len(self.tokens) : len(self.tokens) + piece])
            if len(self.tokens) < len(ids):
                yield Progress("reading the prompt", len(self.tokens), len(ids), "tokens")
        self._logits = self.model.logits(x[-1:])[0]
        self.prefill_s += time.perf_counter() - started

    def _shortened(self, ids: list[int]) -> list[int]:
        """The sinks and the newest half of the context: what --overflow shift keeps."""
        self.truncated = True
        sinks = min(self.cache.shape.sinks, self.n_ctx // 4)
        return ids[:sinks] + ids[len(ids) - (self.n_ctx // 2 - sinks) :]

    def _forward(self, ids: Sequence[int]) -> np.ndarray:
        x = self.model.forward(np.array(ids, np.int64), self.cache)
        self.tokens.extend(ids)
        return x

    # -- answer ----------------------------------------------------------------------------------------------------------------

    def generate(self, sampler: Sampler, max_tokens: int | None, stop_ids: frozenset[int], ignore_eos: bool = False) -> Iterator[Step]:
        """Sample until a stop token, `max_tokens` or the end of the context. The token of a step is run only when the next is asked for."""
        if self._logits is None:
            raise RuntimeError("generate before prefill")
        made = 0
        while max_tokens is None or made < max_tokens:
            started = time.perf_counter()
            token = self._sample(sampler)
            made += 1
            finish = "stop" if token in stop_ids and not ignore_eos else "length" if made == max_tokens else None
            if finish is None and len(self.tokens) + 1 >= self.n_ctx:
                if self.options.overflow == "shift":
                    for _ in self.prefill(self._shortened(self.tokens)):
                        continue
                else:
                    finish = "context"
            self.decode_s += time.perf_counter() - started
            yield Step(token, finish)
            if finish:
                return
            started = time.perf_counter()
            self._logits = self.model.logits(self._forward([token]))[0]
            self.decode_s += time.perf_counter() - started

    def _sample(self, sampler: Sampler) -> int:
        try:
            return sampler.sample(self._logits, self.tokens)
        except EffllmError as error:
            if np.isnan(self._logits).any() and (name := self.model.find_nan()):
                raise replace_error(error, f"tensor {name} holds NaN or infinity: the checkpoint is damaged") from error
            raise

    def forward_logits(self, ids: Sequence[int]) -> np.ndarray:
        """Run `ids` after what is held; logits float32 [len(ids), V], a view. For measurements."""
        return self.model.logits(self._forward(ids))

    def score(self, ids: Sequence[int], pages: int | None = None) -> Iterator[tuple[int, np.ndarray]]:
        """Run `ids` from an empty cache; yields (position, logits float32 [n, V]) for every position. A view: copy what you keep.

        `pages` cuts the text into chunks of so many pages instead of the engine's.
        """
        if not 0 < len(ids) <= self.n_ctx:
            raise ContextOverflow(f"{len(ids)} tokens to score in a context of {self.n_ctx}")
        self.reset()
        for piece in self.cache.pieces(len(ids), pages):
            start = len(self.tokens)
            x = self._forward(ids[start : start + piece])
            for row in range(0, piece, LOGIT_ROWS):
                yield start + row, self.model.logits(x[row : row + LOGIT_ROWS])


def replace_error(error: EffllmError, message: str) -> EffllmError:
    """The same kind of error with a message that knows more."""
    return type(error)(message, error.hint)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for i, (x, y) in enumerate(zip(a, b)):
        if x != y:
            return i
    return min(len(a), len(b))
