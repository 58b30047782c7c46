"""Store over an mmproj file: the tensors of a vision or audio encoder under a checkpoint's names, shapes and row order, converted as
they are read.

16- and 32-bit values are kept; block-quantized matrices become 16-bit floats, vectors 32-bit ones. An encoder is read once, whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod
from pathlib import Path

import numpy as np

from ...offload.checkpoint import TensorStore, open_regular_file
from ...offload.gguf_header import GgufHeader, GgufTensor, read_gguf_header
from ...offload.safetensors_header import CheckpointError, TensorInfo, damaged, shown
from ...quant.imports.gguf import DECODERS, dequantize
from ...quant.weight import from_f32, to_f32
from ..images.modality import AUDIO_INPUT
from .audio_names import AUDIO_PREFIXES
from .ollama_layout import vision_part
from .projector_config import ProjectorConfig
from .projector_names import SECOND_FRAME_EMBD, Projector, checkpoint_name
from .tensor_sources import RAW_TYPES, deinterleaved

CHANNELS = 3
DAMAGED_HINT = "the file is damaged: download it again"


@dataclass(frozen=True)
class TensorSource:
    """The file's tensors that a checkpoint tensor is made of, and the conversions to apply. Several are concatenated by rows."""

    tensors: tuple[GgufTensor, ...]
    has_two_frames: bool = False  # two tensors, stacked in a new third dimension
    row_order: np.ndarray | None = None  # row in the file for each row; None for the same order
    offset: float = 0.0  # subtracted from every value
    is_softplus: bool = False  # the file holds the softplus of the values
    channels_last: bool = False  # the channels, second in the file, come last
    planar_colors: bool = False  # as in `Projector`
    swapped_axes: bool = False  # as in `Projector`

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.tensors[0].shape
        if self.channels_last:
            return first[0], *first[2:], first[1]
        if self.swapped_axes:
            return first[1], first[0], *first[2:]
        return (first[0], first[1], 2, *first[2:]) if self.has_two_frames else (sum(each.shape[0] for each in self.tensors), *first[1:])

    @property
    def dtype(self) -> str:
        types = {each.type for each in self.tensors}
        keeps_type = len(types) == 1 and types <= {*RAW_TYPES} and not (self.offset or self.is_softplus)
        return types.pop() if keeps_type else "F32" if len(self.shape) == 1 else "F16"


def read_projector_header(path: Path) -> GgufHeader:
    """The header of an mmproj file, or of the vision part of a model file. Raises CheckpointError, ModelNotFound."""
    opened = open_regular_file(path)
    try:
        return _projector_part(read_gguf_header(path, opened.fd))
    finally:
        opened.close()


def _projector_part(header: GgufHeader) -> GgufHeader:
    return vision_part(header) or header


class ProjectorStore(TensorStore):
    """The tensors of one modality. Raises CheckpointError for an unknown tensor and for an unsupported tensor type."""

    def __init__(self, path: Path, config: ProjectorConfig) -> None:
        opened = open_regular_file(path)
        try:
            header = _projector_part(read_gguf_header(path, opened.fd))
            self._parts = dict(_tensor_sources(header, config))
            first = {name: part.tensors[0] for name, part in self._parts.items()}
            infos = {name: TensorInfo(name, part.dtype, part.shape, path, first[name].offset,
                                      prod(part.shape) * (4 if part.dtype == "F32" else 2)) for name, part in self._parts.items()}
            super().__init__(path, infos, {path: opened})
        except BaseException:
            opened.close()
            raise

    def read(self, info: TensorInfo, row_begin: int = 0, row_end: int | None = None) -> np.ndarray:
        part = self._parts[info.name]
        values = [self._values(each, info.dtype) for each in part.tensors]
        result = np.stack(values, axis=2) if part.has_two_frames else values[0] if len(values) == 1 else np.concatenate(values)
        if part.row_order is not None:
            result = result[part.row_order]
        if part.channels_last:
            result = np.moveaxis(result, 1, -1)
        if part.planar_colors:
            result = result.reshape(*result.shape[:-1], CHANNELS, -1).swapaxes(-1, -2).reshape(result.shape)
        if part.swapped_axes:
            result = result.swapaxes(0, 1)
        if part.is_softplus:
            result = from_f32(_inverse_softplus(to_f32(result, info.dtype.lower())), info.dtype.lower())
        if part.offset:
            result = from_f32(to_f32(result, info.dtype.lower()) - np.float32(part.offset), info.dtype.lower())
        return np.ascontiguousarray(result[row_begin:row_end]).reshape(-1).view(np.uint8)

    def _values(self, tensor: GgufTensor, dtype: str) -> np.ndarray:
        """The values of a tensor in its shape: float32 for `dtype` F32, uint16 for 16-bit types. Raises CheckpointError for values out of
        range."""
        raw = np.empty(tensor.nbytes, np.uint8)
        self.read_at(tensor.file, tensor.offset, memoryview(raw))
        if tensor.type == dtype:
            return raw.view(np.float32 if dtype == "F32" else np.uint16).reshape(tensor.shape)
        if tensor.type in RAW_TYPES:
            floats = to_f32(raw.view(np.float32 if tensor.type == "F32" else np.uint16), tensor.type.lower())
        else:
            floats = dequantize(raw, tensor.type, tensor.shape[-1])
        result = from_f32(floats.reshape(tensor.shape), dtype.lower())
        if not np.isfinite(floats).all() or dtype == "F16" and np.isinf(result.view(np.float16)).any():
            raise CheckpointError(f"{self.folder} has tensor {shown(tensor.name)} with values that exceed the 16-bit range", DAMAGED_HINT)
        return result


