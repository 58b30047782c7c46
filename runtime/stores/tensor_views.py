"""Views on tensors that are fused, split or transposed in the file: a store that gives each matrix of the model by itself.

Qwen 3 Next fuses all projections of a layer's input by key head, GPT-NeoX queries, keys and values by head: their rows are gathered on
demand, of a matrix or its bias. StableLM's per-head norms are stored one by one and are stacked; queries, keys and values of OLMo
Hybrid's and Kimi Linear's linear attention are concatenated, and so are the two tensors of Molmo 2's embedding. GPT-2's matrices and
ERNIE 4.5 VL's routers are stored transposed. All other tensors come from the inner store, of whatever kind.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np

from ...offload.checkpoint import CheckpointError, OpenFile, TensorStore
from ...offload.repack import Repack
from ...offload.safetensors_header import TensorInfo
from .. import families
from ..config import ModelConfig
from .converting_store import ConvertingStore

# Families whose folders hold several matrices in one, or one in another order of rows.
ROW_GATHERED_FAMILIES = ("axk2", "bloom", "codegen", "falcon", "gpt2", "gpt_neox", "hy_v4", "internlm2", "minimax", "persimmon",
                         "qwen3_next")
STACKED_FAMILIES = ("stablelm",)  # some of their models hold the rows of a matrix as separate vectors
# Families whose folders hold one matrix as several.
CONCATENATED_FAMILIES = ("bailing_hybrid", "glm5_next_text", "kimi_linear", "molmo2_text", "olmo_hybrid", "qwen4_exp_text", "zaya")
TRANSPOSED_FAMILIES = ("gpt2",)  # their matrices are stored inputs before outputs
TRANSPOSED_ROUTER_FAMILIES = ("ernie4_5_vl_moe_text",)  # of their matrices, only routers are
VIEW_FAMILIES = (*ROW_GATHERED_FAMILIES, *STACKED_FAMILIES, *CONCATENATED_FAMILIES, *TRANSPOSED_FAMILIES, *TRANSPOSED_ROUTER_FAMILIES)
VECTOR_ENDINGS = (".bias", "_norm.weight")
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")


class TensorView(Protocol):
    """A matrix computed from one or several tensors of a store."""

    source: TensorInfo  # the first of `sources`
    at_once: bool  # reading some rows reads all of the sources

    @property
    def sources(self) -> tuple[TensorInfo, ...]: ...

    def read(self, store: TensorStore, begin: int, end: int) -> np.ndarray:
        """Bytes of the rows [begin, end)."""


@dataclass(frozen=True)
class GatheredRows:
    """Selected rows of a stored matrix."""

    source: TensorInfo
    rows: np.ndarray
    at_once: bool = False

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        return (self.source,)

    def read(self, store: TensorStore, begin: int, end: int) -> np.ndarray:
        rows = self.rows[begin:end]
        runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        return np.concatenate([store.read(self.source, int(run[0]), int(run[-1]) + 1) for run in runs])


@dataclass(frozen=True)
class StackedVectors:
    """Vectors stacked into a matrix."""

    sources: tuple[TensorInfo, ...]
    at_once: bool = False

    @property
    def source(self) -> TensorInfo:
        return self.sources[0]

    def read(self, store: TensorStore, begin: int, end: int) -> np.ndarray:
        return np.concatenate([store.read(info) for info in self.sources[begin:end]])


@dataclass(frozen=True)
class ConcatenatedRows:
    """Matrices of `heights` rows each, concatenated."""

    sources: tuple[TensorInfo, ...]
    heights: tuple[int, ...]
    at_once: bool = False

    @property
    def source(self) -> TensorInfo:
        return self.sources[0]

    def read(self, store: TensorStore, begin: int, end: int) -> np.ndarray:
        parts = []
        while begin < end:  # there may be hundreds, of which a row is asked for
            index = bisect_right(self.firsts, begin) - 1
            first, last = self.firsts[index], min(end, self.firsts[index] + self.heights[index])
            parts.append(store.read(self.sources[index], begin - first, last - first))
            begin = last
        return np.concatenate(parts)

    @cached_property
    def firsts(self) -> list[int]:
        """The first row of each."""
        return list(accumulate(self.heights, initial=0))[:-1]


@dataclass(frozen=True)
class TransposedColumns:
    """Columns from `first` on of a matrix [K, N], as rows."""

    source: TensorInfo
    first: int
    at_once: bool = True

    @property
    def sources(self) -> tuple[TensorInfo, ...]:
        return (self.source,)

    def read(self, store: TensorStore, begin: int, end: int) -> np.ndarray:
        inputs, outputs = self.source.shape
        typed = store.read(self.source).view(f"u{self.source.nbytes // (inputs * outputs)}").reshape(inputs, outputs)
        return np.ascontiguousarray(typed[:, self.first + begin : self.first + end].T).view(np.uint8).reshape(-1)


def transposed_columns(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """Name of a matrix -> the transposed matrix that contains it, and its first column there."""
    family = families.get(config.family)
    return {} if config.family not in (*TRANSPOSED_FAMILIES, *TRANSPOSED_ROUTER_FAMILIES) else {
        name: source for layer in range(config.num_hidden_layers) for name, source in family.transposed_columns(config, layer).items()}


def concatenated_parts(config: ModelConfig) -> dict[str, tuple[tuple[str, int], ...]]:
    """Name of a matrix -> the separately stored matrices it is concatenated from, with their row counts."""
    family = families.get(config.family)
    return {} if config.family not in CONCATENATED_FAMILIES else {
        name: sources for layer in range(config.num_hidden_layers) for name, sources in family.joined_rows(config, layer).items()}


def stacked_vectors(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Name of a matrix -> its separately stored rows."""
    family = families.get(config.family)
    return {} if config.family not in STACKED_FAMILIES else {
        name: sources for layer in range(config.num_hidden_layers) for name, sources in family.stacked_rows(config, layer).items()}


