"""N-gram embedding tables, read from disk row by row.

One layer's table may exceed the rest of the model, and most rows are never used. So it is never loaded, wherever the other weights are:
rows are read once their indices are known, those of a pass by several threads, since a disk serves many small requests in parallel. Rows
read before may be in the page cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.tiles import ROWS, row_nbytes
from ...offload.safetensors_header import damaged, shown
from ...quant.weight import RAW_NUMPY, Weight
from .stream_layout import sections
from .streamed_weights import batches, rows_in_blocks

if TYPE_CHECKING:
    from ...offload.checkpoint import TensorStore
    from ..config import ModelConfig
    from ..tensors import ModelTensor

READERS = 8  # threads
MAX_SERIAL_BLOCKS = 4  # up to this many blocks are read without other threads
MAX_BATCH_NBYTES = 4 << 20  # of rows in memory at once
NUMBERING = "ple.ple_embedding."  # prefix, within a layer, of the integers that checkpoints store beside a table


class NgramTable:
    """An n-gram table of an open store."""

    def __init__(self, tensor: ModelTensor, store: TensorStore) -> None:
        self._tensor, self._store = tensor, store
        self._block_rows = 1 if tensor.spec.is_raw else ROWS

    @property
    def weight(self) -> Weight:
        """The table as ops use it: without parts, its rows are fetched."""
        return Weight(self._tensor.spec, self._tensor.shape, {}, fetch_rows=self._fetch)

    def _fetch(self, ids: np.ndarray) -> Iterator[tuple[int, np.ndarray, Weight]]:
        block_rows = self._block_rows
        max_blocks = max(1, MAX_BATCH_NBYTES // self._tensor.spec.nbytes((block_rows, self._tensor.shape[1])))
        for begin, end, blocks in batches(ids, block_rows, max_blocks):
            yield begin, rows_in_blocks(ids[begin:end], blocks, block_rows), self._read(blocks)

    def _read(self, blocks: np.ndarray) -> Weight:
        """Scattered blocks of rows, concatenated."""
        if self._tensor.spec.is_raw:
            return self._raw_weight(self._read_all(self._read_raw_row, blocks))
        return self._low_bit_weight(self._read_all(self._read_low_bit_block, blocks))

    def _read_all(self, read: Callable[[int], object], blocks: np.ndarray) -> list:
        """`read` of every block, in order."""
        if len(blocks) <= MAX_SERIAL_BLOCKS:
            return list(map(read, blocks))
        shares = self._readers.map(lambda share: list(map(read, share)), np.array_split(blocks, READERS))
        return [block for share in shares for block in share]

    def _read_raw_row(self, row: int) -> np.ndarray:
        return self._store.read(self._tensor.info, int(row), int(row) + 1)

    def _raw_weight(self, rows: Sequence[np.ndarray]) -> Weight:
        spec, shape = self._tensor.spec, (len(rows), self._tensor.shape[1])
        return Weight(spec, shape, {"data": np.stack(rows).view(RAW_NUMPY[spec.scheme]).reshape(shape)})

    def _read_low_bit_block(self, block: int) -> dict[str, np.ndarray]:
        """The sections of a block of rows, and its row scales."""
        tensor, first_row = self._tensor, int(block) * ROWS
        offset, parts = self._store.place(tensor.info), {}
        for name, section in sections(tensor, offset, first_row, min(tensor.shape[0], first_row + ROWS)):
            parts[name] = self._read_bytes(section.offset, section.nbytes)
        scales_nbytes = row_nbytes(tensor.spec.scheme) * ROWS
        return parts | {"row_scales": self._read_bytes(offset + self._sections.row_scales + int(block) * scales_nbytes, scales_nbytes)}

    def _low_bit_weight(self, blocks: Sequence[Mapping[str, np.ndarray]]) -> Weight:
        parts = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
        return Weight(self._tensor.spec, (len(blocks) * ROWS, self._tensor.shape[1]), parts | self._codebook)

    def _read_bytes(self, offset: int, nbytes: int) -> np.ndarray:
        out = np.empty(nbytes, np.uint8)
        self._store.read_at(self._tensor.info.file, offset, memoryview(out))
        return out

    @cached_property
    def _sections(self) -> object:
        return self._tensor.spec.sections(self._tensor.shape)

    @cached_property
    def _codebook(self) -> dict[str, np.ndarray]:
        """The levels of a codebook, shared by all rows."""
        tables = self._sections.tables
        if tables < 0:
            return {}
        return {"tables": self._read_bytes(self._store.place(self._tensor.info) + tables, self._sections.nbytes - tables)}

    @cached_property
    def _readers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(READERS, "n-grams")


def check_numbering(config: ModelConfig, store: TensorStore) -> None:
    """Raises CheckpointError if a checkpoint numbers its n-gram words or rows differently from its config."""
    ngrams = config.ngrams
    for layer in ngrams.layers:
        sizes = ngrams.table_sizes(layer)
        offsets = tuple(sum(sizes[:table]) for table in range(len(sizes)))
        for name, expected in (("layer_multipliers", ngrams.multipliers(layer)), ("ngram_heads_vocab_sizes", sizes),
                               ("ngram_heads_offsets", offsets)):
            info = store.tensors.get(f"model.layers.{layer}.{NUMBERING}{name}")
            if info is None or info.dtype != "I64" or info.nbytes > 8 * len(expected):
                continue
            if tuple(store.read(info).reshape(-1).view(np.int64).tolist()) != expected:
                damaged(info.file, f"holds {shown(info.name)}, whose n-gram numbering does not match its config.json")
