"""Exports a model as one GGUF file, with tokenizer and chat template, for llama.cpp and programs built on it.

Matrices become F16, BF16, Q8_0 or Q4_0, vectors stay F32; at Q4_0 the embedding and the head are Q8_0, since errors there weigh most and
llama.cpp's own files keep them at higher precision too. One block of rows is in memory at a time, one tensor if the source is quantized.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from ..source import is_already_quantized, licence_of, open_store
from ..sparse.neuron_bundles import is_bundled
from ..stores.container import read_container
from ..stores.tensor_views import concatenated_parts
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
from .config_export import FILE_TYPES, config_metadata, export_architecture, ignored_window
from .file_architecture import ARCHITECTURE_BY_FAMILY, file_architecture
from .folder_files import licence_metadata, sampling_metadata
from .multimodal_text import checkpoint_rows, with_mrope_keys
from .rope_export import ignored_rope_scaling, rotary_tensors
from .tensor_names import file_part
from .tensor_sources import RAW_TYPES, deinterleaved

OUTPUT_PATH_HINT = "choose another path with -o"
MXFP4, HALF_TYPES = "MXFP4", ("F16", "BF16")
BLOCK_SIZE, HIGH_PRECISION_ROLES = 32, ("embed", "layer_embed", "head")
STEP_NBYTES = 16 << 20  # float32 rows at once
VECTOR_ROLES = (SHARED_EXPERT_ROLES[3], "correction")  # roles of one-row matrices that files hold as vectors
# Architectures for which llama.cpp requires an output head, even if it is tied to the embedding.
REQUIRES_HEAD = ("apertus", "bailingmoe2", "glm5-next", "gptneox", hy_v4.NAME, "kimi-linear", "mellum", "muse-glimmer", "nemotron", "olmo2",
                 "olmoe", "phi2", "stablelm", "step35")

SHARED_AS_MLP = ("afmoe", "kolibri1")  # families whose shared experts are a plain MLP in the checkpoint


@dataclass(frozen=True)
class Exported:
    """The written file."""

    path: Path
    nbytes: int
    tensors: int  # number of them
    types: Mapping[str, int]  # GGUF type -> number of tensors

    def to_json(self) -> dict[str, object]:
        return {"file": str(self.path), "file_bytes": self.nbytes, "tensors": self.tensors, "types": dict(self.types)}


@dataclass(frozen=True)
class _TensorJob:
    """A tensor of the file, made from one or several of the model's, concatenated by rows, and the transformations to apply."""

    planned: PlannedTensor
    tensors: tuple[ModelTensor, ...]
    interleaved_heads: int = 0  # number of heads to interleave the rows within; 0 for none
    offset: float = 0.0  # added to the values
    rows: np.ndarray | None = None  # the model's row for each row of the file; None for the same order
    columns: np.ndarray | None = None  # the same for columns
    decay_sign: float = 0.0  # +1 or -1: values x become decay_sign * exp(x); 0 for no change
    kv_b_half: tuple[ModelConfig, str] | None = None  # (config, part): write one half of latent attention's KV up-projection
    factors: tuple[float | np.ndarray, ...] = ()  # multiplier of each tensor, one or one per row; empty for none
    interleaved_rows: int = 0  # alternate between the tensors after this many rows; 0 for no


