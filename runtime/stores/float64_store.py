"""float64 weights, left by training in double precision, rounded to float32 as they are read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...offload.checkpoint import TensorStore
from ...offload.safetensors_header import TensorInfo
from ...offload.size import format_size
from .converting_store import ConvertingStore

DOUBLE = "F64"


class Float64Store(ConvertingStore):
    """A store's tensors, with float64 ones as float32."""

    def __init__(self, store: TensorStore) -> None:
        self._stored = {name: info for name, info in store.tensors.items() if info.dtype == DOUBLE}
        rounded = {name: replace(info, dtype="F32", nbytes=info.nbytes // 2) for name, info in self._stored.items()}
        super().__init__(store.folder, store.tensors | rounded, store.take_files())
        self.converted = self._stored
        nbytes, file_nbytes = (format_size(sum(info.nbytes for info in infos.values())) for infos in (rounded, self._stored))
        self.notices = (f"{len(rounded)} tensors of 64 bits are rounded to f32 as they are read: {nbytes} of memory for {file_nbytes} "
                        "of file",)

    def fill(self, info: TensorInfo, begin: int, end: int, out: np.ndarray) -> None:
        raw = TensorStore.read(self, self._stored[info.name], begin, end)
        with np.errstate(over="ignore"):  # infinite like any that a checkpoint holds
            out.view(np.float32)[:] = raw.view(np.float64)

    def put_codes(self, info: TensorInfo, begin: int, end: int, blob: np.ndarray) -> None:
        raise TypeError(f"{info.name} has no codes")


def has_float64(store: TensorStore) -> bool:
    return any(info.dtype == DOUBLE for info in store.tensors.values())
