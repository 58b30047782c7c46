"""Store over weights quantized by MLX (mlx-lm, LM Studio, mlx-community), under the names of the model families.

A weight is stored as `weight`, 32-bit words, beside `scales`, and `biases` where it is affine; embedding, head and routers too. Its bits
follow from the shapes, so per-module settings in the config need not be looked up. What kernels can multiply (`quant/imports/mlx.py`) is
repacked; the rest is widened. Norms of some families already have the 1 added; other differences from the published checkpoint are in
`mlx_names.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from ...kernels.tiles import ROWS
from ...offload.checkpoint import CheckpointError, TensorStore
from ...offload.notes import Detail, Fallback
from ...offload.repack import Repack
from ...offload.safetensors_header import TensorInfo, damaged, shown
from ...offload.size import format_size
from ...quant.imports import mlx
from ...quant.imports.repack import put_int32_words, put_mxfp4, put_nvfp4
from ...quant.pack import put_factors, put_rows
from ...quant.weight import RAW_NUMPY, from_f32, to_f32
from .. import families
from .container import Container, StoredTensor
from .converting_store import ConvertingStore, repack_from_parts, scratch_nbytes, steps
from .import_config import FLOATS, MLX_OMISSION_NOTICES, ORIGINAL
from .tensor_views import GatheredRows

OFFSET_NORM_FAMILIES = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")  # MLX adds 1 to the weights of their norms
OFFSET_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight", ".q_norm.weight", ".k_norm.weight")
POWER_OF_TWO_MODES = ("mxfp4", "mxfp8")  # modes whose scales are powers of two
WORD_ALIGNED_BITS = (4, 8)  # affine codes of so many bits do not cross words


class MlxStore(ConvertingStore):
    """The tensors of a folder that MLX quantized, under the names of the model's family.

    `rules`: tensors that the model reads.
    `packable`: names of weights that may stay packed: those for which `keeps_packed` is true, in a format that kernels can multiply.
    `container` lists their formats.
    `exact`: names of small matrices that are dequantized to f32; all others become `dequant_dtype`, f16 or f32.
    `gathered`: as returned by `tensor_views.gathered_rows`.
    """

    def __init__(self, store: TensorStore, family: str, dequant_dtype: str, rules: Iterable[families.TensorRule], packable: Collection[str],
                 exact_names: Collection[str], keeps_packed: Callable[[str], bool], gathered: Mapping[str, tuple[str, np.ndarray]]) -> None:
        self._dequant_dtype, self._exact = dequant_dtype, exact_names
        self._rows: dict[str, np.ndarray] = {}  # of weights that lie in others, row by row
        self._shapes: dict[str, tuple[int, int]] = {}
        self._parts: dict[str, tuple[TensorInfo, ...]] = {}  # words, scales, and biases where there are some
        self._formats: dict[str, mlx.MlxFormat] = {}
        self._offset_norms = {name for name in store.tensors if family in OFFSET_NORM_FAMILIES and name.endswith(OFFSET_NORMS)}
        tensors, stored = dict(store.tensors), {}
        for rule in rules:
            if len(rule.shape) != 2:
                continue
            source, rows = gathered.get(rule.name, (None, None))
            if (components := self._find_parts(store.tensors, replace(rule, also=(*rule.also, source)) if source else rule)) is None:
                continue
            name, (words, scales, biases) = rule.name, components
            mlx_format, shape = self._format_of(name, words, scales, biases, rule.shape[1]), (words.shape[0], rule.shape[1])
            if words.name == source:
                shape, self._rows[name] = (len(rows), shape[1]), rows
                if rows.max() >= words.shape[0]:
                    raise _mismatch_error(words, name, f"{source} has {words.shape[0]} outputs")
            self._parts[name] = (words, scales) if biases is None else (words, scales, biases)
            self._formats[name], self._shapes[name] = mlx_format, shape
            for part in self._parts[name]:
                tensors.pop(part.name, None)
            if name in packable and mlx_format.spec is not None and keeps_packed(name):
                stored[name] = StoredTensor(name, mlx_format.spec, shape, 0)
                tensors[name] = TensorInfo(name, "U8", (stored[name].nbytes,), words.file, words.offset, stored[name].nbytes)
            else:
                dtype = self._dtype_of(name)
                nbytes = prod(shape) * (4 if dtype == "f32" else 2)
                tensors[name] = TensorInfo(name, dtype.upper(), shape, words.file, words.offset, nbytes)
        for name in self._offset_norms:
            tensors[name] = self._norm_info(store.tensors[name])
        if not self._parts:
            raise CheckpointError(f"{store.folder} says that MLX quantized it, but has no such weights", ORIGINAL)
        self._norm_dtypes = {name: store.tensors[name].dtype for name in self._offset_norms}
        super().__init__(store.folder, tensors, store.take_files())
        self.converted = self._parts.keys() | self._offset_norms
        self.container = self._build_container(stored) if stored else None
        self.notices = tuple(self._describe_conversion(stored, MLX_OMISSION_NOTICES.get(family)))

    def _dtype_of(self, name: str) -> str:
        """The dtype to which a weight is dequantized: bf16 instead of f16 under power-of-two scales, whose range exceeds that of f16."""
        if name in self._exact:
            return "f32"
        return "bf16" if self._dequant_dtype == "f16" and self._formats[name].mode in POWER_OF_TWO_MODES else self._dequant_dtype

    @staticmethod
    def _find_parts(tensors: Mapping[str, TensorInfo],
                    rule: families.TensorRule) -> tuple[TensorInfo, TensorInfo, TensorInfo | None] | None:
        """Words, scales and biases of a weight, which may be rows of another; None where it was not quantized."""
        for name in (rule.name, *rule.also):
            base = name.removesuffix(".weight")
            if f"{base}.scales" in tensors and name in tensors:
                return tensors[name], tensors[f"{base}.scales"], tensors.get(f"{base}.biases")
        if rule.part_of is None:
            return None
        source, first, rows = rule.part_of
        parts = [tensors.get(f"{source.removesuffix('weight')}{ending}") for ending in ("weight", "scales", "biases")]
        if None in parts[:2]:
            return None
        for part in filter(None, parts):
            if part.shape[:1] != (rows,) or part.nbytes % rows:
                raise _mismatch_error(part, source, f"{part.name} is {part.dtype} {list(part.shape)}, of {rows} outputs")
        words, scales, biases = (part and replace(part, shape=(rule.shape[0], *part.shape[1:]), nbytes=part.nbytes // rows * rule.shape[0],
                                                  offset=part.offset + part.nbytes // rows * first) for part in parts)
        return words, scales, biases

    @staticmethod
    def _format_of(name: str, words: TensorInfo, scales: TensorInfo, biases: TensorInfo | None, input_width: int) -> mlx.MlxFormat:
        """The format of a weight. Raises CheckpointError for parts that do not fit one another or the model."""
        has_scale_dtypes = all(part.dtype in FLOATS for part in (scales, biases)) if biases else scales.dtype == "U8"
        rows = words.shape[:1]
        fits = words.dtype == "U32" and len(words.shape) == len(scales.shape) == 2 and scales.shape[:1] == rows and rows != (0,) and (
            biases is None or biases.shape == scales.shape)
        mlx_format = None
        if fits and has_scale_dtypes:
            mlx_format = mlx.infer_format(input_width, words.shape[1], scales.shape[1], biases is not None)
        if mlx_format is None:
            description = ", ".join(f"{part.name.rpartition('.')[2]} {part.dtype} {list(part.shape)}"
                                    for part in (words, scales, biases) if part)
            raise _mismatch_error(words, name, f"{description} for {input_width} inputs")
        return mlx_format

    @staticmethod
    def _norm_info(info: TensorInfo) -> TensorInfo:
        if info.dtype not in FLOATS or len(info.shape) != 1:
            damaged(info.file, f"holds {shown(info.name)} as {info.dtype} {list(info.shape)}")
        return TensorInfo(info.name, "F32", info.shape, info.file, info.offset, 4 * info.shape[0])

    def _build_container(self, stored: dict[str, StoredTensor]) -> Container:
        """A container for the weights that stay packed, without checksums."""
        weights = sum(prod(self._shapes.get(name, info.shape)) for name, info in self.tensors.items())
        nbytes = sum(self.stored_nbytes(info) for info in self.tensors.values())
        spec = ", ".join(sorted({str(each.spec) for each in stored.values()}))
        return Container(f"mlx, {spec}", 8 * nbytes / weights, stored, {"model": self.folder.name}, {"name": "mlx"}, {"name": "mlx"}, {})

    def _describe_conversion(self, stored: Collection[str], missing: str | None) -> Iterator[str]:
        for dtype in (None, "f16", "bf16", "f32"):
            is_packed = dtype is None
            if names := [name for name in self._parts if (None if name in stored else self._dtype_of(name)) == dtype
                         and name not in self._exact]:
                bits = ", ".join(map(str, sorted({self._formats[name].bits for name in names})))
                action = "are repacked for the kernels" if is_packed else f"are widened to {dtype}"
                if is_packed and any(part.dtype == "F32" for name in names for part in self._parts[name]):
                    action += ", their scales rounded to half precision,"
                sizes = sum(self.tensors[name].nbytes for name in names), sum(self.stored_nbytes(self.tensors[name]) for name in names)
                message = (f"{len(names)} MLX weights of {bits} bits {action} as they are read: {format_size(sizes[0])} of memory for "
                        f"{format_size(sizes[1])} of file")
                yield Detail(message) if is_packed else Fallback(message)
        if missing:
            yield Fallback(missing)

    def files_of(self, info: TensorInfo) -> frozenset[Path]:
        """As in TensorStore."""
        return frozenset(part.file for part in self._parts.get(info.name, (info,)))

    def stored_nbytes(self, info: TensorInfo) -> int:
        """As in TensorStore."""
        if info.name not in self._parts:
            return super().stored_nbytes(info)
        parts = self._parts[info.name]
        return sum(part.nbytes for part in parts) * self._shapes[info.name][0] // parts[0].shape[0]

    def reads(self, info: TensorInfo, out: np.ndarray) -> Iterator[tuple[Callable[[], None], int]]:
        """As in TensorStore; a packed weight is one step, because its parts are read once."""
        if info.name not in self._parts or info.dtype != "U8":
            yield from super().reads(info, out)
            return
        yield partial(self.put_codes, info, 0, self._shapes[info.name][0], out), info.nbytes

    def repack_plan(self, infos: Sequence[TensorInfo]) -> Repack | None:
        """As in TensorStore."""
        if any(info.name not in self._parts or info.name in self._rows for info in infos):
            return None
        parts = [self._parts[info.name] for info in infos]
        return repack_from_parts(infos, parts, max(map(self._scratch_nbytes, infos)), self._convert)

    def _scratch_nbytes(self, info: TensorInfo) -> int:
        """Bytes of intermediate arrays while a weight is converted: those of a step, and scales and biases as floats."""
        _, *others = self._parts[info.name]
        return scratch_nbytes(*self._shapes[info.name]) + 8 * sum(part.nbytes for part in others)

    def _convert(self, info: TensorInfo, index: int, raws: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> None:
        """Convert a weight from the bytes of its parts."""
        if info.dtype == "U8":
            self._put_codes(info, raws, outs[index])
            return
        rows, input_width = self._shapes[info.name]
        row_nbytes = info.nbytes // rows
        for begin, end in steps(rows, input_width):
            values = self._dequantized(info, begin, end, self._slice_rows(info, begin, end, raws))
            outs[index][begin * row_nbytes : end * row_nbytes] = values

    def fill(self, info: TensorInfo, begin: int, end: int, out: np.ndarray) -> None:
        """See `ConvertingStore`."""
        if info.name in self._offset_norms:
            dtype = self._norm_dtypes[info.name]
            stored = TensorInfo(info.name, dtype, info.shape, info.file, info.offset, info.shape[0] * RAW_NUMPY[dtype.lower()].itemsize)
            raw = TensorStore.read(self, stored, begin, end).view(RAW_NUMPY[dtype.lower()])
            out[:] = (to_f32(raw, dtype.lower()) - np.float32(1)).view(np.uint8)
            return
        out[:] = self._dequantized(info, begin, end, self._read(info, begin, end))

    def put_codes(self, info: TensorInfo, begin: int, end: int, blob: np.ndarray) -> None:
        """See `ConvertingStore`: all rows."""
        self._put_codes(info, self._read(info, 0, self._shapes[info.name][0]), blob)

    def _read(self, info: TensorInfo, begin: int, end: int) -> list[np.ndarray]:
        """The bytes of rows [begin, end) of each part, from the file."""
        rows = self._rows.get(info.name)
        return [TensorStore.read(self, part, begin, end) if rows is None else GatheredRows(part, rows).read(self, begin, end)
                for part in self._parts[info.name]]

    def _slice_rows(self, info: TensorInfo, begin: int, end: int, raws: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The bytes of rows [begin, end) of each part."""
        num_rows = self._shapes[info.name][0]
        return [raw[raw.size // num_rows * begin : raw.size // num_rows * end] for raw in raws]

    def _arrays(self, name: str, raws: Sequence[np.ndarray], rows: int) -> tuple[np.ndarray, ...]:
        """Bytes of codes, and scales and biases as floats where they are, [rows, ...] each; no biases: None."""
        def typed(part: TensorInfo, raw: np.ndarray) -> np.ndarray:
            dtype = part.dtype.lower()
            return (raw if dtype == "u8" else to_f32(raw.view(RAW_NUMPY[dtype]), dtype)).reshape(rows, -1)

        words, *others = self._parts[name]
        floats = [typed(part, raw) for part, raw in zip(others, raws[1:], strict=True)]
        return (np.ascontiguousarray(raws[0]).reshape(rows, -1), *floats, *([None] if len(floats) == 1 else []))

    def _dequantized(self, info: TensorInfo, begin: int, end: int, raws: Sequence[np.ndarray]) -> np.ndarray:
        """Rows in the weight's dtype, as uint8."""
        try:
            values = mlx.dequantize(self._formats[info.name], *self._arrays(info.name, raws, end - begin))
        except ValueError as error:
            raise _mismatch_error(info, info.name, str(error)) from error
        return np.ascontiguousarray(from_f32(values, self._dtype_of(info.name))).reshape(-1).view(np.uint8)

    def _put_codes(self, info: TensorInfo, raws: Sequence[np.ndarray], blob: np.ndarray) -> None:
        mlx_format, shape = self._formats[info.name], self._shapes[info.name]
        packed, scales, biases = self._arrays(info.name, raws, shape[0])
        try:
            if mlx_format.mode == "nvfp4":
                put_nvfp4(blob, packed, scales, np.float32(1))
            elif mlx_format.mode == "mxfp4":
                if not put_mxfp4(blob, shape, 0, packed, scales):
                    raise ValueError("a scale is NaN")
            elif mlx_format.bits in WORD_ALIGNED_BITS:
                halves, minima, rows = mlx.factors(mlx_format, scales, biases)
                put_factors(blob, mlx_format.spec, shape, 0, halves, None, rows, minima=minima)
                put_int32_words(blob, mlx_format.spec, shape, "packed", packed.view(np.int32))
            else:
                for begin, end in steps(*shape, ROWS):
                    codes = mlx.packable(mlx_format, packed[begin:end], scales[begin:end], biases[begin:end])
                    put_rows(blob, mlx_format.spec, shape, begin, codes)
        except ValueError as error:
            raise _mismatch_error(info, info.name, str(error)) from error


def _mismatch_error(info: TensorInfo, weight: str, reason: str) -> CheckpointError:
    return CheckpointError(f"{info.file} holds parts of {shown(weight)}, which MLX quantized, that do not fit: {reason}",
                           f"if it is as published, this layout is not supported: {ORIGINAL}; else download the model again")
