"""Pages of a spill file that are read one by one, as they are asked for: what selective attention wants of a layer.

Every layer has slots of its own, in which the pages that its last tokens asked for stay: the next token asks for most of them again. What
is missing is read at once, before anything that was read ahead; the page that was not asked for longest makes room.

Handing a read to a thread and waiting for it cost as much as a small read itself. So pages that are asked for together are handed over in
a few portions, one for each thread, and given out as portions come.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from .checkpoint import CheckpointError
from .direct import BLOCK, Read, Reader, Ticket
from .memory import anonymous


@dataclass(slots=True)
class _Page:
    """A page in a slot: where it begins, what reads it, the portion that this is a part of. `there`: it is read. `dropped`: nobody wants
    it any more, so it need not be read."""

    slot: int
    address: int
    reads: list[Read]
    ticket: Ticket | None = None
    there: bool = False
    dropped: bool = False

    def run(self, fill: Callable[[Read], int]) -> int:
        if self.dropped:
            return 0
        count = sum(fill(read) for read in self.reads)
        self.there = True
        return count


class PageSlots:
    """`slots` pages of `nbytes` bytes. `reads(page, memory)` says what to read for a page; it then begins `skip(page)` bytes into the
    memory."""

    def __init__(self, nbytes: int, slots: int, reader: Reader, reads: Callable[[int, np.ndarray], list[Read]],
                 skip: Callable[[int], int], cancelled: Callable[[], bool]) -> None:
        self._size = slot_nbytes(nbytes)
        self._memory, self._reader, self._reads, self._skip, self._cancelled = anonymous(slots * self._size), reader, reads, skip, cancelled
        self._at = self._memory.ctypes.data
        self._held: OrderedDict[int, _Page] = OrderedDict()  # the one not asked for longest first
        self._free = list(range(slots))
        self._stale: list[_Page] = []  # given up before their portion was read
        self.most = slots
        self.asked = self.found = self.among = 0  # pages asked for, those that were there, and those that they were picked from

    def fetch(self, pages: Sequence[int], among: int = 0) -> Iterator[list[tuple[int, int]]]:
        """(page, address) of at most `most` pages, picked `among` so many, some at a time as they come, those first that are there; they
        stay until more are asked for. Raises CheckpointError, Interrupted."""
        held = self._held
        self.among += among
        for page in pages:
            if page in held and _failed(held[page]):
                self.forget(page)  # who asks for it may try again
        missing = [page for page in pages if page not in held]
        self.asked, self.found = self.asked + len(pages), self.found + len(pages) - len(missing)
        self._submit(missing, set(pages), urgent=True)
        for page in pages:
            held.move_to_end(page)
        left, asked_now = list(pages), set(missing)
        while left:
            if come := {page for page in left if held[page].there}:
                left = [page for page in left if page not in come]
                yield [(page, held[page].address) for page in come]
            elif _failed(held[left[0]]) and left[0] not in asked_now:  # ahead, by itself or beside another; now it is waited for
                self.forget(left[0])
                self._submit(left[:1], set(pages), urgent=True)
                asked_now.add(left[0])
            else:
                self._wait(left, asked_now)

    def prefetch(self, pages: Sequence[int], keep: Sequence[int]) -> None:
        """Begin to read pages that may be asked for next, in the place of others than those to `keep`."""
        missing = [page for page in pages if page not in self._held]
        if missing:
            self._submit(missing, {*keep, *pages}, urgent=False)

    def forget(self, page: int) -> None:
        """A page is made anew, or was not read."""
        if page in self._held:
            self._give_up(page)

    def _wait(self, left: Sequence[int], asked_now: set[int]) -> None:
        """For the portion of the first of those that are `left`; where that fails, those that are not there are not held."""
        first = self._held[left[0]]
        try:
            self._reader.wait(first.ticket, self._cancelled)
        except CheckpointError:
            if left[0] in asked_now:
                self._forget_unread(left)
                raise
        except BaseException:
            self._forget_unread(left)
            raise

    def _forget_unread(self, pages: Sequence[int]) -> None:
        for page in pages:
            if page in self._held and not self._held[page].there:
                self._give_up(page)

    def _submit(self, pages: Sequence[int], wanted: set[int], urgent: bool) -> None:
        """Begin to read pages that are not held: all of them if it is urgent, else those for which there is a slot at once."""
        made = []
        try:
            for page in pages:
                slot = self._slot(wanted, urgent)
                if slot is None:
                    break
                memory = self._memory[slot * self._size : (slot + 1) * self._size]
                made.append((page, _Page(slot, self._at + slot * self._size + self._skip(page), self._reads(page, memory))))
        except BaseException:
            self._free += [page.slot for _, page in made]
            raise
        portion = -(-len(made) // self._reader.threads)
        for begin in range(0, len(made), portion or 1):
            own = made[begin : begin + portion]
            ticket = self._reader.submit([page for _, page in own], urgent, together=portion)
            for number, page in own:
                page.ticket = ticket
                self._held[number] = page

    def _slot(self, wanted: set[int], wait: bool) -> int | None:
        """A slot for another page; None where there is none, or none without a wait and nobody may `wait`."""
        self._free_stale()
        while not self._free:
            oldest = next((page for page, own in self._held.items() if page not in wanted and not own.ticket.left), None)
            if oldest is not None:
                self._give_up(oldest)
                continue
            if wait and not self._stale and (oldest := next((page for page in self._held if page not in wanted), None)) is not None:
                self._give_up(oldest)
            if not wait or not self._stale:
                return None
            with suppress(CheckpointError):  # nobody wants that page any more
                self._reader.wait(self._stale[0].ticket, self._cancelled)
            self._free_stale()
        return self._free.pop()

    def _free_stale(self) -> None:
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
    return not page.ticket.left and not page.there  # in this order: a thread says last that it is done


def slot_nbytes(nbytes: int) -> int:
    """Memory for a page with the blocks at its ends."""
    return -(-nbytes // BLOCK) * BLOCK + BLOCK
