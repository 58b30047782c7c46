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

MAX_IN_FLIGHT = 64  # reads
MAX_PREFETCHES = 3  # of these
CLOSE_TIMEOUT_S = 0.5  # for reads in flight


class AsyncReader(Reader):
    """A single-threaded `Reader`: only its owner's thread may call it."""

    def __init__(self, files: Mapping[Path, int], threads: int = THREADS, direct: bool = True, what: str = "weights are") -> None:
        super().__init__(files, threads, direct, what)
        self._async_reads: AsyncReads | None = None
        self._prefetches: deque[PendingRead] = deque()
        if any(self.direct(file) is not None for file in files):
            with suppress(OSError):
                self._async_reads = AsyncReads(AioQueue(MAX_IN_FLIGHT), self)

    def submit(self, reads: Sequence[Job], urgent: bool = False, batch_size: int = 1) -> Ticket:
        ticket = Ticket(len(reads))
        requests = [self._request(read, ticket) for read in reads] if self._async_reads is not None else [None]
        # Many small prefetches go to threads: the disk would keep waiting for the next poll.
        if None in requests or (len(reads) > MAX_PREFETCHES and not urgent):
            self.to_threads(reads, ticket, urgent, batch_size)
        elif urgent:
            self._start(requests, urgent)
        else:
            self._prefetches.extend(requests)
            self.poll()
        return ticket

    def poll(self) -> None:
        if self._async_reads is None:
            return
        self._async_reads.collect()
        while self._prefetches and len(self._async_reads.in_flight) < MAX_PREFETCHES:
            self._start([self._prefetches.popleft()], False)

    def wait(self, ticket: Ticket, cancelled: Callable[[], bool] = lambda: False) -> None:
        if self._async_reads is not None:
            self._start(self._cancel_prefetches(ticket), True)
            self._async_reads.wait([each for each in self._async_reads.in_flight if each.ticket is ticket], cancelled)
            self.poll()
        super().wait(ticket, cancelled)

    def drop(self, ticket: Ticket) -> None:
        self.add(ReadStats(), [each.ticket for each in self._cancel_prefetches(ticket)])
        super().drop(ticket)

    @property
    def idle(self) -> bool:
        return super().idle and not self._prefetches and (self._async_reads is None or not self._async_reads.in_flight)

    def close(self) -> None:
        """Waits at most CLOSE_TIMEOUT_S for reads in flight."""
        self._prefetches.clear()
        if self._async_reads is not None:
            self._async_reads.collect(len(self._async_reads.in_flight), CLOSE_TIMEOUT_S)
            self._async_reads.close()
        super().close()

    def _request(self, read: Job, ticket: Ticket) -> PendingRead | None:
        """The read as an asynchronous request; None where it has to run on a thread."""
        descriptor = self.direct(read.file) if isinstance(read, Read) and not read.more else None
        if descriptor is None:
            return None
        memory = np.frombuffer(read.out, np.uint8)
        return PendingRead(request=AioRead(descriptor, memory.ctypes.data, read.offset, memory.nbytes), needed=read.needed,
                           reads=lambda: [read], ticket=ticket)

    def _start(self, requests: Sequence[PendingRead], urgent: bool) -> None:
        """Submit reads, handing to threads what the queue does not take; prefetches keep their lower priority there too."""
        for each in requests[self._async_reads.submit(requests) :]:
            self.to_threads([each], each.ticket, urgent)

    def _cancel_prefetches(self, ticket: Ticket) -> list[PendingRead]:
        """Cancel prefetches that have not been submitted yet."""
        cancelled = [each for each in self._prefetches if each.ticket is ticket]
        if cancelled:
            self._prefetches = deque(each for each in self._prefetches if each.ticket is not ticket)
        return cancelled
