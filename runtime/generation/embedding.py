"""Embeddings by causal models: the last token's hidden state or the mean of all, after the final norm.

The pooling is read from sentence-transformers' files, `modules.json` and `1_Pooling/config.json` (kept as `pooling.json` in folders that
effllm made); a GGUF file states it, and whether an EOS token is appended. Vectors always have length 1, whatever these files say, as API
clients expect.
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
from ..files.bounded_read import JSON_NBYTES, read_bounded
from ..gguf.architecture import POOLED
from ..hub import DENSE, MODULES, POOLING, POOLING_KEPT
from ..kv.varlen_cache import kernel_boundaries, plan_batches, supports_varlen
from ..tokenizer import Tokenizer

if TYPE_CHECKING:
    from .dense import Dense

LAST, MEAN = "last", "mean"
WAYS = {"lasttoken": LAST, "mean": MEAN}
STATED = {"pooling_mode_lasttoken": LAST, "pooling_mode_mean_tokens": MEAN}  # as it was written before
USUAL = {"transformer", "pooling", "normalize"}  # modules that do what is done here, by the last word of their type
POOLING_TYPE, EOS, ADDS_EOS = "{}.pooling_type", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.add_eos_token"
OTHERS = "use an embedding model, such as qwen3-embedding-0.6b"


def pooling_of(path: Path | None) -> str:
    """The pooling of the model at `path`: last or mean. Raises UsageError for a model that is no embedding model, or whose pooling is
    not supported."""
    if path is not None and is_gguf(path):
        if (way := POOLED.get(stated_in(path, POOLING_TYPE))) is None:
            raise UsageError("this model is not an embedding model: its file states no pooling", OTHERS)
        return way
    names = () if path is None else (POOLING, POOLING_KEPT)
    stated = next((found for name in names if (found := read_json(path / name)) is not None), None)
    if not isinstance(stated, dict):
        raise UsageError("this model is not an embedding model: its files state no pooling", OTHERS)
    modules = read_json(path / MODULES)
    for module in modules if isinstance(modules, list) else () if modules is None else (modules,):
        kind = module.get("type") if isinstance(module, dict) else None
        known = isinstance(kind, str) and (kind.rpartition(".")[2].lower() in USUAL or is_dense(module) and module.get("path") in DENSE)
        if not known:
            raise UsageError(f"this model's embeddings go through a module {show(kind)}, which is not supported", OTHERS)
    way = stated.get("pooling_mode")
    said = {WAYS.get(way, str(way))} if isinstance(way, str) else {
        STATED.get(name, name.removeprefix("pooling_mode_")) for name, value in stated.items()
        if name.startswith("pooling_mode_") and value is True}
    if not said:
        raise UsageError("this model's files state no pooling mode", OTHERS)
    if len(said) != 1 or not said <= {LAST, MEAN}:
        raise UsageError(f"this model's pooling is {show(' and '.join(sorted(said)))}, which is not supported (last token and mean "
                         "are)", OTHERS)
    return said.pop()


def is_dense(module: object) -> bool:
    """Whether an entry of modules.json is a dense layer."""
    kind = module.get("type") if isinstance(module, dict) else None
    return isinstance(kind, str) and kind.rpartition(".")[2].lower() == "dense"


def dense_of(path: Path | None, width: int) -> tuple[Dense, ...]:
    """The dense layers after pooling, for vectors of `width` numbers. Raises EffllmError."""
    from .dense import dense_of_folder, dense_of_gguf

    if path is None:
        return ()
    if is_gguf(path):
        from ..gguf.store import read_header

        return dense_of_gguf(path, read_header(path).tensors, width)
    modules = read_json(path / MODULES)
    return dense_of_folder(path, [each["path"] for each in modules if is_dense(each)] if isinstance(modules, list) else [], width)


def dense_layers_of(engine: Engine) -> tuple[Dense, ...]:
    """All dense layers of this model after pooling: its own, and those stored beside it. Raises EffllmError."""
    from .dense import CURVES, Dense

    own = engine.model.read_vector()
    before = tuple(Dense(matrix, curve=CURVES["ReLU"] if place < len(own) else None) for place, matrix in enumerate(own, 1))
    return before + dense_of(engine.prepared.folder, len(own[-1]) if own else engine.config.hidden_size)


def ending(path: Path | None, tokenizer: Tokenizer) -> list[int]:
    """The EOS token appended to every text, if any; for folders the tokenizer appends it itself."""
    if path is not None and is_gguf(path):
        number = stated_in(path, EOS)
        return [number] if stated_in(path, ADDS_EOS) is True and type(number) is int else []
    whole, bare = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    return [] if whole[-1] == bare[-1] else whole[-1:]


def stated_in(path: Path, key: str) -> Any:
    """A GGUF metadata value; `{}` stands for the architecture."""
    from ..gguf.store import read_header

    metadata = read_header(path).metadata
    return metadata.get(key.format(metadata.get("general.architecture")))


def read_json(path: Path) -> object:
    """A parsed JSON file, None if there is none. Raises ConfigError."""
    try:
        return json.loads(read_bounded(path, JSON_NBYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON", "the download may be incomplete") from error


def vector(engine: Engine, ids: Sequence[int], pooling: str, cancelled: Callable[[], bool],
           dense: Sequence[Dense] = ()) -> Generator[Yield, None, np.ndarray | None]:
    """`vectors` of one text."""
    made = yield from vectors(engine, [ids], pooling, cancelled, dense)
    return None if made is None else made[0]


def vectors(engine: Engine, texts: Sequence[Sequence[int]], pooling: str, cancelled: Callable[[], bool],
            dense: Sequence[Dense] = ()) -> Generator[Yield | Progress, None, list[np.ndarray] | None]:
    """One vector float32 [D] of length 1 per text of token ids, after `dense`; None if cancelled. The engine's sequence is dropped.
    Raises ContextOverflow."""
    for ids in texts:
        demand_room(ids, engine.n_ctx)
    norm, totals = engine.model.read_norm(), np.zeros((len(texts), engine.config.hidden_size))

    def add(place: int, states: np.ndarray, is_last: bool) -> None:
        if pooling == MEAN or is_last:
            rows = states if pooling == MEAN else states[-1:]
            totals[place] += normalise(rows, norm.kind, norm.weight, norm.bias, norm.eps).sum(0)

    if not (yield from prefill_texts(engine, texts, "embedding", cancelled, add, wanted=None if pooling == MEAN else 1)):
        return None
    made = []
    for ids, total in zip(texts, totals, strict=True):
        engine.demand_finite(total[None])
        mean = total / len(ids) if pooling == MEAN else total
        for each in dense:
            mean = each(mean)
        made.append(normalized(mean))
    return made


def prefill_texts(engine: Engine, texts: Sequence[Sequence[int]], phase: str, cancelled: Callable[[], bool],
                  see: Callable[[int, np.ndarray, bool], None], wanted: int | None = None) -> Generator[Yield | Progress, None, bool]:
    """Prefill texts of token ids, each from an empty cache; short ones share a pass where the engine can. `see` gets (index of the text,
    hidden states of a chunk, is it the last chunk), with the states of the text's last `wanted` tokens at least, None for all. False if
    cancelled. The engine's sequence is dropped."""
    engine.cancelled, read = cancelled, 0
    try:
        for places in _passes(engine, texts):
            if len(places) > 1:
                for place, states in zip(places, engine.together([texts[place] for place in places]), strict=True):
                    see(place, states, True)
                if cancelled():
                    return False
                yield Yield()
            else:
                for start, states in engine.states(texts[places[0]], wanted=wanted):
                    see(places[0], states, start + len(states) == len(texts[places[0]]))
                    if cancelled():
                        return False
                    yield Yield()
            read += len(places)
            if read < len(texts):
                yield Progress(phase, read, len(texts), "texts")
    except Interrupted:
        return False
    finally:
        engine.reset()  # what a prompt would go on from is not here
    return True


