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
    """How a model's weights are streamed."""

    parts: StreamLayout
    residency: Residency  # which parts stay in memory
    cancelled: Callable[[], bool] = lambda: False
    direct: bool = True  # use direct reads, past the page cache
    windows: NeuronWindows | None = None  # neurons that are read on demand; None: parts alone

    def pager(self, store: TensorStore) -> StreamingPager | NeuronPager:
        """The pager that carries out this plan."""
        pager = StreamingPager(store, self.parts.always, self.parts.parts, self.residency, self.cancelled, self.direct)
        if self.windows is None:
            return pager
        return NeuronPager(pager, store, self.windows.places, self.windows.slots, self.cancelled, self.direct)


@dataclass(frozen=True)
class StreamedWeights:
    """Makes the `Weight`s of streamed matrices and of the embedding."""

    parts: StreamLayout
    pager: StreamingPager | NeuronPager

    def holds(self, tensor: ModelTensor) -> bool:
        """Whether this is a streamed matrix."""
        return tensor.used_as in self.parts.slices

    def matrix(self, tensor: ModelTensor, resident: Mapping[str, np.ndarray]) -> Weight:
        """A streamed matrix; `resident` holds its row scales and tables, by name (`fixed_name`)."""
        row_parts = []
        for rows in self.parts.slices[tensor.used_as]:
            views, lease = self.pager.part(rows.part)
            parts = {name: views[index] for name, index in rows.ranges.items()}
            row_parts.append(RowPart(rows.first, _rows_weight(tensor, parts, rows.first, rows.end, resident), rows.part, lease))
        return Weight(tensor.spec, tensor.shape, {}, row_parts=tuple(row_parts))

    def table(self, tensor: ModelTensor, offset: int, resident: Mapping[str, np.ndarray]) -> Weight:
        """The embedding, which begins at `offset` of its file; `resident` as in `matrix`."""
        block_rows = 1 if tensor.spec.is_raw else ROWS
        block_nbytes = sum(section.nbytes + 2 * BLOCK for _, section in sections(tensor, offset, 0, block_rows))
        max_blocks = max(1, FETCH_NBYTES // block_nbytes)

        def fetch(ids: np.ndarray) -> Iterator[tuple[int, np.ndarray, Weight]]:
            for begin, end, blocks in batches(ids, block_rows, max_blocks):
                named_ranges = [section for block in blocks for section in sections(
                    tensor, offset, block * block_rows, min(tensor.shape[0], (block + 1) * block_rows))]
                with self.pager.fetch([section for _, section in named_ranges]) as views:
                    parts: dict[str, list[np.ndarray]] = {}
                    for (name, _), view in zip(named_ranges, views, strict=True):
                        parts.setdefault(name, []).append(view)
                    joined = {name: np.concatenate(pieces) for name, pieces in parts.items()}
                    rows = rows_in_blocks(ids[begin:end], blocks, block_rows)
                    yield begin, rows, _blocks_weight(tensor, joined, blocks, block_rows, resident)

        return Weight(tensor.spec, tensor.shape, {}, fetch_rows=fetch)


def batches(ids: np.ndarray, block_rows: int, max_blocks: int) -> Iterator[tuple[int, int, np.ndarray]]:
    """(begin, end, ascending blocks of `block_rows` rows that contain ids [begin, end)), at most `max_blocks` blocks each."""
    begin = 0
    while begin < len(ids):
        end, blocks = begin, set()
        while end < len(ids) and (len(blocks) < max_blocks or int(ids[end]) // block_rows in blocks):
            blocks.add(int(ids[end]) // block_rows)
            end += 1
        yield begin, end, np.array(sorted(blocks), np.int64)
        begin = end


def rows_in_blocks(ids: np.ndarray, blocks: np.ndarray, block_rows: int) -> np.ndarray:
    """Positions of ids among the rows of these ascending blocks, one block after the other."""
    return np.searchsorted(blocks, ids // block_rows) * block_rows + ids % block_rows


def _rows_weight(tensor: ModelTensor, parts: dict[str, np.ndarray], first: int, end: int, resident: Mapping[str, np.ndarray]) -> Weight:
    """Rows [first, end) of a matrix, from its sections."""
    shape = (end - first, tensor.shape[1])
    if tensor.spec.is_raw:
        return Weight.raw(tensor.spec.scheme, shape, parts["data"])
    scales, tables = _scales_and_tables(tensor, resident)
    padded_end, scale_nbytes = -(-end // ROWS) * ROWS, row_nbytes(tensor.spec.scheme)
    return Weight(tensor.spec, shape, {**parts, "row_scales": scales[scale_nbytes * first : scale_nbytes * padded_end], **tables})


def _blocks_weight(tensor: ModelTensor, parts: dict[str, np.ndarray], blocks: np.ndarray, block_rows: int,
                   resident: Mapping[str, np.ndarray]) -> Weight:
    """Scattered blocks of rows of a table, from their concatenated sections."""
    shape = (len(blocks) * block_rows, tensor.shape[1])
    if tensor.spec.is_raw:
        return Weight(tensor.spec, shape, {"data": parts["data"].view(RAW_NUMPY[tensor.spec.scheme]).reshape(shape)})
    scales, tables = _scales_and_tables(tensor, resident)
    row_scales = scales.reshape(-1, row_nbytes(tensor.spec.scheme) * ROWS)[blocks].reshape(-1)
    return Weight(tensor.spec, shape, {**parts, "row_scales": row_scales, **tables})


def _scales_and_tables(tensor: ModelTensor, resident: Mapping[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Row scales and tables of a low-bit matrix, which stay in memory."""
    fixed, layout = resident[fixed_name(tensor.name)], tensor.spec.sections(tensor.shape)
    tables = {} if layout.tables < 0 else {"tables": fixed[layout.tables - layout.row_scales :]}
    return fixed[: row_nbytes(tensor.spec.scheme) * layout.rows], tables
