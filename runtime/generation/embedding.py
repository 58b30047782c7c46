"""Embeddings by causal models: the last token's hidden state or the mean of all, after the final norm.

The pooling is read from sentence-transformers' files, `modules.json` and `1_Pooling/config.json` (`pooling.json` in folders that effllm
made); a GGUF file states it in its metadata, and whether an EOS token is appended. Vectors always have length 1, whatever these files say,
as API clients expect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import ContextOverflow, EffllmError, UsageError
from ...kernels.reference import normalise
from ...offload.direct_io import Interrupted
from ...offload.safetensors_header import is_gguf
from ..config_reader import ConfigError, show
from ..engine import Engine
from ..events import Progress, Yield
from ..files.bounded_read import MAX_JSON_NBYTES, read_bounded
from ..gguf.architecture import POOLING_TYPES
from ..hub import DENSE, MODULES, POOLING, POOLING_KEPT
from ..kv.varlen_cache import kernel_boundaries, plan_batches, supports_varlen
from ..tokenizer import Tokenizer

if TYPE_CHECKING:
    from .dense import Dense

LAST, MEAN = "last", "mean"
POOLING_MODES = {"lasttoken": LAST, "mean": MEAN}
OLD_POOLING_KEYS = {"pooling_mode_lasttoken": LAST, "pooling_mode_mean_tokens": MEAN}  # as older versions write it
IMPLICIT_MODULES = {"transformer", "pooling", "normalize"}  # last words of the types of modules whose work is done here anyway
POOLING_TYPE, EOS_TOKEN_ID, ADD_EOS_TOKEN = "{}.pooling_type", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.add_eos_token"
OTHER_MODEL_HINT = "use an embedding model, such as qwen3-embedding-0.6b"


def read_pooling_mode(path: Path | None) -> str:
    """The pooling of the model at `path`: last or mean. Raises UsageError for a model that is no embedding model, or whose pooling is
    not supported."""
    if path is not None and is_gguf(path):
        if (mode := POOLING_TYPES.get(gguf_value(path, POOLING_TYPE))) is None:
            raise UsageError("this model is not an embedding model: its file states no pooling", OTHER_MODEL_HINT)
        return mode
    names = () if path is None else (POOLING, POOLING_KEPT)
    config = next((found for name in names if (found := read_json(path / name)) is not None), None)
    if not isinstance(config, dict):
        raise UsageError("this model is not an embedding model: its files state no pooling", OTHER_MODEL_HINT)
    modules = read_json(path / MODULES)
    for module in modules if isinstance(modules, list) else () if modules is None else (modules,):
        module_type = module.get("type") if isinstance(module, dict) else None
        is_supported = isinstance(module_type, str) and (module_type.rpartition(".")[2].lower() in IMPLICIT_MODULES or is_dense(module)
                                                  and module.get("path") in DENSE)
        if not is_supported:
            raise UsageError(f"this model's embeddings go through a module {show(module_type)}, which is not supported", OTHER_MODEL_HINT)
    mode = config.get("pooling_mode")
    modes = {POOLING_MODES.get(mode, str(mode))} if isinstance(mode, str) else {
        OLD_POOLING_KEYS.get(name, name.removeprefix("pooling_mode_")) for name, value in config.items()
        if name.startswith("pooling_mode_") and value is True}
    if not modes:
        raise UsageError("this model's files state no pooling mode", OTHER_MODEL_HINT)
    if len(modes) != 1 or not modes <= {LAST, MEAN}:
        raise UsageError(f"this model's pooling is {show(' and '.join(sorted(modes)))}, which is not supported (last token and mean "
                         "are)", OTHER_MODEL_HINT)
    return modes.pop()


def is_dense(module: object) -> bool:
    """Whether an entry of modules.json is a dense layer."""
    module_type = module.get("type") if isinstance(module, dict) else None
    return isinstance(module_type, str) and module_type.rpartition(".")[2].lower() == "dense"


def read_dense_layers(path: Path | None, width: int) -> tuple[Dense, ...]:
    """The dense layers after pooling, for vectors of `width` numbers. Raises EffllmError."""
    from .dense import dense_layers_of_folder, dense_layers_of_gguf

    if path is None:
        return ()
    if is_gguf(path):
        from ..gguf.store import read_header

        return dense_layers_of_gguf(path, read_header(path).tensors, width)
    modules = read_json(path / MODULES)
    return dense_layers_of_folder(path, [each["path"] for each in modules if is_dense(each)] if isinstance(modules, list) else [], width)


def all_dense_layers(engine: Engine) -> tuple[Dense, ...]:
    """All dense layers after pooling: the model's own projector, and those of sentence-transformers. Raises EffllmError."""
    from .dense import ACTIVATIONS, Dense

    projector = engine.model.read_vector()
    projector_layers = tuple(Dense(matrix, activation=ACTIVATIONS["ReLU"] if index < len(projector) else None)
                             for index, matrix in enumerate(projector, 1))
    return projector_layers + read_dense_layers(engine.prepared.folder, len(projector[-1]) if projector else engine.config.hidden_size)


def eos_suffix(path: Path | None, tokenizer: Tokenizer) -> list[int]:
    """The EOS token appended to every text, if any; for folders the tokenizer appends it itself."""
    if path is not None and is_gguf(path):
        eos_id = gguf_value(path, EOS_TOKEN_ID)
        return [eos_id] if gguf_value(path, ADD_EOS_TOKEN) is True and type(eos_id) is int else []
    with_special, without_special = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    return [] if with_special[-1] == without_special[-1] else with_special[-1:]


