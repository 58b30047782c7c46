"""A reader whose large direct reads the system does asynchronously, for an owner that computes on all processors and polls it often.

What is waited for begins when it is asked for, all of it; what is read ahead a few reads at a time, so that little stands before what
will be waited for: more of it begins whenever the owner comes by (`poll`, or any other call but `traffic`). Jobs that are more than reads
are done by threads, as is everything where the system has no queue for reads.
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

QUEUED = 64  # reads at a time, at most
AHEAD = 3  # of those that nobody waits for
CLOSING_S = 0.5  # that the last reads have to come to their end


class AsyncReader(Reader):
    """A `Reader` for one thread, the owner's."""

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
        if None in wanted or (len(reads) > AHEAD and not urgent):  # of many the disk would wait for the owner time and again
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
        """What the system still reads is waited for, but not for long."""
        self._ahead.clear()
        if self._queue is not None:
            self._queue.collect(len(self._queue.under_way), CLOSING_S)
            self._queue.close()
        super().close()

    def _wanted(self, read: Job, ticket: Ticket) -> PendingRead | None:
        """A read as a queue takes it; None where it does not."""
        descriptor = self.direct(read.file) if isinstance(read, Read) and not read.more else None
        if descriptor is None:
            return None
        memory = np.frombuffer(read.out, np.uint8)
        return PendingRead(asked=AioRead(descriptor, memory.ctypes.data, read.offset, memory.nbytes), needed=read.needed,
                           reads=lambda: [read], ticket=ticket)

    def _begin(self, wanted: Sequence[PendingRead], urgent: bool) -> None:
        """Hand reads to the queue, and to threads what it does not take: there, too, what nobody waits for stays behind the rest."""
        for each in wanted[self._queue.submit(wanted) :]:
            self.to_threads([each], each.ticket, urgent)

    def _take_back(self, ticket: Ticket) -> list[PendingRead]:
        """Reads ahead that have not begun."""
        taken = [each for each in self._ahead if each.ticket is ticket]
        if taken:
            self._ahead = deque(each for each in self._ahead if each.ticket is not ticket)
        return taken
