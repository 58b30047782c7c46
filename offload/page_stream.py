"""KV pages that are read from a spill file, layer by layer on every pass, while the processor works on others.

A layer's pages lie one behind another in its extent of the file. A pass reads those that memory does not hold once, in order of layers, in
runs of about 2 MiB (an eighth of a short extent); runs take turns in a ring of slots. What comes next is known from the pass before, so
reading ahead goes on over the end of a pass, as with weights (`streaming_pager.py`). A pass that reads other runs (a page more, a window
that moved) keeps what fits.
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
QUEUED = 128  # pages that are read at a time, at most
RUN_THREADS = 2  # reads of runs at a time: more are no faster, and take from the threads that compute


class PagesLost(EffllmError):
    """Pages in the file cannot be read, or are not what was written. Of a file where that happens no page is to be trusted: whoever reads
    on writes all of them anew."""


@contextmanager
def _told() -> Iterator[None]:
    """What a reader of files says of this one. Raises PagesLost."""
    try:
        yield
    except CheckpointError as error:
        raise PagesLost(error.message, "check the disk, or give another one with --spill-dir DIR, then run it again") from error


def run_pages(page_nbytes: int, pages: int) -> int:
    """Pages of a run in an extent of `pages`."""
    return max(1, min(RUN_NBYTES // page_nbytes, -(-pages // 8)))


def slot_nbytes(page_nbytes: Sequence[int], pages: int) -> int:
    """Memory of the longest run, with the blocks at its ends; `page_nbytes` by layer."""
    return max(-(-run_pages(nbytes, pages) * nbytes // BLOCK) * BLOCK + BLOCK for nbytes in page_nbytes)


def ring_nbytes(page_nbytes: Sequence[int], pages: int, budget: int = RING_NBYTES) -> int:
    """Memory for runs that are used or on their way: about `budget`, no more than all runs, at least two."""
    slot = slot_nbytes(page_nbytes, pages)
    runs = sum(-(-pages // run_pages(nbytes, pages)) for nbytes in page_nbytes)
    return max(2, min(budget // slot, runs)) * slot


@dataclass(frozen=True)
class Run:
    """Pages [begin, end) of a layer, as one of those that read it does: the `reader`th that a pass has."""

    layer: int
    begin: int
    end: int
    reader: int = 0


@dataclass(frozen=True)
class _Slot:
    """Where a run lies."""

    run: Run
    slot: int


@dataclass(frozen=True)
class _Checked:
    """Reads of which `check` says whether they brought what was written; else they are made once more, in case it was the way and not the
    disk. Raises CheckpointError."""

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
    """`pages` pages of each layer have a place in `spill`, those from `first` on are read from there: in runs, or one by one through
    `slots` places of memory for each layer. `cancelled` is asked while somebody waits. Closes the file with itself.

    A pass has one reader for each layer, and as many more behind these as `add_reader` was called for: layers that read another's pages."""

    def __init__(self, spill: SpillFile, page_nbytes: Sequence[int], pages: int, first: int, budget: int = RING_NBYTES,
                 cancelled: Callable[[], bool] = lambda: False, direct: bool = True, slots: int = 0) -> None:
        self.page_nbytes, self.first, self.spill, self._cancelled = tuple(page_nbytes), first, spill, cancelled
        self._starts = [0]
        for nbytes in page_nbytes:
            self._starts.append(self._starts[-1] + -(-pages * nbytes // BLOCK) * BLOCK)
        self._pages, self._slot = pages, slot_nbytes(page_nbytes, pages)
        self._ring = anonymous(ring_nbytes(page_nbytes, pages, budget))
        self._at, self._most = self._ring.ctypes.data, max(1, len(self._ring) // self._slot // 2)
        self._reader = Reader({spill.path: spill.descriptor}, THREADS if slots else RUN_THREADS, direct, "the KV cache is")
        self._queue = self._queue_for(slots)
        self.slots = [self._slots_of(layer, slots) for layer in range(len(page_nbytes) if slots else 0)]
        self.staging = [np.zeros(nbytes, np.uint8) for nbytes in page_nbytes]
        self._sums = np.zeros((len(page_nbytes), pages), np.uint64)  # of what was written
        self._wanted: tuple[tuple[int, int], ...] = ()
        self._order: list[Run] = []
        self._places: dict[Run, int] = {}
        self._layer_of = list(range(len(page_nbytes)))  # by reader
        self._runs: list[list[Run]] = [[] for _ in page_nbytes]
        self._turns = ReadAhead(self._reader, self._ask, cancelled)

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
        """Another reader of a layer's pages, behind those there are; returns its number."""
        self._layer_of.append(layer)
        self._runs.append([])
        return len(self._layer_of) - 1

    # -- writing ---------------------------------------------------------------------------------------------------------------

    def write(self, page: int, memory: Sequence[np.ndarray] | None = None) -> None:
        """Put what lies in `staging`, or in `memory`, into its place as page `page` of every layer. Raises as `SpillFile.write` does."""
        for slots in self.slots:
            slots.forget(page)
        for place, turn in enumerate(self._turns):
            if turn.where.run.begin <= page < turn.where.run.end:  # a page that is made anew, of other tokens
                self._turns.keep(place)
                break
        pages = memory or self.staging
        for sums, own in zip(self._sums, pages, strict=True):
            sums[page] = word_sums(own[None])[0]
        self.spill.write([(self._starts[layer] + page * nbytes, own)
                          for layer, (nbytes, own) in enumerate(zip(self.page_nbytes, pages, strict=True))])

    # -- reading ---------------------------------------------------------------------------------------------------------------

    def begin(self, wanted: Sequence[tuple[int, int]]) -> bool:
        """A pass begins; `wanted` are the pages [begin, end) that it reads, by reader. Are they others than in the pass before?"""
        if is_new := tuple(wanted) != self._wanted:
            self._wanted = tuple(wanted)
            self._runs = [list(self._cut(reader, begin, end)) for reader, (begin, end) in enumerate(wanted)]
            self._order = [run for runs in self._runs for run in runs]
            self._places = {run: place for place, run in enumerate(self._order)}
            fitting = takewhile(lambda pair: pair[0].where.run == pair[1], zip(self._turns, self._order))  # of what was read ahead
            self._turns.keep(sum(1 for _ in fitting))
            self._turns.reorder(len(self._order))
        self._turns.read_ahead()
        return is_new

    def runs(self, reader: int) -> list[Run]:
        """Of the pass in hand."""
        return self._runs[reader]

    @contextmanager
    def lease(self, run: Run) -> Iterator[int]:
        """The address of a run's first page for the time of a `with`. Raises PagesLost, Interrupted."""
        turn = self._enter(run)
        try:
            yield self._address(turn.where)
        finally:
            self._turns.leave()

    def come(self, reader: int) -> Generator[list[tuple[int, int, int]]]:
        """A reader's runs of the pass in hand, in order, as (first page, the one behind the last, address of the first): those that have
        come, at most half of the ring, and at least one, which is waited for. They stay until the next are asked for. Raises as `lease`."""
        runs, at = self._runs[reader], 0
        while at < len(runs):
            self._enter(runs[at])
            turns = self._turns.come(min(self._most, len(runs) - at))
            try:
                yield [(turn.where.run.begin, turn.where.run.end, self._address(turn.where)) for turn in turns]
            finally:
                self._turns.leave(len(turns))
            at += len(turns)

    def _enter(self, run: Run) -> Pending:
        with _told():
            return self._turns.enter(self._places[run])

    def _address(self, held: _Slot) -> int:
        """Of the first page of a run in its slot."""
        run = held.run
        return self._at + held.slot * self._slot + (self._starts[run.layer] + run.begin * self.page_nbytes[run.layer]) % BLOCK

    def page(self, layer: int, index: int) -> np.ndarray:
        """A copy of one page, for those who need one now and then. Raises as `lease` does."""
        offset, nbytes = self._starts[layer] + index * self.page_nbytes[layer], self.page_nbytes[layer]
        memory = anonymous(-(-nbytes // BLOCK) * BLOCK + BLOCK)
        ticket = self._reader.submit([self._checked(Run(layer, index, index + 1), memory)], urgent=True)
        with _told():
            self._reader.wait(ticket, self._cancelled)
        return memory[offset % BLOCK : offset % BLOCK + nbytes]

    def _slots_of(self, layer: int, count: int) -> PageSlots:
        start, nbytes = self._starts[layer], self.page_nbytes[layer]
        return PageSlots(nbytes, count, self._reader, lambda page, memory: self._reads(start + page * nbytes, nbytes, memory),
                         lambda page: start + page * nbytes, self._cancelled, self._queue, self._reader.direct(self.spill.path) or -1,
                         lambda page, memory: self._altered(Run(layer, page, page + 1), memory[None]))

    def _queue_for(self, slots: int) -> AsyncReads | None:
        """For pages that are waited for, where there are some and the system and the file system have such a queue."""
        if not slots or self._reader.direct(self.spill.path) is None:
            return None
        with suppress(OSError):
            return AsyncReads(AioQueue(QUEUED), self._reader)
        return None

    def _cut(self, reader: int, begin: int, end: int) -> Iterator[Run]:
        """Runs on a fixed grid, so that one page more, or one less, changes one run."""
        layer = self._layer_of[reader]
        length = run_pages(self.page_nbytes[layer], self._pages)
        while begin < end:
            stop = min(end, begin + length - begin % length)
            yield Run(layer, begin, stop, reader)
            begin = stop

    def _ask(self, place: int, taken: Sequence[_Slot]) -> tuple[_Slot, list[_Checked]] | None:
        """A run in a slot that is nobody's, and its reads."""
        free = set(range(len(self._ring) // self._slot)) - {own.slot for own in taken}
        if not free:
            return None
        run, slot = self._order[place], free.pop()
        return _Slot(run, slot), [self._checked(run, self._ring[slot * self._slot : (slot + 1) * self._slot])]

    def _checked(self, run: Run, memory: np.ndarray) -> _Checked:
        """Pages of a layer, read into `memory` behind what is before them in their first block."""
        nbytes = self.page_nbytes[run.layer]
        offset = self._starts[run.layer] + run.begin * nbytes
        pages = memory[offset % BLOCK :][: nbytes * (run.end - run.begin)].reshape(-1, nbytes)
        return _Checked(self._reads(offset, pages.size, memory), lambda: self._altered(run, pages))

    def _altered(self, run: Run, pages: np.ndarray) -> CheckpointError | None:
        """What is wrong with pages as they were read, uint8 [pages, bytes]; None where they are what was written."""
        differ = word_sums(pages) != self._sums[run.layer, run.begin : run.end]
        if not differ.any():
            return None
        page = run.begin + int(differ.argmax())
        return CheckpointError(f"the KV cache's file was altered: the checksum of page {page} of layer {run.layer} differs")

    def _reads(self, offset: int, nbytes: int, memory: np.ndarray) -> list[Read]:
        """Whole blocks around bytes of the file, cut into reads."""
        start, view = offset // BLOCK * BLOCK, memoryview(memory)
        needed = offset + nbytes - start
        return [Read(self.spill.path, start + at, view[at : at + min(READ_NBYTES, -(-(needed - at) // BLOCK) * BLOCK)],
                     min(READ_NBYTES, needed - at)) for at in range(0, needed, READ_NBYTES)]


class LayerSpill:
    """One layer's view of a stream, as attention asks for it. `lead`: rows of a block table before that of page 0; `reader`: which of the
    stream's it is, by default the layer's own."""

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
        return self._stream.come(self._reader)

    def page(self, index: int) -> np.ndarray:
        return self._stream.page(self._layer, index)

    @property
    def most(self) -> int:
        return self._stream.slots[self._layer].most if self._stream.slots else 0

    def fetch(self, pages: Sequence[int], among: int = 0) -> Iterator[list[tuple[int, int]]]:
        """As of `PageSlots`: reading begins with the call. Raises PagesLost, Interrupted, as what it gives does."""
        with _told():
            return _each(self._stream.slots[self._layer].fetch(pages, among))

    def prefetch(self, pages: Sequence[int], keep: Sequence[int]) -> None:
        self._stream.slots[self._layer].prefetch(pages, keep)


def _each(coming: Iterator[list[tuple[int, int]]]) -> Iterator[list[tuple[int, int]]]:
    with _told():
        yield from coming
