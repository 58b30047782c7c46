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

STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
ORIGINAL = ".parametrizations.weight.original"  # what a matrix is called beside which adapters lie
FORMER = {"weight": "gamma", "bias": "beta"}  # what norms called theirs


class FolderTensors:
    """Tensors of an open folder, by name without the first matching of `prefixes`."""

    def __init__(self, store: TensorStore, prefixes: Sequence[str]) -> None:
        self._store, self._prefixes, self.folder = store, ("", *prefixes), store.folder

    def stored(self, name: str) -> TensorInfo | None:
        own = name.removesuffix(".weight") + ORIGINAL if name.endswith(".weight") else name
        return next((found for each in (name, own) for prefix in self._prefixes
                     if (found := self._store.tensors.get(prefix + each)) is not None), None)

    def values(self, info: TensorInfo) -> np.ndarray:
        """As it is stored: bfloat16 as uint16. Raises CheckpointError."""
        if info.dtype not in STORED:
            raise CheckpointError(f"{info.name} is stored as {info.dtype}: encoders are supported only in F32, F16 and BF16",
                                  "use a version in one of these")
        return self._store.read(info).view(STORED[info.dtype]).reshape(info.shape)


class Tensors:
    """Tensors of a folder or a GGUF file, by the checkpoint's names."""

    def __init__(self, stored: FolderTensors | GgufTensors) -> None:
        self._stored = stored
        self.read: set[str] = set()  # which a test holds against what is stored

    def has(self, name: str) -> bool:
        return self._stored.stored(name) is not None

    def table(self, name: str, *shape: int) -> np.ndarray:
        """As it is stored: bfloat16 as uint16. Raises CheckpointError."""
        found = self._stored.stored(name)
        if found is None:
            raise CheckpointError(f"{self._stored.folder} holds no tensor {name}", AGAIN)
        if tuple(found.shape) != shape:
            raise CheckpointError(f"{found.name} is {list(found.shape)}, but the config says {list(shape)}", AGAIN)
        self.read.add(found.name)
        return self._stored.values(found)

    def numbers(self, name: str, *shape: int) -> np.ndarray:
        """As float32."""
        return np.ascontiguousarray(to_float32(self.table(name, *shape)))

    def linear(self, name: str, rows: int, depth: int, bias: bool = True) -> Float32Matrix:
        """`name`.weight [rows, depth], with its bias if there is one."""
        return Float32Matrix(self.numbers(f"{name}.weight", rows, depth).T, self.numbers(f"{name}.bias", rows) if bias else None)

    def halves(self, name: str, rows: int, depth: int) -> tuple[Float32Matrix, Float32Matrix]:
        """Two matrices [rows, depth] stored as one, without biases."""
        first, second = np.split(self.numbers(f"{name}.weight", 2 * rows, depth), 2)
        return Float32Matrix(first.T, None), Float32Matrix(second.T, None)

    def side_by_side(self, names: Sequence[str], rows: int, depth: int, bias: bool = True) -> Float32Matrix:
        """Several matrices concatenated along the outputs."""
        weights = np.concatenate([self.numbers(f"{name}.weight", rows, depth) for name in names])
        return Float32Matrix(weights.T, np.concatenate([self.numbers(f"{name}.bias", rows) for name in names]) if bias else None)

    def norm(self, name: str, width: int, eps: float, bias: bool = True) -> Norm:
        return Norm(self._of_norm(name, "weight", width), self._of_norm(name, "bias", width) if bias else None, eps)

    def _of_norm(self, name: str, part: str, width: int) -> np.ndarray:
        former = f"{name}.{FORMER[part]}"
        return self.numbers(former if self.has(former) else f"{name}.{part}", width)
