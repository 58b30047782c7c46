"""Base of stores that convert tensors as they are read, a few rows at a time, so that a load needs only megabytes of scratch memory and
threads can share it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import numpy as np

from ...kernels.tiles import ROWS
from ...offload.checkpoint import TensorStore
from ...offload.repack import Repack, RepackStep, staging_buffer
from ...offload.safetensors_header import TensorInfo
from ...offload.streaming_pager import Range
from .container import Container

BLOCK_NBYTES = 256 << 10  # output of one conversion step: the arrays of four threads stay within a few megabytes
STEP_VALUES = 1 << 17  # values repacked at once by experts that are paged in repeatedly: intermediate arrays stay in a cache
SCRATCH_NBYTES_PER_VALUE = 32  # upper bound over all arrays between file bytes and result; tests measure them
REPACK_SCRATCH_NBYTES = 4 << 10  # scratch of the schemes that compiled functions repack without intermediate arrays
REPACKED_SCHEMES = ("block", "minimum", "mxfp", "nvfp", "super", "nibble", "signed", "table")


def steps(rows: int, width: int, unit: int = ROWS) -> Iterator[tuple[int, int]]:
    """Row ranges [begin, end) of about STEP_VALUES values each, `width` per row, aligned to `unit` rows."""
    step = _step(width, unit)
    for begin in range(0, rows, step):
        yield begin, min(rows, begin + step)


def scratch_nbytes(rows: int, width: int, unit: int = ROWS) -> int:
    """Upper bound on the memory for the arrays of one step."""
    return SCRATCH_NBYTES_PER_VALUE * width * min(rows, _step(width, unit))


def repack_from_parts(infos: Sequence[TensorInfo], parts: Sequence[Sequence[TensorInfo]], scratch_nbytes: int,
                      convert: Callable[[TensorInfo, int, Sequence[np.ndarray], Sequence[np.ndarray]], None]) -> Repack:
    """A plan that reads all parts of each tensor, then calls `convert(info, index, bytes of its parts, outputs)`."""
    def repack_steps() -> list[RepackStep]:
        return [RepackStep(tuple(Range(part.file, part.offset, part.nbytes) for part in own_parts), partial(convert, info, index))
                for index, (info, own_parts) in enumerate(zip(infos, parts, strict=True))]

    return Repack(tuple(info.nbytes for info in infos), sum(part.nbytes for own_parts in parts for part in own_parts),
                  max(staging_buffer(*(part.nbytes for part in own_parts)) for own_parts in parts), scratch_nbytes, repack_steps)


def _step(width: int, unit: int) -> int:
    return max(unit, STEP_VALUES // width // unit * unit)


class ConvertingStore(TensorStore, ABC):
    """A store that computes some of its tensors from those in the files.

    A converted tensor of dtype U8 is a blob of codes in the layout of the kernels (`kernels/tiles.py`).
    """

    converted: Collection[str]  # names of the computed tensors; all others are read from files as they are
    container: Container | None = None  # formats and shapes of the blobs, None if there are none

    @property
    def repacks_on_read(self) -> bool:
        """As in TensorStore; only blobs of codes need compiled functions."""
        return self.container is not None

    @abstractmethod
    def fill(self, info: TensorInfo, begin: int, end: int, out: np.ndarray) -> None:
        """Write rows [begin, end) of a raw tensor, in its dtype, into `out`."""

    @abstractmethod
    def put_codes(self, info: TensorInfo, begin: int, end: int, blob: np.ndarray) -> None:
        """Write the codes of rows [begin, end) into their places in a blob; `begin` is a multiple of ROWS."""

    def place(self, info: TensorInfo) -> int | None:
        """As in TensorStore; None for a converted tensor."""
        return None if info.name in self.converted else super().place(info)

    def read(self, info: TensorInfo, row_begin: int = 0, row_end: int | None = None) -> np.ndarray:
        """As in TensorStore: bytes of rows of the tensor as `tensors` describes it."""
        if info.name not in self.converted:
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
        if info.name not in self.converted:
            super().read_into(info, out)
            return
        for step, _ in self.reads(info, np.frombuffer(out, np.uint8)):
            step()

    def reads(self, info: TensorInfo, out: np.ndarray) -> Iterator[tuple[Callable[[], None], int]]:
        if info.name not in self.converted:
            yield from super().reads(info, out)
            return
        if out.nbytes != info.nbytes:
            raise ValueError(f"{info.name} has {info.nbytes} bytes, the buffer {out.nbytes}")
        is_blob = info.dtype == "U8"
        rows = self.container.tensors[info.name].shape[0] if is_blob else info.shape[0]
        step = max(ROWS, BLOCK_NBYTES // max(1, info.nbytes // rows) // ROWS * ROWS)
        offset = 0
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            nbytes = info.nbytes * end // rows - offset
            if is_blob:
                convert = partial(self.put_codes, info, begin, end, out)
            else:
                convert = partial(self.fill, info, begin, end, out[offset : offset + nbytes])
            offset += nbytes
            yield convert, nbytes
