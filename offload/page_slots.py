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

PORTION = 3  # pages that a thread reads before it reports, at most
FEW = 6  # demand pages returned together; of more, half


@dataclass(slots=True, kw_only=True)
class _Page(PendingRead):
    """A page in a slot, and its address."""

    slot: int
    address: int
    checked: bool = False


class PageSlots:
    """`slots` pages of `nbytes` bytes. `place(page)`: its position in the file; `reads(page, memory)`: the reads for it. Demand reads go to
    `queue` through `descriptor`, if there is one. `altered(page, memory)`: what is wrong with a page as read, or None."""

    def __init__(self, nbytes: int, slots: int, reader: Reader, reads: Callable[[int, np.ndarray], list[Read]],
                 place: Callable[[int], int], cancelled: Callable[[], bool], queue: AsyncReads | None = None,
                 descriptor: int = -1, altered: Callable[[int, np.ndarray], CheckpointError | None] = lambda page, memory: None) -> None:
        self._nbytes, self._queue, self._place, self._descriptor, self._altered = nbytes, queue, place, descriptor, altered
        self._size = slot_nbytes(nbytes)
        self._memory, self._reader, self._reads, self._cancelled = anonymous(slots * self._size), reader, reads, cancelled
        self._at = self._memory.ctypes.data
        self._held: OrderedDict[int, _Page] = OrderedDict()  # least recently used first
        self._free = list(range(slots))
        self._stale: list[_Page] = []  # evicted before their portion was read
        self.most = slots
        self.asked = self.found = self.among = 0  # pages requested, found in memory, and selected from

    def fetch(self, pages: Sequence[int], among: int = 0) -> Iterator[list[tuple[int, int]]]:
        """Start reading `pages` (at most `most`), selected out of `among`. Yields batches of (page, address) as they arrive, those in
        memory first; they stay valid until the next call. Raises CheckpointError, Interrupted, also while iterating."""
        held = self._held
        self._collect()
        self.among += among
        for page in pages:
            if page in held and _failed(held[page]):
                self.forget(page)  # the caller may try again
        missing = [page for page in pages if page not in held]
        self.asked, self.found = self.asked + len(pages), self.found + len(pages) - len(missing)
        for page in pages:
            if page in held:
                held.move_to_end(page)  # before eviction victims are looked for
        self._submit(missing, set(pages), urgent=True)
        return self._come(list(pages), set(missing))

    def _come(self, left: list[int], asked_now: set[int]) -> Iterator[list[tuple[int, int]]]:
        """Yield pages as `fetch` does; `asked_now` are those that had to be read."""
        held, pages = self._held, frozenset(left)
        while left:
            self._collect()
            if come := {page for page in left if held[page].there}:
                self._check(come)
                left = [page for page in left if page not in come]
                yield [(page, held[page].address) for page in come]
                continue
            again = [page for page in left if _failed(held[page]) and page not in asked_now]  # failed prefetches, or pages of the same read
            for page in again:
                self.forget(page)
            if again:  # now as demand reads
                self._submit(again, pages, urgent=True)
                asked_now.update(again)
            else:
                self._wait(left, asked_now)

    def _check(self, pages: Set[int]) -> None:
        """Verify pages once after each read. Raises CheckpointError and evicts the page."""
        for page in pages:
            own = self._held[page]
            if own.checked:
                continue
            begin = own.address - self._at
            if (error := self._altered(page, self._memory[begin : begin + self._nbytes])) is not None:
                self._give_up(page)
                raise error
            own.checked = True

    def prefetch(self, pages: Sequence[int], keep: Sequence[int]) -> None:
        """Start reading pages that may be selected next, evicting any but those in `keep`."""
        missing = [page for page in pages if page not in self._held]
        if missing:
            self._submit(missing, {*keep, *pages}, urgent=False)

    def forget(self, page: int) -> None:
        """Drop a page: it is rewritten, or was not read."""
        if page in self._held:
            self._give_up(page)

    def _wait(self, left: Sequence[int], asked_now: set[int]) -> None:
        """Wait for the first half of `left`, or for all if they are few; on failure, those that have not arrived are dropped."""
        first = left if len(left) <= FEW else left[: (len(left) + 1) // 2]
        page = first[0]
        try:
            if self._queue is not None:
                self._queue.wait([self._held[each] for each in first], self._cancelled)
            for page in first:
                if not self._held[page].there:
                    self._reader.wait(self._held[page].ticket, self._cancelled)
        except CheckpointError:
            if page in asked_now:
                self._forget_unread(left)
                raise
        except BaseException:
            self._forget_unread(left)
            raise

    def _collect(self) -> None:
        if self._queue is not None:
            self._queue.collect()

    def _forget_unread(self, pages: Sequence[int]) -> None:
        for page in pages:
            if page in self._held and not self._held[page].there:
                self._give_up(page)

    def _submit(self, pages: Sequence[int], wanted: Set[int], urgent: bool) -> None:
        """Start reading missing pages: all of them if `urgent`, else those for which a slot is free at once."""
        slots = self._empty(len(pages), wanted, urgent)
        made = [(page, self._page(page, slot)) for page, slot in zip(pages, slots)]
        taken = 0 if self._queue is None or not urgent else self._queue.submit([page for _, page in made])
        self._held.update(made[:taken])
        made = made[taken:]
        portion = max(1, min(PORTION, -(-len(made) // self._reader.threads)))
        for begin in range(0, len(made), portion):
            own = made[begin : begin + portion]
            ticket = self._reader.submit([page for _, page in own], urgent, together=portion)
            for number, page in own:
                page.ticket = ticket
                self._held[number] = page

    def _page(self, number: int, slot: int) -> _Page:
        begin, offset = slot * self._size, self._place(number)
        skip = offset % BLOCK
        asked = AioRead(self._descriptor, self._at + begin, offset - skip, -(-(skip + self._nbytes) // BLOCK) * BLOCK)
        reads = partial(self._reads, number, self._memory[begin : begin + self._size])
        return _Page(slot=slot, address=self._at + begin + skip, reads=reads, asked=asked, needed=skip + self._nbytes)

    def _empty(self, count: int, wanted: Set[int], wait: bool) -> list[int]:
        """Free `count` slots, evicting the least recently used pages that are not `wanted`; fewer if that needs a wait and `wait` is False.
        Raises Interrupted."""
        self._free_stale()
        if len(self._free) < count:
            idle = [page for page, own in self._held.items() if page not in wanted and not own.ticket.left]
            for page in idle[: count - len(self._free)]:
                self._give_up(page)
        while wait and len(self._free) < count:
            if not self._stale:
                self._give_up(next(page for page in self._held if page not in wanted))
            if self._stale:  # else its read had already ended
                if self._queue is not None:
                    self._queue.wait(self._stale[:1], self._cancelled)
                with suppress(CheckpointError):  # nobody wants that page any more
                    self._reader.wait(self._stale[0].ticket, self._cancelled)
                self._free_stale()
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def _free_stale(self) -> None:
        self._collect()
        self._free += [page.slot for page in self._stale if not page.ticket.left]
        self._stale = [page for page in self._stale if page.ticket.left]

    def _give_up(self, number: int) -> None:
        page = self._held.pop(number)
        page.dropped = True
        if page.ticket.left:
            self._stale.append(page)
        else:
            self._free.append(page.slot)


def _failed(page: _Page) -> bool:
    return not page.ticket.left and not page.there  # in this order: a thread marks a read done last


def slot_nbytes(nbytes: int) -> int:
    """Memory for a page with the blocks at its ends."""
    return -(-nbytes // BLOCK) * BLOCK + BLOCK
