"""`Source`: where the rows of a checkpoint tensor are in a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...kernels.tiles import ROWS
from ...offload.direct_io import READ_NBYTES
from ...offload.gguf_header import GgufTensor

RAW = ("F32", "F16", "BF16")
WHOLE, TABLE = "I32", "tid2eid.weight"  # numbers of experts in tables, float32 where they are read


@dataclass(frozen=True)
class Source:
    """Where a tensor's rows come from: from row `first` of the file's tensor on, in its shape. `heads`: they are interleaved within so
    many heads (0: they are not); `offset` is to be taken off. `decay`: values are less than zero, their logarithms without the sign are
    meant; `growth`: they are more than zero, and those of theirs are. `rows`: which of the file's tensor they are, where they are not one
    after the other.
    `scale`: what NVFP4 is multiplied by beside the scales in its blocks."""

    tensor: GgufTensor
    shape: tuple[int, ...]
    first: int = 0
    heads: int = 0
    offset: float = 0.0
    decay: bool = False
    growth: bool = False
    rows: np.ndarray | None = None
    scale: float = 1.0

    @property
    def nbytes(self) -> int:
        """In the file."""
        return self.tensor.nbytes // self.tensor.shape[0] * self.shape[0]

    @property
    def piece(self) -> int:
        """Rows that are read at once where a matrix is made again and again: a disk's full rate, or a block of them."""
        return min(self.shape[0], max(ROWS, READ_NBYTES // self.tensor.row_nbytes // ROWS * ROWS))

    @property
    def changed(self) -> bool:
        """Are its values other ones than the file's?"""
        return bool(self.offset) or self.decay or self.growth

    @property
    def in_order(self) -> bool:
        """Is it a matrix whose rows the file has in a checkpoint's order?"""
        return len(self.shape) == 2 and not self.moved and not self.offset

    @property
    def moved(self) -> bool:
        """Do its rows lie in the file in another order?"""
        return bool(self.heads) or self.rows is not None

    def order(self, begin: int, end: int) -> np.ndarray | None:
        """Which rows of the file, counted from `first`, the rows [begin, end) are; None where those."""
        if self.rows is not None:
            return self.rows[begin:end]
        return deinterleaved(np.arange(begin, end), self.shape[0] // self.heads) if self.heads else None


def deinterleaved(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Row of a checkpoint (halves of a head, one after the other) -> row of a file that interleaves them."""
    head, place = rows // head_dim, rows % head_dim
    half = head_dim // 2
    return head * head_dim + 2 * (place % half) + place // half
