"""A model written as one GGUF file, with its tokenizer and chat template, for llama.cpp and what is built on it.

Matrices become F16, Q8_0 or Q4_0, vectors stay F32; at Q4_0 the embedding and the head are Q8_0, because errors there weigh most and
llama.cpp's own files keep them finer too. One block of rows is in memory at a time, one tensor where the source is quantized.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from ... import DoesNotFit, EffllmError, UsageError
from ...offload.checkpoint import TensorStore
from ...offload.gguf import Value
from ...offload.gguf_writer import NewFile, PlannedTensor, gguf_head, padded
from ...offload.header import CheckpointError, is_gguf
from ...offload.size import format_size
from ...quant.imports.gguf import quantize
from ...quant.weight import RAW_NUMPY, Weight, from_f32, to_f32
from ..config import ModelConfig, read_config
from ..container import read_container
from ..convert_plan import MATRICES
from ..events import Notice, Progress
from ..model import ModelTensor, check_tensors
from ..rope import rope_table
from ..source import open_store
from ..text import Tokenizer
from .architectures import ARCHITECTURES, BY_FAMILY, FACTORS, Architecture, file_name
from .store import separated

TYPES = {"F16": 1, "Q8_0": 7, "Q4_0": 2}  # what a person may ask for -> general.file_type
BLOCK, HEADS = 32, ("embed", "head")
BLOCK_NBYTES = 16 << 20  # float32 rows at once
QUANTIZATION_VERSION = 2


@dataclass(frozen=True)
class Exported:
    """The file that was made."""

    path: Path
    nbytes: int
    tensors: int
    types: Mapping[str, int]

    def to_json(self) -> dict[str, object]:
        return {"file": str(self.path), "file_bytes": self.nbytes, "tensors": self.tensors, "types": dict(self.types)}


@dataclass(frozen=True)
class _Job:
    """A tensor and what it becomes. `heads`: rows are interleaved within so many."""

    tensor: ModelTensor
    planned: PlannedTensor
    heads: int = 0


def export_gguf(source: Path, out: Path, kind: str, name: str, replace: bool = False) -> Iterator[Progress | Notice | Exported]:
    """Write the model in `source` to the file `out`, matrices as `kind`; `name` becomes its title. The result comes last.

    Raises UsageError where `out` exists or `kind` is unknown, EffllmError for what GGUF cannot express.
    """
    if kind not in TYPES:
        raise UsageError(f"no GGUF type {kind!r} is written", f"known: {', '.join(TYPES)}")
    out = Path(os.path.abspath(out))
    _check_target(out, replace)
    config, container = read_config(source), read_container(source)
    found = _architecture(config)
    with open_store(source, wide="f32") as store:
        jobs = list(_jobs(check_tensors(config, store, container), config, found, kind))
        metadata = config_metadata(config, name, kind) | _tokenizer(source, config)
        factors = rotary_divisors(config)
        planned = [job.planned for job in jobs]
        if factors is not None:
            planned.insert(0, PlannedTensor(FACTORS, "F32", factors.shape))
        yield from _notices(config, jobs, kind, container is not None)
        head = gguf_head(metadata, planned)
        total = len(head) + sum(padded(tensor.nbytes) for tensor in planned)
        if (free := shutil.disk_usage(out.parent).free) < total:
            raise DoesNotFit(f"{out.name} needs {format_size(total)}, and the disk of {out.parent} has {format_size(free)} free",
                             "make room, or give a place on another disk with -o")
        done = len(head)
        with NewFile(out) as file:
            file.write(head)
            if factors is not None:
                file.write(factors.tobytes() + bytes(padded(factors.nbytes) - factors.nbytes))
                done += padded(factors.nbytes)
            for job in jobs:
                for piece in _pieces(store, job):
                    file.write(memoryview(piece).cast("B"))
                    done += piece.nbytes
                    yield Progress("exporting", done, total, "bytes", job.tensor.name)
                gap = padded(job.planned.nbytes) - job.planned.nbytes
                file.write(bytes(gap))
                done += gap
            store.check_unchanged()
            file.commit()
    counts = {each: sum(tensor.type == each for tensor in planned) for each in dict.fromkeys(tensor.type for tensor in planned)}
    yield Exported(out, total, len(planned), counts)


def _check_target(out: Path, replace: bool) -> None:
    if not out.parent.is_dir():
        raise UsageError(f"there is no folder {out.parent}", f"mkdir -p {out.parent}")
    if not is_gguf(out):
        raise UsageError(f"{out.name} does not end in .gguf, by which such files are known", f"-o {out.name}.gguf")
    if os.path.lexists(out) and not (replace and out.is_file() and not out.is_symlink()):
        raise UsageError(f"{out} exists", "--force replaces a file, or give another place with -o")


def _architecture(config: ModelConfig) -> Architecture:
    if config.family not in BY_FAMILY:
        raise EffllmError(f"{config.family} models are not exported as GGUF", f"exported are {', '.join(BY_FAMILY)}")
    if config.o_bias or config.mlp_bias:
        raise EffllmError("a model with biases on o or in its feed-forward has no place for them in a GGUF file of its family",
                          "leave it in its folder")
    if config.hidden_act != "silu":
        raise EffllmError(f"a GGUF file of the {config.family} family means silu, this model has {config.hidden_act}",
                          "leave it in its folder")
    if config.family == "mistral" or set(config.windows) == {None}:
        return ARCHITECTURES[BY_FAMILY[config.family]]
    raise EffllmError("a GGUF file of this family has no sliding window, and this model has one", "leave it in its folder")


def config_metadata(config: ModelConfig, name: str, kind: str) -> dict[str, Value]:
    """The keys that describe the model, tokenizer apart."""
    arch = BY_FAMILY[config.family]
    out: dict[str, Value] = {"general.architecture": arch, "general.type": "model", "general.name": name, "general.file_type": TYPES[kind],
                             "general.quantization_version": QUANTIZATION_VERSION}
    keys: dict[str, Value] = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim, "rope.dimension_count": config.head_dim,
        "rope.freq_base": float(config.rope.theta), "vocab_size": config.vocab_size}
    if config.windows[0] is not None:
        keys["attention.sliding_window"] = config.windows[0]
    params = config.rope.params
    if config.rope.kind == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(params["factor"])}
    elif config.rope.kind == "yarn":
        if params["attention_factor"] is not None or params["mscale"] or params["mscale_all_dim"] or not params["truncate"]:
            raise EffllmError("this model's yarn scaling has settings that a GGUF file cannot state", "leave it in its folder")
        keys |= {"rope.scaling.type": "yarn", "rope.scaling.factor": float(params["factor"]),
                 "rope.scaling.original_context_length": int(params["original_max_position_embeddings"]),
                 "rope.scaling.yarn_beta_fast": float(params["beta_fast"]), "rope.scaling.yarn_beta_slow": float(params["beta_slow"])}
    return out | {f"{arch}.{key}": value for key, value in keys.items()}


def rotary_divisors(config: ModelConfig) -> np.ndarray | None:
    """What FACTORS holds, float32 [head_dim / 2]; None where plain or scaled positions need none. Raises EffllmError for kinds that depend
    on the length."""
    kind, params = config.rope.kind, config.rope.params
    if kind in ("default", "linear", "yarn"):
        return None
    if kind == "longrope" and params["short_factor"] == params["long_factor"] and params["attention_factor"] == 1.0:
        return np.array(params["long_factor"], "<f4")
    if kind != "llama3":
        raise EffllmError(f"rotary positions of kind {kind} depend on the length of the text, which a GGUF file cannot state",
                          "leave it in its folder")
    plain = config.rope.theta ** (-np.arange(0, config.head_dim, 2, np.float64) / config.head_dim)
    stretched = rope_table(config.rope, config.head_dim, config.max_position_embeddings, config.max_position_embeddings).inv_freq
    return (plain / stretched).astype("<f4")


def _tokenizer(source: Path, config: ModelConfig) -> dict[str, Value]:
    """The keys of the tokenizer: those of a GGUF file as they are, a folder's translated."""
    if is_gguf(source):
        from .store import read_header

        return {key: value for key, value in read_header(source).metadata.items() if key.startswith("tokenizer.")}
    from .vocabulary_out import tokenizer_metadata

    return tokenizer_metadata(source, Tokenizer.load(source, config), config.vocab_size)


