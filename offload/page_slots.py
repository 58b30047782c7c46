"""Pages of a spill file that are read one by one, as they are asked for: what selective attention wants of a layer.

Every layer has slots of its own, in which the pages that its last tokens asked for stay: the next token asks for most of them again. What
is missing is read at once, before anything that was read ahead; the page that was not asked for longest makes room.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np

from .checkpoint import CheckpointError
from .direct import BLOCK, Read, Reader, Ticket
from .memory import anonymous


class PageSlots:
    """`slots` pages of `nbytes` bytes. `reads(page, memory)` says what to read for a page; it then begins `skip(page)` bytes into the
    memory."""

    def __init__(self, nbytes: int, slots: int, reader: Reader, reads: Callable[[int, np.ndarray], list[Read]],
                 skip: Callable[[int], int], cancelled: Callable[[], bool]) -> None:
        self._size = slot_nbytes(nbytes)
        self._memory, self._reader, self._reads, self._skip, self._cancelled = anonymous(slots * self._size), reader, reads, skip, cancelled
        self._held: OrderedDict[int, tuple[int, Ticket]] = OrderedDict()  # page -> slot and its reads; the one not asked for longest first
        self._free = list(range(slots))
        self._stale: list[tuple[int, Ticket]] = []  # slots given up while a read was under way
        self.most = slots
        self.asked = self.found = 0

    def fetch(self, pages: Sequence[int], before_wait: Callable[[], None] = lambda: None) -> Iterator[tuple[int, int]]:
        """(page, address) of at most `most` pages, those first that are there; they stay until the next fetch. `before_wait` is called when
        the first is not. Raises CheckpointError, Interrupted."""
        wanted = set(pages)
        missing = [page for page in pages if page not in self._held]
        self.asked, self.found = self.asked + len(pages), self.found + len(pages) - len(missing)
        for page in missing:
            self._submit(page, wanted, urgent=True)
        for page in sorted(wanted, key=lambda page: (self._held[page][1].left > 0, page)):
            slot, ticket = self._held[page]
            self._held.move_to_end(page)
            if ticket.left or ticket.error is not None:
                try:
                    before_wait()
                    self._reader.wait(ticket, self._cancelled)
                except BaseException:
                    for each in {page, *missing}:  # it may have been read ahead, and failed then
                        self.forget(each)
                    raise
            yield page, self._memory.ctypes.data + slot * self._size + self._skip(page)

    def prefetch(self, pages: Sequence[int], keep: Sequence[int]) -> None:
        """Begin to read pages that may be asked for next, in the place of others than those to `keep`."""
        for page in pages:
            if page not in self._held:
                self._submit(page, {*keep, *pages}, urgent=False)

    def forget(self, page: int) -> None:
        """A page is made anew, or was not read."""
        if page in self._held:
            self._give_up(page)

    def _submit(self, page: int, wanted: set[int], urgent: bool) -> None:
        slot = self._slot(wanted)
        if slot is None:
            return
        memory = self._memory[slot * self._size : (slot + 1) * self._size]
        self._held[page] = slot, self._reader.submit(self._reads(page, memory), urgent)

    def _slot(self, wanted: set[int]) -> int | None:
        """A slot for another page."""
        for slot, ticket in [each for each in self._stale if not each[1].left]:
            self._stale.remove((slot, ticket))
            self._free.append(slot)
        while not self._free:
            oldest = next((page for page in self._held if page not in wanted), None)
            if oldest is None:
                return None
            self._give_up(oldest)
            if self._stale and not self._free:
                with suppress(CheckpointError):  # nobody wants that page any more
                    self._reader.wait(self._stale[0][1], self._cancelled)
                self._free.append(self._stale.pop(0)[0])
        return self._free.pop()

    def _give_up(self, page: int) -> None:
        slot, ticket = self._held.pop(page)
        self._reader.drop(ticket)
        if ticket.left:
            self._stale.append((slot, ticket))
        else:
            self._free.append(slot)


def slot_nbytes(nbytes: int) -> int:
    """Memory for a page with the blocks at its ends."""
    return -(-nbytes // BLOCK) * BLOCK + BLOCK
