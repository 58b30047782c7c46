"""Store over a GGUF file: its weights under the names, shapes and row order of a checkpoint folder, converted as they are read.

16- and 32-bit values are passed through. Block types that kernels can multiply are repacked losslessly, code by code and scale by scale;
others become 16-bit floats, or 32-bit ones where the exact value matters. Conversion runs a few rows at a time, so a load needs only
megabytes beside its result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import NoReturn

import numpy as np

from ... import EffllmError
from ...offload.checkpoint import TensorStore
from ...offload.gguf_header import GgufHeader, GgufTensor
from ...offload.notes import Detail, Fallback
from ...offload.repack import Repack, RepackStep, staging_buffer
from ...offload.safetensors_header import CheckpointError, TensorInfo, shown
from ...offload.size import format_size
from ...offload.streaming_pager import Range
from ...quant.imports.gguf import dequantize
from ...quant.imports.repack import put_gguf_blocks
from ...quant.weight import RAW_NUMPY, from_f32, to_f32
from ..config import ModelConfig
from ..stores.container import Container, StoredTensor
from ..stores.converting_store import ARRANGED_NBYTES, ConvertingStore, scratch_nbytes, steps
from . import listwise
from .architecture import DIVISORS
from .architectures import architecture
from .config import model_config, rotary_divisors
from .split_files import close_all, open_parts
from .tensor_mapping import NO_SCALE, GgufFile, TensorMapping, map_tensors
from .tensor_sources import RAW, WHOLE, Source


class GgufStore(ConvertingStore):
    """`wide`: the raw type that blocks become, `low_bit`: but for those that kernels multiply, whose formats `container` then lists.

    Rows are those of the checkpoint: a row of the file may lie elsewhere in its head.
    """

    def __init__(self, file: GgufFile, config: ModelConfig, wide: str, low_bit: bool) -> None:
        self._path, self._wide = file.header.path, wide
        found = map_tensors(file, config, wide, low_bit)
        self._sources, self._halves, self._joined, self._scales = found.sources, found.halves, found.split_matrices, found.scales
        opened = dict(file.opened)
        if config.listwise_reranker:
            beside = listwise.open_ranking_file(self._path)
            found.tensors |= beside.tensors
            opened |= beside.take_files()
        super().__init__(self._path, found.tensors, opened)
        self.made = self._sources.keys() | self._halves.keys() | self._joined.keys()
        self.container = _container(file, found.stored, self._sources) if found.stored else None
        self.notices = tuple(self._said(found))

    def stored_nbytes(self, info: TensorInfo) -> int:
        own = self._sources.get(info.name) or self._halves.get(info.name) or self._joined.get(info.name) or info
        return own.nbytes

    def files_of(self, info: TensorInfo) -> frozenset[Path]:
        own = self._joined.get(info.name) or self._halves.get(info.name)
        return super().files_of(info) if own is None else own.files

    def _said(self, found: TensorMapping) -> Iterator[str]:
        for ours, what in ((True, "are repacked for the kernels"), (False, f"are widened to {self._wide}")):
            names = [name for name, source in self._sources.items()
                     if source.tensor.type not in RAW and (name in found.stored) == ours and name not in found.plain]
            if names:
                kinds = Counter(self._sources[name].tensor.type for name in names)
                listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
                sizes = (sum(self.tensors[name].nbytes for name in names), sum(self._sources[name].nbytes for name in names))
                said = (f"weights in blocks ({listed}) {what} as they are read: {format_size(sizes[0])} of memory for "
                        f"{format_size(sizes[1])} of file")
                yield Detail(said) if ours else Fallback(said)

    def place(self, info: TensorInfo) -> int | None:
        if info.name not in self._sources:
            return None
        source = self._sources[info.name]
        if source.tensor.type not in RAW or source.moved or source.changed:
            return None
        return source.tensor.offset + source.first * (source.tensor.nbytes // source.tensor.shape[0])

    def repack_plan(self, infos: Sequence[TensorInfo]) -> Repack | None:
        if any(info.name not in self._sources for info in infos):
            return None
        sources = [self._sources[info.name] for info in infos]
        if not all(source.in_order for source in sources):
            return None
        return Repack(tuple(info.nbytes for info in infos), sum(source.nbytes for source in sources),
                      max(staging_buffer(source.piece * source.tensor.row_nbytes) for source in sources),
                      max(ARRANGED_NBYTES if info.dtype == "U8" else scratch_nbytes(*source.shape)
                          for info, source in zip(infos, sources, strict=True)), partial(self._pieces, tuple(infos)))

    def _pieces(self, infos: Sequence[TensorInfo]) -> list[RepackStep]:
        """Runs of rows of each matrix; those of an expert lie side by side."""
        found = []
        for index, info in enumerate(infos):
            source, (rows, _) = self._sources[info.name], self._sources[info.name].shape
            tensor, each = source.tensor, source.tensor.row_nbytes
            for begin in range(0, rows, source.piece):
                own = Range(tensor.file, tensor.offset + (source.first + begin) * each, min(source.piece, rows - begin) * each)
                found.append(RepackStep((own,), partial(self._put, info, index, begin)))
        return found

    def _put(self, info: TensorInfo, index: int, first: int, raws: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> None:
        """Rows from `first` on, as the file has them, into their places."""
        source, out = self._sources[info.name], outs[index]
        raw, each = raws[0].reshape(-1, source.tensor.row_nbytes), info.nbytes // source.shape[0]
        if info.dtype == "U8":
            self._put_codes(info, first, raw, out)
            return
        for begin, end in steps(len(raw), source.shape[1]):
            self._widen(info, raw[begin:end], out[(first + begin) * each : (first + end) * each])

    def put_codes(self, info: TensorInfo, begin: int, end: int, blob: np.ndarray) -> None:
        if (own := self._joined.get(info.name)) is not None:
            for part, first, last, at in own.ranges(begin, end):
                self._put_codes(info, at, self._rows(part, first, last, part.tensor.row_nbytes), blob, part)
            return
        source = self._sources[info.name]
        self._put_codes(info, begin, self._rows(source, begin, end, source.tensor.row_nbytes), blob)

    def _put_codes(self, info: TensorInfo, begin: int, raw: np.ndarray, blob: np.ndarray, part: Source | None = None) -> None:
        source = part or self._sources[info.name]
        if not put_gguf_blocks(blob, source.tensor.type, source.shape, begin, raw, source.scale):
            self._refuse(source.tensor, "a scale of NaN or infinity")

    def fill(self, info: TensorInfo, begin: int, end: int, out: np.ndarray) -> None:
        """Write rows [begin, end) of a tensor as raw values into `out`, its bytes. Raises CheckpointError."""
        if (own := self._halves.get(info.name)) is not None:
            self._store(own.rows(begin, end, self._values), info, own.keys, out)
            return
        if (own := self._joined.get(info.name)) is not None:
            each = len(out) // (end - begin)
            for part, first, last, at in own.ranges(begin, end):
                raw = self._rows(part, first, last, part.tensor.nbytes // part.tensor.shape[0])
                self._widen(info, raw, out[(at - begin) * each : (at - begin + last - first) * each], part)
            return
        source = self._sources[info.name]
        tensor = source.tensor
        nbytes = tensor.nbytes // tensor.shape[0]
        if len(tensor.shape) == 1 and tensor.type not in RAW:  # a vector of blocks has no rows to speak of
            raw = np.empty(tensor.nbytes, np.uint8)
            self.read_at(tensor.file, tensor.offset, memoryview(raw))
            values = self._dequantized(raw, tensor, tensor.shape[0]).reshape(-1)[begin:end]
            out[:] = np.ascontiguousarray(self._meant(source, values)).view(np.uint8)
            return
        self._widen(info, self._rows(source, begin, end, nbytes), out)

    def _widen(self, info: TensorInfo, raw: np.ndarray, out: np.ndarray, part: Source | None = None) -> None:
        """Rows [n, row bytes] of the file as raw values."""
        source = part or self._sources[info.name]
        tensor = source.tensor
        if tensor.type == WHOLE:
            values = raw.reshape(-1).view(np.int32).astype(np.float32)
        elif tensor.type not in RAW:
            values = self._dequantized(raw, tensor, tensor.shape[-1] if len(tensor.shape) > 1 else 1) * np.float32(source.scale)
        elif source.changed or info.dtype != tensor.type:
            scheme = tensor.type.lower()
            values = self._meant(source, to_f32(raw.reshape(-1).view(RAW_NUMPY[scheme]), scheme))
        else:
            out[:] = raw.reshape(-1)
            return
        self._store(values, info, tensor, out)

    def _values(self, tensor: GgufTensor, begin: int, end: int) -> np.ndarray:
        """What rows of a matrix in the file mean, float32."""
        raw = self._rows(Source(tensor, tensor.shape), begin, end, tensor.row_nbytes)
        if tensor.type not in RAW:
            return self._dequantized(raw, tensor, tensor.shape[1]) * self._scales.get(tensor.name, NO_SCALE)[0]
        scheme = tensor.type.lower()
        return to_f32(raw.reshape(-1).view(RAW_NUMPY[scheme]), scheme).reshape(end - begin, -1)

    def _store(self, values: np.ndarray, info: TensorInfo, tensor: GgufTensor, out: np.ndarray) -> None:
        """float32 values as what the store says that they are."""
        made = from_f32(values, info.dtype.lower())
        if info.dtype == "F16" and np.isinf(made.view(np.float16)).any() and np.isfinite(values).all():
            self._refuse(tensor, "weights that exceed the 16-bit range")
        out[:] = made.reshape(-1).view(np.uint8)

    def _meant(self, source: Source, values: np.ndarray) -> np.ndarray:
        """float32 values of a vector as the checkpoint has them."""
        if source.decay:
            if not (values < 0).all() or np.isinf(values).any():
                self._refuse(source.tensor, "a decay that is not below zero")
            return np.log(-values)
        if source.growth:
            if not (values > 0).all() or np.isinf(values).any():
                self._refuse(source.tensor, "a decay that is not above zero")
            return np.log(values)
        return values - np.float32(source.offset) if source.offset else values

    def _dequantized(self, raw: np.ndarray, tensor: GgufTensor, width: int) -> np.ndarray:
        """float32 [rows, width] of blocks."""
        values = dequantize(raw, tensor.type, width)
        if not np.isfinite(values).all():
            self._refuse(tensor, "a scale of NaN or infinity")
        return values

    def _refuse(self, tensor: GgufTensor, what: str) -> NoReturn:
        raise CheckpointError(f"{self._path} has tensor {shown(tensor.name)} with {what}", "the file is damaged: download it again")

    def _rows(self, source: Source, begin: int, end: int, nbytes: int) -> np.ndarray:
        """Bytes [rows, nbytes] of the rows [begin, end) in a checkpoint's order."""
        first, last, order = begin, end, source.order(begin, end)
        if order is not None:
            first, last = int(order.min()), int(order.max()) + 1
        raw = np.empty(((last - first), nbytes), np.uint8)
        self.read_at(source.tensor.file, source.tensor.offset + (source.first + first) * nbytes, memoryview(raw).cast("B"))
        return raw if order is None else raw[order - first]


