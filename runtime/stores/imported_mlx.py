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
from ...offload.repack import Repack, RepackStep, staging_buffer
from ...offload.safetensors_header import TensorInfo, damaged, shown
from ...offload.size import format_size
from ...offload.streaming_pager import Range
from ...quant.imports import mlx
from ...quant.imports.repack import put_int32_words, put_mxfp4, put_nvfp4
from ...quant.pack import put_factors, put_rows
from ...quant.weight import RAW_NUMPY, from_f32, to_f32
from .. import families
from .container import Container, StoredTensor
from .converting_store import ConvertingStore, scratch_nbytes, steps
from .import_config import FLOATS, MLX_LEAVES_OUT, ORIGINAL
from .tensor_views import GatheredRows

ONE_ADDED = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")  # norms of these lie with the 1 added
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight", ".q_norm.weight", ".k_norm.weight")
POWERS = ("mxfp4", "mxfp8")  # modes whose scales are powers of two
WHOLE = (4, 8)  # bits of affine codes that do not cross the words that they lie in


class MlxStore(ConvertingStore):
    """`rules`: what the model asks for. Of the weights in `codes` what kernels can multiply stays codes where `kept` says so, whose formats
    `container` then lists. Of the others those that are `exact` become float32, which holds what they mean, any other `wide`, f16 or f32.
    `within`: as of `tensor_views.places`."""

    def __init__(self, store: TensorStore, family: str, wide: str, rules: Iterable[families.TensorRule], codes: Collection[str],
                 exact: Collection[str], kept: Callable[[str], bool], within: Mapping[str, tuple[str, np.ndarray]]) -> None:
        self._wide, self._exact = wide, exact
        self._rows: dict[str, np.ndarray] = {}  # of weights that lie in others, row by row
        self._shapes: dict[str, tuple[int, int]] = {}
        self._parts: dict[str, tuple[TensorInfo, ...]] = {}  # words, scales, and biases where there are some
        self._forms: dict[str, mlx.MlxFormat] = {}
        self._norms = {name for name in store.tensors if family in ONE_ADDED and name.endswith(NORMS)}
        tensors, stored = dict(store.tensors), {}
        for rule in rules:
            if len(rule.shape) != 2:
                continue
            whole, rows = within.get(rule.name, (None, None))
            if (found := self._found(store.tensors, replace(rule, also=(*rule.also, whole)) if whole else rule)) is None:
                continue
            name, (words, scales, biases) = rule.name, found
            form, shape = self._form(name, words, scales, biases, rule.shape[1]), (words.shape[0], rule.shape[1])
            if words.name == whole:
                shape, self._rows[name] = (len(rows), shape[1]), rows
                if rows.max() >= words.shape[0]:
                    raise _unfit(words, name, f"{whole} has {words.shape[0]} outputs")
            self._parts[name], self._forms[name], self._shapes[name] = (words, scales, *([biases] if biases else [])), form, shape
            for part in self._parts[name]:
                tensors.pop(part.name, None)
            if name in codes and form.spec is not None and kept(name):
                stored[name] = StoredTensor(name, form.spec, shape, 0)
                tensors[name] = TensorInfo(name, "U8", (stored[name].nbytes,), words.file, words.offset, stored[name].nbytes)
            else:
                own = self._wide_of(name)
                tensors[name] = TensorInfo(name, own.upper(), shape, words.file, words.offset, prod(shape) * (4 if own == "f32" else 2))
        for name in self._norms:
            tensors[name] = self._norm(store.tensors[name])
        if not self._parts:
            raise CheckpointError(f"{store.folder} says that MLX quantized it, but has no such weights", ORIGINAL)
        self._norm_types = {name: store.tensors[name].dtype for name in self._norms}
        super().__init__(store.folder, tensors, store.take_files())
        self.converted = self._parts.keys() | self._norms
        self.container = self._described(stored) if stored else None
        self.notices = tuple(self._said(stored, MLX_LEAVES_OUT.get(family)))

    def _wide_of(self, name: str) -> str:
        """What a weight is widened to: bfloat16 holds all that is under powers of two, a half does not."""
        if name in self._exact:
            return "f32"
        return "bf16" if self._wide == "f16" and self._forms[name].mode in POWERS else self._wide

    @staticmethod
    def _found(tensors: Mapping[str, TensorInfo], rule: families.TensorRule) -> tuple[TensorInfo, TensorInfo, TensorInfo | None] | None:
        """Words, scales and biases of a weight, which may be rows of another; None where it was not quantized."""
        for name in (rule.name, *rule.also):
            base = name.removesuffix(".weight")
            if f"{base}.scales" in tensors and name in tensors:
                return tensors[name], tensors[f"{base}.scales"], tensors.get(f"{base}.biases")
        if rule.part_of is None:
            return None
        whole, first, rows = rule.part_of
        parts = [tensors.get(f"{whole.removesuffix('weight')}{ending}") for ending in ("weight", "scales", "biases")]
        if None in parts[:2]:
            return None
        for part in filter(None, parts):
            if part.shape[:1] != (rows,) or part.nbytes % rows:
                raise _unfit(part, whole, f"{part.name} is {part.dtype} {list(part.shape)}, of {rows} outputs")
        words, scales, biases = (part and replace(part, shape=(rule.shape[0], *part.shape[1:]), nbytes=part.nbytes // rows * rule.shape[0],
                                                  offset=part.offset + part.nbytes // rows * first) for part in parts)
        return words, scales, biases

    @staticmethod
    def _form(name: str, words: TensorInfo, scales: TensorInfo, biases: TensorInfo | None, depth: int) -> mlx.MlxFormat:
        """How a weight lies. Raises CheckpointError for parts that do not fit one another or the model."""
        floats = all(part.dtype in FLOATS for part in (scales, biases)) if biases else scales.dtype == "U8"
        rows = words.shape[:1]
        fits = words.dtype == "U32" and len(words.shape) == len(scales.shape) == 2 and scales.shape[:1] == rows and rows != (0,) and (
            biases is None or biases.shape == scales.shape)
        form = mlx.infer_format(depth, words.shape[1], scales.shape[1], biases is not None) if fits and floats else None
        if form is None:
            said = ", ".join(f"{part.name.rpartition('.')[2]} {part.dtype} {list(part.shape)}" for part in (words, scales, biases) if part)
            raise _unfit(words, name, f"{said} for {depth} inputs")
        return form

    @staticmethod
    def _norm(info: TensorInfo) -> TensorInfo:
        if info.dtype not in FLOATS or len(info.shape) != 1:
            damaged(info.file, f"holds {shown(info.name)} as {info.dtype} {list(info.shape)}")
        return TensorInfo(info.name, "F32", info.shape, info.file, info.offset, 4 * info.shape[0])

    def _described(self, stored: dict[str, StoredTensor]) -> Container:
        """What an effllm.json would say of the weights that run from their codes. There are no checksums."""
        weights = sum(prod(self._shapes.get(name, info.shape)) for name, info in self.tensors.items())
        nbytes = sum(self.stored_nbytes(info) for info in self.tensors.values())
        spec = ", ".join(sorted({str(each.spec) for each in stored.values()}))
        return Container(f"mlx, {spec}", 8 * nbytes / weights, stored, {"model": self.folder.name}, {"name": "mlx"}, {"name": "mlx"}, {})

    def _said(self, stored: Collection[str], missing: str | None) -> Iterator[str]:
        for wide in (None, "f16", "bf16", "f32"):
            ours = wide is None
            if names := [name for name in self._parts if (None if name in stored else self._wide_of(name)) == wide
                         and name not in self._exact]:
                bits = ", ".join(map(str, sorted({self._forms[name].bits for name in names})))
                what = "are repacked for the kernels" if ours else f"are widened to {wide}"
                if ours and any(part.dtype == "F32" for name in names for part in self._parts[name]):
                    what += ", their scales rounded to half precision,"
                sizes = sum(self.tensors[name].nbytes for name in names), sum(self.stored_nbytes(self.tensors[name]) for name in names)
                said = (f"{len(names)} MLX weights of {bits} bits {what} as they are read: {format_size(sizes[0])} of memory for "
                        f"{format_size(sizes[1])} of file")
                yield Detail(said) if ours else Fallback(said)
        if missing:
            yield Fallback(missing)

    def files_of(self, info: TensorInfo) -> frozenset[Path]:
        """As of any store."""
        return frozenset(part.file for part in self._parts.get(info.name, (info,)))

    def stored_nbytes(self, info: TensorInfo) -> int:
        """As of any store."""
        if info.name not in self._parts:
            return super().stored_nbytes(info)
        parts = self._parts[info.name]
        return sum(part.nbytes for part in parts) * self._shapes[info.name][0] // parts[0].shape[0]

    def reads(self, info: TensorInfo, out: np.ndarray) -> Iterator[tuple[Callable[[], None], int]]:
        """As of any store: codes come all at once, since their parts are read once."""
        if info.name not in self._parts or info.dtype != "U8":
            yield from super().reads(info, out)
            return
        yield partial(self.put_codes, info, 0, self._shapes[info.name][0], out), info.nbytes

    def repack_plan(self, infos: Sequence[TensorInfo]) -> Repack | None:
        """As of any store."""
        if any(info.name not in self._parts or info.name in self._rows for info in infos):
            return None
        parts = [self._parts[info.name] for info in infos]
        return Repack(tuple(info.nbytes for info in infos), sum(part.nbytes for own in parts for part in own),
                      max(staging_buffer(*(part.nbytes for part in own)) for own in parts), max(map(self._scratch, infos)),
                      lambda: [RepackStep(tuple(Range(part.file, part.offset, part.nbytes) for part in own),
                                partial(self._put, info, index))
                               for index, (info, own) in enumerate(zip(infos, parts, strict=True))])

    def _scratch(self, info: TensorInfo) -> int:
        """Bytes of memory between a weight's parts and the weight: a step's arrays, and scales and biases as floats."""
        _, *others = self._parts[info.name]
        return scratch_nbytes(*self._shapes[info.name]) + 8 * sum(part.nbytes for part in others)

    def _put(self, info: TensorInfo, index: int, raws: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> None:
        """A weight out of the bytes of its parts."""
        if info.dtype == "U8":
            self._put_codes(info, raws, outs[index])
            return
        rows, depth = self._shapes[info.name]
        each = info.nbytes // rows
        for begin, end in steps(rows, depth):
            made = self._widened(info, begin, end, self._cut(info, begin, end, raws))
            outs[index][begin * each : end * each] = made

    def fill(self, info: TensorInfo, begin: int, end: int, out: np.ndarray) -> None:
        """See `ConvertingStore`."""
        if info.name in self._norms:
            kind = self._norm_types[info.name]
            stored = TensorInfo(info.name, kind, info.shape, info.file, info.offset, info.shape[0] * RAW_NUMPY[kind.lower()].itemsize)
            raw = TensorStore.read(self, stored, begin, end).view(RAW_NUMPY[kind.lower()])
            out[:] = (to_f32(raw, kind.lower()) - np.float32(1)).view(np.uint8)
            return
        out[:] = self._widened(info, begin, end, self._read(info, begin, end))

    def put_codes(self, info: TensorInfo, begin: int, end: int, blob: np.ndarray) -> None:
        """See `ConvertingStore`: all rows."""
        self._put_codes(info, self._read(info, 0, self._shapes[info.name][0]), blob)

    def _read(self, info: TensorInfo, begin: int, end: int) -> list[np.ndarray]:
        """The bytes of rows [begin, end) of each part, from the file."""
        rows = self._rows.get(info.name)
        return [TensorStore.read(self, part, begin, end) if rows is None else GatheredRows(part, rows).read(self, begin, end)
                for part in self._parts[info.name]]

    def _cut(self, info: TensorInfo, begin: int, end: int, raws: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The bytes of rows [begin, end) of each part."""
        every = self._shapes[info.name][0]
        return [raw[raw.size // every * begin : raw.size // every * end] for raw in raws]

    def _arrays(self, name: str, raws: Sequence[np.ndarray], rows: int) -> tuple[np.ndarray, ...]:
        """Bytes of codes, and scales and biases as floats where they are, [rows, ...] each; no biases: None."""
        def typed(part: TensorInfo, raw: np.ndarray) -> np.ndarray:
            kind = part.dtype.lower()
            return (raw if kind == "u8" else to_f32(raw.view(RAW_NUMPY[kind]), kind)).reshape(rows, -1)

        words, *others = self._parts[name]
        found = [typed(part, raw) for part, raw in zip(others, raws[1:], strict=True)]
        return (np.ascontiguousarray(raws[0]).reshape(rows, -1), *found, *([None] if len(found) == 1 else []))

    def _widened(self, info: TensorInfo, begin: int, end: int, raws: Sequence[np.ndarray]) -> np.ndarray:
        """Rows as they are kept, uint8."""
        try:
            values = mlx.dequantize(self._forms[info.name], *self._arrays(info.name, raws, end - begin))
        except ValueError as error:
            raise _unfit(info, info.name, str(error)) from error
        return np.ascontiguousarray(from_f32(values, self._wide_of(info.name))).reshape(-1).view(np.uint8)

    def _put_codes(self, info: TensorInfo, raws: Sequence[np.ndarray], blob: np.ndarray) -> None:
        form, shape = self._forms[info.name], self._shapes[info.name]
        packed, scales, biases = self._arrays(info.name, raws, shape[0])
        try:
            if form.mode == "nvfp4":
                put_nvfp4(blob, packed, scales, np.float32(1))
            elif form.mode == "mxfp4":
                if not put_mxfp4(blob, shape, 0, packed, scales):
                    raise ValueError("a scale is NaN")
            elif form.bits in WHOLE:
                halves, minima, rows = mlx.factors(form, scales, biases)
                put_factors(blob, form.spec, shape, 0, halves, None, rows, minima=minima)
                put_int32_words(blob, form.spec, shape, "packed", packed.view(np.int32))
            else:
                for begin, end in steps(*shape, ROWS):
                    put_rows(blob, form.spec, shape, begin, mlx.packable(form, packed[begin:end], scales[begin:end], biases[begin:end]))
        except ValueError as error:
            raise _unfit(info, info.name, str(error)) from error


def _unfit(info: TensorInfo, weight: str, why: str) -> CheckpointError:
    return CheckpointError(f"{info.file} holds parts of {shown(weight)}, which MLX quantized, that do not fit: {why}",
                           f"if it is as published, this layout is not supported: {ORIGINAL}; else download the model again")
