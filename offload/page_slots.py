"""Random access to spilled pages: those that sparse attention selects in a layer.

Every layer has slots that keep the pages its last tokens selected, since the next token selects most of them again. Missing pages are read
at once, ahead of all prefetches; the least recently used page is evicted.

Where the system has asynchronous I/O, demand reads are submitted to it in one call; otherwise, and for prefetches, threads read. Handing a
read to a thread and waiting for it costs as much as a small read itself, and so does attending to a single page. So pages selected together
are submitted in portions of a few, and returned in halves: those in memory, half of the others, and so on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from .async_reads import AsyncReads, PendingRead
from .checkpoint import CheckpointError
from .direct_io import BLOCK, Read, Reader
from .linux_aio import AioRead
from .memory import anonymous

MAX_PORTION = 3  # pages that a thread reads before it reports, at most
MIN_BATCH = 6  # demand pages returned together; of more, half


@dataclass(slots=True, kw_only=True)
class _Page(PendingRead):
    """A page in a slot, and its address."""

    slot: int
    address: int
    checked: bool = False


class PageSlots:
    """Memory for some of a layer's pages.

    nbytes:      bytes of a page
    slots:       how many pages it holds
    reads:       (page, memory) -> the reads that fill the memory
    file_offset: page -> its offset in the file
    queue:       for demand reads, None for threads alone; through `descriptor`
    mismatch:    (page, memory) -> what is wrong with a page as read, or None"""

    def __init__(self, nbytes: int, slots: int, reader: Reader, reads: Callable[[int, np.ndarray], list[Read]],
                 file_offset: Callable[[int], int], cancelled: Callable[[], bool], queue: AsyncReads | None = None,
                 descriptor: int = -1, mismatch: Callable[[int, np.ndarray], CheckpointError | None] = lambda page, memory: None) -> None:
        self._nbytes, self._queue, self._file_offset, self._descriptor, self._mismatch = nbytes, queue, file_offset, descriptor, mismatch
        self._slot_nbytes = slot_nbytes(nbytes)
        self._memory, self._reader, self._reads, self._cancelled = anonymous(slots * self._slot_nbytes), reader, reads, cancelled
        self._address = self._memory.ctypes.data
        self._pages: OrderedDict[int, _Page] = OrderedDict()  # least recently used first
        self._free_slots = list(range(slots))
        self._evicted_in_flight: list[_Page] = []  # evicted before their portion was read
        self.num_slots = slots
        self.num_requested = self.num_hits = self.num_candidates = 0  # pages requested, found in memory, and selected from

    def fetch(self, pages: Sequence[int], num_candidates: int = 0) -> Iterator[list[tuple[int, int]]]:
        """Start reading `pages` (at most `num_slots`), selected out of `num_candidates`. Yields batches of (page, address) as they arrive,
        those in memory first; they stay valid until the next call. Raises CheckpointError, Interrupted, also while iterating."""
        resident = self._pages
        self._collect()
        self.num_candidates += num_candidates
        for page in pages:
            if page in resident and _has_failed(resident[page]):
                self.forget(page)  # the caller may try again
        missing = [page for page in pages if page not in resident]
        self.num_requested, self.num_hits = self.num_requested + len(pages), self.num_hits + len(pages) - len(missing)
        for page in pages:
            if page in resident:
                resident.move_to_end(page)  # before eviction victims are looked for
        self._submit(missing, set(pages), urgent=True)
        return self._arriving(list(pages), set(missing))

    def _arriving(self, remaining: list[int], demanded: set[int]) -> Iterator[list[tuple[int, int]]]:
        """Yield pages as `fetch` does; `demanded`: those that had to be read."""
        resident, pages = self._pages, frozenset(remaining)
        while remaining:
            self._collect()
            if arrived := {page for page in remaining if resident[page].is_complete}:
                self._check(arrived)
                remaining = [page for page in remaining if page not in arrived]
                yield [(page, resident[page].address) for page in arrived]
                continue
            # Failed prefetches, or pages of the same read.
            to_retry = [page for page in remaining if _has_failed(resident[page]) and page not in demanded]
            for page in to_retry:
                self.forget(page)
            if to_retry:  # now as demand reads
                self._submit(to_retry, pages, urgent=True)
                demanded.update(to_retry)
            else:
                self._wait(remaining, demanded)

    def _check(self, pages: Set[int]) -> None:
        """Verify pages once after each read. Raises CheckpointError and evicts the page."""
        for page in pages:
            entry = self._pages[page]
            if entry.checked:
                continue
            begin = entry.address - self._address
            if (error := self._mismatch(page, self._memory[begin : begin + self._nbytes])) is not None:
                self._evict(page)
                raise error
            entry.checked = True

    def prefetch(self, pages: Sequence[int], keep: Sequence[int]) -> None:
        """Start reading pages that may be selected next, evicting any but those in `keep`."""
        missing = [page for page in pages if page not in self._pages]
        if missing:
            self._submit(missing, {*keep, *pages}, urgent=False)

    def forget(self, page: int) -> None:
        """Drop a page: it is rewritten, or was not read."""
        if page in self._pages:
            self._evict(page)

    def _wait(self, remaining: Sequence[int], demanded: set[int]) -> None:
        """Wait for the first half of `remaining`, or for all if they are few; on failure, drop those that have not arrived."""
        first = remaining if len(remaining) <= MIN_BATCH else remaining[: (len(remaining) + 1) // 2]
        page = first[0]
        try:
            if self._queue is not None:
                self._queue.wait([self._pages[each] for each in first], self._cancelled)
            for page in first:
                if not self._pages[page].is_complete:
                    self._reader.wait(self._pages[page].ticket, self._cancelled)
        except CheckpointError:
            if page in demanded:
                self._forget_unread(remaining)
                raise
        except BaseException:
            self._forget_unread(remaining)
            raise

    def _collect(self) -> None:
        if self._queue is not None:
            self._queue.collect()

    def _forget_unread(self, pages: Sequence[int]) -> None:
        for page in pages:
            if page in self._pages and not self._pages[page].is_complete:
                self._evict(page)

    def _submit(self, pages: Sequence[int], keep: Set[int], urgent: bool) -> None:
        """Start reading missing pages: all of them if `urgent`, else those for which a slot is free at once."""
        slots = self._free_for(len(pages), keep, urgent)
        new_pages = [(page, self._page(page, slot)) for page, slot in zip(pages, slots)]
        num_accepted = 0 if self._queue is None or not urgent else self._queue.submit([page for _, page in new_pages])
        self._pages.update(new_pages[:num_accepted])
        new_pages = new_pages[num_accepted:]
        portion = max(1, min(MAX_PORTION, -(-len(new_pages) // self._reader.threads)))
        for begin in range(0, len(new_pages), portion):
            portion_pages = new_pages[begin : begin + portion]
            ticket = self._reader.submit([page for _, page in portion_pages], urgent, batch_size=portion)
            for number, page in portion_pages:
                page.ticket = ticket
                self._pages[number] = page

    def _page(self, number: int, slot: int) -> _Page:
        begin, offset = slot * self._slot_nbytes, self._file_offset(number)
        skip = offset % BLOCK
        request = AioRead(self._descriptor, self._address + begin, offset - skip, -(-(skip + self._nbytes) // BLOCK) * BLOCK)
        reads = partial(self._reads, number, self._memory[begin : begin + self._slot_nbytes])
        return _Page(slot=slot, address=self._address + begin + skip, reads=reads, request=request, needed=skip + self._nbytes)

    def _free_for(self, count: int, keep: Set[int], wait: bool) -> list[int]:
        """Free `count` slots, evicting the least recently used pages that are not in `keep`.

        Fewer if that needs a wait and `wait` is False. Raises Interrupted."""
        self._release_evicted()
        if len(self._free_slots) < count:
            idle = [page for page, entry in self._pages.items() if page not in keep and not entry.ticket.left]
            for page in idle[: count - len(self._free_slots)]:
                self._evict(page)
        while wait and len(self._free_slots) < count:
            if not self._evicted_in_flight:
                self._evict(next(page for page in self._pages if page not in keep))
            if self._evicted_in_flight:  # else its read had already ended
                if self._queue is not None:
                    self._queue.wait(self._evicted_in_flight[:1], self._cancelled)
                with suppress(CheckpointError):  # nobody wants that page any more
                    self._reader.wait(self._evicted_in_flight[0].ticket, self._cancelled)
                self._release_evicted()
        slots, self._free_slots = self._free_slots[:count], self._free_slots[count:]
        return slots

    def _release_evicted(self) -> None:
        self._collect()
        self._free_slots += [page.slot for page in self._evicted_in_flight if not page.ticket.left]
        self._evicted_in_flight = [page for page in self._evicted_in_flight if page.ticket.left]

    def _evict(self, number: int) -> None:
        page = self._pages.pop(number)
        page.is_dropped = True
        if page.ticket.left:
            self._evicted_in_flight.append(page)
        else:
            self._free_slots.append(page.slot)


def _has_failed(page: _Page) -> bool:
    """Whether a page's read has ended without it."""
    return not page.ticket.left and not page.is_complete  # in this order: a thread marks a read done last


def slot_nbytes(nbytes: int) -> int:
    """Memory for a page with the blocks at its ends."""
    return -(-nbytes // BLOCK) * BLOCK + BLOCK