def _passes(engine: Engine, texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Groups of indexes of texts that share a pass; a long text has its own."""
    together = [place for place, ids in enumerate(texts) if engine.alone(len(ids))] if len(texts) > 1 and supports_varlen(engine) else []
    passes = plan_batches([len(texts[place]) for place in together], engine.cache.shape.chunk, kernel_boundaries(engine))
    apart = [[place] for place in range(len(texts)) if place not in {*together}]
    return [[together[each] for each in places] for places in passes] + apart


def demand_room(ids: Sequence[int], room: int, hint: str = "shorten it, or serve with a larger -c") -> None:
    """Raises ContextOverflow for a text that does not fit a context of `room` tokens."""
    if not 0 < len(ids) <= room:
        raise ContextOverflow(f"a text has {len(ids)} token{'' if len(ids) == 1 else 's'} and the context holds {room}",
                              hint if ids else "write something")


def not_finite() -> EffllmError:
    """The error for a model whose outputs are NaN or infinite."""
    return EffllmError("this model computes NaN or infinite numbers", "its weights may be damaged: fetch it again")


def normalized(values: np.ndarray) -> np.ndarray:
    """Normalized to length 1, float32; zeros stay zeros. Raises EffllmError for NaN."""
    length = np.linalg.norm(values.astype(np.float64))
    if not np.isfinite(length):
        raise not_finite()
    return (values / length if length else values).astype(np.float32)


def truncated(vectors: Iterable[np.ndarray], dimensions: int | None) -> list[np.ndarray]:
    """Matryoshka truncation: the first `dimensions` numbers of each, normalized again."""
    return [each if dimensions is None else normalized(each[:dimensions]) for each in vectors]


def shortest_floats(vector: np.ndarray) -> list[float]:
    """Rounded to the significant digits of float32."""
    return [float(str(each)) for each in vector]
