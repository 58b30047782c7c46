"""Folders whose matrices lie in one another row by row: a store that gives each by itself.

Qwen 3 Next joins all that reads a layer's input by heads of keys, so that no matrix of it is one range of the file. Rows are gathered as
they are asked for; what lies in no other matrix is the inner store's, whatever kind that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..offload.arrival import Arrival
from ..offload.checkpoint import CheckpointError, OpenFile, TensorStore
from ..offload.header import TensorInfo
from .config import ModelConfig
from .families import qwen3_next
from .made_store import MadeStore


@dataclass(frozen=True)
class Parted:
    """The stored matrix that one lies in, and which of its rows it is."""

    whole: TensorInfo
    rows: np.ndarray


def places(config: ModelConfig) -> dict[str, tuple[str, np.ndarray]]:
    """Name of a matrix -> that of the one that it is stored in, and its rows there."""
    parts = qwen3_next.parted_rows(config.state)
    return {f"{prefix}{own}.weight": (f"{prefix}{whole}.weight", rows)
            for prefix in (f"model.layers.{layer}.linear_attn." for layer in config.state_layers) for own, (whole, rows) in parts.items()}


class PartedStore(MadeStore):
    """The tensors of `inner`, which it takes over, with the matrices of `places` by themselves where they are stored in others. Raises
    CheckpointError for one of these that has another height."""

    def __init__(self, inner: TensorStore, config: ModelConfig) -> None:
        self._inner = inner
        self._parts: dict[str, Parted] = {}
        tensors, joined = dict(inner.tensors), set()
        heights: dict[str, int] = {}
        for whole, rows in places(config).values():
            heights[whole] = heights.get(whole, 0) + len(rows)
        for name, (whole, rows) in places(config).items():
            info = inner.tensors.get(whole)
            if name in inner.tensors or info is None:
                continue
            if len(info.shape) != 2 or info.shape[0] != heights[whole]:
                raise CheckpointError(f"tensor {whole} has shape {list(info.shape)}, the config says {heights[whole]} rows",
                                      "the config and the weights are of different models")
            self._parts[name] = Parted(info, rows)
            tensors[name] = replace(info, name=name, shape=(len(rows), info.shape[1]), nbytes=info.nbytes // info.shape[0] * len(rows))
            joined.add(whole)
        super().__init__(inner.folder, {name: info for name, info in tensors.items() if name not in joined}, {})
        self.made, self.files = self._parts.keys(), inner.files
        self.container, self.notices = getattr(inner, "container", None), inner.notices

    @property
    def puts_in_order(self) -> bool:
        return self._inner.puts_in_order

    def fill(self, info: TensorInfo, begin: int, end: int, out: np.ndarray) -> None:
        own = self._parts[info.name]
        rows, row, at = own.rows[begin:end], own.whole.nbytes // own.whole.shape[0], 0
        for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
            out[at : at + len(run) * row] = self._inner.read(own.whole, int(run[0]), int(run[-1]) + 1)
            at += len(run) * row

    def put_codes(self, info: TensorInfo, begin: int, end: int, blob: np.ndarray) -> None:
        raise TypeError(f"{info.name} has no codes")

    def place(self, info: TensorInfo) -> int | None:
        return None if info.name in self.made else self._inner.place(info)

    def read(self, info: TensorInfo, row_begin: int = 0, row_end: int | None = None) -> np.ndarray:
        return (super() if info.name in self.made else self._inner).read(info, row_begin, row_end)

    def read_into(self, info: TensorInfo, out: np.ndarray | memoryview) -> None:
        (super() if info.name in self.made else self._inner).read_into(info, out)

    def reads(self, info: TensorInfo, out: np.ndarray) -> Iterator[tuple[Callable[[], None], int]]:
        return (super() if info.name in self.made else self._inner).reads(info, out)

    def arrival(self, infos: Sequence[TensorInfo]) -> Arrival | None:
        return None if any(info.name in self.made for info in infos) else self._inner.arrival(infos)

    def files_of(self, info: TensorInfo) -> frozenset[Path]:
        own = self._parts.get(info.name)
        return self._inner.files_of(info if own is None else own.whole)

    def stored_nbytes(self, info: TensorInfo) -> int:
        own = self._parts.get(info.name)
        return self._inner.stored_nbytes(info) if own is None else self._inner.stored_nbytes(own.whole) * info.nbytes // own.whole.nbytes

    def read_at(self, file: Path, offset: int, out: memoryview) -> None:
        self._inner.read_at(file, offset, out)

    def descriptor(self, file: Path) -> int:
        return self._inner.descriptor(file)

    def check_unchanged(self) -> None:
        self._inner.check_unchanged()

    def take_files(self) -> dict[Path, OpenFile]:
        return self._inner.take_files()

    def close(self) -> None:
        self._inner.close()
