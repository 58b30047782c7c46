"""Streaming spilled KV pages from disk, layer by layer on every pass, overlapped with compute.

A layer's pages are contiguous in its extent of the file. A pass reads those that are not in memory once, in layer order, in runs of about 2
MiB (an eighth of a short extent), which rotate through a ring of slots. The order is known from the previous pass, so read-ahead continues
past the end of a pass, as with weights (`streaming_pager.py`). A pass that reads other runs (one page more, a window that moved) keeps what
still fits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from .. import EffllmError
from .async_reads import AsyncReads
from .checksum import word_sums
from .direct_io import BLOCK, READ_NBYTES, THREADS, Read, Reader, ReadStats
from .linux_aio import AioQueue
from .memory import anonymous
from .page_slots import PageSlots
from .read_ahead import Pending, ReadAhead
from .safetensors_header import CheckpointError
from .spill_file import SpillFile

RING_NBYTES = 16 << 20  # at least two slots, else about this much
RUN_NBYTES = 2 << 20
MAX_RANDOM_READS = 128  # in flight
RUN_THREADS = 2  # concurrent run reads: more are no faster, and take from the compute threads


class PagesLost(EffllmError):
    """Pages of the spill file cannot be read, or differ from what was written. No page of such a file can be trusted: the caller must
    recompute all of them."""


@contextmanager
def _as_pages_lost() -> Iterator[None]:
    """Translate a reader's errors into errors of this file. Raises PagesLost."""
    try:
        yield
    except CheckpointError as error:
        raise PagesLost(error.message, "check the disk, or use another one (--spill-dir DIR), then run it again") from error