def export_gguf(source: Path, out: Path, matrix_type: str, name: str, replace: bool = False,
                tokenizer: Mapping[str, Value] | None = None, licence: str | None = None) -> Iterator[Progress | Notice | Exported]:
    """Write the model in `source` to the file `out`; yields progress, the result last.

    matrix_type: type of the matrices, a key of FILE_TYPES.
    name: title of the model in the file.
    tokenizer: the tokenizer's keys, None for those of `source`.
    licence: its name, None for the one that `source` states.

    Raises UsageError if `out` exists (unless `replace`) or belongs to the source, and for an unknown `matrix_type`; EffllmError for what
    GGUF cannot express.
    """
    if matrix_type not in FILE_TYPES:
        raise UsageError(f"unknown GGUF type {matrix_type!r}",
                         f"known: {', '.join(FILE_TYPES)}; INT8 and INT4 go with --format compressed-tensors")
    out = Path(os.path.abspath(out))
    check_output_name(out)
    config, container = read_config(source), read_container(source)
    if is_bundled(container):
        raise UsageError(f"{source} has bundled neurons, a layout that no other program reads", "export the original checkpoint")
    with open_store(source, dequant_dtype="f32") as store:
        check_target(out, replace, store)
        tensors = (with_own_layer if config.family in nextn.EXPORTED_FAMILIES else check_tensors)(config, store, container)
        config = replace_fields(config, tie_word_embeddings="head" not in tensors["outer"])
        arch = export_architecture(config)
        check_outliers(tensors, store)
        config, tensors = apertus.extract_activations(config, tensors, store)
        jobs = list(_jobs(tensors, config, arch, matrix_type))
        settings, notices = read_generation_config(source)
        yield from map(Notice, notices)
        keys = _tokenizer(source, config) if tokenizer is None else tokenizer
        licence = licence or (container and container.licence) or licence_of(source)
        mtp_keys = nextn.export_keys(file_architecture(config), config) if nextn.split_mtp_layer(tensors["outer"])[1] else {}
        metadata = with_mrope_keys(source, config, config_metadata(config, name, matrix_type) | mtp_keys)
        metadata |= licence_metadata(source, licence) | sampling_metadata(settings) | dict(keys)
        row_order = {hy_v4.FAMILY: hy_v4.checkpoint_rows}.get(config.family, checkpoint_rows)
        for index, job in enumerate(jobs):
            if (rows := row_order(job.planned.name, config, metadata)) is not None:
                jobs[index] = replace_fields(job, rows=rows)
        constants_of = {muse_glimmer.FAMILY: muse_glimmer.head_norms, rwkv7.FAMILY: rwkv7.placeholder_tensors}.get(config.family)
        constants = rotary_tensors(config) | (constants_of(config) if constants_of else {})
        planned = [PlannedTensor(key, "F32", values.shape) for key, values in constants.items()] + [job.planned for job in jobs]
        yield from _notices(config, jobs, matrix_type, is_already_quantized(source))
        yield from _write_file(out, replace, store, gguf_head(metadata, planned), planned, constants.values(), jobs)


def _write_file(out: Path, replace: bool, store: TensorStore, head: bytes, planned: Sequence[PlannedTensor],
                constants: Iterable[np.ndarray], jobs: Iterable[_TensorJob]) -> Iterator[Progress | Notice | Exported]:
    """Write head, constants and jobs in this order, and rename the complete file to `out`. Raises DoesNotFit for a full disk."""
    total = len(head) + sum(padded(tensor.nbytes) for tensor in planned)
    done = len(head)
    with NewFile(out, total) as file:
        if file.left_nbytes:
            yield Notice(f"an export to {out.name} that was ended had left {format_size(file.left_nbytes)}: removed, starting over")
        if (free := shutil.disk_usage(out.parent).free) < total:
            raise DoesNotFit(f"{out.name} needs {format_size(total)}, and the disk of {out.parent} has {format_size(free)} free",
                             "make room, or give a place on another disk with -o")
        file.write(head)
        for values in constants:
            file.write(values.tobytes() + bytes(padded(values.nbytes) - values.nbytes))
            done += padded(values.nbytes)
        for job in jobs:
            for chunk in _encoded_chunks(store, job):
                file.write(memoryview(chunk).cast("B"))
                done += chunk.nbytes
                yield Progress("exporting", done, total, "bytes", job.planned.name)
            padding = padded(job.planned.nbytes) - job.planned.nbytes
            file.write(bytes(padding))
            done += padding
        store.check_unchanged()
        check_target(out, replace, store)  # it may have been created meanwhile
        file.commit()
    counts = Counter(tensor.type for tensor in planned)
    yield Exported(out, total, len(planned), dict(counts))


def check_output_name(out: Path) -> None:
    """Raises UsageError for a name without .gguf, and for a folder that does not exist."""
    require_folder(out.parent)
    if not is_gguf(out):
        raise UsageError(f"{out.name or out} does not end in .gguf", f"-o {out.name or 'model'}.gguf")


def check_target(out: Path, replace: bool, store: TensorStore) -> None:
    """Raises UsageError for a file that must not be replaced: one of the model, no plain file, or any without `replace`."""
    if not os.path.lexists(out):
        return
    if any(out.exists() and os.path.samefile(out, file) for file in store.files):
        raise UsageError(f"{out} belongs to the model being exported", OUTPUT_PATH_HINT)
    if out.is_symlink() or not out.is_file():
        raise UsageError(f"{out} is {describe_existing(out)}, which cannot be replaced", OUTPUT_PATH_HINT)
    if not replace:
        raise UsageError(f"{out} exists", f"--force replaces it, or {OUTPUT_PATH_HINT}")


