"""Integer lookup tables as float32: which experts a token id is routed to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import numpy as np

from ...offload.checkpoint import TensorStore
from ...offload.safetensors_header import TensorInfo
from .tensor_views import ViewStore

ENDING, TYPES = ".tid2eid", {"I32": np.int32, "I64": np.int64}


@dataclass(frozen=True)
class IntegerTable:
    """A table `stored` as integers (see `tensor_views.TensorView`)."""

    stored: TensorInfo
    at_once: bool = False

    @property
    def source(self) -> TensorInfo:
        return replace(self.stored, dtype="F32", nbytes=4 * prod(self.stored.shape))

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        return (self.source,)

    def read(self, store: TensorStore, begin: int, end: int) -> np.ndarray:
        raw = store.read(self.stored, begin, end)
        return raw.view(TYPES[self.stored.dtype]).astype(np.float32).view(np.uint8).reshape(-1)


def with_integer_tables(store: TensorStore) -> TensorStore:
    """The store with its tables of whole numbers as float32, which holds all of as many experts as there can be."""
    found = {name: info for name, info in store.tensors.items() if name.endswith(ENDING) and info.dtype in TYPES and len(info.shape) == 2}
    return ViewStore(store, {name: (info.shape, IntegerTable(info)) for name, info in found.items()}) if found else store
