"""Base of stores that convert tensors as they are read, a few rows at a time, so that a load needs only megabytes of scratch memory and
threads can share it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from functools import partial

import numpy as np

from ...kernels.tiles import ROWS
from ...offload.checkpoint import TensorStore
from ...offload.safetensors_header import TensorInfo
from .container import Container

BLOCK_NBYTES = 256 << 10  # of what one step of a conversion makes: the arrays of four threads stay within a few megabytes
STEP_VALUES = 1 << 17  # that are put in order at once where a tensor is made again and again: what is between stays in a cache
SCRATCH_NBYTES = 32  # for each of them, of all arrays between what is read and what is made; tests measure them
ARRANGED_NBYTES = 4 << 10  # of all there is beside blob and file where compiled functions put in order
ARRANGED = ("block", "minimum", "mxfp", "nvfp", "super", "nibble", "signed", "table")  # the schemes of that


def steps(rows: int, width: int, unit: int = ROWS) -> Iterator[tuple[int, int]]:
    """Row ranges [begin, end) of about STEP_VALUES values each, `width` per row, aligned to `unit` rows."""
    step = _step(width, unit)
    for begin in range(0, rows, step):
        yield begin, min(rows, begin + step)


def scratch_nbytes(rows: int, width: int, unit: int = ROWS) -> int:
    """Upper bound on the memory for the arrays of one step."""
    return SCRATCH_NBYTES * width * min(rows, _step(width, unit))


def _step(width: int, unit: int) -> int:
    return max(unit, STEP_VALUES // width // unit * unit)


class ConvertingStore(TensorStore, ABC):
    """`made` names the tensors that are made, whoever inherits makes their rows; others lie in files as they are read. One of bytes (U8)
    is a blob of codes in the order of the kernels, whose format and shape `container` lists."""

    made: Collection[str]
    container: Container | None = None

    @property
    def repacks_on_read(self) -> bool:
        """As of any store: where codes are read; what else is made needs no compiled function."""
        return self.container is not None

    @abstractmethod
    def fill(self, info: TensorInfo, begin: int, end: int, out: np.ndarray) -> None:
        """Rows [begin, end) of a raw tensor, as they are described, into `out`."""

    @abstractmethod
    def put_codes(self, info: TensorInfo, begin: int, end: int, blob: np.ndarray) -> None:
        """Rows [begin, end), `begin` on a row block, into their places in a blob."""

    def place(self, info: TensorInfo) -> int | None:
        """As of any store: none for what is made."""
        return None if info.name in self.made else super().place(info)

    def read(self, info: TensorInfo, row_begin: int = 0, row_end: int | None = None) -> np.ndarray:
        """As of any store: bytes of rows of the tensor as `tensors` describes it."""
        if info.name not in self.made:
            return super().read(info, row_begin, row_end)
        if info.dtype == "U8":
            blob = np.zeros(info.nbytes, np.uint8)
            self.read_into(info, blob)
            return blob[row_begin:row_end]
        rows = info.shape[0]
        row_end = rows if row_end is None else row_end
        if not 0 <= row_begin <= row_end <= rows:
            raise ValueError(f"rows {row_begin}:{row_end} of {info.name}, which has {rows}")
        out = np.empty((row_end - row_begin) * (info.nbytes // rows), np.uint8)
        if out.size:
            self.fill(info, row_begin, row_end, out)
        return out

    def read_into(self, info: TensorInfo, out: np.ndarray | memoryview) -> None:
        if info.name not in self.made:
            super().read_into(info, out)
            return
        for step, _ in self.reads(info, np.frombuffer(out, np.uint8)):
            step()

    def reads(self, info: TensorInfo, out: np.ndarray) -> Iterator[tuple[Callable[[], None], int]]:
        if info.name not in self.made:
            yield from super().reads(info, out)
            return
        if out.nbytes != info.nbytes:
            raise ValueError(f"{info.name} has {info.nbytes} bytes, the buffer {out.nbytes}")
        low = info.dtype == "U8"
        rows = self.container.tensors[info.name].shape[0] if low else info.shape[0]
        step = max(ROWS, BLOCK_NBYTES // max(1, info.nbytes // rows) // ROWS * ROWS)
        share = 0
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            nbytes = info.nbytes * end // rows - share
            call = partial(self.put_codes, info, begin, end, out) if low else partial(self.fill, info, begin, end,
                                                                                      out[share : share + nbytes])
            share += nbytes
            yield call, nbytes
