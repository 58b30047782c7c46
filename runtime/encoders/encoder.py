"""A loaded encoder: token ids in, embeddings or reranking scores out."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import TypeVar

import numpy as np

from ... import DoesNotFit, UsageError
from ...kernels.threads import MAX_WORKERS
from ...offload import hardware
from ...offload.checkpoint import TensorStore
from ...offload.safetensors_header import is_gguf
from ...offload.size import format_size, parse_size
from ..events import Progress, Yield
from ..images import EncodingCancelled, EncodingJob
from ..images.tower_ops import WorkerPool
from ..tokenizer import Tokenizer
from .encoder_config import EncoderConfig, family_of, read_encoder_config
from .gguf_encoder import GgufTensors
from .layers import Batch, Stack
from .pooling import Pooling, read_pooling
from .ranking_head import RankingHead
from .task_adapters import task_stacks
from .weights import STORED_DTYPES, FolderTensors, Tensors

BATCH_TOKENS = 4096  # maximum tokens of a batch, unless it is one longer text
STORED_NAME_PARTS = ("embeddings.", "_embd.", "token_types.")  # parts of the names of tables, which are kept as stored
NO_TASKS: Mapping[str | None, Stack] = {}
Result = TypeVar("Result")


@dataclass(frozen=True)
class EncoderOptions:
    """Options of a run."""

    ctx: int | None = None  # maximum tokens of a text, None for the model's maximum
    threads: int | None = None  # None: one per core
    ram: str | None = None  # such as "6G"
    strict: bool = False
    caps_ctx: bool = False  # a larger `ctx` is capped at the model's maximum with a notice: it is a setting for all models


@dataclass(frozen=True)
class EncoderPlan:
    """Sizes and limits of a run, known before weights are read."""

    folder: Path
    config: EncoderConfig
    context: int  # maximum tokens of a text
    threads: int
    weight_bytes: int
    activation_bytes: int  # at peak
    baseline_bytes: int  # of the process without a model
    budget_bytes: int  # available for all three
    notices: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes + self.baseline_bytes


def read_headers(folder: Path) -> tuple[EncoderConfig, dict[str, tuple[str, tuple[int, ...], int]], Pooling | None]:
    """Config, tensors and pooling of an encoder, without reading weights. Raises as `plan_encoder` and `open_encoder` do."""
    config = read_encoder_config(folder)
    return config, tensors_of(folder), None if config.ranks else read_pooling(folder, config.hidden_size)


def tensors_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """(dtype, shape, bytes) of each weight by stored name, without the position-id buffers of some folders."""
    if is_gguf(folder):
        from ..gguf.store import read_header

        return {name: (info.type, info.shape, info.nbytes) for name, info in read_header(folder).tensors.items()}
    with TensorStore.open(folder) as store:
        return {name: (info.dtype, info.shape, info.nbytes) for name, info in store.tensors.items() if info.dtype in STORED_DTYPES}


def tokenizer_of(folder: Path, config: EncoderConfig) -> Tokenizer:
    """The tokenizer of a folder or GGUF file. Raises ModelNotFound, TokenizerError."""
    if is_gguf(folder):
        from .gguf_tokenizer import load_file_tokenizer

        return load_file_tokenizer(folder, config.vocab_size)
    return Tokenizer.load(folder, config)


def plan_encoder(folder: Path, options: EncoderOptions) -> EncoderPlan:
    """Plan a run from the headers. Raises ModelNotFound, ConfigError, CheckpointError, UsageError, and DoesNotFit with the numbers."""
    config = read_encoder_config(folder, options.strict)
    context, notices = options.ctx or config.context_length, list(config.warnings)
    if context > config.context_length:
        message = f"-c {context} is more than the {config.context_length} tokens that this model takes"
        if not options.caps_ctx:
            raise UsageError(message, "leave out -c")
        context = config.context_length
        notices.append(f"{message}: ignored, since it is a setting for all models")
    weight_bytes = config.distance_nbytes + sum(
        nbytes if dtype in STORED_DTYPES and any(part in name for part in STORED_NAME_PARTS) else 4 * int(np.prod(shape, dtype=np.int64))
        for name, (dtype, shape, nbytes) in tensors_of(folder).items())
    threads = min(MAX_WORKERS, options.threads or hardware.cpu_threads())
    tokens = max(BATCH_TOKENS, context)
    activation_bytes = 4 * tokens * (6 * config.hidden_size) + threads * 4 * 384 * (2 * config.intermediate_size + 2 * context)
    budget_bytes = parse_size(options.ram) if options.ram else hardware.memory_available() + hardware.rss()
    plan = EncoderPlan(folder, config, context, threads, weight_bytes, activation_bytes, hardware.rss(), budget_bytes, tuple(notices))
    if plan.total_bytes > budget_bytes:
        raise DoesNotFit(f"{format_size(plan.total_bytes)} of memory are needed, {format_size(weight_bytes)} for weights, "
                         f"and there are only {format_size(budget_bytes)}",
                         "an encoder's weights are never offloaded: use a smaller model, or raise --ram")
    return plan


class Encoder:
    """A model with its weights in memory. Not thread-safe."""

    def __init__(self, plan: EncoderPlan, tokenizer: Tokenizer, stack: Stack, pooling: Pooling | None, head: RankingHead | None,
                 tasks: Mapping[str, Stack] = NO_TASKS) -> None:
        self.plan, self.config, self.folder, self.n_ctx, self.tokenizer = plan, plan.config, plan.folder, plan.context, tokenizer
        self._stack, self._pooling, self._head, self._tasks = stack, pooling, head, tasks

    @property
    def ranks(self) -> bool:
        return self._head is not None

    @property
    def width(self) -> int:
        """Dimension of an embedding."""
        return self.config.hidden_size if self._pooling is None else self._pooling.width(self.config.hidden_size)

    def require_embeddings(self) -> None:
        """Raises UsageError if the model makes no embeddings."""
        if self._pooling is None:
            raise UsageError("this model is a reranker and makes no embeddings",
                             "use POST /v1/rerank, or serve an embedding model")

    def require_ranking(self) -> None:
        """Raises UsageError if the model has no ranking head."""
        if self._head is None:
            raise UsageError("this model is not a reranker: it has no ranking head",
                             "use a reranker, such as BAAI/bge-reranker-v2-m3")

    def vectors(self, token_ids: Sequence[Sequence[int]], cancelled: Callable[[], bool],
                task: str | None = None) -> Generator[Progress | Yield, None, list[np.ndarray] | None]:
        """An embedding float32 [D] for each text's token ids, with the adapter of `task` if the model has it; None if cancelled.

        Raises UsageError if the model makes no embeddings.
        """
        self.require_embeddings()
        stack = self._tasks.get(task, self._stack)
        return (yield from self._run_batched(token_ids, None, self._pooling, "embedding", cancelled, stack))

    def scores(self, token_ids: Sequence[Sequence[int]], token_types: Sequence[Sequence[int]],
               cancelled: Callable[[], bool]) -> Generator[Progress | Yield, None, list[float] | None]:
        """Sigmoid of the ranking head's logit for each text pair, 0 to 1; None if cancelled. Raises UsageError if there is no such head."""
        self.require_ranking()

        def score(states: np.ndarray) -> float:
            return sigmoid(self._head.logit(states))

        return (yield from self._run_batched(token_ids, token_types, score, "ranking", cancelled))

    def _run_batched(self, token_ids: Sequence[Sequence[int]], token_types: Sequence[Sequence[int]] | None,
                     reduce: Callable[[np.ndarray], Result], phase: str, cancelled: Callable[[], bool],
                     stack: Stack | None = None) -> Generator[Progress | Yield, None, list[Result] | None]:
        """`reduce` of each text's hidden states [T, D], in order of the texts, which are batched by length; None if cancelled.

        stack: the layers of a task, None for the model's
        """
        order, results, num_done = sorted(range(len(token_ids)), key=lambda index: len(token_ids[index])), {}, 0
        while num_done < len(order):
            batch_indexes, tokens = [], 0
            for index in order[num_done:]:
                if batch_indexes and tokens + len(token_ids[index]) > BATCH_TOKENS:
                    break
                batch_indexes.append(index)
                tokens += len(token_ids[index])
            batch = Batch.from_texts([token_ids[index] for index in batch_indexes],
                                     token_types and [token_types[index] for index in batch_indexes])
            try:
                with WorkerPool(self.plan.threads, EncodingRequest(cancelled)) as pool:
                    states = (stack or self._stack).states(batch, pool)
            except EncodingCancelled:
                return None
            _check_finite(states)
            with np.errstate(over="ignore", invalid="ignore"):
                results |= {index: reduce(states[span]) for index, span in zip(batch_indexes, batch.texts, strict=True)}
            for index in batch_indexes:  # weights of pooling or head may be damaged too
                _check_finite(results[index])
            num_done += len(batch_indexes)
            yield Progress(phase, num_done, len(order), "texts") if num_done < len(order) else Yield()
        return [results[index] for index in range(len(token_ids))]


