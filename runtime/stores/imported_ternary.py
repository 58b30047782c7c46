"""Store over checkpoints with ternary weights: BitNet, and 1.58-bit Falcon 3 and Falcon-E.

`quantization_config` with quant_method bitnet describes the layout. Packed weights, `weight` in bytes beside `weight_scale`, are
repacked for the kernels with values unchanged. With linear_class autobitlinear the scale multiplies, else (bitlinear) it divides. With
quantization_mode online the checkpoint holds the float master weights, which are rounded as they are read by the rule the model itself
applies in every forward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from math import prod

import numpy as np

from ...offload.checkpoint import CheckpointError, TensorStore
from ...offload.notes import Detail, Fallback
from ...offload.safetensors_header import TensorInfo, damaged, shown
from ...offload.size import format_size
from ...quant.imports import ternary
from ...quant.pack import put_rows
from ...quant.weight import RAW_NUMPY, from_f32, to_f32
from .container import Container, StoredTensor
from .converting_store import ConvertingStore, steps
from .import_config import FLOATS, ORIGINAL

MULTIPLYING_CLASS, ONLINE = "autobitlinear", "online"
ENDING, SCALE = ".weight", ".weight_scale"
CACHED_TENSORS = 2
# (rows as stored, scale that the codes are multiplied by, mean magnitude by which floats are rounded to codes or None)
LoadedTensor = tuple[np.ndarray, float, "np.float32 | None"]


class TernaryStore(ConvertingStore):
    """The tensors of a folder with ternary weights.

    `dequant_dtype`: f16 or f32, of ternary weights that do not stay packed.
    `masters`: names of the float matrices that the model rounds to ternary values, where the checkpoint holds its master weights.
    `keeps_packed`: whether the ternary weight of that name stays packed; `container` lists the formats of those that do.
    """

    def __init__(self, store: TensorStore, section: Mapping[str, object], dequant_dtype: str, masters: Collection[str],
                 keeps_packed: Callable[[str], bool]) -> None:
        self._multiplies, self._dequant_dtype = section.get("linear_class") == MULTIPLYING_CLASS, dequant_dtype
        self._online = self._multiplies and section.get("quantization_mode") == ONLINE
        self._parts: dict[str, tuple[TensorInfo, TensorInfo | None]] = {}  # (codes or floats, scale or None)
        self._cache: dict[str, LoadedTensor] = {}
        self._lock = threading.RLock()
        tensors, stored = dict(store.tensors), {}
        for name, info in store.tensors.items():
            scale = store.tensors.get(name.removesuffix(ENDING) + SCALE) if name.endswith(ENDING) else None
            if info.dtype != "U8" and scale is None and not (self._online and name in masters):
                continue
            shape = self._check_shape(info, scale, store.tensors)
            self._parts[name] = info, scale
            tensors.pop(scale.name if scale is not None else "", None)
            if keeps_packed(name):
                stored[name] = StoredTensor(name, ternary.spec_of(shape[1]), shape, 0)
                tensors[name] = TensorInfo(name, "U8", (stored[name].nbytes,), info.file, info.offset, stored[name].nbytes)
            else:
                nbytes = prod(shape) * (4 if dequant_dtype == "f32" else 2)
                tensors[name] = TensorInfo(name, dequant_dtype.upper(), shape, info.file, info.offset, nbytes)
        super().__init__(store.folder, tensors, store.take_files())
        self.converted = self._parts
        self.container = self._build_container(stored) if stored else None
        self.notices = tuple(self._describe_conversion(stored))

    def _check_shape(self, info: TensorInfo, scale: TensorInfo | None, others: Mapping[str, TensorInfo]) -> tuple[int, int]:
        """The shape of a ternary weight. Raises CheckpointError for parts that do not fit."""
        if info.dtype == "U8" and scale is None:
            damaged(info.file, f"holds {shown(info.name)} in two bits without {shown(info.name.removesuffix(ENDING) + SCALE)}")
        if len(info.shape) != 2 or 0 in info.shape or info.dtype not in ("U8", *FLOATS):
            raise _mismatch_error(info, f"{info.dtype} {list(info.shape)}")
        if scale is not None and (scale.dtype not in FLOATS or scale.shape not in ((), (1,))):
            raise _mismatch_error(info, f"a scale that is {scale.dtype} {list(scale.shape)}")
        if scale is not None and self._multiplies and f"{info.name.removesuffix(ENDING)}.bias" in others:
            raise _mismatch_error(info, "a bias, which its scale multiplies too")
        return (info.shape[0] * (ternary.IN_BYTE if info.dtype == "U8" else 1), info.shape[1])

    def _build_container(self, stored: Mapping[str, StoredTensor]) -> Container:
        """A container for the weights that stay packed, without checksums."""
        weights = sum(prod(stored[name].shape if name in stored else info.shape) for name, info in self.tensors.items())
        bits = 8 * sum(info.nbytes for info in self.tensors.values()) / weights
        return Container(f"bitnet, {next(iter(stored.values())).spec}", bits, dict(stored), {"model": self.folder.name}, {"name": "bitnet"},
                         {"name": "bitnet"}, {})

    def _describe_conversion(self, stored: Collection[str]) -> Iterator[str]:
        for is_packed in (True, False):
            if names := [name for name in self._parts if (name in stored) == is_packed]:
                sizes = (sum(self.tensors[name].nbytes for name in names), sum(map(self._file_nbytes, names)))
                rounds_masters = any(self._parts[name][0].dtype != "U8" and self._parts[name][1] is None for name in names)
                action = "repacked for the kernels, values as they are," if is_packed else f"widened to {self._dequant_dtype}"
                if rounds_masters:
                    action = "rounded to -1, 0 or 1 times the mean of their magnitudes, as the model rounds them whenever it runs,"
                message = (f"{len(names)} ternary weights are {action} as they are read: {format_size(sizes[0])} of memory for "
                        f"{format_size(sizes[1])} of file")
                yield Fallback(message) if not is_packed else message if rounds_masters else Detail(message)

    def _file_nbytes(self, name: str) -> int:
        return sum(part.nbytes for part in self._parts[name] if part is not None)

    def stored_nbytes(self, info: TensorInfo) -> int:
        """As in TensorStore."""
        return self._file_nbytes(info.name) if info.name in self._parts else super().stored_nbytes(info)

    def fill(self, info: TensorInfo, begin: int, end: int, out: np.ndarray) -> None:
        """See `ConvertingStore`."""
        codes, number = self._codes(info.name, begin, end)
        made = from_f32((codes.astype(np.float32) - np.float32(1)) * np.float32(number), self._dequant_dtype)
        out[:] = np.ascontiguousarray(made).reshape(-1).view(np.uint8)

    def put_codes(self, info: TensorInfo, begin: int, end: int, blob: np.ndarray) -> None:
        """See `ConvertingStore`."""
        stored = self.container.tensors[info.name]
        codes, number = self._codes(info.name, begin, end)
        put_rows(blob, stored.spec, stored.shape, begin, ternary.packable(codes, number, stored.spec))

    def _codes(self, name: str, begin: int, end: int) -> tuple[np.ndarray, float]:
        """(codes of rows [begin, end), their scale)."""
        info = self._parts[name][0]
        try:
            raw, scale, mean = self._load(name)
            if info.dtype == "U8":
                return ternary.unpack(raw, begin, end), scale
            values = _floats(raw[begin:end], info)
            return ternary.codes_from_floats(values) if mean is None else ternary.absmean_codes(values, mean), scale
        except ValueError as error:
            raise _mismatch_error(info, str(error)) from error

    def _load(self, name: str) -> LoadedTensor:
        """A tensor as read. The last ones are cached: rows are read in blocks, by threads of which some are still at the end of one tensor
        while others begin the next."""
        with self._lock:
            if name not in self._cache:
                while len(self._cache) >= CACHED_TENSORS:
                    del self._cache[next(iter(self._cache))]  # its memory is for the next one
                info, scale = self._parts[name]
                raw = TensorStore.read(self, info).view(np.uint8 if info.dtype == "U8" else RAW_NUMPY[info.dtype.lower()])
                raw, mean = raw.reshape(info.shape), None
                if scale is None:
                    mean = ternary.absmean((_floats(raw[begin:end], info) for begin, end in steps(*info.shape)), raw.size)
                    scale_value = _as_stored(np.float32(1) / (np.float32(1) / mean), info)  # the model divides by what it multiplied by
                else:
                    scale_value = self._scale_of(scale)
                self._cache[name] = raw, scale_value, mean
            return self._cache[name]

    def _scale_of(self, scale: TensorInfo) -> float:
        """The factor of a matrix' codes. Raises ValueError for one that is no positive number."""
        value = float(_floats(TensorStore.read(self, scale).view(RAW_NUMPY[scale.dtype.lower()]), scale).reshape(-1)[0])
        if not np.isfinite(value) or value <= 0:
            raise ValueError(f"a scale of {value}")
        return value if self._multiplies else float(np.float32(1) / np.float32(value))


def _as_stored(value: np.float32, info: TensorInfo) -> float:
    """A number rounded to the dtype of a tensor."""
    return float(_floats(from_f32(np.array([value], np.float32), info.dtype.lower()), info)[0])


def _floats(values: np.ndarray, info: TensorInfo) -> np.ndarray:
    return to_f32(values, info.dtype.lower())


def _mismatch_error(info: TensorInfo, reason: str) -> CheckpointError:
    return CheckpointError(f"{info.file} holds {shown(info.name)}, a ternary weight, with {reason}",
                           f"if it is as published, this layout is not supported: {ORIGINAL}; else download the model again")
