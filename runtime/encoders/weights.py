"""Tensors of an encoder in float32, except for embedding tables, which stay as stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...offload.checkpoint import CheckpointError, TensorStore
from ...offload.safetensors_header import AGAIN, TensorInfo
from ..images.tower_ops import Float32Matrix, Norm, to_float32

if TYPE_CHECKING:
    from .gguf_encoder import GgufTensors

STORED_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
PARAMETRIZED_SUFFIX = ".parametrizations.weight.original"  # of a matrix that is stored with adapters
OLD_NORM_NAMES = {"weight": "gamma", "bias": "beta"}  # parameters of norms in old checkpoints


class FolderTensors:
    """Tensors of an open folder, by name without a prefix, of which the first that matches is used."""

    def __init__(self, store: TensorStore, prefixes: Sequence[str]) -> None:
        self._store, self._prefixes, self.folder = store, ("", *prefixes), store.folder

    def stored(self, name: str) -> TensorInfo | None:
        parametrized = name.removesuffix(".weight") + PARAMETRIZED_SUFFIX if name.endswith(".weight") else name
        for candidate in (name, parametrized):
            for prefix in self._prefixes:
                if (info := self._store.tensors.get(prefix + candidate)) is not None:
                    return info
        return None

    def values(self, info: TensorInfo) -> np.ndarray:
        """A tensor as stored, bfloat16 as uint16. Raises CheckpointError."""
        if info.dtype not in STORED_DTYPES:
            raise CheckpointError(f"{info.name} is stored as {info.dtype}: encoders are supported only in F32, F16 and BF16",
                                  "use a version in one of these")
        return self._store.read(info).view(STORED_DTYPES[info.dtype]).reshape(info.shape)


class Tensors:
    """Tensors of a folder or a GGUF file, by the checkpoint's names."""

    def __init__(self, stored: FolderTensors | GgufTensors) -> None:
        self._stored = stored
        self.read: set[str] = set()  # stored names; a test checks that all tensors are used

    def has(self, name: str) -> bool:
        return self._stored.stored(name) is not None

    def table(self, name: str, *shape: int) -> np.ndarray:
        """A tensor as stored, bfloat16 as uint16. Raises CheckpointError."""
        info = self._stored.stored(name)
        if info is None:
            raise CheckpointError(f"{self._stored.folder} holds no tensor {name}", AGAIN)
        if tuple(info.shape) != shape:
            raise CheckpointError(f"{info.name} is {list(info.shape)}, but the config says {list(shape)}", AGAIN)
        self.read.add(info.name)
        return self._stored.values(info)

    def optional_table(self, name: str, rows: int, width: int) -> np.ndarray | None:
        """As `table`; None for a table without rows. Raises CheckpointError."""
        return self.table(name, rows, width) if rows else None

    def numbers(self, name: str, *shape: int) -> np.ndarray:
        """A tensor as float32. Raises CheckpointError."""
        return np.ascontiguousarray(to_float32(self.table(name, *shape)))

    def linear(self, name: str, rows: int, depth: int, bias: bool = True) -> Float32Matrix:
        """The matrix `name`.weight [rows, depth], with `name`.bias if `bias`. Raises CheckpointError."""
        return Float32Matrix(self.numbers(f"{name}.weight", rows, depth).T, self.numbers(f"{name}.bias", rows) if bias else None)

    def split_linear(self, name: str, rows: int, depth: int) -> tuple[Float32Matrix, Float32Matrix]:
        """Two matrices [rows, depth] that are stored as one, without biases. Raises CheckpointError."""
        first, second = np.split(self.numbers(f"{name}.weight", 2 * rows, depth), 2)
        return Float32Matrix(first.T, None), Float32Matrix(second.T, None)

    def fused_linear(self, names: Sequence[str], rows: int, depth: int, bias: bool = True) -> Float32Matrix:
        """Matrices [rows, depth] concatenated along the outputs. Raises CheckpointError."""
        weights = np.concatenate([self.numbers(f"{name}.weight", rows, depth) for name in names])
        return Float32Matrix(weights.T, np.concatenate([self.numbers(f"{name}.bias", rows) for name in names]) if bias else None)

    def norm(self, name: str, width: int, eps: float, bias: bool = True) -> Norm:
        return Norm(self._norm_parameter(name, "weight", width), self._norm_parameter(name, "bias", width) if bias else None, eps)

    def _norm_parameter(self, name: str, part: str, width: int) -> np.ndarray:
        old_name = f"{name}.{OLD_NORM_NAMES[part]}"
        return self.numbers(old_name if self.has(old_name) else f"{name}.{part}", width)
