"""Store over quantized checkpoints of other tools: GPTQ, AWQ, AutoRound, compressed-tensors (packed or int8 integers, FP8, NVFP4),
ModelOpt, bitsandbytes and FP8, some weights of which may be MXFP4.

`quantization_config` names the method (`import_config.py`); a weight's component tensors (codes, scales, zero points) are found by name
(`import_index.py`). Integers of 4 and 8 bits with contiguous groups, FP8, NVFP4 and MXFP4 are repacked losslessly for the kernels, NF4
and FP4 with levels and scales rounded to integers; any other weight is widened to 16 bits. Either happens one weight at a time as it is
read, and is announced with its memory cost.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import gcd, lcm, prod
from pathlib import Path

import numpy as np

from ...kernels.tiles import ROWS
from ...offload.checkpoint import TensorStore
from ...offload.notes import Detail, Fallback
from ...offload.repack import Repack
from ...offload.safetensors_header import TensorInfo, damaged, shown
from ...offload.size import format_size
from ...quant.codes import Codes
from ...quant.imports import bitsandbytes, compressed_tensors, fp8, groups, mxfp4, nvfp4
from ...quant.imports.repack import WORDS, put_bitsandbytes, put_fp8, put_fp8_as_halves, put_int32_words, put_mxfp4, put_nvfp4
from ...quant.pack import pack, put_factors, put_rows
from ...quant.spec import QuantSpec
from ...quant.weight import RAW_NUMPY, from_f32
from .container import Container as StoredContainer
from .container import StoredTensor
from .converting_store import REPACK_SCRATCH_NBYTES, repack_from_parts, scratch_nbytes, steps
from .import_config import BLOCK_SCALED, BNB_4BIT, BNB_INT8, MXFP4, MXFP4_IN_FP8, NVFP4, OUTPUT_AXES, runs_from_codes
from .import_decoder import BLOCK, BNB_PARTS, Array, Decoder, decoders_of
from .import_index import CONVERTED_OFFSET, as_typed, index_weights, mismatch_error, scales_of, widened_dtype

WORD_BITS = 32  # bits


class ImportedStore(TensorStore):
    """The tensors of a quantized folder under the names that they had before it was quantized.

    `dequant_dtype`: f16 or f32, of dequantized weights; MXFP4 becomes bf16 instead of f16, which loses nothing.
    `low_bit`: weights that kernels can multiply as stored stay packed; `container` lists their formats.
    `sliced`: names of tensors of which row ranges are read under other names; they are always dequantized.
    `keeps_packed`: decides for MXFP4 weights beside FP8 by name, instead of `low_bit`.
    `input_widths`: of the model's weights, needed where the codes do not determine it.
    """

    repacks_on_read = True

    def __init__(self, store: TensorStore, section: Mapping[str, object], dequant_dtype: str, low_bit: bool = False,
                 sliced: Container[str] = (), keeps_packed: Callable[[str], bool] | None = None,
                 input_widths: Mapping[str, int] | None = None) -> None:
        self._method, self._dequant_dtype = str(section["quant_method"]), dequant_dtype
        self._cached: tuple[str, np.ndarray] | None = None
        self._lock = threading.Lock()
        index = index_weights(store, decoders_of(section), dequant_dtype, input_widths or {})
        tensors, self._parts, self._decoders, self._offsets = index.tensors, index.parts, index.decoders, index.offsets
        packs_all, packs_mxfp4 = low_bit and runs_from_codes(section), keeps_packed or (lambda name: low_bit)
        formats = {name: self._format(store, name, tensors[name].shape) for name, decoder in self._decoders.items()
               if name not in sliced and (packs_mxfp4(name) if decoder.layout == MXFP4_IN_FP8 else packs_all)}
        self._specs = {name: spec for name, spec in formats.items() if spec is not None}
        self._shapes = {name: tensors[name].shape for name in self._specs}
        stored = {}
        for name, spec in self._specs.items():
            info, nbytes = tensors[name], spec.nbytes(tensors[name].shape)
            stored[name] = StoredTensor(name, spec, info.shape, 0)
            tensors[name] = TensorInfo(name, "U8", (nbytes,), info.file, info.offset, nbytes)
        super().__init__(store.folder, tensors, store.take_files())
        self.container = self._build_container(stored) if stored else None
        self.notices = tuple(self._describe_conversion())

    def _format(self, store: TensorStore, name: str, shape: tuple[int, int]) -> QuantSpec | None:
        """The format in which kernels multiply a weight's codes as stored; None where they cannot."""
        parts, decoder, input_width = self._parts[name], self._decoders[name], shape[1]
        layout, block_width = decoder.layout, decoder.block[1]
        if layout in MXFP4:
            return mxfp4.SPEC if input_width % mxfp4.GROUP == 0 else None
        if layout == BNB_4BIT:
            return bitsandbytes.spec_of(shape, parts["weight.absmax"].shape[0])
        if layout in NVFP4:
            return nvfp4.SPEC if input_width % nvfp4.GROUP == 0 else None
        if layout == "fp8":
            return fp8.spec_of(shape, scales_of(parts).shape, decoder.block)
        if layout == BNB_INT8:  # scales become f16, as its dequantized weights would
            return groups.spec_of(decoder.bits, groups.SCALES[0], input_width, 1)
        scales = parts["scales" if "scales" in parts else "weight_scale"]
        num_groups = self._groups(layout, scales)
        spec = groups.spec_of(decoder.bits, scales.dtype, input_width, num_groups)
        if spec is None:
            return None
        if (group_index := parts.get("g_idx", parts.get("weight_g_idx"))) is not None:
            is_contiguous = group_index.dtype == "I32" and groups.in_order(store.read(group_index).view(np.int32), num_groups)
        else:  # groups as a config states them may end in part
            block_fits = block_width > 0 and -(-input_width // block_width) == num_groups
            group_width = block_width if block_fits else input_width // num_groups
            is_contiguous = layout not in ("integers", "gptq") or group_width * num_groups == input_width
        return spec if is_contiguous else None

    @staticmethod
    def _groups(layout: str, scales: TensorInfo) -> int:
        """Number of scales per output, 0 where their shape does not tell."""
        if layout == "integers":
            return compressed_tensors.columns(scales.shape)
        return 0 if len(scales.shape) != 2 else scales.shape[1 if layout == "packed" else 0]

    def _build_container(self, stored: Mapping[str, StoredTensor]) -> StoredContainer:
        """A container for the weights that stay packed, without checksums."""
        parts = [part for components in self._parts.values() for part in components.values()]
        others = [info for name, info in self.tensors.items() if name not in self._parts]
        nbytes = sum(info.nbytes for info in [*parts, *others])
        weights = sum(prod(self._shapes.get(name, info.shape)) for name, info in self.tensors.items())
        specs = ", ".join(sorted({str(tensor.spec) for tensor in stored.values()}))
        return StoredContainer(f"{self._method}, {specs}", 8 * nbytes / weights, dict(stored), {"model": self.folder.name},
                               {"name": self._method}, {"name": self._method}, {})

    def _describe_conversion(self) -> Iterator[str]:
        """A notice for the weights of each layout that are packed, and one for those that are dequantized."""
        for layout, is_packed in product(dict.fromkeys(decoder.layout for decoder in self._decoders.values()), (True, False)):
            action = f"are {'repacked for the kernels' if is_packed else f'widened to {widened_dtype(layout, self._dequant_dtype)}'}"
            rounded = ", their levels and scales rounded to whole numbers," if is_packed and layout == BNB_4BIT else ""
            if is_packed and any(self._rounds_scales(name) for name, own in self._decoders.items() if own.layout == layout):
                rounded = ", their scales rounded to half precision,"
            if names := [name for name, own in self._decoders.items() if own.layout == layout and (name in self._specs) == is_packed]:
                components = [part for name in names for part in self._parts[name].values()]
                sizes = (sum(self.tensors[name].nbytes for name in names), sum(part.nbytes for part in components))
                ordered = not is_packed and any("g_idx" in each for name in names for each in self._parts[name])
                method = "MXFP4" if layout in MXFP4 else self._method
                message = (f"{len(names)} {method} weights {action}{rounded} as they are read: {format_size(sizes[0])} of memory for "
                        f"{format_size(sizes[1])} of file{'; their inputs are grouped by activation order' if ordered else ''}")
                yield Fallback(message) if not is_packed else message if rounded else Detail(message)

    def _rounds_scales(self, name: str) -> bool:
        """Whether a weight stays packed, as integers whose scales of 32 bits are rounded."""
        parts = self._parts[name]
        scales = parts.get("scales", parts.get("weight_scale"))
        return name in self._specs and self._specs[name].scheme == "offset" and scales is not None and scales.dtype == "F32"

    def place(self, info: TensorInfo) -> int | None:
        return None if self._weight_name(info) else info.offset

    def files_of(self, info: TensorInfo) -> frozenset[Path]:
        name = self._weight_name(info)
        return super().files_of(info) if name is None else frozenset(part.file for part in self._parts[name].values())

    def stored_nbytes(self, info: TensorInfo) -> int:
        if (name := self._weight_name(info)) is None:
            return info.nbytes
        return sum(part.nbytes for part in self._parts[name].values()) * info.nbytes // self.tensors[name].nbytes

    def read(self, info: TensorInfo, row_begin: int = 0, row_end: int | None = None) -> np.ndarray:
        name = self._weight_name(info)
        if name is None:
            return super().read(info, row_begin, row_end)
        if name in self._specs:
            return self._packed(info)[row_begin:row_end]
        weight = self.tensors[name]
        first = (info.offset - weight.offset) * weight.shape[0] // weight.nbytes  # of a range of rows with a name of its own
        dequantized = self._dequantized(weight)[first : first + info.shape[0]][row_begin:row_end]
        return np.ascontiguousarray(dequantized).reshape(-1).view(np.uint8)

    def read_into(self, info: TensorInfo, out: np.ndarray | memoryview) -> None:
        if self._weight_name(info) is None:
            super().read_into(info, out)
            return
        np.frombuffer(out, np.uint8)[:] = self.read(info)

    def reads(self, info: TensorInfo, out: np.ndarray) -> Iterator[tuple[Callable[[], None], int]]:
        if self._weight_name(info) is None:
            yield from super().reads(info, out)
            return
        yield partial(self.read_into, info, out), info.nbytes

    def repack_plan(self, infos: Sequence[TensorInfo]) -> Repack | None:
        if any(info.name not in self._parts for info in infos):
            return None  # read as stored, or a range of rows of a weight
        parts = [tuple(self._parts[info.name].values()) for info in infos]
        return repack_from_parts(infos, parts, max(map(self._scratch_nbytes, infos)), self._convert)

    def _scratch_nbytes(self, info: TensorInfo) -> int:
        """Bytes of intermediate arrays while a weight is converted: those of a step, all scales and zero points, the group of every
        input."""
        codes = next(iter(self._parts[info.name].values()))
        others = sum(part.nbytes for part in self._parts[info.name].values()) - codes.nbytes
        rows, input_width = self._shape_of(info)
        if self._decoders[info.name].layout in MXFP4 and info.name in self._specs:
            return REPACK_SCRATCH_NBYTES
        if self._stays_float(info):  # scales are spread over row blocks
            return REPACK_SCRATCH_NBYTES + 4 * others + 3 * (info.nbytes - self._specs[info.name].sections((rows, input_width)).scales)
        if self._becomes_f16(info):
            return REPACK_SCRATCH_NBYTES + 4 * others
        if self._decoder(info).layout == BNB_4BIT:
            others *= 4  # scales may be stored as codes
        step_nbytes = scratch_nbytes(rows, self._values_per_row(info), self._row_alignment(info))
        return step_nbytes + 4 * others + 16 * input_width * self._repacks_words(info)

    def _convert(self, info: TensorInfo, index: int, raws: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> None:
        """Convert a weight from the bytes of its parts, some outputs at a time."""
        parts, shape, spec, out = self._parts[info.name], self._shape_of(info), self._specs.get(info.name), outs[index]
        decoder = self._decoder(info)
        arrays = {name: as_typed(part, raw, decoder.layout) for (name, part), raw in zip(parts.items(), raws, strict=True)}
        arrays = self._with_decoded_scales(info, arrays)
        if self._stays_float(info) or self._becomes_f16(info):
            self._repack_floats(info, arrays.get, out)
            return
        row_nbytes, repacks_words = info.nbytes // shape[0], self._repacks_words(info)
        alignment = self._row_alignment(info)
        if BLOCK in arrays:  # blocks of values do not end with rows: a step has to begin with a block
            block = int(arrays[BLOCK])
            alignment = lcm(alignment, block // gcd(block, shape[1]))
        for begin, end in steps(shape[0], self._values_per_row(info), alignment):
            try:
                array = self._slice_rows(arrays, begin, end, shape, decoder).get
            except ValueError as error:
                raise mismatch_error(info, info.name, str(error)) from error
            step_shape = end - begin, shape[1]
            if spec is None:
                values = from_f32(self._checked(info, step_shape, decoder.dequantize, array),
                                  widened_dtype(decoder.layout, self._dequant_dtype))
                out[begin * row_nbytes : end * row_nbytes] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            elif decoder.layout == BNB_4BIT:
                try:
                    put_bitsandbytes(out, shape, begin, *decoder.bnb_4bit_parts(array))
                except ValueError as error:
                    raise mismatch_error(info, info.name, str(error)) from error
            elif repacks_words:
                try:
                    scales, zeros, rows = groups.factors(*decoder.zeros_and_scales(array, step_shape), shape[1], spec)
                except ValueError as error:
                    raise mismatch_error(info, info.name, str(error)) from error
                put_factors(out, spec, shape, begin, scales, zeros, rows)
            else:
                codes = self._checked(info, step_shape, lambda *args: groups.packable(decoder.decode_integers(*args), spec), array)
                put_rows(out, spec, shape, begin, codes)
        if repacks_words:  # all at once: this needs no intermediate arrays
            put_int32_words(out, spec, shape, decoder.layout, next(iter(arrays.values())))

    def _repacks_words(self, info: TensorInfo) -> bool:
        """Whether its codes are repacked directly from the words of the file, without unpacking them."""
        return info.name in self._specs and (self._decoders[info.name].layout, self._specs[info.name].bits) in WORDS

    def _stays_float(self, info: TensorInfo) -> bool:
        """Whether it stays packed as floats of eight or four bits."""
        return self._decoders[info.name].layout in ("fp8", *MXFP4, *NVFP4) and info.name in self._specs

    def _becomes_f16(self, info: TensorInfo) -> bool:
        """Whether its FP8 values are widened to f16."""
        return self._decoders[info.name].layout == "fp8" and info.dtype == "F16"

    def _values_per_row(self, info: TensorInfo) -> int:
        """Intermediate values per output: one per input, or one per group where words are repacked directly."""
        input_width = self._shape_of(info)[1]
        return input_width // self._specs[info.name].group if self._repacks_words(info) else input_width

    def _decoder(self, info: TensorInfo) -> Decoder:
        return self._decoders[info.name]

    def _shape_of(self, info: TensorInfo) -> tuple[int, int]:
        """The shape of the weight, also where the store lists it as a blob."""
        return self._shapes.get(info.name, info.shape)

    def _row_alignment(self, info: TensorInfo) -> int:
        """Outputs that can be converted by themselves: whole words of zero points and whole blocks of scales. All of them where the height
        of a block is unknown."""
        rows, scales = self._shape_of(info)[0], self._parts[info.name].get("weight_scale_inv", self._parts[info.name].get("weight_scale"))
        if self._decoders[info.name].layout not in BLOCK_SCALED or len(scales.shape) < 2 or scales.shape[0] in (1, rows):
            return lcm(ROWS, WORD_BITS)
        block_rows = self._decoder(info).block[0]
        return lcm(ROWS, block_rows) if block_rows else rows

    @staticmethod
    def _slice_rows(arrays: Mapping[str, np.ndarray], begin: int, end: int, shape: tuple[int, int],
                    decoder: Decoder) -> dict[str, np.ndarray]:
        """The parts of outputs [begin, end) of a weight. Raises ValueError for arrays of another number of outputs."""
        sliced, rows = dict(arrays), shape[0]
        for name, (axis, packed) in OUTPUT_AXES[decoder.layout].items():
            if name not in arrays:
                continue
            first, last, total = (-(-row * decoder.bits // WORD_BITS) if packed else row for row in (begin, end, rows))
            if arrays[name].shape[axis] != total:
                raise ValueError(f"{name} {list(arrays[name].shape)} for {rows} outputs")
            sliced[name] = arrays[name][first:last] if axis == 0 else arrays[name][:, first:last]
        if "weight_shape" in arrays:
            sliced["weight_shape"] = arrays["weight_shape"].reshape(-1) - [rows - (end - begin), 0]
        if decoder.layout == BNB_4BIT:
            for name, values_per_item in ((BNB_PARTS[0], 2), (BNB_PARTS[2], int(arrays[BLOCK]))):
                sliced[name] = arrays[name][begin * shape[1] // values_per_item : -(-end * shape[1] // values_per_item)]
        for name in arrays.keys() - {"weight", "weight_g_idx"} if decoder.layout in BLOCK_SCALED else ():
            values, block_rows = arrays[name], decoder.block[0]
            if values.size == 1 or len(values) == 1:
                continue
            block_rows = 1 if len(values) == rows else block_rows
            if block_rows and len(values) != -(-rows // block_rows):
                raise ValueError(f"{name} {list(values.shape)} for {rows} outputs")
            sliced[name] = values[begin // block_rows : -(-end // block_rows)] if block_rows else values
        return sliced

    def _weight_name(self, info: TensorInfo) -> str | None:
        """The name of the weight that a tensor is, or of which it is a range of rows; None for a tensor that is read as stored."""
        if info.name in self._parts:
            return info.name
        return self._offsets[bisect_right(self._offsets, (info.offset, "\U0010ffff")) - 1][1] if info.offset >= CONVERTED_OFFSET else None

    def _packed(self, info: TensorInfo) -> np.ndarray:
        """The weight in the layout of the kernels. One thread at a time: the intermediate arrays are several times as large."""
        spec, shape = self._specs[info.name], self._shapes[info.name]
        with self._lock:
            if self._stays_float(info):
                blob = np.zeros(info.nbytes, np.uint8)
                self._repack_floats(info, self._part_reader(info), blob)
                return blob
            if self._repacks_words(info) or self._decoder(info).layout == BNB_4BIT:
                blob = np.zeros(info.nbytes, np.uint8)
                self._convert(info, 0, [TensorStore.read(self, part) for part in self._parts[info.name].values()], [blob])
                return blob
            decode = lambda *args: groups.packable(self._decoder(info).decode_integers(*args), spec)  # noqa: E731
            return pack(self._checked(info, shape, decode, self._part_reader(info)), spec)

    def _dequantized(self, info: TensorInfo) -> np.ndarray:
        """The dequantized weight [N, K] in its dtype. The last one is cached, because rows of a weight are read in blocks. One thread at a
        time."""
        with self._lock:
            if self._cached is None or self._cached[0] != info.name:
                self._cached = None  # free its memory before the next one is allocated
                if self._becomes_f16(info):
                    values = np.empty(info.shape, np.uint16)
                    self._repack_floats(info, self._part_reader(info), values.reshape(-1).view(np.uint8))
                elif self._decoder(info).layout == BNB_4BIT:  # in steps, whose arrays stay in the processor's cache
                    values = np.empty(info.shape, RAW_NUMPY[info.dtype.lower()])
                    self._convert(info, 0, [TensorStore.read(self, part) for part in self._parts[info.name].values()],
                              [values.reshape(-1).view(np.uint8)])
                else:
                    decoder = self._decoder(info)
                    values = from_f32(self._checked(info, info.shape, decoder.dequantize, self._part_reader(info)),
                                    widened_dtype(decoder.layout, self._dequant_dtype))
                self._cached = info.name, values
            return self._cached[1]

    def _repack_floats(self, info: TensorInfo, array: Array, out: np.ndarray) -> None:
        """Write floats of few bits into a blob, or as f16 values. `array` returns a part by name."""
        scale_inv, spec = array("weight_scale_inv"), self._specs.get(info.name)
        scales = array("weight_scale") if scale_inv is None else scale_inv
        try:
            if self._decoders[info.name].layout in MXFP4:
                if not put_mxfp4(out, self._shapes[info.name], 0, *self._decoder(info).packed_mxfp4_parts(array)):
                    raise mismatch_error(info, info.name, "a scale is NaN")
            elif self._decoders[info.name].layout in NVFP4:
                put_nvfp4(out, *self._decoder(info).nvfp4_parts(array))
            elif spec is None:
                put_fp8_as_halves(out, array("weight"), scales, self._decoder(info).block)
            else:
                put_fp8(out, spec, array("weight"), scales, self._decoder(info).block)
        except ValueError as error:
            raise mismatch_error(info, info.name, str(error)) from error

    def _checked(self, info: TensorInfo, shape: tuple[int, ...], decode: Callable, array: Array) -> np.ndarray | Codes:
        """`decode(array, shape)`, where `array` returns a part by name. Raises CheckpointError for parts that do not fit one another or the
        shape."""
        try:
            decoded = decode(array, shape)
        except ValueError as error:
            raise mismatch_error(info, info.name, str(error)) from error
        decoded_shape = decoded.shape if isinstance(decoded, np.ndarray) else decoded.codes.shape
        if decoded_shape != shape:
            damaged(info.file, f"holds {shown(info.name)} of shape {list(decoded_shape)}, expected {list(shape)}")
        return decoded

    def _part_reader(self, info: TensorInfo) -> Array:
        """A function that reads a part of a weight by name."""
        parts, layout = self._parts[info.name], self._decoder(info).layout

        def read(name: str) -> np.ndarray | None:
            return as_typed(parts[name], TensorStore.read(self, parts[name]), layout) if name in parts else None

        return read if layout != BNB_4BIT else self._with_decoded_scales(info, {name: read(name) for name in parts}).get

    def _with_decoded_scales(self, info: TensorInfo, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """`Decoder.with_decoded_scales`, raising CheckpointError."""
        try:
            return self._decoder(info).with_decoded_scales(arrays, self._shape_of(info))
        except ValueError as error:
            raise mismatch_error(info, info.name, str(error)) from error
