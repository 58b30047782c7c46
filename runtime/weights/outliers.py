"""Bounds checks of low-bit weights' outliers, whose positions in the file become addresses in a kernel."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...kernels.tiles import MAX_SPARSE_COLUMNS, ROWS
from ...offload.checkpoint import CheckpointError, TensorStore
from ..stores.container import REQUANTIZE
from ..tensors import ModelTensor

PIECE = 1 << 20  # positions checked at a time


def check_outliers(tensors: Mapping[int | str, Mapping[str, ModelTensor]], store: TensorStore) -> None:
    """Validate the outlier positions of all weights. Raises CheckpointError naming the first tensor with one out of bounds."""
    for roles in tensors.values():
        for tensor in roles.values():
            if tensor.spec.outliers and not _inside(tensor, store):
                raise CheckpointError(f"{tensor.info.file} is damaged: tensor {tensor.name} has outliers out of bounds", REQUANTIZE)


def _inside(tensor: ModelTensor, store: TensorStore) -> bool:
    """Whether block offsets rise from 0 to the total, and every position lies within the matrix."""
    at = tensor.spec.sections(tensor.shape)
    begin, blocks = tensor.info.offset + at.sparse, at.rows // ROWS
    starts = _words(tensor, store, begin, blocks + 1)
    if starts[0] != 0 or starts[-1] != at.sparse_count or (starts[1:] < starts[:-1]).any():
        return False
    last = int(starts[-2])  # of the last block, which may have fewer rows
    for first in range(0, at.sparse_count, PIECE):
        places = _words(tensor, store, begin + 4 * (blocks + 1 + first), min(PIECE, at.sparse_count - first))
        rows = (places // MAX_SPARSE_COLUMNS)[max(0, last - first) :]
        if (places % MAX_SPARSE_COLUMNS).max() >= tensor.shape[1] or (rows.size and rows.max() >= tensor.shape[0] - (blocks - 1) * ROWS):
            return False
    return True


def _words(tensor: ModelTensor, store: TensorStore, offset: int, count: int) -> np.ndarray:
    words = np.empty(count, "<u4")
    store.read_at(tensor.info.file, offset, memoryview(words).cast("B"))
    return words
