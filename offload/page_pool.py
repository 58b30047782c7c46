"""The pool of sealed KV pages: one extent per layer, pages in position order, in lazily backed anonymous memory.

An extent is reserved for the whole planned context but costs nothing until a page is written, so a short chat in a long context stays
small. Where memory cannot hold all pages, those from some index on are spilled to a file (`page_stream.py`): every pass scans all pages in
the same order, and a fixed set in memory is optimal for that. The pool does not interpret pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .direct_io import ReadStats
from .memory import anonymous, discard
from .page_stream import RING_NBYTES, LayerSpill, PageStream
from .spill_file import SpillFile


@dataclass(frozen=True)
class DiskTier:
    """Where pages go that memory cannot hold, and how they are read."""

    folder: Path  # of the file
    first: int  # the first page that goes into it
    ring: int = RING_NBYTES  # about so many bytes of memory for reading all pages in order
    cancelled: Callable[[], bool] = lambda: False  # polled while waiting for the disk
    direct: bool = True  # False reads through the page cache
    slots: int = 0  # pages per layer kept for selective reads, 0 without them
    max_nbytes: int | None = None  # limit of the file, None for the disk's free space


class PagePool:
    """An extent of `pages` pages for each layer; `page_nbytes`: bytes of a page, by layer. Without `disk`, all are in memory."""

    def __init__(self, pages: int, page_nbytes: Sequence[int], disk: DiskTier | None = None) -> None:
        """Raises EffllmError if the spill folder cannot take a file."""
        self.page_nbytes, self.pages = tuple(page_nbytes), pages
        self.first = pages if disk is None else min(pages, disk.first)
        limit = None if disk is None else disk.max_nbytes
        self._min_resident = 0 if limit is None else max(0, pages - limit // sum(page_nbytes))  # pages that stay in memory
        self.stream: PageStream | None = None
        if self.first < pages:
            self.stream = PageStream(SpillFile(disk.folder, disk.cancelled), page_nbytes, pages, self.first, disk.ring, disk.cancelled,
                                     disk.direct, disk.slots)
        self._extents = [anonymous(self.first * nbytes) for nbytes in page_nbytes]

    @property
    def nbytes(self) -> int:
        """Memory reserved: for pages that stay, and for writing and reading the others."""
        return sum(map(len, self._extents)) + (0 if self.stream is None else self.stream.nbytes)

    def extent(self, layer: int) -> np.ndarray:
        """The memory of a layer's first pages, uint8 `[first * page_nbytes]`."""
        return self._extents[layer]

    def page(self, layer: int, index: int) -> np.ndarray:
        """The bytes of page `index` of a layer; a copy if it is on disk."""
        if index >= self.first:
            return self.stream.page(layer, index)
        nbytes = self.page_nbytes[layer]
        return self._extents[layer][index * nbytes : (index + 1) * nbytes]

    def place(self, layer: int, index: int) -> np.ndarray:
        """The memory to write page `index` of a layer to, before `keep`."""
        return self.stream.staging[layer] if index >= self.first else self.page(layer, index)

    def keep(self, index: int) -> None:
        """Commit page `index`, which has been written to its `place` in every layer. Raises EffllmError if the disk refuses it,
        Interrupted."""
        if index >= self.first:
            self.stream.write(index)

    def shed(self, sealed: int) -> int:
        """Move half of the pages in memory to disk, or as many as it may take; the first `sealed` of them are written. Returns the bytes
        released. Raises as `keep`, in which case nothing changes."""
        first = max(self.first // 2, self._min_resident)
        if self.stream is None or first >= self.first or self.stream.slots:  # pages selected sparsely have summaries, which these lack
            return 0
        for index in range(first, min(sealed, self.first)):
            self.stream.write(index, [self.page(layer, index) for layer in range(len(self.page_nbytes))])
        for nbytes, extent in zip(self.page_nbytes, self._extents, strict=True):
            discard(extent[first * nbytes :])
        freed = max(0, min(sealed, self.first) - first) * sum(self.page_nbytes)
        self.first = self.stream.first = first
        return freed

    def spilled(self, layer: int, lead: int, again: bool = False) -> LayerSpill:
        """The layer's pages on disk, if any, as attention reads them; `lead`: block-table rows before that of page 0; `again`: for another
        layer that attends to the same pages."""
        return LayerSpill(self.stream, layer, lead, self.stream.add_reader(layer) if again else None)

    @property
    def picks(self) -> bool:
        """Whether only a few of the pages on disk are selected per token."""
        return self.stream is not None and bool(self.stream.slots)

    @property
    def traffic(self) -> ReadStats:
        """I/O counters of pages on disk."""
        return ReadStats() if self.stream is None else self.stream.traffic

    def announcements(self) -> list[str]:
        """Fallbacks since the last call."""
        return [] if self.stream is None else self.stream.announcements()

    def close(self) -> None:
        if self.stream is not None:
            self.stream.close()
