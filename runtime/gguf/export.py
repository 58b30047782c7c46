"""Exports a model as one GGUF file, with tokenizer and chat template, for llama.cpp and programs built on it.

Matrices become F16, Q8_0 or Q4_0, vectors stay F32; at Q4_0 the embedding and the head are Q8_0, because errors there weigh most and
llama.cpp's own files keep them at higher precision too. One block of rows is in memory at a time, one tensor where the source is
quantized.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from math import prod
from pathlib import Path

import numpy as np

from ... import DoesNotFit, EffllmError, UsageError
from ...offload.checkpoint import TensorStore
from ...offload.gguf_header import BLOCKS, Value
from ...offload.gguf_writer import NewFile, PlannedTensor, gguf_head, padded
from ...offload.safetensors_header import CheckpointError, is_gguf
from ...offload.size import format_size
from ...quant.imports.gguf import quantize
from ...quant.weight import RAW_NUMPY, Weight, from_f32, to_f32
from ..config import ModelConfig, read_config
from ..conversion.convert_plan import MATRICES
from ..events import Notice, Progress
from ..families import EXPERT_ROLES, SHARED_EXPERT_ROLES, base_role, expert_of
from ..files.model_folder_files import describe_existing, require_folder
from ..ngrams import is_table
from ..sampling.generation_config import read_generation_config
from ..source import is_rounded, licence_of, open_store
from ..sparse.neuron_bundles import is_bundled
from ..stores.container import read_container
from ..stores.tensor_views import joins
from ..tensors import ModelTensor, check_tensors, with_own_layer
from ..tokenizer import Tokenizer
from ..weights.outliers import check_outliers
from . import (
    apertus,
    bitnet,
    deci,
    falcon_h1,
    hy_v4,
    kimi_delta_attention,
    latent_attention,
    linear_attention,
    muse_glimmer,
    nemotron_h,
    nextn,
    recurrent_layers,
    rwkv7,
)
from .architecture import Architecture
from .architectures import BY_FAMILY, file_architecture
from .config_export import TYPES, config_metadata, export_architecture, ignored_rope_scaling, ignored_window, rotary_tensors
from .folder_files import licence_metadata, sampling_metadata
from .multimodal_text import rows_of, with_mrope_keys
from .tensor_names import file_part
from .tensor_sources import deinterleaved

OTHER_PLACE = "choose another path with -o"
MXFP4 = "MXFP4"
BLOCK, HEADS = 32, ("embed", "layer_embed", "head")
BLOCK_NBYTES = 16 << 20  # float32 rows at once
VECTORS = (SHARED_EXPERT_ROLES[3], "correction")  # roles of rows that files hold as vectors
# Their files hold a head, also where it is the embedding.
HEADED = ("apertus", "bailingmoe2", "glm5-next", "gptneox", hy_v4.NAME, "kimi-linear", "mellum", "muse-glimmer", "nemotron", "olmo2",
          "olmoe", "phi2", "stablelm", "step35")

SHARED_AS_MLP = ("afmoe", "kolibri1")  # families whose layers have what all tokens visit as an MLP


@dataclass(frozen=True)
class Exported:
    """The file written."""

    path: Path
    nbytes: int
    tensors: int
    types: Mapping[str, int]

    def to_json(self) -> dict[str, object]:
        return {"file": str(self.path), "file_bytes": self.nbytes, "tensors": self.tensors, "types": dict(self.types)}


@dataclass(frozen=True)
class _Job:
    """A tensor of the file and what lies in it, one after the other. `heads`: rows are interleaved within so many; `offset` is added.
    `rows` and `columns`: which one of the model each of the file is, None for its own order; `decay`: logarithms become what they are of,
    times its number; `half`: (the model's config, the part) of the matrix that latent attention shares out, of which the tensor is one;
    `factors`: what each of `tensors` is multiplied by, or its rows, where any is. `turns`: so many rows of each of `tensors` in turn."""

    planned: PlannedTensor
    tensors: tuple[ModelTensor, ...]
    heads: int = 0
    offset: float = 0.0
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    decay: float = 0.0
    half: tuple[ModelConfig, str] | None = None
    factors: tuple[float | np.ndarray, ...] = ()
    turns: int = 0


def export_gguf(source: Path, out: Path, kind: str, name: str, replace: bool = False,
                tokenizer: Mapping[str, Value] | None = None,
                licence: str | None = None) -> Iterator[Progress | Notice | Exported]:
    """Write the model in `source` to the file `out`, matrices as `kind`; `name` becomes its title. The result comes last. `tokenizer`: its
    keys in the file, those of `source`'s own if None. `licence`: its name, as `source` states it if None.

    Raises UsageError where `out` exists or `kind` is unknown, and where `out` is of the source, whatever `replace` says; EffllmError for
    what GGUF cannot express.
    """
    if kind not in TYPES:
        raise UsageError(f"unknown GGUF type {kind!r}",
                         f"known: {', '.join(TYPES)}; INT8 and INT4 go with --format compressed-tensors")
    out = Path(os.path.abspath(out))
    check_name(out)
    config, container = read_config(source), read_container(source)
    if is_bundled(container):
        raise UsageError(f"{source} has bundled neurons, a layout that no other program reads", "export the original checkpoint")
    with open_store(source, wide="f32") as store:
        check_target(out, replace, store)
        tensors = (with_own_layer if config.family in nextn.WRITTEN else check_tensors)(config, store, container)
        config = replace_fields(config, tie_word_embeddings="head" not in tensors["outer"])
        found = export_architecture(config)
        check_outliers(tensors, store)
        config, tensors = apertus.with_curves(config, tensors, store)
        jobs = list(_jobs(tensors, config, found, kind))
        settings, remarks = read_generation_config(source)
        yield from map(Notice, remarks)
        keys = _tokenizer(source, config) if tokenizer is None else tokenizer
        licence = licence or (container and container.licence) or licence_of(source)
        ahead = nextn.export_keys(file_architecture(config), config) if nextn.parted(tensors["outer"])[1] else {}
        metadata = with_mrope_keys(source, config, config_metadata(config, name, kind) | ahead) | licence_metadata(source, licence)
        metadata |= sampling_metadata(settings) | dict(keys)
        orders = {hy_v4.FAMILY: hy_v4.rows_of}.get(config.family, rows_of)
        jobs = [job if (rows := orders(job.planned.name, config, metadata)) is None else replace_fields(job, rows=rows) for job in jobs]
        beside = {muse_glimmer.FAMILY: muse_glimmer.head_norms, rwkv7.FAMILY: rwkv7.unread}.get(config.family)
        factors = rotary_tensors(config) | (beside(config) if beside else {})
        planned = [PlannedTensor(each, "F32", values.shape) for each, values in factors.items()] + [job.planned for job in jobs]
        yield from _notices(config, jobs, kind, is_rounded(source))
        head = gguf_head(metadata, planned)
        total = len(head) + sum(padded(tensor.nbytes) for tensor in planned)
        done = len(head)
        with NewFile(out, total) as file:
            if file.left_nbytes:
                yield Notice(f"an export to {out.name} that was ended had left {format_size(file.left_nbytes)}: removed, starting over")
            if (free := shutil.disk_usage(out.parent).free) < total:
                raise DoesNotFit(f"{out.name} needs {format_size(total)}, and the disk of {out.parent} has {format_size(free)} free",
                                 "make room, or give a place on another disk with -o")
            file.write(head)
            for values in factors.values():
                file.write(values.tobytes() + bytes(padded(values.nbytes) - values.nbytes))
                done += padded(values.nbytes)
            for job in jobs:
                for piece in _pieces(store, job):
                    file.write(memoryview(piece).cast("B"))
                    done += piece.nbytes
                    yield Progress("exporting", done, total, "bytes", job.planned.name)
                gap = padded(job.planned.nbytes) - job.planned.nbytes
                file.write(bytes(gap))
                done += gap
            store.check_unchanged()
            check_target(out, replace, store)  # it may have been made meanwhile
            file.commit()
    counts = {each: sum(tensor.type == each for tensor in planned) for each in dict.fromkeys(tensor.type for tensor in planned)}
    yield Exported(out, total, len(planned), counts)


def check_name(out: Path) -> None:
    require_folder(out.parent)
    if not is_gguf(out):
        raise UsageError(f"{out.name or out} does not end in .gguf", f"-o {out.name or 'model'}.gguf")


def check_target(out: Path, replace: bool, store: TensorStore) -> None:
    """Raises UsageError for a file that must not be replaced: one of the model, no plain file, or any without `replace`."""
    if not os.path.lexists(out):
        return
    if any(out.exists() and os.path.samefile(out, file) for file in store.files):
        raise UsageError(f"{out} belongs to the model being exported", OTHER_PLACE)
    if out.is_symlink() or not out.is_file():
        raise UsageError(f"{out} is {describe_existing(out)}, which cannot be replaced", OTHER_PLACE)
    if not replace:
        raise UsageError(f"{out} exists", f"--force replaces it, or {OTHER_PLACE}")


def _tokenizer(source: Path, config: ModelConfig) -> dict[str, Value]:
    """The keys of the tokenizer: those of a GGUF file as they are, a folder's translated."""
    if is_gguf(source):
        from .store import read_header

        return {key: value for key, value in read_header(source).metadata.items() if key.startswith("tokenizer.")}
    from .tokenizer_export import tokenizer_metadata

    return tokenizer_metadata(source, Tokenizer.load(source, config), config.vocab_size)


def _jobs(tensors: Mapping[int | str, Mapping[str, ModelTensor]], config: ModelConfig, found: Architecture, kind: str) -> Iterator[_Job]:
    """The tensors of the file in the model's order: what is one in it and several in the model is put together."""
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads} if found.interleaved else {}
    outer, beside = nextn.parted(tensors["outer"])
    factors = falcon_h1.factors(config)
    if "head" not in outer and (BY_FAMILY[config.family] in HEADED or factors.get("head") != factors.get("embed")):
        outer = {**outer, "head": outer["embed"]}
    joined = joins(config)
    parts = {part: whole for whole, own in found.fused.items() for part in own}
    layers = [(key, roles) for key, roles in tensors.items() if key != "outer"]
    for key, roles in (("outer", outer), *layers, (config.num_hidden_layers, beside)):
        if config.family == deci.FAMILY and key != "outer":
            heads["k"] = config.kv_heads_of(key)[0] if key < config.num_hidden_layers else 0
        grouped: dict[str, list[tuple[str, ModelTensor]]] = {}
        for role, tensor in roles.items():
            if role in found.parts:
                yield from _in_parts(f"blk.{key}.", role, tensor, zip(found.parts[role], joined[tensor.name], strict=True), kind)
                continue
            shared = role in EXPERT_ROLES and "router" in roles and config.family in SHARED_AS_MLP
            own = file_part(f"shared.{role}" if shared else role, found)
            if config.family == "falcon" and config.parallel_block_norms and role.startswith("input_norm"):
                own = "attn_norm_2"
            end = "bias" if role.endswith("_bias") or role == "correction" else "weight"
            block = "" if key == "outer" or f"{own}.{end}" in found.outer else f"blk.{nemotron_h.block_of(config, key, role)}."
            grouped.setdefault(block + (own if own in found.whole else f"{parts.get(own, own)}.{end}"), []).append((role, tensor))
        for name, members in grouped.items():
            role, first = members[0]
            if role == "kv_b" and config.family != "minicpm3":
                yield from _halves(f"blk.{key}", first, config, kind)
                continue
            matrix = base_role(role)
            own, finer = "F32", role == "kv_b" or (bool(found.parts) and role in kimi_delta_attention.FINER)
            if matrix in MATRICES or finer:
                own = "Q8_0" if kind == "Q4_0" and (role in HEADS or finer or is_table(role)) else kind
                if first.spec.scheme == "mxfp" or (config.expert_format and expert_of(role) is not None):
                    own = MXFP4  # which files have too: nothing is rounded
                own = own if first.shape[1] % BLOCK == 0 else "F16"
            shape = (sum(tensor.shape[0] for _, tensor in members), *first.shape[1:])
            if expert_of(role) is not None:
                shape = (len(members), *first.shape)
            elif role in VECTORS and len(shape) == 2:
                shape = shape[1:]
            elif role.startswith(("state_", "shift_", "ngram_conv")):
                shape = recurrent_layers.shape_in_file(role, config, shape)
            planned, grown = PlannedTensor(name, own, shape), "norm" in role and role != "state_norm" and not role.endswith("_bias")
            yield _Job(planned, tuple(tensor for _, tensor in members), heads.get(role.removesuffix("_bias"), 0),
                       found.norm_offset if grown and first.name not in found.as_is else 0.0, *recurrent_layers.order(role, config),
                       recurrent_layers.side(config) if role == "state_decay" else 0.0,
                       factors=tuple(factors.get(role, 1.0) for role, _ in members) if factors else (),
                       turns=first.shape[0] // config.recurrent.key_heads if name.endswith(linear_attention.IN_TURN) else 0)


def _in_parts(block: str, role: str, tensor: ModelTensor, parts: Iterable[tuple[str, tuple[str, int]]], kind: str) -> Iterator[_Job]:
    """A tensor that files hold as several; `parts`: what each is called there, and in a checkpoint with how many rows."""
    begin, matrix = 0, base_role(role) in MATRICES
    for name, (_, rows) in parts:
        stored = "F32" if not matrix else kind if tensor.shape[1] % BLOCK == 0 else "F16"
        planned = PlannedTensor(f"{block}{name}.weight", stored, (rows, *tensor.shape[1:]))
        yield _Job(planned, (tensor,), rows=np.arange(begin, begin + rows))
        begin += rows


def _halves(block: str, tensor: ModelTensor, config: ModelConfig, kind: str) -> Iterator[_Job]:
    """The matrix that latent attention shares out among heads; as finely as the embedding, as llama.cpp's own files have it."""
    own, heads = config.mla, config.num_attention_heads
    for part, shape in zip(latent_attention.HALVES, ((heads, own.rank, own.nope), (heads, own.value, own.rank))):
        stored = ("Q8_0" if kind == "Q4_0" else kind) if shape[-1] % BLOCK == 0 else "F16"
        yield _Job(PlannedTensor(block + part, stored, shape), (tensor,), half=(config, part))


def _notices(config: ModelConfig, jobs: list[_Job], kind: str, quantized: bool) -> Iterator[Notice]:
    if any(job.planned.type == MXFP4 for job in jobs):
        yield Notice("experts stay in MXFP4, as they were published")
    if quantized and not config.expert_format:
        yield Notice("the source is quantized already: its errors and those of the new type add up")
    if kind == "Q4_0":
        yield Notice("the embedding and the head are written as Q8_0, where errors weigh most")
    odd = [job for job in jobs if len(job.planned.shape) > 1 and job.planned.shape[-1] % BLOCK and job.planned.type == "F16" != kind]
    if odd:
        yield Notice(f"{odd[0].planned.name} and {len(odd) - 1} more are written as F16: their rows are not a multiple of {BLOCK}")
    if config.family == bitnet.FAMILY and config.hidden_act != bitnet.ACTS[0]:
        yield Notice(bitnet.RUN_OTHERWISE)
    if (window := ignored_window(config)) is not None:
        yield Notice(f"llama.cpp runs this family without its sliding window: texts beyond {window} tokens differ")
    if said := ignored_rope_scaling(config):
        yield Notice(said)


def _pieces(store: TensorStore, job: _Job) -> Iterator[np.ndarray]:
    """The bytes of a tensor, some rows at a time."""
    if job.turns:
        parts = [_whole(store, tensor).reshape(-1, job.turns, tensor.shape[1]) for tensor in job.tensors]
        values = np.stack(parts, axis=1).reshape(job.planned.shape)
        yield _encoded(values, job, job.tensors[0], len(values))
        return
    for tensor, factor in zip(job.tensors, job.factors or (1.0,) * len(job.tensors), strict=True):
        rows = tensor.shape[0] if job.rows is None else len(job.rows)
        if not tensor.spec.is_raw:
            values = _whole(store, tensor)
            yield _encoded(_times(values if job.rows is None else values[job.rows], factor, 0), job, tensor, rows)
            continue
        step = max(1, BLOCK_NBYTES // 4 // max(1, prod(tensor.shape[1:])))
        if job.half is not None:
            step = max(1, step // job.half[0].mla.made) * job.half[0].mla.made
        if job.heads:  # whole heads, within which rows move
            per = rows // job.heads
            step = max(1, step // per) * per
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            with np.errstate(over="ignore"):  # looked for in what comes out
                encoded = _encoded(_times(_values(store, tensor, begin, end, job.rows), factor, begin), job, tensor, end - begin)
            yield encoded


def _whole(store: TensorStore, tensor: ModelTensor) -> np.ndarray:
    """All values of a matrix, float32."""
    if tensor.spec.is_raw:
        return _values(store, tensor, 0, tensor.shape[0], None)
    return Weight.low_bit(tensor.spec, tensor.shape, store.read(tensor.info)).to_f32()


def _times(values: np.ndarray, factor: float | np.ndarray, begin: int) -> np.ndarray:
    """Rows from `begin` on of a tensor that is multiplied by a number, or row by row."""
    if isinstance(factor, np.ndarray):
        return values * factor[begin : begin + len(values), None]
    return values if factor == 1.0 else values * np.float32(factor)


def _values(store: TensorStore, tensor: ModelTensor, begin: int, end: int, rows: np.ndarray | None) -> np.ndarray:
    if rows is not None:
        own = rows[begin:end]
        runs = np.split(own, np.flatnonzero(np.diff(own) != 1) + 1)
        return np.concatenate([_values(store, tensor, int(run[0]), int(run[-1]) + 1, None) for run in runs])
    scheme = tensor.spec.scheme
    return to_f32(store.read(tensor.info, begin, end).view(RAW_NUMPY[scheme]), scheme).reshape(end - begin, -1)


def _encoded(values: np.ndarray, job: _Job, tensor: ModelTensor, rows: int) -> np.ndarray:
    if not np.isfinite(values).all():
        raise EffllmError(f"{tensor.name}: NaN or infinity", "the checkpoint is damaged: download it again, or contact its publisher")
    if job.half is not None:
        values = latent_attention.half_of(values, *job.half)
    if job.heads:
        per = tensor.shape[0] // job.heads
        back = np.empty(rows, np.intp)
        back[deinterleaved(np.arange(rows), per)] = np.arange(rows)
        values = values[back]
    if job.columns is not None:
        values = np.ascontiguousarray(values[:, job.columns])
    if job.decay:
        values = np.float32(job.decay) * np.exp(values)
    if job.offset:
        values = values + np.float32(job.offset)
    own = job.planned.type
    if own in ("F32", "F16"):
        made = from_f32(values, own.lower())
        if own == "F16" and np.isinf(made.view(np.float16)).any():
            raise CheckpointError(f"{tensor.name} holds weights that F16 cannot", "--type Q8_0")
        return np.ascontiguousarray(made).view(np.uint8)
    made = quantize(values, own)
    scales = made.reshape(-1, BLOCKS[own][1])[:, :2].copy().view(np.float16)  # a block begins with its own, but for MXFP4's
    if own != MXFP4 and np.isinf(scales).any():
        raise CheckpointError(f"{tensor.name} holds weights that {own} cannot", "no model has such weights: contact its publisher")
    return made
