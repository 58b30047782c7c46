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

AUTO, ONLINE = "autobitlinear", "online"
ENDING, SCALE = ".weight", ".weight_scale"
HELD = 2  # tensors
# A tensor as it lies in its file, by rows; the number that its codes are multiples of; and the mean by which floats are rounded to them,
# None where nothing is.
Whole = tuple[np.ndarray, float, "np.float32 | None"]


class TernaryStore(ConvertingStore):
    """`masters` names the matrices that are ternary where all are floats. `kept`, asked for every ternary weight by name: does it stay
    codes, whose formats `container` then lists? Else it becomes `wide`, f16 or f32."""

    def __init__(self, store: TensorStore, section: Mapping[str, object], wide: str, masters: Collection[str],
                 kept: Callable[[str], bool]) -> None:
        self._multiplies, self._wide = section.get("linear_class") == AUTO, wide
        self._online = self._multiplies and section.get("quantization_mode") == ONLINE
        self._parts: dict[str, tuple[TensorInfo, TensorInfo | None]] = {}  # codes or floats, and the number beside them
        self._held: dict[str, Whole] = {}
        self._lock = threading.RLock()
        tensors, stored = dict(store.tensors), {}
        for name, info in store.tensors.items():
            scale = store.tensors.get(name.removesuffix(ENDING) + SCALE) if name.endswith(ENDING) else None
            if info.dtype != "U8" and scale is None and not (self._online and name in masters):
                continue
            shape = self._checked(info, scale, store.tensors)
            self._parts[name] = info, scale
            tensors.pop(scale.name if scale is not None else "", None)
            if kept(name):
                stored[name] = StoredTensor(name, ternary.spec_of(shape[1]), shape, 0)
                tensors[name] = TensorInfo(name, "U8", (stored[name].nbytes,), info.file, info.offset, stored[name].nbytes)
            else:
                tensors[name] = TensorInfo(name, wide.upper(), shape, info.file, info.offset, prod(shape) * (4 if wide == "f32" else 2))
        super().__init__(store.folder, tensors, store.take_files())
        self.converted = self._parts
        self.container = self._described(stored) if stored else None
        self.notices = tuple(self._said(stored))

    def _checked(self, info: TensorInfo, scale: TensorInfo | None, others: Mapping[str, TensorInfo]) -> tuple[int, int]:
        """The shape of a ternary weight. Raises CheckpointError for parts that do not fit."""
        if info.dtype == "U8" and scale is None:
            damaged(info.file, f"holds {shown(info.name)} in two bits without {shown(info.name.removesuffix(ENDING) + SCALE)}")
        if len(info.shape) != 2 or 0 in info.shape or info.dtype not in ("U8", *FLOATS):
            raise _unfit(info, f"{info.dtype} {list(info.shape)}")
        if scale is not None and (scale.dtype not in FLOATS or scale.shape not in ((), (1,))):
            raise _unfit(info, f"a scale that is {scale.dtype} {list(scale.shape)}")
        if scale is not None and self._multiplies and f"{info.name.removesuffix(ENDING)}.bias" in others:
            raise _unfit(info, "a bias, which its scale multiplies too")
        return (info.shape[0] * (ternary.IN_BYTE if info.dtype == "U8" else 1), info.shape[1])

    def _described(self, stored: Mapping[str, StoredTensor]) -> Container:
        """What an effllm.json would say of them. The checkpoint has no checksums."""
        weights = sum(prod(stored[name].shape if name in stored else info.shape) for name, info in self.tensors.items())
        bits = 8 * sum(info.nbytes for info in self.tensors.values()) / weights
        return Container(f"bitnet, {next(iter(stored.values())).spec}", bits, dict(stored), {"model": self.folder.name}, {"name": "bitnet"},
                         {"name": "bitnet"}, {})

    def _said(self, stored: Collection[str]) -> Iterator[str]:
        for codes in (True, False):
            if names := [name for name in self._parts if (name in stored) == codes]:
                sizes = (sum(self.tensors[name].nbytes for name in names), sum(map(self._file_nbytes, names)))
                floats = any(self._parts[name][0].dtype != "U8" and self._parts[name][1] is None for name in names)
                what = "repacked for the kernels, values as they are," if codes else f"widened to {self._wide}"
                if floats:
                    what = "rounded to -1, 0 or 1 times the mean of their magnitudes, as the model rounds them whenever it runs,"
                said = (f"{len(names)} ternary weights are {what} as they are read: {format_size(sizes[0])} of memory for "
                        f"{format_size(sizes[1])} of file")
                yield Fallback(said) if not codes else said if floats else Detail(said)

    def _file_nbytes(self, name: str) -> int:
        return sum(part.nbytes for part in self._parts[name] if part is not None)

    def stored_nbytes(self, info: TensorInfo) -> int:
        """As of any store."""
        return self._file_nbytes(info.name) if info.name in self._parts else super().stored_nbytes(info)

    def fill(self, info: TensorInfo, begin: int, end: int, out: np.ndarray) -> None:
        """See `ConvertingStore`."""
        codes, number = self._codes(info.name, begin, end)
        made = from_f32((codes.astype(np.float32) - np.float32(1)) * np.float32(number), self._wide)
        out[:] = np.ascontiguousarray(made).reshape(-1).view(np.uint8)

    def put_codes(self, info: TensorInfo, begin: int, end: int, blob: np.ndarray) -> None:
        """See `ConvertingStore`."""
        stored = self.container.tensors[info.name]
        codes, number = self._codes(info.name, begin, end)
        put_rows(blob, stored.spec, stored.shape, begin, ternary.packable(codes, number, stored.spec))

    def _codes(self, name: str, begin: int, end: int) -> tuple[np.ndarray, float]:
        """Codes of rows [begin, end), and the number that all are multiples of."""
        info = self._parts[name][0]
        try:
            raw, number, mean = self._whole(name)
            if info.dtype == "U8":
                return ternary.unpack(raw, begin, end), number
            values = _floats(raw[begin:end], info)
            return ternary.codes_from_floats(values) if mean is None else ternary.absmean_codes(values, mean), number
        except ValueError as error:
            raise _unfit(info, str(error)) from error

    def _whole(self, name: str) -> Whole:
        """A tensor. The last ones stay: rows are asked for some at a time, and threads are at the end of one and the beginning of the
        next."""
        with self._lock:
            if name not in self._held:
                while len(self._held) >= HELD:
                    del self._held[next(iter(self._held))]  # its memory is for the next one
                info, scale = self._parts[name]
                raw = TensorStore.read(self, info).view(np.uint8 if info.dtype == "U8" else RAW_NUMPY[info.dtype.lower()])
                raw, mean = raw.reshape(info.shape), None
                if scale is None:
                    mean = ternary.absmean((_floats(raw[begin:end], info) for begin, end in steps(*info.shape)), raw.size)
                    number = _as_stored(np.float32(1) / (np.float32(1) / mean), info)  # the model divides by what it multiplied by
                else:
                    number = self._stated(scale)
                self._held[name] = raw, number, mean
            return self._held[name]

    def _stated(self, scale: TensorInfo) -> float:
        """What the number beside a matrix multiplies its codes by."""
        stated = float(_floats(TensorStore.read(self, scale).view(RAW_NUMPY[scale.dtype.lower()]), scale).reshape(-1)[0])
        if not np.isfinite(stated) or stated <= 0:
            raise ValueError(f"a scale of {stated}")
        return stated if self._multiplies else float(np.float32(1) / np.float32(stated))


def _as_stored(number: np.float32, info: TensorInfo) -> float:
    """A number as the type of a tensor holds it."""
    return float(_floats(from_f32(np.array([number], np.float32), info.dtype.lower()), info)[0])


def _floats(values: np.ndarray, info: TensorInfo) -> np.ndarray:
    return to_f32(values, info.dtype.lower())


def _unfit(info: TensorInfo, why: str) -> CheckpointError:
    return CheckpointError(f"{info.file} holds {shown(info.name)}, a ternary weight, with {why}",
                           f"if it is as published, this layout is not supported: {ORIGINAL}; else download the model again")
