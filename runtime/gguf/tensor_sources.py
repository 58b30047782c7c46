"""`Source`: where the rows of a checkpoint tensor are in a GGUF file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...kernels.tiles import ROWS
from ...offload.direct_io import READ_NBYTES
from ...offload.gguf_header import GgufTensor

RAW_TYPES = ("F32", "F16", "BF16")
INTEGER_TYPE, EXPERT_TABLE_SUFFIX = "I32", "tid2eid.weight"  # tables from token to expert index, read as float32


@dataclass(frozen=True)
class Source:
    """Where the rows of a tensor come from.

    The transformations undo what llama.cpp's converter does to a checkpoint's values.
    """

    tensor: GgufTensor
    shape: tuple[int, ...]
    first_row: int = 0  # row of `tensor`
    interleaved_heads: int = 0  # number of heads that rows are interleaved within; 0 for none
    offset: float = 0.0  # subtracted from the values
    is_negative_decay: bool = False  # the file holds -exp(x) of the values x
    is_positive_decay: bool = False  # the file holds exp(x) of the values x
    rows: np.ndarray | None = None  # rows of `tensor`, if they are not consecutive
    scale: float = 1.0  # per-tensor scale of NVFP4, in addition to the scales in its blocks

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.tensor.nbytes // self.tensor.shape[0] * self.shape[0]

    @property
    def rows_per_step(self) -> int:
        """Rows to read at once when a matrix is repacked repeatedly: enough for the disk's full rate, at least a tile."""
        return min(self.shape[0], max(ROWS, READ_NBYTES // self.tensor.row_nbytes // ROWS * ROWS))

    @property
    def is_transformed(self) -> bool:
        """Whether its values differ from the file's."""
        return bool(self.offset) or self.is_negative_decay or self.is_positive_decay

    @property
    def in_order(self) -> bool:
        """Whether it is a matrix whose rows the file has in the checkpoint's order."""
        return len(self.shape) == 2 and not self.is_reordered and not self.offset

    @property
    def is_reordered(self) -> bool:
        """Whether the file has its rows in another order."""
        return bool(self.interleaved_heads) or self.rows is not None

    def order(self, begin: int, end: int) -> np.ndarray | None:
        """The rows of the file, counted from `first_row`, of the rows [begin, end); None if they are the same."""
        if self.rows is not None:
            return self.rows[begin:end]
        return deinterleaved(np.arange(begin, end), self.shape[0] // self.interleaved_heads) if self.interleaved_heads else None


def deinterleaved(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Row of a checkpoint (first half of a head, then second half) -> row of a file that interleaves them."""
    head, channel = rows // head_dim, rows % head_dim
    half = head_dim // 2
    return head * head_dim + 2 * (channel % half) + channel // half