def gguf_row_order(checkpoint_name: str, projector: Projector, rows: int, heads: int) -> np.ndarray | None:
    """The row in the file for each of a layer tensor's rows, int64 [rows]; None for the same order. Raises ValueError for a number of rows
    that does not divide into `heads`."""
    stem = checkpoint_name.rpartition(".")[0]
    if projector.deinterleaved_qk and stem.endswith(("q_proj", "k_proj")):
        if heads < 1 or rows % (2 * heads):
            raise ValueError(heads)
        return deinterleaved(np.arange(rows), rows // heads)
    if projector.regrouped_axes and stem.endswith("wqkv"):
        if heads < 1 or rows % (3 * 4 * heads):
            raise ValueError(heads)
        q_order = np.arange(rows // 3).reshape(heads, 2, -1, 2).swapaxes(1, 2).reshape(-1)
        return np.concatenate([q_order, q_order + len(q_order), np.arange(2 * len(q_order), rows)])
    return None


def _inverse_softplus(values: np.ndarray) -> np.ndarray:
    """x with softplus(x) = values, float32; values of 0 are taken as the smallest positive float32."""
    positive = np.maximum(values.astype(np.float64), np.finfo(np.float32).tiny)
    return (positive + np.log(-np.expm1(-positive))).astype(np.float32)


def _tensor_sources(header: GgufHeader, config: ProjectorConfig) -> Iterator[tuple[str, TensorSource]]:
    """(checkpoint name, source) of every tensor of the modality. Raises CheckpointError."""
    path, projector, fused = header.path, config.projector, []
    for name, tensor in header.tensors.items():
        is_other_modality = name.startswith(AUDIO_PREFIXES) is not (config.modality is AUDIO_INPUT)
        if name in projector.ignored or name == SECOND_FRAME_EMBD or is_other_modality:
            continue
        target = checkpoint_name(name, projector, [*config.deepstack_layers], config.ffn_swapped)
        if target is None:
            raise CheckpointError(f"{path} holds tensor {shown(name)}, which no projector of its type has",
                                  "the file's contents do not match its stated type: use another mmproj file of this model")
        if tensor.type not in (*RAW_TYPES, *DECODERS):
            raise CheckpointError(f"{path} has tensor {shown(name)} of type {tensor.type}, which is not supported",
                                  f"known: {', '.join((*RAW_TYPES, *DECODERS))}")
        fused_part = next((each for each in projector.fused_parts if f".{each}." in target), None)
        if fused_part is not None:
            fused.append((target.replace(f".{fused_part}.", f".{projector.fused_name}."), projector.fused_parts.index(fused_part), tensor))
            continue
        if (second := header.tensors.get(SECOND_FRAME_EMBD)) is not None and name == SECOND_FRAME_EMBD.removesuffix(".1"):
            if second.shape != tensor.shape or len(tensor.shape) != 4:
                damaged(path,
                        f"has tensor {shown(SECOND_FRAME_EMBD)} of shape {list(second.shape)}, of another than that of the first frame")
            yield target, TensorSource((tensor, second), has_two_frames=True)
            continue
        try:
            order = gguf_row_order(target, projector, tensor.shape[0], config.heads)
        except ValueError:
            damaged(path, f"has tensor {shown(name)} of {tensor.shape[0]} rows for {config.heads} heads")
        if name in projector.channels_last and len(tensor.shape) != 4:
            damaged(path, f"has tensor {shown(name)} of {len(tensor.shape)} dimensions, not 4")
        if name in projector.swapped_axes and len(tensor.shape) != 3:
            damaged(path, f"has tensor {shown(name)} of {len(tensor.shape)} dimensions, not 3")
        if name in projector.planar_colors and tensor.shape[-1] % CHANNELS:
            damaged(path, f"has tensor {shown(name)} of {tensor.shape[-1]} values a row, not as many of each colour")
        yield target, TensorSource((tensor,), row_order=order, offset=float(name in projector.shifted_norms),
                                   is_softplus=name.endswith(projector.softplus_suffixes) if projector.softplus_suffixes else False,
                                   channels_last=name in projector.channels_last,
                                   planar_colors=name in projector.planar_colors, swapped_axes=name in projector.swapped_axes)
    for target, group in groupby(sorted(fused, key=lambda each: each[:2]), key=lambda each: each[0]):
        tensors = tuple(tensor for _, _, tensor in group)
        if len(tensors) != len(projector.fused_parts) or len({each.shape[1:] for each in tensors}) > 1:
            damaged(path,
                    f"holds {len(tensors)} of {len(projector.fused_parts)} parts of a matrix beside {shown(tensors[0].name)}, or such as "
                          "do not belong together")
        yield target, TensorSource(tensors)
