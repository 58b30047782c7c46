"""A weight is a frozen record, not a tensor type: its spec, its shape and its parts by name. Ops read `weight.spec`.

Shapes are `[N, K]` (out, in) as checkpoints store them. 16-bit parts travel as uint16 on the CPU, because NumPy has no bfloat16
and Numba no half; a torch backend holds native tensors in `parts` instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..kernels.layout import STORED_TYPES
from .spec import QuantSpec

RAW_NUMPY = {"f32": np.dtype(np.float32), "f16": np.dtype(np.uint16), "bf16": np.dtype(np.uint16)}


@dataclass(frozen=True)
class Weight:
    """`parts["data"]` holds raw values. `address` is for CPU kernels."""

    spec: QuantSpec
    shape: tuple[int, ...]
    parts: Mapping[str, object]

    @cached_property
    def address(self) -> int:
        return self.parts["data"].ctypes.data

    @classmethod
    def raw(cls, scheme: str, shape: tuple[int, ...], data: np.ndarray) -> Weight:
        """Wrap raw bytes (or an array of the stored type) without copying. Raises ValueError when the size is not the shape's."""
        spec = QuantSpec.raw(scheme)
        if data.nbytes != spec.nbytes(shape):
            raise ValueError(f"{data.nbytes} bytes for shape {shape} in {scheme}, expected {spec.nbytes(shape)}")
        return cls(spec, shape, {"data": data.view(RAW_NUMPY[scheme]).reshape(shape)})


def to_f32(data: np.ndarray, scheme: str) -> np.ndarray:
    """Raw values in their stored type -> float32 (a copy for 16-bit types)."""
    if scheme == "bf16":
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return data.view(np.float16).astype(np.float32) if scheme == "f16" else data.view(np.float32)


def from_f32(data: np.ndarray, scheme: str) -> np.ndarray:
    """float32 -> stored type, nearest with ties to even."""
    if scheme == "bf16":
        bits = np.ascontiguousarray(data, np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(data), np.uint16(0x7FC0), rounded)
    return data.astype(np.float16).view(np.uint16) if scheme == "f16" else np.ascontiguousarray(data, np.float32)


@dataclass(frozen=True)
class Linear:
    """y = x @ weight.T + bias; `bias` is float32 `[N]` or None."""

    weight: Weight
    bias: np.ndarray | None = None

    @cached_property
    def fields(self) -> tuple[int, int, int, int]:
        """What a CPU kernel reads of it: address, stored type, rows, address of the bias (0: none)."""
        weight, bias = self.weight, self.bias
        return weight.address, STORED_TYPES[weight.spec.scheme], weight.shape[0], 0 if bias is None else bias.ctypes.data


@dataclass(frozen=True)
class Norm:
    """`kind` is rms, rms+1 (weights stored minus one), layer or none; `weight` and `bias` are float32 `[K]` or None."""

    kind: str
    weight: np.ndarray | None = None
    bias: np.ndarray | None = None
    eps: float = 1e-5