def gathered_rows(config: ModelConfig) -> dict[str, tuple[str, np.ndarray]]:
    """Name of a tensor -> the stored tensor that contains it, and its rows there."""
    if config.family not in ROW_GATHERED_FAMILIES:
        return {}
    family = families.get(config.family)
    return {name: source for layer in range(config.num_hidden_layers) for name, source in family.stored_rows(config, layer).items()}


def with_views(store: TensorStore, config: ModelConfig) -> TensorStore:
    """The store with the tensors of `gathered_rows`, `transposed_columns`, `stacked_vectors` and `concatenated_parts`. Raises
    CheckpointError for a source of another shape."""
    parts: dict[str, tuple[tuple[int, ...], TensorView]] = {}
    heights: dict[str, int] = {}
    for whole, rows in gathered_rows(config).values():
        heights[whole] = heights.get(whole, 0) + len(rows)
    for name, (whole, rows) in gathered_rows(config).items():
        info = store.tensors.get(whole)
        if name in store.tensors or info is None:
            continue
        if len(info.shape) != (1 if name.endswith(VECTOR_ENDINGS) else 2) or info.shape[0] != heights[whole]:
            raise CheckpointError(f"tensor {whole} has shape {list(info.shape)}, the config says {heights[whole]} rows",
                                  "the config and the weights are of different models")
        parts[name] = (len(rows), *info.shape[1:]), GatheredRows(info, rows)
    turned = transposed_columns(config)
    if turned and (low := next((store.tensors[whole] for whole, _ in turned.values() if whole in store.tensors
                                and store.tensors[whole].dtype not in FLOAT_DTYPES), None)) is not None:
        raise CheckpointError(f"tensor {low.name} is {low.dtype}: matrices of {config.family} models are transposed, which is not "
                              "supported for other tools' low-bit formats", "use the original 16-bit checkpoint, or a GGUF file")
    for name, (whole, first) in turned.items():
        info = store.tensors.get(whole)
        if name in store.tensors or info is None:
            continue
        shape = _rule_shape(config, name)
        if len(info.shape) != 2 or info.shape[0] != shape[1] or info.shape[1] not in (shape[0], 3 * shape[0]):
            raise CheckpointError(f"tensor {whole} has shape {list(info.shape)}, expected {shape[1]} inputs before its outputs",
                                  "the config and the weights are of different models")
        parts[name] = shape, TransposedColumns(info, first)
    for name, rows in stacked_vectors(config).items():
        wholes = tuple(found for found in map(store.tensors.get, rows) if found is not None)
        if name in store.tensors or len(wholes) < len(rows):
            continue
        if stray := next((info for info in wholes if info.shape != (config.head_dim,) or info.dtype != wholes[0].dtype), None):
            raise CheckpointError(f"tensor {stray.name} is {stray.dtype} {list(stray.shape)}, expected {config.head_dim} numbers alike",
                                  "the config and the weights are of different models")
        parts[name] = (len(rows), config.head_dim), StackedVectors(wholes)
    for name, named in concatenated_parts(config).items():
        wholes = tuple(found for found in (store.tensors.get(each) for each, _ in named) if found is not None)
        if name in store.tensors or len(wholes) < len(named):
            continue
        # transformers writes the taps of three sorts in three parts of equal height, wherever one sort ends
        heights, rows, width = tuple(info.shape[0] for info in wholes), sum(own for _, own in named), wholes[0].shape[1:]
        if sum(heights) != rows or any(info.shape[1:] != width or info.dtype != wholes[0].dtype for info in wholes):
            raise CheckpointError(f"tensor {wholes[0].name} is {wholes[0].dtype} {list(wholes[0].shape)}, expected a part of {rows} rows",
                                  "the config and the weights are of different models")
        parts[name] = (sum(heights), *width), ConcatenatedRows(wholes, heights)
    return ViewStore(store, parts) if parts else store


