"""Store over a GGUF file: its weights under the names, shapes and row order of a checkpoint folder, converted as they are read.

16- and 32-bit values are passed through. Block types that kernels can multiply are repacked losslessly, code by code and scale by scale;
others become 16-bit floats, or 32-bit ones where the exact value matters. Conversion runs a few rows at a time, so a load needs only
megabytes in addition to its result.
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
from ..stores.converting_store import REPACK_SCRATCH_NBYTES, ConvertingStore, scratch_nbytes, steps
from . import listwise
from .architecture import ROPE_FACTOR_TENSORS
from .architectures import architecture
from .config import model_config, rope_factors
from .split_files import close_all, open_parts
from .tensor_mapping import UNIT_SCALE, GgufFile, TensorMapping, map_tensors
from .tensor_sources import INTEGER_TYPE, RAW_TYPES, Source


class GgufStore(ConvertingStore):
    """The weights of an open GGUF file.

    dequant_dtype: raw type that blocks are dequantized to, f16 or f32.
    low_bit: keep blocks that kernels can multiply as codes; `container` lists their formats.

    Rows are in the checkpoint's order, which within a head may differ from the file's.
    """

    def __init__(self, file: GgufFile, config: ModelConfig, dequant_dtype: str, low_bit: bool) -> None:
        self._path, self._dequant_dtype = file.header.path, dequant_dtype
        mapping = map_tensors(file, config, dequant_dtype, low_bit)
        self._sources, self._scales = mapping.sources, mapping.scales
        self._kv_b, self._split_matrices = mapping.kv_b, mapping.split_matrices
        opened = dict(file.opened)
        if config.listwise_reranker:
            ranking = listwise.open_ranking_file(self._path)
            mapping.tensors |= ranking.tensors
            opened |= ranking.take_files()
        super().__init__(self._path, mapping.tensors, opened)
        self.converted = self._sources.keys() | self._kv_b.keys() | self._split_matrices.keys()
        self.container = _container(file, mapping.stored, self._sources) if mapping.stored else None
        self.notices = tuple(self._conversion_notices(mapping))

    def stored_nbytes(self, info: TensorInfo) -> int:
        source = self._sources.get(info.name) or self._kv_b.get(info.name) or self._split_matrices.get(info.name) or info
        return source.nbytes

    def files_of(self, info: TensorInfo) -> frozenset[Path]:
        parts = self._split_matrices.get(info.name) or self._kv_b.get(info.name)
        return super().files_of(info) if parts is None else parts.files

    def _conversion_notices(self, mapping: TensorMapping) -> Iterator[str]:
        for is_repacked, action in ((True, "are repacked for the kernels"), (False, f"are widened to {self._dequant_dtype}")):
            names = [name for name, source in self._sources.items()
                     if source.tensor.type not in RAW_TYPES and (name in mapping.stored) == is_repacked
                     and name not in mapping.high_precision]
            if names:
                counts = Counter(self._sources[name].tensor.type for name in names)
                listed = ", ".join(f"{count} {type_name}" for type_name, count in sorted(counts.items()))
                loaded, stored = (sum(tensors[name].nbytes for name in names) for tensors in (self.tensors, self._sources))
                message = (f"weights in blocks ({listed}) {action} as they are read: {format_size(loaded)} of memory for "
                           f"{format_size(stored)} of file")
                yield Detail(message) if is_repacked else Fallback(message)

    def place(self, info: TensorInfo) -> int | None:
        if info.name not in self._sources:
            return None
        source = self._sources[info.name]
        if source.tensor.type not in RAW_TYPES or source.is_reordered or source.is_transformed:
            return None
        return source.tensor.offset + source.first_row * (source.tensor.nbytes // source.tensor.shape[0])

    def repack_plan(self, tensors: Sequence[TensorInfo]) -> Repack | None:
        if any(info.name not in self._sources for info in tensors):
            return None
        sources = [self._sources[info.name] for info in tensors]
        if not all(source.in_order for source in sources):
            return None
        return Repack(tuple(info.nbytes for info in tensors), sum(source.nbytes for source in sources),
                      max(staging_buffer(source.rows_per_step * source.tensor.row_nbytes) for source in sources),
                      max(REPACK_SCRATCH_NBYTES if info.dtype == "U8" else scratch_nbytes(*source.shape)
                          for info, source in zip(tensors, sources, strict=True)), partial(self._repack_steps, tuple(tensors)))

    def _repack_steps(self, tensors: Sequence[TensorInfo]) -> list[RepackStep]:
        """Steps over some rows of each matrix; the rows of an expert are consecutive in the file."""
        repack_steps = []
        for index, info in enumerate(tensors):
            source, (rows, _) = self._sources[info.name], self._sources[info.name].shape
            tensor, row_nbytes = source.tensor, source.tensor.row_nbytes
            for begin in range(0, rows, source.rows_per_step):
                count = min(source.rows_per_step, rows - begin)
                extent = Range(tensor.file, tensor.offset + (source.first_row + begin) * row_nbytes, count * row_nbytes)
                repack_steps.append(RepackStep((extent,), partial(self._repack, info, index, begin)))
        return repack_steps

    def _repack(self, info: TensorInfo, index: int, first: int, raw_buffers: Sequence[np.ndarray],
                out_buffers: Sequence[np.ndarray]) -> None:
        """Convert the rows from `first` on, as read from the file."""
        source, out = self._sources[info.name], out_buffers[index]
        raw, row_nbytes = raw_buffers[0].reshape(-1, source.tensor.row_nbytes), info.nbytes // source.shape[0]
        if info.dtype == "U8":
            self._put_codes(info, first, raw, out)
            return
        for begin, end in steps(len(raw), source.shape[1]):
            self._widen(info, raw[begin:end], out[(first + begin) * row_nbytes : (first + end) * row_nbytes])

    def put_codes(self, info: TensorInfo, begin: int, end: int, codes: np.ndarray) -> None:
        if (split := self._split_matrices.get(info.name)) is not None:
            for part, first, last, row in split.ranges(begin, end):
                self._put_codes(info, row, self._rows(part, first, last, part.tensor.row_nbytes), codes, part)
            return
        source = self._sources[info.name]
        self._put_codes(info, begin, self._rows(source, begin, end, source.tensor.row_nbytes), codes)

    def _put_codes(self, info: TensorInfo, begin: int, raw: np.ndarray, codes: np.ndarray, part: Source | None = None) -> None:
        source = part or self._sources[info.name]
        if not put_gguf_blocks(codes, source.tensor.type, source.shape, begin, raw, source.scale):
            self._refuse(source.tensor, "a scale of NaN or infinity")

    def fill(self, info: TensorInfo, begin: int, end: int, out: np.ndarray) -> None:
        """Write rows [begin, end) of a tensor as raw values into `out`, its bytes. Raises CheckpointError."""
        if (joined := self._kv_b.get(info.name)) is not None:
            self._store(joined.rows(begin, end, self._values), info, joined.keys, out)
            return
        if (joined := self._split_matrices.get(info.name)) is not None:
            row_nbytes = len(out) // (end - begin)
            for part, first, last, at in joined.ranges(begin, end):
                raw = self._rows(part, first, last, part.tensor.nbytes // part.tensor.shape[0])
                self._widen(info, raw, out[(at - begin) * row_nbytes : (at - begin + last - first) * row_nbytes], part)
            return
        source = self._sources[info.name]
        tensor = source.tensor
        nbytes = tensor.nbytes // tensor.shape[0]
        if len(tensor.shape) == 1 and tensor.type not in RAW_TYPES:  # a block spans several values of a vector: read it whole
            raw = np.empty(tensor.nbytes, np.uint8)
            self.read_at(tensor.file, tensor.offset, memoryview(raw))
            values = self._dequantized(raw, tensor, tensor.shape[0]).reshape(-1)[begin:end]
            out[:] = np.ascontiguousarray(self._untransform(source, values)).view(np.uint8)
            return
        self._widen(info, self._rows(source, begin, end, nbytes), out)

    def _widen(self, info: TensorInfo, raw: np.ndarray, out: np.ndarray, part: Source | None = None) -> None:
        """Rows [n, row bytes] of the file as raw values."""
        source = part or self._sources[info.name]
        tensor = source.tensor
        if tensor.type == INTEGER_TYPE:
            values = raw.reshape(-1).view(np.int32).astype(np.float32)
        elif tensor.type not in RAW_TYPES:
            values = self._dequantized(raw, tensor, tensor.shape[-1] if len(tensor.shape) > 1 else 1) * np.float32(source.scale)
        elif source.is_transformed or info.dtype != tensor.type:
            scheme = tensor.type.lower()
            values = self._untransform(source, to_f32(raw.reshape(-1).view(RAW_NUMPY[scheme]), scheme))
        else:
            out[:] = raw.reshape(-1)
            return
        self._store(values, info, tensor, out)

    def _values(self, tensor: GgufTensor, begin: int, end: int) -> np.ndarray:
        """Values of rows of a matrix in the file, float32."""
        raw = self._rows(Source(tensor, tensor.shape), begin, end, tensor.row_nbytes)
        if tensor.type not in RAW_TYPES:
            return self._dequantized(raw, tensor, tensor.shape[1]) * self._scales.get(tensor.name, UNIT_SCALE)[0]
        scheme = tensor.type.lower()
        return to_f32(raw.reshape(-1).view(RAW_NUMPY[scheme]), scheme).reshape(end - begin, -1)

    def _store(self, values: np.ndarray, info: TensorInfo, tensor: GgufTensor, out: np.ndarray) -> None:
        """Write float32 values in the dtype of `info`."""
        result = from_f32(values, info.dtype.lower())
        if info.dtype == "F16" and np.isinf(result.view(np.float16)).any() and np.isfinite(values).all():
            self._refuse(tensor, "weights that exceed the 16-bit range")
        out[:] = result.reshape(-1).view(np.uint8)

    def _untransform(self, source: Source, values: np.ndarray) -> np.ndarray:
        """The checkpoint's values of a vector of the file, float32."""
        if source.is_negative_decay:
            if not (values < 0).all() or np.isinf(values).any():
                self._refuse(source.tensor, "a decay that is not below zero")
            return np.log(-values)
        if source.is_positive_decay:
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

    def _refuse(self, tensor: GgufTensor, problem: str) -> NoReturn:
        raise CheckpointError(f"{self._path} has tensor {shown(tensor.name)} with {problem}", "the file is damaged: download it again")

    def _rows(self, source: Source, begin: int, end: int, nbytes: int) -> np.ndarray:
        """Bytes [rows, nbytes] of the rows [begin, end) in a checkpoint's order."""
        first, last, order = begin, end, source.order(begin, end)
        if order is not None:
            first, last = int(order.min()), int(order.max()) + 1
        raw = np.empty(((last - first), nbytes), np.uint8)
        self.read_at(source.tensor.file, source.tensor.offset + (source.first_row + first) * nbytes, memoryview(raw).cast("B"))
        return raw if order is None else raw[order - first]