def run_pages(page_nbytes: int, pages: int) -> int:
    """Pages per run in an extent of `pages`."""
    return max(1, min(RUN_NBYTES // page_nbytes, -(-pages // 8)))


def slot_nbytes(page_nbytes: Sequence[int], pages: int) -> int:
    """Memory of the longest run, with the blocks at its ends; `page_nbytes` by layer."""
    return max(-(-run_pages(nbytes, pages) * nbytes // BLOCK) * BLOCK + BLOCK for nbytes in page_nbytes)


def ring_nbytes(page_nbytes: Sequence[int], pages: int, budget: int = RING_NBYTES) -> int:
    """Memory for runs in use or in flight: about `budget`, at most all runs, at least two."""
    slot = slot_nbytes(page_nbytes, pages)
    runs = sum(-(-pages // run_pages(nbytes, pages)) for nbytes in page_nbytes)
    return max(2, min(budget // slot, runs)) * slot


@dataclass(frozen=True)
class Run:
    """Pages [begin, end) of a layer, for the pass's reader number `reader`."""

    layer: int
    begin: int
    end: int
    reader: int = 0


@dataclass(frozen=True)
class _RunSlot:
    """The slot of a run."""

    run: Run
    slot: int


@dataclass(frozen=True)
class _CheckedReads:
    """Reads that `check` verifies; on a mismatch they are repeated once, in case the transfer and not the disk was at fault. Raises
    CheckpointError."""

    reads: Sequence[Read]
    check: Callable[[], CheckpointError | None]

    def run(self, fill: Callable[[Read], int]) -> int:
        count = sum(fill(read) for read in self.reads)
        if self.check() is not None:
            count += sum(fill(read) for read in self.reads)
            if (error := self.check()) is not None:
                raise error
        return count


class PageStream:
    """Reads a spill file's pages, in runs or individually. Closes the file with itself.

    spill:      the file, with room for `pages` pages of each layer
    page_nbytes: bytes of a page, by layer
    first:      the first page that is read from the file
    budget:     bytes of memory for runs, about
    cancelled:  polled while waiting
    direct:     False reads through the page cache
    slots:      pages per layer that individual reads can keep, 0 without them

    A pass has one reader per layer, followed by those registered with `add_reader`: layers that attend to another layer's pages."""

    def __init__(self, spill: SpillFile, page_nbytes: Sequence[int], pages: int, first: int, budget: int = RING_NBYTES,
                 cancelled: Callable[[], bool] = lambda: False, direct: bool = True, slots: int = 0) -> None:
        self.page_nbytes, self.first, self.spill, self._cancelled = tuple(page_nbytes), first, spill, cancelled
        self._layer_offsets = [0]
        for nbytes in page_nbytes:
            self._layer_offsets.append(self._layer_offsets[-1] + -(-pages * nbytes // BLOCK) * BLOCK)
        self._pages, self._slot_nbytes = pages, slot_nbytes(page_nbytes, pages)
        self._ring = anonymous(ring_nbytes(page_nbytes, pages, budget))
        self._ring_address, self._max_runs = self._ring.ctypes.data, max(1, len(self._ring) // self._slot_nbytes // 2)
        self._reader = Reader({spill.path: spill.descriptor}, THREADS if slots else RUN_THREADS, direct, "the KV cache is")
        self._queue = self._open_queue(slots)
        self.slots = [self._page_slots(layer, slots) for layer in range(len(page_nbytes) if slots else 0)]
        self.staging = [np.zeros(nbytes, np.uint8) for nbytes in page_nbytes]
        self._checksums = np.zeros((len(page_nbytes), pages), np.uint64)  # checksums of what was written
        self._page_ranges: tuple[tuple[int, int], ...] = ()
        self._runs_in_order: list[Run] = []
        self._positions: dict[Run, int] = {}
        self._reader_layers = list(range(len(page_nbytes)))  # by reader
        self._runs: list[list[Run]] = [[] for _ in page_nbytes]
        self._read_ahead = ReadAhead(self._reader, self._next_reads, cancelled)

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return len(self._ring) + sum(self.page_nbytes)

    @property
    def traffic(self) -> ReadStats:
        return self._reader.traffic

    def announcements(self) -> list[str]:
        """Fallbacks since the last call."""
        return self._reader.announcements()

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()
        self._reader.close()
        self.spill.close()

    def add_reader(self, layer: int) -> int:
        """Register another reader of a layer's pages; returns its number."""
        self._reader_layers.append(layer)
        self._runs.append([])
        return len(self._reader_layers) - 1

    # -- writing ---------------------------------------------------------------------------------------------------------------

    def write(self, page: int, memory: Sequence[np.ndarray] | None = None) -> None:
        """Write what is in `staging`, or in `memory`, as page `page` of every layer. Raises as `SpillFile.write`."""
        for slots in self.slots:
            slots.forget(page)
        for position, pending in enumerate(self._read_ahead):
            if pending.destination.run.begin <= page < pending.destination.run.end:  # a page that is rewritten, with other tokens
                self._read_ahead.keep(position)
                break
        pages = memory or self.staging
        for sums, memory_page in zip(self._checksums, pages, strict=True):
            sums[page] = word_sums(memory_page[None])[0]
        self.spill.write([(self._layer_offsets[layer] + page * nbytes, memory_page)
                          for layer, (nbytes, memory_page) in enumerate(zip(self.page_nbytes, pages, strict=True))])

    # -- reading ---------------------------------------------------------------------------------------------------------------

    def begin(self, page_ranges: Sequence[tuple[int, int]]) -> bool:
        """Begin a pass. `page_ranges`: the pages [begin, end) that it reads, by reader. Returns whether they differ from the previous
        pass."""
        if is_new := tuple(page_ranges) != self._page_ranges:
            self._page_ranges = tuple(page_ranges)
            self._runs = [list(self._split_runs(reader, begin, end)) for reader, (begin, end) in enumerate(page_ranges)]
            self._runs_in_order = [run for runs in self._runs for run in runs]
            self._positions = {run: position for position, run in enumerate(self._runs_in_order)}
            # Prefetches that still match.
            fitting = takewhile(lambda pair: pair[0].destination.run == pair[1], zip(self._read_ahead, self._runs_in_order))
            self._read_ahead.keep(sum(1 for _ in fitting))
            self._read_ahead.reorder(len(self._runs_in_order))
        self._read_ahead.read_ahead()
        return is_new

    def runs(self, reader: int) -> list[Run]:
        """The reader's runs in the current pass."""
        return self._runs[reader]

    @contextmanager
    def lease(self, run: Run) -> Iterator[int]:
        """The address of a run's first page, for a `with` block. Raises PagesLost, Interrupted."""
        pending = self._wait_for(run)
        try:
            yield self._address(pending.destination)
        finally:
            self._read_ahead.leave()

    def arriving_runs(self, reader: int) -> Generator[list[tuple[int, int, int]]]:
        """Yield lists of (first page, end page, address) of a reader's runs in order: those that have arrived, at most half of the ring,
        waiting for at least one. They stay valid until the next iteration. Raises as `lease`."""
        runs, at = self._runs[reader], 0
        while at < len(runs):
            self._wait_for(runs[at])
            batch = self._read_ahead.ready(min(self._max_runs, len(runs) - at))
            try:
                arrived = [pending.destination for pending in batch]
                yield [(held.run.begin, held.run.end, self._address(held)) for held in arrived]
            finally:
                self._read_ahead.leave(len(batch))
            at += len(batch)

    def _wait_for(self, run: Run) -> Pending:
        with _as_pages_lost():
            return self._read_ahead.enter(self._positions[run])

    def _address(self, held: _RunSlot) -> int:
        """The address of a run's first page in its slot."""
        run = held.run
        offset = self._layer_offsets[run.layer] + run.begin * self.page_nbytes[run.layer]
        return self._ring_address + held.slot * self._slot_nbytes + offset % BLOCK

    def page(self, layer: int, index: int) -> np.ndarray:
        """A copy of one page, for occasional access. Raises as `lease`."""
        offset, nbytes = self._layer_offsets[layer] + index * self.page_nbytes[layer], self.page_nbytes[layer]
        memory = anonymous(-(-nbytes // BLOCK) * BLOCK + BLOCK)
        ticket = self._reader.submit([self._checked_reads(Run(layer, index, index + 1), memory)], urgent=True)
        with _as_pages_lost():
            self._reader.wait(ticket, self._cancelled)
        return memory[offset % BLOCK : offset % BLOCK + nbytes]

    def _page_slots(self, layer: int, count: int) -> PageSlots:
        start, nbytes = self._layer_offsets[layer], self.page_nbytes[layer]
        return PageSlots(nbytes, count, self._reader, lambda page, memory: self._block_reads(start + page * nbytes, nbytes, memory),
                         lambda page: start + page * nbytes, self._cancelled, self._queue, self._reader.direct(self.spill.path) or -1,
                         lambda page, memory: self._mismatch(Run(layer, page, page + 1), memory[None]))

    def _open_queue(self, slots: int) -> AsyncReads | None:
        """An AIO queue for demand reads, where there are slots and the system and the file system support it."""
        if not slots or self._reader.direct(self.spill.path) is None:
            return None
        with suppress(OSError):
            return AsyncReads(AioQueue(MAX_RANDOM_READS), self._reader)
        return None

    def _split_runs(self, reader: int, begin: int, end: int) -> Iterator[Run]:
        """Runs on a fixed grid, so that one page more or less changes only one run."""
        layer = self._reader_layers[reader]
        length = run_pages(self.page_nbytes[layer], self._pages)
        while begin < end:
            stop = min(end, begin + length - begin % length)
            yield Run(layer, begin, stop, reader)
            begin = stop

    def _next_reads(self, position: int, taken: Sequence[_RunSlot]) -> tuple[_RunSlot, list[_CheckedReads]] | None:
        """A free slot for a run, and its reads."""
        free = set(range(len(self._ring) // self._slot_nbytes)) - {held.slot for held in taken}
        if not free:
            return None
        run, slot = self._runs_in_order[position], free.pop()
        return _RunSlot(run, slot), [self._checked_reads(run, self._ring[slot * self._slot_nbytes : (slot + 1) * self._slot_nbytes])]

    def _checked_reads(self, run: Run, memory: np.ndarray) -> _CheckedReads:
        """Reads of a layer's pages into `memory`, offset by what precedes them in their first block, with verification."""
        nbytes = self.page_nbytes[run.layer]
        offset = self._layer_offsets[run.layer] + run.begin * nbytes
        pages = memory[offset % BLOCK :][: nbytes * (run.end - run.begin)].reshape(-1, nbytes)
        return _CheckedReads(self._block_reads(offset, pages.size, memory), lambda: self._mismatch(run, pages))

    def _mismatch(self, run: Run, pages: np.ndarray) -> CheckpointError | None:
        """What is wrong with pages as read, uint8 [pages, bytes]; None if they match what was written."""
        differ = word_sums(pages) != self._checksums[run.layer, run.begin : run.end]
        if not differ.any():
            return None
        page = run.begin + int(differ.argmax())
        return CheckpointError(f"the KV cache's file was altered: the checksum of page {page} of layer {run.layer} differs")

    def _block_reads(self, offset: int, nbytes: int, memory: np.ndarray) -> list[Read]:
        """Whole blocks that cover a byte range of the file, split into reads."""
        start, view = offset // BLOCK * BLOCK, memoryview(memory)
        needed = offset + nbytes - start
        return [Read(self.spill.path, start + at, view[at : at + min(READ_NBYTES, -(-(needed - at) // BLOCK) * BLOCK)],
                     min(READ_NBYTES, needed - at)) for at in range(0, needed, READ_NBYTES)]


class LayerSpill:
    """One layer's view of a stream, as attention reads it.

    lead:   block-table rows before that of page 0
    reader: its reader number, by default the layer's own"""

    def __init__(self, stream: PageStream, layer: int, lead: int, reader: int | None = None) -> None:
        self._stream, self._layer, self.lead = stream, layer, lead
        self._reader = layer if reader is None else reader
        self.staging = stream.staging[layer]

    @property
    def first(self) -> int:
        return self._stream.first

    def reads(self) -> tuple[int, int]:
        runs = self._stream.runs(self._reader)
        return (runs[0].begin, runs[-1].end) if runs else (self.first, self.first)

    def come(self) -> Generator[list[tuple[int, int, int]]]:
        return self._stream.arriving_runs(self._reader)

    def page(self, index: int) -> np.ndarray:
        return self._stream.page(self._layer, index)

    @property
    def most(self) -> int:
        return self._stream.slots[self._layer].num_slots if self._stream.slots else 0

    def fetch(self, pages: Sequence[int], num_candidates: int = 0) -> Iterator[list[tuple[int, int]]]:
        """See `PageSlots.fetch`; reading begins with the call. Raises PagesLost, Interrupted, also while iterating."""
        with _as_pages_lost():
            return _translated(self._stream.slots[self._layer].fetch(pages, num_candidates))

    def prefetch(self, pages: Sequence[int], keep: Sequence[int]) -> None:
        self._stream.slots[self._layer].prefetch(pages, keep)


def _translated(batches: Iterator[list[tuple[int, int]]]) -> Iterator[list[tuple[int, int]]]:
    """Batches of pages, with errors of their reads translated."""
    with _as_pages_lost():
        yield from batches
