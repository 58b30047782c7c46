"""Asynchronous direct reads with a fallback to reader threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from .direct_io import POLL_S, Interrupted, Read, Reader, ReadStats, Ticket
from .linux_aio import AioQueue, AioRead

# Submission counts as synchronous after this many batches in a row that were complete once submitted; of fewer, the thread may simply have
# been descheduled that long.
MAX_SYNCHRONOUS = 8
# Small batches may legitimately be complete once submitted: only those of so many reads or bytes count.
MIN_READS = 6
MIN_NBYTES = 1 << 20


@dataclass(slots=True, kw_only=True)
class PendingRead:
    """A read that the kernel performs, or a reader thread if that fails."""

    request: AioRead
    needed: int  # bytes of the request that must arrive
    reads: Callable[[], list[Read]]  # the equivalent for a reader thread
    ticket: Ticket | None = None  # counts the read
    is_complete: bool = False
    is_submitted: bool = False  # to the kernel
    is_dropped: bool = False  # no longer wanted, so not to be retried

    def run(self, fill: Callable[[Read], int]) -> int:
        if self.is_dropped:
            return 0
        count = sum(fill(read) for read in self.reads())
        self.is_complete = True
        return count


class AsyncReads:
    """Reads submitted to `queue`, with the threads of `reader` as the fallback.

    A read that fails is retried by the threads, which report why; from then on all reads go to the threads. The same holds where submission
    turns out to be synchronous: if all reads of MAX_SYNCHRONOUS batches in a row were complete once submitted."""

    def __init__(self, queue: AioQueue, reader: Reader) -> None:
        self._queue, self._reader, self._is_usable, self._num_synchronous = queue, reader, True, 0

    @property
    def in_flight(self) -> Collection[PendingRead]:
        """Reads that have not been collected yet."""
        return self._queue.in_flight

    def submit(self, requests: Sequence[PendingRead]) -> int:
        """Submit reads; returns how many were accepted (a prefix). Reads without a ticket get one."""
        if not self._is_usable or not requests:
            return 0
        idle, started = not self._queue.in_flight, time.perf_counter()
        num_accepted = self._queue.submit([(each, each.request) for each in requests])
        for each in requests[:num_accepted]:
            each.ticket, each.is_submitted = each.ticket or Ticket(1), True
        if idle:
            self._since = started
            is_conclusive = num_accepted >= MIN_READS or sum(each.needed for each in requests[:num_accepted]) >= MIN_NBYTES
            was_synchronous = self.collect() and not self._queue.in_flight and is_conclusive
            self._num_synchronous = self._num_synchronous + 1 if was_synchronous else 0
            self._is_usable = self._is_usable and self._num_synchronous < MAX_SYNCHRONOUS
        return num_accepted

    def collect(self, min_completed: int = 0, timeout_s: float = 0.0) -> bool:
        """Collect completed reads, waiting at most `timeout_s` for at least `min_completed` of them. Returns whether there were any."""
        if not self._queue.in_flight:
            return False
        completed, nbytes, reads, tickets = self._queue.collect(min_completed, timeout_s), 0, 0, []
        for each, result in completed:
            each.is_submitted = False
            if result >= each.needed:
                each.is_complete, reads, nbytes = True, reads + 1, nbytes + result
            elif not each.is_dropped:
                self._is_usable = False
                self._reader.to_threads([each], each.ticket, urgent=True)
                continue
            tickets.append(each.ticket)
        now = time.perf_counter()
        self._reader.add(ReadStats(reads, nbytes, busy_s=now - self._since), tickets)
        self._since = now
        return bool(completed)

    def wait(self, requests: Sequence[PendingRead], cancelled: Callable[[], bool]) -> None:
        """Block until the kernel is done with these reads. Raises Interrupted."""
        started = time.perf_counter()
        while remaining := sum(each.is_submitted for each in requests):
            if cancelled():
                raise Interrupted
            self.collect(remaining, POLL_S)
        self._reader.add(ReadStats(wait_s=time.perf_counter() - started))

    def close(self) -> None:
        self._queue.close()