def _jobs(tensors: Mapping[int | str, Mapping[str, ModelTensor]], config: ModelConfig, found: Architecture, kind: str) -> Iterator[_Job]:
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    for roles in tensors.values():
        for role, tensor in roles.items():
            own = "F32"
            if role in MATRICES:
                own = "Q8_0" if kind == "Q4_0" and role in HEADS else kind
                own = own if tensor.shape[1] % BLOCK == 0 else "F16"
            name = file_name(tensor.name, found)
            yield _Job(tensor, PlannedTensor(name, own, tensor.shape), heads.get(role.removesuffix("_bias"), 0) if found.interleaved else 0)


def _notices(config: ModelConfig, jobs: list[_Job], kind: str, quantized: bool) -> Iterator[Notice]:
    if quantized:
        yield Notice("the source is quantized already: its errors and those of the new type add up")
    if kind == "Q4_0":
        yield Notice("the embedding and the head are written as Q8_0, where errors weigh most")
    if odd := [job for job in jobs if len(job.tensor.shape) == 2 and job.tensor.shape[1] % BLOCK and kind != "F16"]:
        yield Notice(f"{odd[0].tensor.name} and {len(odd) - 1} more are written as F16: their rows are no multiple of {BLOCK}")
    if config.windows[0] is not None:
        yield Notice(f"llama.cpp runs this family without its sliding window: texts beyond {config.windows[0]} tokens differ")