def open_file(path: Path) -> GgufFile:
    """Open a file; the store made from it closes it. Raises CheckpointError, ModelNotFound."""
    header, opened = open_parts(path)
    try:
        arch = architecture(path, header.metadata.get("general.architecture"))
        factors = {}
        for name in ROPE_FACTOR_TENSORS:
            if (tensor := header.tensors.get(name)) is not None:
                raw = np.empty(min(tensor.nbytes, 1 << 17), np.uint8)
                TensorStore(path, {}, opened).read_at(tensor.file, tensor.offset, memoryview(raw))
                factors[name] = rope_factors(tensor, raw, path)
        return GgufFile(header, opened, arch, factors)
    except BaseException:
        close_all(opened)
        raise


def read_header(path: Path) -> GgufHeader:
    """The header alone, of any architecture; of a split model the merged header of all parts."""
    header, opened = open_parts(path)
    close_all(opened)
    return header


def read_gguf_config(path: Path, strict: bool = False) -> ModelConfig:
    """The ModelConfig of a file. Raises CheckpointError, ModelNotFound, with `strict` UsageError."""
    file = open_file(path)
    close_all(file.opened)
    return model_config(file.header, file.rope_factors, strict)


def _container(file: GgufFile, stored: dict[str, StoredTensor], sources: Mapping[str, Source]) -> Container:
    """The container of the tensors that run from their codes. A GGUF file has no checksums."""
    counts = Counter(source.tensor.type for source in sources.values() if len(source.tensor.shape) == 2)
    nbytes = sum(source.nbytes for source in sources.values())
    weights = sum(prod(source.shape) for source in sources.values())
    model = str(file.header.metadata.get("general.name", file.header.path.name))
    spec_text = ", ".join(kind for kind, _ in counts.most_common())
    return Container(spec_text, 8 * nbytes / weights, stored, {"model": model}, {"name": "GGUF"}, {"name": "GGUF blocks"}, {})


def open_gguf_store(path: Path, dequant_dtype: str = "f16", low_bit: bool = False) -> GgufStore:
    """The weights of a file; blocks as `dequant_dtype` (f16 or f32), or with `low_bit` as codes where kernels can multiply them.

    Raises CheckpointError, ModelNotFound.
    """
    file = open_file(path)
    try:
        return GgufStore(file, model_config(file.header, file.rope_factors), dequant_dtype, low_bit)
    except EffllmError:
        close_all(file.opened)
        raise