def open_file(path: Path) -> GgufFile:
    """An open file; whoever makes a store of it closes it. Raises CheckpointError, ModelNotFound."""
    header, opened = open_parts(path)
    try:
        found = architecture(path, header.metadata.get("general.architecture"))
        factors = {}
        for name in DIVISORS:
            if (tensor := header.tensors.get(name)) is not None:
                raw = np.empty(min(tensor.nbytes, 1 << 17), np.uint8)
                TensorStore(path, {}, opened).read_at(tensor.file, tensor.offset, memoryview(raw))
                factors[name] = rotary_divisors(tensor, raw, path)
        return GgufFile(header, opened, found, factors)
    except BaseException:
        close_all(opened)
        raise


def read_header(path: Path) -> GgufHeader:
    """The header alone, of whatever architecture; of a split model that of all parts."""
    header, opened = open_parts(path)
    close_all(opened)
    return header


def read_gguf_config(path: Path, strict: bool = False) -> ModelConfig:
    """The ModelConfig of a file. Raises CheckpointError, ModelNotFound, with `strict` UsageError."""
    file = open_file(path)
    close_all(file.opened)
    return model_config(file.header, file.factors, strict)


def _container(file: GgufFile, stored: dict[str, StoredTensor], sources: Mapping[str, Source]) -> Container:
    """What a folder's effllm.json would say of the tensors that run from their codes. There are no checksums in a GGUF file."""
    kinds = Counter(source.tensor.type for source in sources.values() if len(source.tensor.shape) == 2)
    nbytes, weights = (sum(each) for each in zip(*((source.nbytes, prod(source.shape)) for source in sources.values())))
    origin = str(file.header.metadata.get("general.name", file.header.path.name))
    named = ", ".join(kind for kind, _ in kinds.most_common())
    return Container(named, 8 * nbytes / weights, stored, {"model": origin}, {"name": "GGUF"}, {"name": "GGUF blocks"}, {})


def open_gguf_store(path: Path, wide: str = "f16", low_bit: bool = False) -> GgufStore:
    """The weights of a file; blocks as `wide` (f16 or f32), with `low_bit` as codes where kernels can multiply them.

    Raises CheckpointError, ModelNotFound.
    """
    file = open_file(path)
    try:
        return GgufStore(file, model_config(file.header, file.factors), wide, low_bit)
    except EffllmError:
        close_all(file.opened)
        raise