def _rule_shape(config: ModelConfig, name: str) -> tuple[int, ...]:
    """The shape of a layer's tensor as the family says it."""
    rules = families.get(config.family).layer_tensors(config, int(name.split(".", 3)[2]))
    return next(rule.shape for rule in rules.values() if rule.name == name)


class ViewStore(ConvertingStore):
    """The tensors of `inner`, which it takes over, with `parts`, views by name with their shapes, replacing the tensors they are cut
    from."""

    def __init__(self, inner: TensorStore, parts: Mapping[str, tuple[tuple[int, ...], TensorView]]) -> None:
        self._inner, self._parts = inner, {name: part for name, (_, part) in parts.items()}
        source_names = {info.name for part in self._parts.values() for info in part.sources}
        tensors = {name: info for name, info in inner.tensors.items() if name not in source_names}
        for name, (shape, part) in parts.items():
            nbytes = part.source.nbytes * prod(shape) // prod(part.source.shape)
            tensors[name] = TensorInfo(name, part.source.dtype, shape, part.source.file, part.source.offset, nbytes)
        super().__init__(inner.folder, tensors, {})
        self.converted, self.files = self._parts.keys(), inner.files
        self.container, self.notices = getattr(inner, "container", None), inner.notices

    @property
    def repacks_on_read(self) -> bool:
        return self._inner.repacks_on_read

    def fill(self, info: TensorInfo, begin: int, end: int, out: np.ndarray) -> None:
        out[:] = self._parts[info.name].read(self._inner, begin, end)

    def put_codes(self, info: TensorInfo, begin: int, end: int, blob: np.ndarray) -> None:
        raise TypeError(f"{info.name} has no codes")

    def place(self, info: TensorInfo) -> int | None:
        return None if info.name in self.converted else self._inner.place(info)

    def read(self, info: TensorInfo, row_begin: int = 0, row_end: int | None = None) -> np.ndarray:
        return (super() if info.name in self.converted else self._inner).read(info, row_begin, row_end)

    def read_into(self, info: TensorInfo, out: np.ndarray | memoryview) -> None:
        view = self._parts.get(info.name)
        if view is not None and view.at_once:
            self.fill(info, 0, info.shape[0], np.frombuffer(out, np.uint8))
        else:
            (self._inner if view is None else super()).read_into(info, out)

    def reads(self, info: TensorInfo, out: np.ndarray) -> Iterator[tuple[Callable[[], None], int]]:
        view = self._parts.get(info.name)
        if view is not None and view.at_once:
            return iter([(partial(self.read_into, info, out), info.nbytes)])
        return (self._inner if view is None else super()).reads(info, out)

    def repack_plan(self, infos: Sequence[TensorInfo]) -> Repack | None:
        return None if any(info.name in self.converted for info in infos) else self._inner.repack_plan(infos)

    def files_of(self, info: TensorInfo) -> frozenset[Path]:
        view = self._parts.get(info.name)
        return self._inner.files_of(info) if view is None else frozenset().union(*map(self._inner.files_of, view.sources))

    def stored_nbytes(self, info: TensorInfo) -> int:
        view = self._parts.get(info.name)
        if view is None:
            return self._inner.stored_nbytes(info)
        return self._inner.stored_nbytes(view.source) * info.nbytes // view.source.nbytes

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
