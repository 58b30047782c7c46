"""Asynchronous direct reads with a fallback to reader threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from .direct_io import POLL_S, Interrupted, Read, Reader, ReadStats, Ticket
from .linux_aio import AioQueue, AioRead

CHANCE = 8  # how often the thread may simply have been descheduled that long
FEW = 6  # small reads may legitimately all be done once submitted: up to this many,
LARGE_NBYTES = 1 << 20  # or up to this many bytes


@dataclass(slots=True, kw_only=True)
class PendingRead:
    """A read in flight: the request, how many bytes of it must arrive, the equivalent reads for a thread, and the ticket that counts it.
    `there`: complete. `queued`: submitted to the kernel. `dropped`: no longer wanted, so not to be retried."""

    asked: AioRead
    needed: int
    reads: Callable[[], list[Read]]
    ticket: Ticket | None = None
    there: bool = False
    queued: bool = False
    dropped: bool = False

    def run(self, fill: Callable[[Read], int]) -> int:
        if self.dropped:
            return 0
        count = sum(fill(read) for read in self.reads())
        self.there = True
        return count


class AsyncReads:
    """Reads submitted to `queue`, with the threads of `reader` as the fallback.

    A read that fails is retried by the threads, which report why; from then on all reads go to the threads. The same holds where submission
    turns out to be synchronous: when, time after time, every read is complete as soon as it has been submitted."""

    def __init__(self, queue: AioQueue, reader: Reader) -> None:
        self._queue, self._reader, self._serves, self._at_once = queue, reader, True, 0

    @property
    def under_way(self) -> Collection[PendingRead]:
        """Reads that have not been collected yet."""
        return self._queue.under_way

    def submit(self, wanted: Sequence[PendingRead]) -> int:
        """Submit reads; returns how many were accepted (a prefix). Reads without a ticket get one."""
        if not self._serves or not wanted:
            return 0
        idle, started = not self._queue.under_way, time.perf_counter()
        taken = self._queue.submit([(each, each.asked) for each in wanted])
        for each in wanted[:taken]:
            each.ticket, each.queued = each.ticket or Ticket(1), True
        if idle:
            self._since = started
            telling = taken >= FEW or sum(each.needed for each in wanted[:taken]) >= LARGE_NBYTES
            at_once = self.collect() and not self._queue.under_way and telling
            self._at_once = self._at_once + 1 if at_once else 0
            self._serves = self._serves and self._at_once < CHANCE
        return taken

    def collect(self, least: int = 0, patience_s: float = 0.0) -> bool:
        """Collect completions, waiting for at least `least` of them and at most `patience_s`. Returns whether there were any."""
        if not self._queue.under_way:
            return False
        done, nbytes, reads, tickets = self._queue.collect(least, patience_s), 0, 0, []
        for each, result in done:
            each.queued = False
            if result >= each.needed:
                each.there, reads, nbytes = True, reads + 1, nbytes + result
            elif not each.dropped:
                self._serves = False
                self._reader.to_threads([each], each.ticket, urgent=True)
                continue
            tickets.append(each.ticket)
        now = time.perf_counter()
        self._reader.add(ReadStats(reads, nbytes, busy_s=now - self._since), tickets)
        self._since = now
        return bool(done)

    def wait(self, wanted: Sequence[PendingRead], cancelled: Callable[[], bool]) -> None:
        """Block until the kernel is done with these reads. Raises Interrupted."""
        started = time.perf_counter()
        while left := sum(each.queued for each in wanted):
            if cancelled():
                raise Interrupted
            self.collect(left, POLL_S)
        self._reader.add(ReadStats(wait_s=time.perf_counter() - started))

    def close(self) -> None:
        self._queue.close()
