"""N-gram embedding tables, read from disk row by row.

One layer's table may exceed the rest of the model, and most rows are never used. So it is never loaded, wherever the other weights are:
rows are read once their indices are known, those of a pass by several threads, since a disk serves many small requests in parallel. Rows
read before may be in the page cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...kernels.tiles import ROWS, row_nbytes
from ...offload.safetensors_header import damaged, shown
from ...quant.weight import RAW_NUMPY, Weight
from .stream_layout import sections
from .streamed_weights import batches

if TYPE_CHECKING:
    from ...offload.checkpoint import TensorStore
    from ..config import ModelConfig
    from ..tensors import ModelTensor

READERS = 8  # threads
ALONE = 4  # up to this many blocks are read without other threads
MOST_NBYTES = 4 << 20  # of rows at once
NUMBERS = "ple.ple_embedding."  # of a layer: integers stored in checkpoints beside a table


class NgramTable:
    """The table `tensor` of an open `store`."""

    def __init__(self, tensor: ModelTensor, store: TensorStore) -> None:
        self._tensor, self._store = tensor, store
        self._height = 1 if tensor.spec.is_raw else ROWS

    @property
    def weight(self) -> Weight:
        """As an op takes it."""
        return Weight(self._tensor.spec, self._tensor.shape, {}, fetch=self._fetch)

    def _fetch(self, ids: np.ndarray) -> Iterator[tuple[int, np.ndarray, Weight]]:
        height, spec = self._height, self._tensor.spec
        most = max(1, MOST_NBYTES // spec.nbytes((height, self._tensor.shape[1])))
        for begin, end, blocks in batches(ids, height, most):
            own = ids[begin:end]
            yield begin, np.searchsorted(blocks, own // height) * height + own % height, self._joined(blocks)

    def _joined(self, blocks: np.ndarray) -> Weight:
        """Scattered blocks of rows, concatenated."""
        tensor = self._tensor
        read, join = (self._raw, self._of_rows) if tensor.spec.is_raw else (self._low_bit, self._of_blocks)
        if len(blocks) <= ALONE:
            return join(list(map(read, blocks)))
        return join([found for part in self._readers.map(lambda own: list(map(read, own)), np.array_split(blocks, READERS))
                     for found in part])

    def _raw(self, row: int) -> np.ndarray:
        return self._store.read(self._tensor.info, int(row), int(row) + 1)

    def _of_rows(self, found: Sequence[np.ndarray]) -> Weight:
        spec, width = self._tensor.spec, self._tensor.shape[1]
        return Weight(spec, (len(found), width), {"data": np.stack(found).view(RAW_NUMPY[spec.scheme]).reshape(len(found), width)})

    def _low_bit(self, block: int) -> dict[str, np.ndarray]:
        """The sections of a block of rows, and its row scales."""
        tensor, own = self._tensor, int(block) * ROWS
        place, found = self._store.place(tensor.info), {}
        for name, where in sections(tensor, place, own, min(tensor.shape[0], own + ROWS)):
            found[name] = self._bytes(where.offset, where.nbytes)
        each = row_nbytes(tensor.spec.scheme) * ROWS
        return found | {"row_scales": self._bytes(place + self._at.row_scales + int(block) * each, each)}

    def _of_blocks(self, found: Sequence[Mapping[str, np.ndarray]]) -> Weight:
        parts = {name: np.concatenate([block[name] for block in found]) for name in found[0]}
        return Weight(self._tensor.spec, (len(found) * ROWS, self._tensor.shape[1]), parts | self._levels)

    def _bytes(self, offset: int, nbytes: int) -> np.ndarray:
        out = np.empty(nbytes, np.uint8)
        self._store.read_at(self._tensor.info.file, offset, memoryview(out))
        return out

    @cached_property
    def _at(self) -> object:
        return self._tensor.spec.sections(self._tensor.shape)

    @cached_property
    def _levels(self) -> dict[str, np.ndarray]:
        """The levels of a codebook, shared by all rows."""
        if self._at.tables < 0:
            return {}
        return {"tables": self._bytes(self._store.place(self._tensor.info) + self._at.tables, self._at.nbytes - self._at.tables)}

    @cached_property
    def _readers(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(READERS, "n-grams")


def check_numbers(config: ModelConfig, store: TensorStore) -> None:
    """Raises CheckpointError if a checkpoint numbers its n-gram words or rows differently from its config."""
    own = config.ngrams
    for layer in own.layers:
        sizes = own.table_sizes(layer)
        firsts = tuple(sum(sizes[:place]) for place in range(len(sizes)))
        for name, expected in (("layer_multipliers", own.multipliers(layer)), ("ngram_heads_vocab_sizes", sizes),
                               ("ngram_heads_offsets", firsts)):
            info = store.tensors.get(f"model.layers.{layer}.{NUMBERS}{name}")
            if info is None or info.dtype != "I64" or info.nbytes > 8 * len(expected):
                continue
            if tuple(store.read(info).reshape(-1).view(np.int64).tolist()) != expected:
                damaged(info.file, f"holds {shown(info.name)}, whose n-gram numbering does not match its config.json")