def _tokenizer(source: Path, config: ModelConfig) -> dict[str, Value]:
    """The tokenizer's keys: those of a GGUF file as they are, a folder's translated."""
    if is_gguf(source):
        from .store import read_header

        return {key: value for key, value in read_header(source).metadata.items() if key.startswith("tokenizer.")}
    from .tokenizer_export import tokenizer_metadata

    return tokenizer_metadata(source, Tokenizer.load(source, config), config.vocab_size)


def _jobs(tensors: Mapping[int | str, Mapping[str, ModelTensor]], config: ModelConfig, arch: Architecture,
          matrix_type: str) -> Iterator[_TensorJob]:
    """The tensors of the file in the model's order. Several model tensors may be one of the file, and the reverse."""
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads} if arch.interleaved else {}
    outer, mtp = nextn.split_mtp_layer(tensors["outer"])
    factors = falcon_h1.tensor_multipliers(config)
    if "head" not in outer and (ARCHITECTURE_BY_FAMILY[config.family] in REQUIRES_HEAD or factors.get("head") != factors.get("embed")):
        outer = {**outer, "head": outer["embed"]}
    joined = concatenated_parts(config)
    layers = [(key, roles) for key, roles in tensors.items() if key != "outer"]
    for key, roles in (("outer", outer), *layers, (config.num_hidden_layers, mtp)):
        if config.family == deci.FAMILY and key != "outer":
            heads["k"] = config.kv_heads_of(key)[0] if key < config.num_hidden_layers else 0
        grouped: dict[str, list[tuple[str, ModelTensor]]] = {}
        for role, tensor in roles.items():
            if role in arch.split_tensors:
                parts = zip(arch.split_tensors[role], joined[tensor.name], strict=True)
                yield from _split_jobs(f"blk.{key}.", role, tensor, parts, matrix_type)
            else:
                grouped.setdefault(_file_name(key, role, roles, config, arch), []).append((role, tensor))
        for name, members in grouped.items():
            role, first = members[0]
            if role == "kv_b" and config.family != "minicpm3":
                yield from _kv_b_jobs(f"blk.{key}", first, config, matrix_type)
                continue
            shape = (sum(tensor.shape[0] for _, tensor in members), *first.shape[1:])
            if expert_of(role) is not None:
                shape = (len(members), *first.shape)
            elif role in VECTOR_ROLES and len(shape) == 2:
                shape = shape[1:]
            elif role.startswith(("state_", "shift_", "ngram_conv")):
                shape = recurrent_layers.gguf_shape(role, config, shape)
            planned = PlannedTensor(name, _file_type(role, first, config, arch, matrix_type), shape)
            is_shifted = "norm" in role and role != "state_norm" and not role.endswith("_bias") and first.name not in arch.unshifted_norms
            yield _TensorJob(planned, tuple(tensor for _, tensor in members), heads.get(role.removesuffix("_bias"), 0),
                             arch.norm_offset if is_shifted else 0.0, *recurrent_layers.reordering(role, config),
                             recurrent_layers.decay_sign(config) if role == "state_decay" else 0.0,
                             factors=tuple(factors.get(role, 1.0) for role, _ in members) if factors else (),
                       interleaved_rows=first.shape[0] // config.recurrent.key_heads if name.endswith(linear_attention.BETA_ALPHA_SUFFIX)
                             else 0)


def _file_name(key: int | str, role: str, roles: Mapping[str, ModelTensor], config: ModelConfig, arch: Architecture) -> str:
    """The name of the file's tensor that holds a role of layer `key`, or "outer"."""
    is_shared = role in EXPERT_ROLES and "router" in roles and config.family in SHARED_AS_MLP
    part = file_part(f"shared.{role}" if is_shared else role, arch)
    if config.family == "falcon" and config.parallel_block_norms and role.startswith("input_norm"):
        part = "attn_norm_2"
    suffix = "bias" if role.endswith("_bias") or role == "correction" else "weight"
    block = "" if key == "outer" or f"{part}.{suffix}" in arch.outer_names else f"blk.{nemotron_h.block_of(config, key, role)}."
    if part in arch.full_names:
        return block + part
    fused = next((fused_name for fused_name, parts in arch.fused.items() if part in parts), part)
    return f"{block}{fused}.{suffix}"