def _pieces(store: TensorStore, job: _Job) -> Iterator[np.ndarray]:
    """The bytes of a tensor, some rows at a time."""
    tensor, rows = job.tensor, job.tensor.shape[0]
    if tensor.spec.is_raw:
        step = max(1, BLOCK_NBYTES // 4 // max(1, prod(tensor.shape[1:])))
        if job.heads:  # whole heads, within which rows move
            per = rows // job.heads
            step = max(1, step // per) * per
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            yield _encoded(_values(store, tensor, begin, end), job, end - begin)
        return
    blob = store.read(tensor.info)
    yield _encoded(Weight.low_bit(tensor.spec, tensor.shape, blob).to_f32(), job, rows)


def _values(store: TensorStore, tensor: ModelTensor, begin: int, end: int) -> np.ndarray:
    scheme = tensor.spec.scheme
    return to_f32(store.read(tensor.info, begin, end).view(RAW_NUMPY[scheme]), scheme).reshape(end - begin, -1)


def _encoded(values: np.ndarray, job: _Job, rows: int) -> np.ndarray:
    if not np.isfinite(values).all():
        raise EffllmError(f"{job.tensor.name}: NaN or infinity", "the checkpoint is damaged: download it again, or ask who published it")
    if job.heads:
        per = job.tensor.shape[0] // job.heads
        back = np.empty(rows, np.intp)
        back[separated(np.arange(rows), per)] = np.arange(rows)
        values = values[back]
    own = job.planned.type
    if own in ("F32", "F16"):
        made = from_f32(values, own.lower())
        if own == "F16" and np.isinf(made.view(np.float16)).any():
            raise CheckpointError(f"{job.tensor.name} holds weights that F16 cannot", "--type Q8_0")
        return np.ascontiguousarray(made).view(np.uint8)
    return quantize(values, own)