class EncodingRequest(EncodingJob):
    """An encoding that is cancelled when its client disconnects."""

    def __init__(self, cancelled: Callable[[], bool]) -> None:
        super().__init__()
        self._cancelled = cancelled

    def raise_if_cancelled(self) -> None:
        if self._cancelled():
            raise EncodingCancelled


def open_encoder(plan: EncoderPlan, tokenizer: Tokenizer) -> Iterator[Progress | Encoder]:
    """Read the weights; yields Progress, and the encoder last.

    Raises CheckpointError, ConfigError, and UsageError for a model that states neither pooling nor a head.
    """
    config = plan.config
    family = family_of(config.family)
    pooling = None if config.ranks else read_pooling(plan.folder, config.hidden_size)
    with ExitStack() as files:
        if is_gguf(plan.folder):
            stored = files.enter_context(GgufTensors(plan.folder))
            nbytes = stored.nbytes
        else:
            store = files.enter_context(TensorStore.open(plan.folder))
            stored, nbytes = FolderTensors(store, family.PREFIXES), store.nbytes
        yield Progress("loading", 0, nbytes, "bytes")
        tensors = Tensors(stored)
        stack = family.load(config, tensors)
        head = family.load_head(config, tensors) if config.ranks else None
        tasks = task_stacks(config, tensors, stack) if config.tasks else NO_TASKS
        if not is_gguf(plan.folder):
            store.check_unchanged()
        yield Progress("loading", nbytes, nbytes, "bytes")
    yield Encoder(plan, tokenizer, stack, pooling, head, tasks)


def _check_finite(values: np.ndarray | float) -> None:
    """Raises EffllmError for NaN or infinity."""
    if not np.isfinite(values).all():
        from ..generation.embedding import not_finite_error

        raise not_finite_error()


def sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x)) if x > -700 else 0.0  # exp overflows below