def _row_type(matrix_type: str, depth: int) -> str:
    """The type of a matrix with rows of this length; types other than halves have blocks."""
    return matrix_type if depth % BLOCK_SIZE == 0 or matrix_type in HALF_TYPES else "F16"


def _file_type(role: str, tensor: ModelTensor, config: ModelConfig, arch: Architecture, matrix_type: str) -> str:
    """The type in the file of a role whose first tensor is `tensor`."""
    is_sensitive = role == "kv_b" or (bool(arch.split_tensors) and role in kimi_delta_attention.HIGH_PRECISION_ROLES)
    if base_role(role) not in MATRICES and not is_sensitive:
        return "F32"
    if tensor.shape[1] % BLOCK_SIZE:
        return _row_type(matrix_type, tensor.shape[1])
    if tensor.spec.scheme == "mxfp" or (config.expert_format and expert_of(role) is not None):
        return MXFP4  # the file has that type too: nothing is rounded
    return "Q8_0" if matrix_type == "Q4_0" and (role in HIGH_PRECISION_ROLES or is_sensitive or is_table(role)) else matrix_type


def _split_jobs(block: str, role: str, tensor: ModelTensor, parts: Iterable[tuple[str, tuple[str, int]]],
                matrix_type: str) -> Iterator[_TensorJob]:
    """Jobs for a tensor that files hold as several. `parts`: (name in the file, (name in the checkpoint, rows))."""
    first_row, is_matrix = 0, base_role(role) in MATRICES
    for name, (_, rows) in parts:
        stored = _row_type(matrix_type, tensor.shape[1]) if is_matrix else "F32"
        planned = PlannedTensor(f"{block}{name}.weight", stored, (rows, *tensor.shape[1:]))
        yield _TensorJob(planned, (tensor,), rows=np.arange(first_row, first_row + rows))
        first_row += rows


def _kv_b_jobs(block: str, tensor: ModelTensor, config: ModelConfig, matrix_type: str) -> Iterator[_TensorJob]:
    """Jobs for latent attention's KV up-projection, which files hold as two tensors with the embedding's precision, as llama.cpp's do."""
    mla, heads = config.mla, config.num_attention_heads
    for part, shape in zip(latent_attention.KV_B_HALVES, ((heads, mla.rank, mla.nope), (heads, mla.value, mla.rank))):
        stored = _row_type("Q8_0" if matrix_type == "Q4_0" else matrix_type, shape[-1])
        yield _TensorJob(PlannedTensor(block + part, stored, shape), (tensor,), kv_b_half=(config, part))


def _notices(config: ModelConfig, jobs: list[_TensorJob], matrix_type: str, quantized: bool) -> Iterator[Notice]:
    if any(job.planned.type == MXFP4 for job in jobs):
        yield Notice("experts stay in MXFP4, as they were published")
    if quantized and not config.expert_format:
        yield Notice("the source is quantized already: its errors and those of the new type add up")
    if matrix_type == "Q4_0":
        yield Notice("the embedding and the head are written as Q8_0, where errors weigh most")
    unaligned = [job for job in jobs if len(job.planned.shape) > 1 and job.planned.shape[-1] % BLOCK_SIZE
                 and job.planned.type == "F16" != matrix_type]
    if unaligned:
        yield Notice(f"{unaligned[0].planned.name} and {len(unaligned) - 1} more are written as F16: "
                     f"their rows are not a multiple of {BLOCK_SIZE}")
    if config.family == bitnet.FAMILY and config.hidden_act != bitnet.ACTIVATIONS[0]:
        yield Notice(bitnet.OLD_LLAMA_CPP_NOTICE)
    if (window := ignored_window(config)) is not None:
        yield Notice(f"llama.cpp runs this family without its sliding window: texts beyond {window} tokens differ")
    if notice := ignored_rope_scaling(config):
        yield Notice(notice)