def gguf_value(path: Path, key: str) -> Any:
    """A GGUF metadata value; `{}` stands for the architecture."""
    from ..gguf.store import read_header

    metadata = read_header(path).metadata
    return metadata.get(key.format(metadata.get("general.architecture")))


def read_json(path: Path) -> object:
    """A parsed JSON file, None if there is none. Raises ConfigError."""
    try:
        return json.loads(read_bounded(path, MAX_JSON_NBYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON", "the download may be incomplete") from error


def embed_text(engine: Engine, ids: Sequence[int], pooling: str, cancelled: Callable[[], bool],
           dense: Sequence[Dense] = ()) -> Generator[Yield, None, np.ndarray | None]:
    """`embed_texts` of one text."""
    embeddings = yield from embed_texts(engine, [ids], pooling, cancelled, dense)
    return None if embeddings is None else embeddings[0]


def embed_texts(engine: Engine, texts: Sequence[Sequence[int]], pooling: str, cancelled: Callable[[], bool],
            dense: Sequence[Dense] = ()) -> Generator[Yield | Progress, None, list[np.ndarray] | None]:
    """One vector float32 [D] of length 1 per text of token ids, after the `dense` layers; None if cancelled.

    The engine's sequence is dropped. Raises ContextOverflow.
    """
    for ids in texts:
        check_length(ids, engine.n_ctx)
    norm, totals = engine.model.read_norm(), np.zeros((len(texts), engine.config.hidden_size))

    def add(index: int, states: np.ndarray, is_last: bool) -> None:
        if pooling == MEAN or is_last:
            rows = states if pooling == MEAN else states[-1:]
            totals[index] += normalise(rows, norm.kind, norm.weight, norm.bias, norm.eps).sum(0)

    if not (yield from prefill_texts(engine, texts, "embedding", cancelled, add, last_states=None if pooling == MEAN else 1)):
        return None
    embeddings = []
    for ids, total in zip(texts, totals, strict=True):
        engine.require_finite_logits(total[None])
        pooled = total / len(ids) if pooling == MEAN else total
        for layer in dense:
            pooled = layer(pooled)
        embeddings.append(normalized(pooled))
    return embeddings


def prefill_texts(engine: Engine, texts: Sequence[Sequence[int]], phase: str, cancelled: Callable[[], bool],
                  on_states: Callable[[int, np.ndarray, bool], None],
                  last_states: int | None = None) -> Generator[Yield | Progress, None, bool]:
    """Prefill texts of token ids, each from an empty cache; short ones share a pass where the engine can. False if cancelled.

    `on_states` gets (index of the text, hidden states of a chunk, whether it is the last chunk).
    `last_states`: how many states from the end of each text it needs, None for all.
    The engine's sequence is dropped.
    """
    engine.cancelled, done = cancelled, 0
    try:
        for indexes in _plan_passes(engine, texts):
            if len(indexes) > 1:
                for index, states in zip(indexes, engine.batched_states([texts[index] for index in indexes]), strict=True):
                    on_states(index, states, True)
                if cancelled():
                    return False
                yield Yield()
            else:
                for start, states in engine.states(texts[indexes[0]], num_last=last_states):
                    on_states(indexes[0], states, start + len(states) == len(texts[indexes[0]]))
                    if cancelled():
                        return False
                    yield Yield()
            done += len(indexes)
            if done < len(texts):
                yield Progress(phase, done, len(texts), "texts")
    except Interrupted:
        return False
    finally:
        engine.reset()  # its tokens are no prefix that a later prompt may continue
    return True


def _plan_passes(engine: Engine, texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indexes of the texts of each pass: short texts share passes, a long one has its own."""
    can_batch = len(texts) > 1 and supports_varlen(engine)
    batchable = [index for index, ids in enumerate(texts) if can_batch and engine.fits_one_pass(len(ids))]
    passes = plan_batches([len(texts[index]) for index in batchable], engine.cache.shape.chunk, kernel_boundaries(engine))
    single_passes = [[index] for index in range(len(texts)) if index not in {*batchable}]
    return [[batchable[position] for position in batch] for batch in passes] + single_passes


def check_length(ids: Sequence[int], n_ctx: int, hint: str = "shorten it, or serve with a larger -c") -> None:
    """Raises ContextOverflow for a text that does not fit a context of `n_ctx` tokens."""
    if not 0 < len(ids) <= n_ctx:
        raise ContextOverflow(f"a text has {len(ids)} token{'' if len(ids) == 1 else 's'} and the context holds {n_ctx}",
                              hint if ids else "write something")


def not_finite_error() -> EffllmError:
    """The error for a model whose outputs are NaN or infinite."""
    return EffllmError("this model computes NaN or infinite numbers", "its weights may be damaged: fetch it again")


def normalized(values: np.ndarray) -> np.ndarray:
    """Normalized to length 1, float32; zeros stay zeros. Raises EffllmError for NaN."""
    length = np.linalg.norm(values.astype(np.float64))
    if not np.isfinite(length):
        raise not_finite_error()
    return (values / length if length else values).astype(np.float32)


def truncate_dimensions(embeddings: Iterable[np.ndarray], dimensions: int | None) -> list[np.ndarray]:
    """Matryoshka truncation: the first `dimensions` numbers of each, normalized again."""
    return [each if dimensions is None else normalized(each[:dimensions]) for each in embeddings]


def shortest_floats(embedding: np.ndarray) -> list[float]:
    """Rounded to the significant digits of float32."""
    return [float(str(each)) for each in embedding]
