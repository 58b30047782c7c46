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
from ...offload.repack import Repack, RepackStep, staging_buffer
from ...offload.safetensors_header import TensorInfo, damaged, shown
from ...offload.size import format_size
from ...offload.streaming_pager import Range
from ...quant.codes import Codes
from ...quant.imports import bitsandbytes, compressed_tensors, fp8, groups, mxfp4, nvfp4
from ...quant.imports.repack import WORDS, put_bitsandbytes, put_fp8, put_fp8_as_halves, put_int32_words, put_mxfp4, put_nvfp4
from ...quant.pack import pack, put_factors, put_rows
from ...quant.spec import QuantSpec
from ...quant.weight import RAW_NUMPY, from_f32
from .container import Container as StoredContainer
from .container import StoredTensor
from .converting_store import REPACK_SCRATCH_NBYTES, scratch_nbytes, steps
from .import_config import BYTES, CUTS, IN_BLOCKS, LEVELS, MXFP4, NVFP4, PAIRS, runs_from_codes
from .import_decoder import BLOCK, OPENED, Array, Decoder, decoders_of
from .import_index import MADE, as_typed, index_weights, scales_of, unfit, widened_dtype

WORD = 32  # bits


class ImportedStore(TensorStore):
    """The tensors of a quantized folder under the names that they had before, weights as `wide` (f16 or f32); with `low_bit` as codes where
    kernels can multiply them, whose formats `container` then lists; of MXFP4, asked for every weight by name, where `kept` says so, and
    bfloat16 else, which loses nothing either. `parted`: tensors of which ranges of rows are asked for stay wide. `depths`: inputs of the
    weights that the model asks for, which not all codes tell."""

    repacks_on_read = True

    def __init__(self, store: TensorStore, section: Mapping[str, object], wide: str, low_bit: bool = False,
                 parted: Container[str] = (), kept: Callable[[str], bool] | None = None, depths: Mapping[str, int] | None = None) -> None:
        self._method, self._wide = str(section["quant_method"]), wide
        self._last: tuple[str, np.ndarray] | None = None
        self._lock = threading.Lock()
        found = index_weights(store, decoders_of(section), wide, depths or {})
        tensors, self._parts, self._decoders, self._begins = found.tensors, found.parts, found.decoders, found.begins
        low, keeps = low_bit and runs_from_codes(section), kept or (lambda name: low_bit)
        own = {name: self._format(store, name, tensors[name].shape) for name, decoder in self._decoders.items()
               if name not in parted and (keeps(name) if decoder.layout == PAIRS else low)}
        self._specs = {name: spec for name, spec in own.items() if spec is not None}
        self._shapes = {name: tensors[name].shape for name in self._specs}
        stored = {}
        for name, spec in self._specs.items():
            info, nbytes = tensors[name], spec.nbytes(tensors[name].shape)
            stored[name] = StoredTensor(name, spec, info.shape, 0)
            tensors[name] = TensorInfo(name, "U8", (nbytes,), info.file, info.offset, nbytes)
        super().__init__(store.folder, tensors, store.take_files())
        self.container = self._described(stored) if stored else None
        self.notices = tuple(self._said())

    def _format(self, store: TensorStore, name: str, shape: tuple[int, int]) -> QuantSpec | None:
        """That in which kernels multiply a weight's own codes; None where there is none."""
        parts, decoder, depth = self._parts[name], self._decoders[name], shape[1]
        layout, wide = decoder.layout, decoder.block[1]
        if layout in MXFP4:
            return mxfp4.SPEC if depth % mxfp4.GROUP == 0 else None
        if layout == LEVELS:
            return bitsandbytes.spec_of(shape, parts["weight.absmax"].shape[0])
        if layout in NVFP4:
            return nvfp4.SPEC if depth % nvfp4.GROUP == 0 else None
        if layout == "fp8":
            return fp8.spec_of(shape, scales_of(parts).shape, decoder.block)
        if layout == BYTES:  # whose scales become halves, as its weights would
            return groups.spec_of(decoder.bits, groups.SCALES[0], depth, 1)
        scales = parts["scales" if "scales" in parts else "weight_scale"]
        count = self._groups(layout, scales)
        spec = groups.spec_of(decoder.bits, scales.dtype, depth, count)
        if spec is None:
            return None
        if (order := parts.get("g_idx", parts.get("weight_g_idx"))) is not None:
            ordered = order.dtype == "I32" and groups.in_order(store.read(order).view(np.int32), count)
        else:  # groups as a config states them may end in part
            covers = wide > 0 and -(-depth // wide) == count
            ordered = layout not in ("integers", "gptq") or (wide if covers else depth // count) * count == depth
        return spec if ordered else None

    @staticmethod
    def _groups(layout: str, scales: TensorInfo) -> int:
        """How many scales an output has, 0 where their shape says none."""
        if layout == "integers":
            return compressed_tensors.columns(scales.shape)
        return 0 if len(scales.shape) != 2 else scales.shape[1 if layout == "packed" else 0]

    def _described(self, stored: Mapping[str, StoredTensor]) -> StoredContainer:
        """What an effllm.json would say of the weights that run from their codes. There are no checksums."""
        parts = [part for each in self._parts.values() for part in each.values()]
        others = [info for name, info in self.tensors.items() if name not in self._parts]
        nbytes = sum(info.nbytes for info in [*parts, *others])
        weights = sum(prod(self._shapes.get(name, info.shape)) for name, info in self.tensors.items())
        return StoredContainer(f"{self._method}, {', '.join(sorted({str(each.spec) for each in stored.values()}))}", 8 * nbytes / weights,
                               dict(stored), {"model": self.folder.name}, {"name": self._method}, {"name": self._method}, {})

    def _said(self) -> Iterator[str]:
        for layout, ours in product(dict.fromkeys(decoder.layout for decoder in self._decoders.values()), (True, False)):
            what = f"are {'repacked for the kernels' if ours else f'widened to {widened_dtype(layout, self._wide)}'}"
            rounded = ", their levels and scales rounded to whole numbers," if ours and layout == LEVELS else ""
            if ours and any(self._scales_rounded(name) for name, own in self._decoders.items() if own.layout == layout):
                rounded = ", their scales rounded to half precision,"
            if names := [name for name, own in self._decoders.items() if own.layout == layout and (name in self._specs) == ours]:
                held = [part for name in names for part in self._parts[name].values()]
                sizes = (sum(self.tensors[name].nbytes for name in names), sum(part.nbytes for part in held))
                ordered = not ours and any("g_idx" in each for name in names for each in self._parts[name])
                method = "MXFP4" if layout in MXFP4 else self._method
                said = (f"{len(names)} {method} weights {what}{rounded} as they are read: {format_size(sizes[0])} of memory for "
                        f"{format_size(sizes[1])} of file{'; their inputs are grouped by activation order' if ordered else ''}")
                yield Fallback(said) if not ours else said if rounded else Detail(said)

    def _scales_rounded(self, name: str) -> bool:
        """Does a weight stay codes, of integers under scales of 32 bits?"""
        parts = self._parts[name]
        scales = parts.get("scales", parts.get("weight_scale"))
        return name in self._specs and self._specs[name].scheme == "offset" and scales is not None and scales.dtype == "F32"

    def place(self, info: TensorInfo) -> int | None:
        return None if self._weight(info) else info.offset

    def files_of(self, info: TensorInfo) -> frozenset[Path]:
        name = self._weight(info)
        return super().files_of(info) if name is None else frozenset(part.file for part in self._parts[name].values())

    def stored_nbytes(self, info: TensorInfo) -> int:
        if (name := self._weight(info)) is None:
            return info.nbytes
        return sum(part.nbytes for part in self._parts[name].values()) * info.nbytes // self.tensors[name].nbytes

    def read(self, info: TensorInfo, row_begin: int = 0, row_end: int | None = None) -> np.ndarray:
        name = self._weight(info)
        if name is None:
            return super().read(info, row_begin, row_end)
        if name in self._specs:
            return self._blob(info)[row_begin:row_end]
        whole = self.tensors[name]
        first = (info.offset - whole.offset) * whole.shape[0] // whole.nbytes  # of a range of rows with a name of its own
        made = self._widened(whole)[first : first + info.shape[0]][row_begin:row_end]
        return np.ascontiguousarray(made).reshape(-1).view(np.uint8)

    def read_into(self, info: TensorInfo, out: np.ndarray | memoryview) -> None:
        if self._weight(info) is None:
            super().read_into(info, out)
            return
        np.frombuffer(out, np.uint8)[:] = self.read(info)

    def reads(self, info: TensorInfo, out: np.ndarray) -> Iterator[tuple[Callable[[], None], int]]:
        if self._weight(info) is None:
            yield from super().reads(info, out)
            return
        yield partial(self.read_into, info, out), info.nbytes

    def repack_plan(self, infos: Sequence[TensorInfo]) -> Repack | None:
        if any(info.name not in self._parts for info in infos):
            return None  # lies ready at an odd place, or is a range of rows
        parts = [tuple(self._parts[info.name].values()) for info in infos]
        return Repack(tuple(info.nbytes for info in infos), sum(part.nbytes for own in parts for part in own),
                      max(staging_buffer(*(part.nbytes for part in own)) for own in parts), max(map(self._scratch, infos)),
                      lambda: [RepackStep(tuple(Range(part.file, part.offset, part.nbytes) for part in own),
                                partial(self._put, info, index))
                               for index, (info, own) in enumerate(zip(infos, parts, strict=True))])

    def _scratch(self, info: TensorInfo) -> int:
        """Bytes of memory for what lies between a weight's parts and the weight: a step's arrays, scales and zero points as a whole,
        the group of every input."""
        codes = next(iter(self._parts[info.name].values()))
        others = sum(part.nbytes for part in self._parts[info.name].values()) - codes.nbytes
        rows, depth = self._shape_of(info)
        if self._decoders[info.name].layout in MXFP4 and info.name in self._specs:
            return REPACK_SCRATCH_NBYTES
        if self._is_floats(info):  # scales are spread over row blocks
            return REPACK_SCRATCH_NBYTES + 4 * others + 3 * (info.nbytes - self._specs[info.name].sections((rows, depth)).scales)
        if self._in_halves(info):
            return REPACK_SCRATCH_NBYTES + 4 * others
        if self._decoder(info).layout == LEVELS:
            others *= 4  # scales as codes, opened
        return scratch_nbytes(rows, self._between(info), self._unit(info)) + 4 * others + 16 * depth * self._in_words(info)

    def _put(self, info: TensorInfo, index: int, raws: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> None:
        """A weight out of its parts, some outputs at a time."""
        parts, shape, spec, out = self._parts[info.name], self._shape_of(info), self._specs.get(info.name), outs[index]
        decoder = self._decoder(info)
        arrays = {name: as_typed(part, raw, decoder.layout) for (name, part), raw in zip(parts.items(), raws, strict=True)}
        arrays = self._laid_open(info, arrays)
        if self._is_floats(info) or self._in_halves(info):
            self._put_floats(info, arrays.get, out)
            return
        each, in_words = info.nbytes // shape[0], self._in_words(info)
        unit = self._unit(info) if BLOCK not in arrays else lcm(self._unit(info), int(arrays[BLOCK]) // gcd(int(arrays[BLOCK]), shape[1]))
        for begin, end in steps(shape[0], self._between(info), unit):  # which begin with a block
            try:
                array = self._cut(arrays, begin, end, shape, decoder).get
            except ValueError as error:
                raise unfit(info, info.name, str(error)) from error
            own = end - begin, shape[1]
            if spec is None:
                made = from_f32(self._checked(info, own, decoder.decoded, array), widened_dtype(decoder.layout, self._wide))
                out[begin * each : end * each] = np.ascontiguousarray(made).reshape(-1).view(np.uint8)
            elif decoder.layout == LEVELS:
                try:
                    put_bitsandbytes(out, shape, begin, *decoder.leveled(array))
                except ValueError as error:
                    raise unfit(info, info.name, str(error)) from error
            elif in_words:
                try:
                    scales, zeros, rows = groups.factors(*decoder.points(array, own), shape[1], spec)
                except ValueError as error:
                    raise unfit(info, info.name, str(error)) from error
                put_factors(out, spec, shape, begin, scales, zeros, rows)
            else:
                codes = self._checked(info, own, lambda *held: groups.packable(decoder.integers(*held), spec), array)
                put_rows(out, spec, shape, begin, codes)
        if in_words:  # all at once: nothing lies in between
            put_int32_words(out, spec, shape, decoder.layout, next(iter(arrays.values())))

    def _in_words(self, info: TensorInfo) -> bool:
        """Do its codes go straight from the words of a file into the order of the kernels?"""
        return info.name in self._specs and (self._decoders[info.name].layout, self._specs[info.name].bits) in WORDS

    def _is_floats(self, info: TensorInfo) -> bool:
        """Does it stay floats, of eight bits or of four?"""
        return self._decoders[info.name].layout in ("fp8", *MXFP4, *NVFP4) and info.name in self._specs

    def _in_halves(self, info: TensorInfo) -> bool:
        """Are its floats of eight bits widened to half precision?"""
        return self._decoders[info.name].layout == "fp8" and info.dtype == "F16"

    def _between(self, info: TensorInfo) -> int:
        """Values of an output between a weight's parts and the weight: its inputs, or its groups where codes go straight."""
        depth = self._shape_of(info)[1]
        return depth // self._specs[info.name].group if self._in_words(info) else depth

    def _decoder(self, info: TensorInfo) -> Decoder:
        return self._decoders[info.name]

    def _shape_of(self, info: TensorInfo) -> tuple[int, int]:
        """The weight's."""
        return self._shapes.get(info.name, info.shape)

    def _unit(self, info: TensorInfo) -> int:
        """Outputs that can be made by themselves: whole words of zero points and blocks of scales; all where nobody says how high those
        are."""
        rows, scales = self._shape_of(info)[0], self._parts[info.name].get("weight_scale_inv", self._parts[info.name].get("weight_scale"))
        if self._decoders[info.name].layout not in IN_BLOCKS or len(scales.shape) < 2 or scales.shape[0] in (1, rows):
            return lcm(ROWS, WORD)
        high = self._decoder(info).block[0]
        return lcm(ROWS, high) if high else rows

    @staticmethod
    def _cut(arrays: Mapping[str, np.ndarray], begin: int, end: int, shape: tuple[int, int], decoder: Decoder) -> dict[str, np.ndarray]:
        """What outputs [begin, end) of a weight are made of. Raises ValueError for arrays that have others than those."""
        found, rows = dict(arrays), shape[0]
        for name, (axis, packed) in CUTS[decoder.layout].items():
            if name not in arrays:
                continue
            first, last, every = (-(-at * decoder.bits // WORD) if packed else at for at in (begin, end, rows))
            if arrays[name].shape[axis] != every:
                raise ValueError(f"{name} {list(arrays[name].shape)} for {rows} outputs")
            found[name] = arrays[name][first:last] if axis == 0 else arrays[name][:, first:last]
        if "weight_shape" in arrays:
            found["weight_shape"] = arrays["weight_shape"].reshape(-1) - [rows - (end - begin), 0]
        if decoder.layout == LEVELS:
            for name, per in ((OPENED[0], 2), (OPENED[2], int(arrays[BLOCK]))):
                found[name] = arrays[name][begin * shape[1] // per : -(-end * shape[1] // per)]
        for name in arrays.keys() - {"weight", "weight_g_idx"} if decoder.layout in IN_BLOCKS else ():
            values, high = arrays[name], decoder.block[0]
            if values.size == 1 or len(values) == 1:
                continue
            high = 1 if len(values) == rows else high
            if high and len(values) != -(-rows // high):
                raise ValueError(f"{name} {list(values.shape)} for {rows} outputs")
            found[name] = values[begin // high : -(-end // high)] if high else values
        return found

    def _weight(self, info: TensorInfo) -> str | None:
        """The weight that a tensor is, or of which it is a range of rows; None for what is read as it lies."""
        if info.name in self._parts:
            return info.name
        return self._begins[bisect_right(self._begins, (info.offset, "\U0010ffff")) - 1][1] if info.offset >= MADE else None

    def _blob(self, info: TensorInfo) -> np.ndarray:
        """The weight as kernels read it. One thread at a time: the arrays in between are several times as large."""
        spec, shape = self._specs[info.name], self._shapes[info.name]
        with self._lock:
            if self._is_floats(info):
                blob = np.zeros(info.nbytes, np.uint8)
                self._put_floats(info, self._read_part(info), blob)
                return blob
            if self._in_words(info) or self._decoder(info).layout == LEVELS:
                blob = np.zeros(info.nbytes, np.uint8)
                self._put(info, 0, [TensorStore.read(self, part) for part in self._parts[info.name].values()], [blob])
                return blob
            decode = lambda *held: groups.packable(self._decoder(info).integers(*held), spec)  # noqa: E731
            return pack(self._checked(info, shape, decode, self._read_part(info)), spec)

    def _widened(self, info: TensorInfo) -> np.ndarray:
        """[N, K] as it is kept; the last one stays, because rows of one weight are asked for block by block. One thread at a time."""
        with self._lock:
            if self._last is None or self._last[0] != info.name:
                self._last = None  # its memory is for the next one
                if self._in_halves(info):
                    made = np.empty(info.shape, np.uint16)
                    self._put_floats(info, self._read_part(info), made.reshape(-1).view(np.uint8))
                elif self._decoder(info).layout == LEVELS:  # by steps, which stay in a cache
                    made = np.empty(info.shape, RAW_NUMPY[info.dtype.lower()])
                    self._put(info, 0, [TensorStore.read(self, part) for part in self._parts[info.name].values()],
                              [made.reshape(-1).view(np.uint8)])
                else:
                    decoder = self._decoder(info)
                    made = from_f32(self._checked(info, info.shape, decoder.decoded, self._read_part(info)),
                                    widened_dtype(decoder.layout, self._wide))
                self._last = info.name, made
            return self._last[1]

    def _put_floats(self, info: TensorInfo, array: Array, out: np.ndarray) -> None:
        """Floats of few bits, which `array` gives by name with their scales, into a blob, or as halves."""
        inverse, spec = array("weight_scale_inv"), self._specs.get(info.name)
        scales = array("weight_scale") if inverse is None else inverse
        try:
            if self._decoders[info.name].layout in MXFP4:
                if not put_mxfp4(out, self._shapes[info.name], 0, *self._decoder(info).packed_pairs(array)):
                    raise unfit(info, info.name, "a scale is NaN")
            elif self._decoders[info.name].layout in NVFP4:
                put_nvfp4(out, *self._decoder(info).small(array))
            elif spec is None:
                put_fp8_as_halves(out, array("weight"), scales, self._decoder(info).block)
            else:
                put_fp8(out, spec, array("weight"), scales, self._decoder(info).block)
        except ValueError as error:
            raise unfit(info, info.name, str(error)) from error

    def _checked(self, info: TensorInfo, shape: tuple[int, ...], decode: Callable, array: Array) -> np.ndarray | Codes:
        """What `decode` makes of parts, which `array` gives by name, for a weight of this shape. Raises CheckpointError where they do not
        fit one another or the shape."""
        try:
            found = decode(array, shape)
        except ValueError as error:
            raise unfit(info, info.name, str(error)) from error
        own = found.shape if isinstance(found, np.ndarray) else found.codes.shape
        if own != shape:
            damaged(info.file, f"holds {shown(info.name)} of shape {list(own)}, expected {list(shape)}")
        return found

    def _read_part(self, info: TensorInfo) -> Array:
        """What reads a part of a weight by its name."""
        parts, layout = self._parts[info.name], self._decoder(info).layout

        def read(name: str) -> np.ndarray | None:
            return as_typed(parts[name], TensorStore.read(self, parts[name]), layout) if name in parts else None

        return read if layout != LEVELS else self._laid_open(info, {name: read(name) for name in parts}).get

    def _laid_open(self, info: TensorInfo, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """See `Decoder`."""
        try:
            return self._decoder(info).opened(arrays, self._shape_of(info))
        except ValueError as error:
            raise unfit(info, info.name, str(error)) from error
