"""A `Reader` that issues large direct reads through the kernel's asynchronous I/O.

For an owner that computes on all cores and polls often. Demand reads are all submitted at once; prefetches only a few at a time, so that
little is queued ahead of the next demand read. More prefetches are issued whenever the owner calls in (`poll`, or any other method but
`traffic`). Jobs that are more than plain reads run on threads, as does everything where the system has no working asynchronous I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from .async_reads import AsyncReads, PendingRead
from .direct_io import THREADS, Job, Read, Reader, ReadStats, Ticket
from .linux_aio import AioQueue, AioRead

QUEUED = 64  # reads in flight, at most
AHEAD = 3  # of those, prefetches
CLOSING_S = 0.5  # grace period for reads in flight


class AsyncReader(Reader):
    """A single-threaded `Reader`: only its owner's thread may call it."""

    def __init__(self, files: Mapping[Path, int], threads: int = THREADS, direct: bool = True, what: str = "weights are") -> None:
        super().__init__(files, threads, direct, what)
        self._queue: AsyncReads | None = None
        self._ahead: deque[PendingRead] = deque()
        if any(self.direct(file) is not None for file in files):
            with suppress(OSError):
                self._queue = AsyncReads(AioQueue(QUEUED), self)

    def submit(self, reads: Sequence[Job], urgent: bool = False, together: int = 1) -> Ticket:
        ticket = Ticket(len(reads))
        wanted = [self._wanted(read, ticket) for read in reads] if self._queue is not None else [None]
        if None in wanted or (len(reads) > AHEAD and not urgent):  # with many small reads the disk would keep waiting for the next poll
            self.to_threads(reads, ticket, urgent, together)
        elif urgent:
            self._begin(wanted, urgent)
        else:
            self._ahead.extend(wanted)
            self.poll()
        return ticket

    def poll(self) -> None:
        if self._queue is None:
            return
        self._queue.collect()
        while self._ahead and len(self._queue.under_way) < AHEAD:
            self._begin([self._ahead.popleft()], False)

    def wait(self, ticket: Ticket, cancelled: Callable[[], bool] = lambda: False) -> None:
        if self._queue is not None:
            self._begin(self._take_back(ticket), True)
            self._queue.wait([each for each in self._queue.under_way if each.ticket is ticket], cancelled)
            self.poll()
        super().wait(ticket, cancelled)

    def drop(self, ticket: Ticket) -> None:
        self.add(ReadStats(), [each.ticket for each in self._take_back(ticket)])
        super().drop(ticket)

    @property
    def idle(self) -> bool:
        return super().idle and not self._ahead and (self._queue is None or not self._queue.under_way)

    def close(self) -> None:
        """Waits for reads in flight, but no longer than CLOSING_S."""
        self._ahead.clear()
        if self._queue is not None:
            self._queue.collect(len(self._queue.under_way), CLOSING_S)
            self._queue.close()
        super().close()

    def _wanted(self, read: Job, ticket: Ticket) -> PendingRead | None:
        """The read as an asynchronous request; None where it has to run on a thread."""
        descriptor = self.direct(read.file) if isinstance(read, Read) and not read.more else None
        if descriptor is None:
            return None
        memory = np.frombuffer(read.out, np.uint8)
        return PendingRead(asked=AioRead(descriptor, memory.ctypes.data, read.offset, memory.nbytes), needed=read.needed,
                           reads=lambda: [read], ticket=ticket)

    def _begin(self, wanted: Sequence[PendingRead], urgent: bool) -> None:
        """Submit reads, handing to threads what the queue does not take; prefetches keep their lower priority there too."""
        for each in wanted[self._queue.submit(wanted) :]:
            self.to_threads([each], each.ticket, urgent)

    def _take_back(self, ticket: Ticket) -> list[PendingRead]:
        """Cancel prefetches that have not been submitted yet."""
        taken = [each for each in self._ahead if each.ticket is ticket]
        if taken:
            self._ahead = deque(each for each in self._ahead if each.ticket is not ticket)
        return taken
