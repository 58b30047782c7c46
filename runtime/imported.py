"""Quantized checkpoints of other tools, read as ordinary ones: GPTQ, AWQ, compressed-tensors (pack-quantized integers), FP8.

`quantization_config` names the method; what stands for a weight (its codes, scales, zero points) is found by name. A weight is widened to
16 bits when it is read, one at a time, which is announced with its cost in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod

import numpy as np

from ..offload.checkpoint import CheckpointError, TensorStore
from ..offload.header import TensorInfo, damaged, shown
from ..offload.size import format_size
from ..quant.imports import awq, compressed_tensors, fp8, gptq
from ..quant.weight import RAW_NUMPY, from_f32, to_f32
from .config_reader import ConfigError, show

FLOATS = ("F32", "F16", "BF16")
ORIGINAL = "take the original 16-bit checkpoint"
# Method -> the ending of the tensor that holds a weight's codes, and those of the others ("?" behind: may be absent).
ENDINGS = {
    "gptq": ("qweight", ("qzeros", "scales", "g_idx?")),
    "awq": ("qweight", ("qzeros", "scales")),
    "compressed-tensors": ("weight_packed", ("weight_scale", "weight_shape", "weight_zero_point?", "weight_g_idx?")),
    "fp8": ("weight", ("weight_scale_inv?", "weight_scale?")),
}
IGNORED = ("input_scale", "output_scale", "activation_scale", "k_scale", "v_scale")  # of activations, which stay in float32 here


def check_method(section: Mapping[str, object]) -> None:
    """Raises ConfigError for a `quantization_config` that is not read, by name."""
    method = section.get("quant_method")

    def refused(what: str, known: str) -> ConfigError:
        return ConfigError(f"config.json: quantization_config with {what} is not supported", f"{known}; or {ORIGINAL}")

    if method not in ENDINGS:
        raise refused(f"quant_method {show(method)}", f"known: {', '.join(ENDINGS)}")
    bits = section.get("bits")
    if method == "gptq" and bits not in (2, 3, 4, 8):
        raise refused(f"bits {show(bits)}", "GPTQ of 2, 3, 4 and 8 bits")
    if method == "awq" and (bits not in (4, None) or str(section.get("version", "gemm")).lower() != "gemm"):
        raise refused(f"bits {show(bits)} and version {show(section.get('version'))}", "AWQ of 4 bits in the gemm layout")
    if method == "compressed-tensors" and _packed_bits(section) is None:
        raise refused(f"format {show(section.get('format'))}", "pack-quantized integers of 4 and 8 bits")


def _packed_bits(section: Mapping[str, object]) -> int | None:
    """Bits of pack-quantized integers, where all groups have the same."""
    groups = section.get("config_groups")
    if section.get("format") != "pack-quantized" or not isinstance(groups, dict):
        return None
    sections = [each.get("weights") for each in groups.values() if isinstance(each, dict)]
    found = {each.get("num_bits") for each in sections if isinstance(each, dict)}
    return found.pop() if len(found) == 1 and found <= {4, 8} else None


class ImportedStore(TensorStore):
    """The tensors of a quantized folder under the names that they had before, weights as `wide` (f16 or f32)."""

    def __init__(self, store: TensorStore, section: Mapping[str, object], wide: str) -> None:
        self._method, self._section, self._wide = str(section["quant_method"]), section, wide
        self._parts: dict[str, dict[str, TensorInfo]] = {}
        self._last: tuple[str, np.ndarray] | None = None
        self._lock = threading.Lock()
        tensors, before = self._named(store)
        super().__init__(store.folder, tensors, store.take_files())
        if self._parts:
            after = sum(tensors[name].nbytes for name in self._parts)
            self.notices = (f"{len(self._parts)} {self._method} weights are widened to {wide} as they are read: {format_size(after)} of "
                            f"memory for {format_size(before)} of file",)

    def _named(self, store: TensorStore) -> tuple[dict[str, TensorInfo], int]:
        """The tensors by the names they had, and the bytes of all parts."""
        codes, others = ENDINGS[self._method]
        tensors, used, nbytes = {}, set(), 0
        for name, info in store.tensors.items():
            base, _, ending = name.rpartition(".")
            if ending != codes or (self._method == "fp8" and info.dtype != "F8_E4M3"):
                continue
            parts = {codes: info}
            for other in others:
                part = store.tensors.get(f"{base}.{other.rstrip('?')}")
                if part is not None:
                    parts[other.rstrip("?")] = part
                elif not other.endswith("?"):
                    damaged(info.file, f"holds {shown(name)} without {base}.{other}")
            if self._method == "fp8" and len(parts) != 2:
                damaged(info.file, f"holds {shown(name)} in 8 bits without one scale for it")
            weight, shape = f"{base}.weight", self._shape(info)
            self._parts[weight] = parts
            used |= {part.name for part in parts.values()}
            nbytes += sum(part.nbytes for part in parts.values())
            size = prod(shape) * (4 if self._wide == "f32" else 2)
            tensors[weight] = TensorInfo(weight, self._wide.upper(), shape, info.file, info.offset, size)
        for name, info in store.tensors.items():
            if name not in used and name.rpartition(".")[2] not in IGNORED:
                tensors[name] = info
        return tensors, nbytes

    def _shape(self, info: TensorInfo) -> tuple[int, int]:
        """The weight's, from that of its codes."""
        if len(info.shape) != 2 or 0 in info.shape or (self._method != "fp8" and info.dtype != "I32"):
            damaged(info.file, f"holds {shown(info.name)} as {info.dtype} {list(info.shape)}")
        rows, columns = info.shape
        if self._method == "gptq":
            return columns, rows * 32 // int(self._section["bits"])
        if self._method == "awq":
            return columns * 8, rows
        return (rows, columns) if self._method == "fp8" else (rows, columns * 32 // _packed_bits(self._section))

    def place(self, info: TensorInfo) -> int | None:
        return None if info.name in self._parts else info.offset

    def read(self, info: TensorInfo, row_begin: int = 0, row_end: int | None = None) -> np.ndarray:
        if info.name not in self._parts:
            return super().read(info, row_begin, row_end)
        values = self._values(info)[row_begin:row_end]
        return np.ascontiguousarray(from_f32(values, self._wide)).reshape(-1).view(np.uint8)

    def read_into(self, info: TensorInfo, out: np.ndarray | memoryview) -> None:
        if info.name not in self._parts:
            super().read_into(info, out)
            return
        np.frombuffer(out, np.uint8)[:] = self.read(info)

    def reads(self, info: TensorInfo, out: np.ndarray) -> Iterator[tuple[Callable[[], None], int]]:
        if info.name not in self._parts:
            yield from super().reads(info, out)
            return
        yield partial(self.read_into, info, out), info.nbytes

    def _values(self, info: TensorInfo) -> np.ndarray:
        """float32 [N, K]; the last one is kept, because rows of one weight are asked for block by block. One thread at a time."""
        with self._lock:
            if self._last is None or self._last[0] != info.name:
                try:
                    values = self._decoded(self._parts[info.name], info.shape)
                except ValueError as error:
                    raise CheckpointError(f"{info.file} holds parts of {shown(info.name)} that do not fit: {error}",
                                          "download the model again") from error
                if values.shape != info.shape:
                    damaged(info.file, f"holds {shown(info.name)} of shape {list(values.shape)}, expected {list(info.shape)}")
                self._last = info.name, values
            return self._last[1]

    def _array(self, parts: Mapping[str, TensorInfo], name: str) -> np.ndarray | None:
        """A part: words as int32, scales as float32, codes as they are."""
        if (info := parts.get(name)) is None:
            return None
        raw = TensorStore.read(self, info)
        if info.dtype in FLOATS:
            return to_f32(raw.view(RAW_NUMPY[info.dtype.lower()]), info.dtype.lower()).reshape(info.shape)
        if info.dtype not in ("I32", "I64", "F8_E4M3"):
            damaged(info.file, f"holds {shown(info.name)} as {info.dtype}")
        return raw.view({"I32": np.int32, "I64": np.int64, "F8_E4M3": np.uint8}[info.dtype]).reshape(info.shape)

    def _decoded(self, parts: Mapping[str, TensorInfo], shape: tuple[int, ...]) -> np.ndarray:
        array = partial(self._array, parts)
        if self._method == "gptq":
            group = self._section.get("group_size")
            order = array("g_idx")
            if order is None:
                order = np.arange(shape[1]) // (group if isinstance(group, int) and group > 0 else shape[1])
            return gptq.dequantize(array("qweight"), array("qzeros"), array("scales"), order.reshape(-1), int(self._section["bits"]),
                                   self._section.get("checkpoint_format", "gptq") != "gptq_v2")
        if self._method == "awq":
            return awq.dequantize(array("qweight"), array("qzeros"), array("scales"), shape[1] // max(1, parts["scales"].shape[0]))
        if self._method == "fp8":
            return fp8.dequantize(array("weight"), array("weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"))
        stated = array("weight_shape").reshape(-1).tolist()
        if stated != list(shape):
            raise ValueError(f"weight_shape says {stated}, the words are for {list(shape)}")
        return compressed_tensors.dequantize(array("weight_packed"), array("weight_scale"), array("weight_zero_point"),
                                             array("weight_g_idx"), _packed_bits(self._section), shape)
