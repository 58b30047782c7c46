"""FP8 n-gram embedding tables whose parts share one scale (FP8 folders of Qwen 4 Exp).

Such a table stays on disk and a token reads a few of its rows, so rows are widened to 16 bits as they are read. It is hidden from the
store of quantized weights, which would decode it whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from ...offload.checkpoint import TensorStore
from ...offload.safetensors_header import TensorInfo, damaged, shown
from ...offload.size import format_size
from ...quant.imports import fp8
from ...quant.weight import RAW_NUMPY, from_f32, to_f32
from .tensor_views import ViewStore

PART = re.compile(r"(.+\.ngram_embedding\.)shard_\d+\.weight")
CODES, SCALE, FLOATS = "F8_E4M3", "weight_scale", ("BF16", "F16", "F32")
ITEM_NBYTES = {"f16": 2, "f32": 4}


@dataclass(frozen=True)
class ScaledTable:
    """A part of a table, dequantized as it is read (see `tensor_views.TensorView`)."""

    stored: TensorInfo  # FP8 codes
    scale: TensorInfo  # one number for all codes
    dequant_dtype: str
    at_once: bool = False
    scale_cache: dict[str, np.float32] = field(default_factory=dict, compare=False)  # scales that were read, by name

    @property
    def source(self) -> TensorInfo:
        return replace(self.stored, dtype=self.dequant_dtype.upper(), nbytes=ITEM_NBYTES[self.dequant_dtype] * prod(self.stored.shape))

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        return self.source, self.scale

    def read(self, store: TensorStore, begin: int, end: int) -> np.ndarray:
        if self.scale.name not in self.scale_cache:
            self.scale_cache[self.scale.name] = _scale(store, self.scale)
        values = fp8.VALUES[store.read(self.stored, begin, end)] * self.scale_cache[self.scale.name]
        if not np.isfinite(values).all():
            damaged(self.stored.file, f"has tensor {shown(self.stored.name)} with NaN or infinity")
        return from_f32(values, self.dequant_dtype).view(np.uint8).reshape(-1)


def pop_tables(store: TensorStore, dequant_dtype: str) -> dict[str, ScaledTable]:
    """The parts of tables in eight bits by name, which `store` no longer lists. Raises CheckpointError for one without one scale."""
    tables, scale_cache = {}, {}
    for name, info in store.tensors.items():
        match = PART.fullmatch(name)
        if match is None or info.dtype != CODES or len(info.shape) != 2:
            continue
        scale_name = next((each for each in (f"{name}_scale", match[1] + SCALE) if each in store.tensors), None)
        if scale_name is None:
            damaged(info.file, f"holds {shown(name)} in 8 bits without one scale for it")
        tables[name] = ScaledTable(info, store.tensors[scale_name], dequant_dtype, scale_cache=scale_cache)
    for name in {*tables, *(part.scale.name for part in tables.values())}:
        del store.tensors[name]
    return tables


def _scale(store: TensorStore, info: TensorInfo) -> np.float32:
    dtype = info.dtype.lower()
    value = to_f32(store.read(info).view(RAW_NUMPY[dtype]), dtype) if info.dtype in FLOATS and prod(info.shape) == 1 else np.zeros(1)
    if not (np.isfinite(value).all() and value.reshape(-1)[0] > 0):
        damaged(info.file, f"holds {shown(info.name)} {list(info.shape)}, expected one number above 0 for a table of n-grams")
    return np.float32(value.reshape(-1)[0])


def with_tables(store: TensorStore, tables: Mapping[str, ScaledTable]) -> TensorStore:
    """The store with these parts again, as rows of 16 bits or of 32."""
    if not tables:
        return store
    view = ViewStore(store, {name: (part.stored.shape, part) for name, part in tables.items()})
    nbytes = sum(part.stored.nbytes for part in tables.values())
    dequant_dtype = next(iter(tables.values())).dequant_dtype
    notice = f"rows of n-grams are widened to {dequant_dtype} as they are read, from {format_size(nbytes)} of 8 bits on the disk"
    view.notices = (*store.notices, notice)
    return view