def _encoded_chunks(store: TensorStore, job: _TensorJob) -> Iterator[np.ndarray]:
    """The encoded bytes of a tensor, some rows at a time."""
    if job.interleaved_rows:
        parts = [_all_values(store, tensor).reshape(-1, job.interleaved_rows, tensor.shape[1]) for tensor in job.tensors]
        values = np.stack(parts, axis=1).reshape(job.planned.shape)
        yield _encode(values, job, job.tensors[0], len(values))
        return
    for tensor, factor in zip(job.tensors, job.factors or (1.0,) * len(job.tensors), strict=True):
        rows = tensor.shape[0] if job.rows is None else len(job.rows)
        if not tensor.spec.is_raw:
            values = _all_values(store, tensor)
            yield _encode(_scale(values if job.rows is None else values[job.rows], factor, 0), job, tensor, rows)
            continue
        step = max(1, STEP_NBYTES // 4 // max(1, prod(tensor.shape[1:])))
        if job.kv_b_half is not None:
            step = max(1, step // job.kv_b_half[0].mla.kv_b_rows) * job.kv_b_half[0].mla.kv_b_rows
        if job.interleaved_heads:  # rows are reordered within a head, so steps are whole heads
            head_rows = rows // job.interleaved_heads
            step = max(1, step // head_rows) * head_rows
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            with np.errstate(over="ignore"):  # _encode checks the result
                encoded = _encode(_scale(_values(store, tensor, begin, end, job.rows), factor, begin), job, tensor, end - begin)
            yield encoded


def _all_values(store: TensorStore, tensor: ModelTensor) -> np.ndarray:
    """All values of a matrix, float32."""
    if tensor.spec.is_raw:
        return _values(store, tensor, 0, tensor.shape[0], None)
    return Weight.low_bit(tensor.spec, tensor.shape, store.read(tensor.info)).to_f32()


def _scale(values: np.ndarray, factor: float | np.ndarray, begin: int) -> np.ndarray:
    """Rows from `begin` on of a tensor, multiplied by a number or by one for each row."""
    if isinstance(factor, np.ndarray):
        return values * factor[begin : begin + len(values), None]
    return values if factor == 1.0 else values * np.float32(factor)


def _values(store: TensorStore, tensor: ModelTensor, begin: int, end: int, rows: np.ndarray | None) -> np.ndarray:
    if rows is not None:
        selected = rows[begin:end]
        runs = np.split(selected, np.flatnonzero(np.diff(selected) != 1) + 1)
        return np.concatenate([_values(store, tensor, int(run[0]), int(run[-1]) + 1, None) for run in runs])
    return to_f32(store.read(tensor.info, begin, end).view(RAW_NUMPY[tensor.spec.scheme]), tensor.spec.scheme).reshape(end - begin, -1)


def _encode(values: np.ndarray, job: _TensorJob, tensor: ModelTensor, rows: int) -> np.ndarray:
    """The encoded bytes of some rows. Raises EffllmError for NaN and infinity, CheckpointError for values out of the type's range."""
    if not np.isfinite(values).all():
        raise EffllmError(f"{tensor.name}: NaN or infinity", "the checkpoint is damaged: download it again, or contact its publisher")
    if job.kv_b_half is not None:
        values = latent_attention.kv_b_half(values, *job.kv_b_half)
    if job.interleaved_heads:
        head_rows = tensor.shape[0] // job.interleaved_heads
        order = np.empty(rows, np.intp)
        order[deinterleaved(np.arange(rows), head_rows)] = np.arange(rows)
        values = values[order]
    if job.columns is not None:
        values = np.ascontiguousarray(values[:, job.columns])
    if job.decay_sign:
        values = np.float32(job.decay_sign) * np.exp(values)
    if job.offset:
        values = values + np.float32(job.offset)
    gguf_type = job.planned.type
    if gguf_type in RAW_TYPES:
        encoded = from_f32(values, gguf_type.lower())
        if gguf_type == "F16" and np.isinf(encoded.view(np.float16)).any():
            raise CheckpointError(f"{tensor.name} holds weights that F16 cannot", "--type BF16")
        return np.ascontiguousarray(encoded).view(np.uint8)
    encoded = quantize(values, gguf_type)
    scales = encoded.reshape(-1, BLOCKS[gguf_type][1])[:, :2].copy().view(np.float16)  # blocks begin with their scale, except MXFP4's
    if gguf_type != MXFP4 and np.isinf(scales).any():
        raise CheckpointError(f"{tensor.name} holds weights that {gguf_type} cannot", "no model has such weights: contact its publisher")
    return encoded
