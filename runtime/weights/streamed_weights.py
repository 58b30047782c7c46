"""Weights on a streaming pager: matrices as row ranges in parts, the embedding as a table whose rows are fetched.

A part's address never changes, so all records are made once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.tiles import ROWS, row_nbytes
from ...offload.checkpoint import TensorStore
from ...offload.direct_io import BLOCK
from ...offload.neuron_pager import NeuronPager
from ...offload.placement import Residency
from ...offload.streaming_pager import FETCH_NBYTES, StreamingPager
from ...quant.weight import RAW_NUMPY, RowPart, Weight
from ..sparse.neuron_bundles import NeuronWindows
from .stream_layout import StreamLayout, fixed_name, sections

if TYPE_CHECKING:  # imported by the module that uses these weights
    from ..tensors import ModelTensor


@dataclass(frozen=True)
class StreamingPlan:
    """How a model is streamed: its parts, which of them stay, cancellation, whether to use direct reads, and which neurons are read on
    demand."""

    parts: StreamLayout
    residency: Residency
    cancelled: Callable[[], bool] = lambda: False
    direct: bool = True
    windows: NeuronWindows | None = None

    def pager(self, store: TensorStore) -> StreamingPager | NeuronPager:
        rest = StreamingPager(store, self.parts.always, self.parts.parts, self.residency, self.cancelled, self.direct)
        if self.windows is None:
            return rest
        return NeuronPager(rest, store, self.windows.places, self.windows.slots, self.cancelled, self.direct)


@dataclass(frozen=True)
class StreamedWeights:
    """Creates the weight records of one model."""

    parts: StreamLayout
    pager: StreamingPager | NeuronPager

    def holds(self, tensor: ModelTensor) -> bool:
        """Whether this is a streamed matrix."""
        return tensor.used_as in self.parts.slices

    def matrix(self, tensor: ModelTensor, resident: Mapping[str, np.ndarray]) -> Weight:
        """A streamed matrix; `resident`: what its group keeps in memory."""
        rows = []
        for own in self.parts.slices[tensor.used_as]:
            views, lease = self.pager.part(own.part)
            found = {name: views[index] for name, index in own.ranges.items()}
            rows.append(RowPart(own.first, _weight(tensor, found, own.first, own.end, resident), own.part, lease))
        return Weight(tensor.spec, tensor.shape, {}, in_parts=tuple(rows))

    def table(self, tensor: ModelTensor, place: int, resident: Mapping[str, np.ndarray]) -> Weight:
        """The embedding, which begins at `place` of its file."""

        def fetch(ids: np.ndarray) -> Iterator[tuple[int, np.ndarray, Weight]]:
            for begin, end, blocks in batches(ids, height, most):
                ranges = [found for block in blocks
                          for found in sections(tensor, place, block * height, min(tensor.shape[0], (block + 1) * height))]
                with self.pager.fetch([found for _, found in ranges]) as views:
                    joined = {name: np.concatenate([view for (own, _), view in zip(ranges, views, strict=True) if own == name])
                              for name in dict.fromkeys(name for name, _ in ranges)}
                    places = np.searchsorted(blocks, ids[begin:end] // height) * height + ids[begin:end] % height
                    yield begin, places, _joined(tensor, joined, blocks, height, resident)

        height = 1 if tensor.spec.is_raw else ROWS
        nbytes = sum(found.nbytes + 2 * BLOCK for _, found in sections(tensor, place, 0, height))
        most = max(1, FETCH_NBYTES // nbytes)
        return Weight(tensor.spec, tensor.shape, {}, fetch=fetch)


def batches(ids: np.ndarray, height: int, most: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """(begin, end, ascending blocks of `height` rows that contain ids [begin, end)), at most `most` blocks each."""
    begin = 0
    while begin < len(ids):
        end, blocks = begin, set()
        while end < len(ids) and (len(blocks) < most or int(ids[end]) // height in blocks):
            blocks.add(int(ids[end]) // height)
            end += 1
        yield begin, end, np.array(sorted(blocks), np.int64)
        begin = end


def _weight(tensor: ModelTensor, found: dict[str, np.ndarray], first: int, end: int, resident: Mapping[str, np.ndarray]) -> Weight:
    """Rows [first, end) of a matrix, from its sections."""
    shape = (end - first, tensor.shape[1])
    if tensor.spec.is_raw:
        return Weight.raw(tensor.spec.scheme, shape, found["data"])
    scales, tables = _fixed(tensor, resident)
    padded, each = -(-end // ROWS) * ROWS, row_nbytes(tensor.spec.scheme)
    return Weight(tensor.spec, shape, {**found, "row_scales": scales[each * first : each * padded], **tables})


def _joined(tensor: ModelTensor, found: dict[str, np.ndarray], blocks: np.ndarray, height: int,
            resident: Mapping[str, np.ndarray]) -> Weight:
    """Scattered blocks of rows of a table, concatenated."""
    shape = (len(blocks) * height, tensor.shape[1])
    if tensor.spec.is_raw:
        return Weight(tensor.spec, shape, {"data": found["data"].view(RAW_NUMPY[tensor.spec.scheme]).reshape(shape)})
    scales, tables = _fixed(tensor, resident)
    chosen = scales.reshape(-1, row_nbytes(tensor.spec.scheme) * ROWS)[blocks].reshape(-1)
    return Weight(tensor.spec, shape, {**found, "row_scales": chosen, **tables})


def _fixed(tensor: ModelTensor, resident: Mapping[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Row scales and tables of a low-bit matrix."""
    kept, at = resident[fixed_name(tensor.name)], tensor.spec.sections(tensor.shape)
    tables = {} if at.tables < 0 else {"tables": kept[at.tables - at.row_scales :]}
    return kept[: row_nbytes(tensor.spec.scheme) * at.rows], tables
