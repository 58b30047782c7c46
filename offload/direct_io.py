"""Large O_DIRECT reads by a few threads; demand reads always go before prefetches.

Weights that are read once per token in the same order would evict everything else from the page cache and never hit it. So reads bypass it:
whole 4096-byte blocks into aligned memory, a superset of the bytes wanted. Where the file system refuses O_DIRECT, reads go through the
page cache and drop their pages at once; that fallback is announced, once per file.

A thread that hangs in a read (a network share that is gone) cannot be interrupted. So the threads are daemons, nobody waits for them
without polling `cancelled`, and they own the memory that they fill.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol

from .safetensors_header import CheckpointError, damaged
from .time_slice import request_short_time_slice

BLOCK = 4096  # alignment of direct reads: file offset, memory and length
READ_NBYTES = 2 << 20  # per read: enough for the disk's full rate (1 MiB and up), short enough for demand reads to overtake
THREADS = 4
POLL_S = 0.05  # how often a wait polls for cancellation


class Interrupted(Exception):
    """A wait was cancelled."""


@dataclass(frozen=True)
class Read:
    """Fill `out` from `offset` of a file."""

    file: Path
    offset: int  # a multiple of BLOCK
    out: memoryview  # whole blocks, aligned
    needed: int  # the file may end after this many bytes
    more: tuple[memoryview, ...] = ()  # buffers for the bytes after those of `out`

    def run(self, fill: Callable[[Read], int]) -> int:
        return fill(self)


class Job(Protocol):
    """A unit of work of a reader thread: a read, or reads followed by some processing."""

    def run(self, fill: Callable[[Read], int]) -> int:
        """Do it, reading through `fill`. Returns the bytes read; raises CheckpointError."""


@dataclass
class ReadStats:
    """I/O counters."""

    reads: int = 0
    nbytes: int = 0
    read_s: float = 0.0  # summed over the threads
    wait_s: float = 0.0  # how long the owner was blocked
    busy_s: float = 0.0  # time during which any read was in flight: `nbytes / busy_s` is the disk's rate

    def add(self, other: ReadStats) -> None:
        """Add another set of counters."""
        for counter in fields(self):
            setattr(self, counter.name, getattr(self, counter.name) + getattr(other, counter.name))

    def since(self, before: ReadStats) -> ReadStats:
        """The difference from an earlier snapshot."""
        return ReadStats(*(getattr(self, counter.name) - getattr(before, counter.name) for counter in fields(self)))


@dataclass
class Ticket:
    """Reads that were submitted together."""

    left: int  # reads not done yet
    error: CheckpointError | None = None  # the first one


@dataclass
class _Source:
    """The descriptors of a file."""

    buffered_fd: int  # the store's
    opened: int | None  # our own, to be closed
    direct: int | None = field(init=False)  # `opened` while direct reads work, else None

    def __post_init__(self) -> None:
        self.direct = self.opened

    def close(self) -> None:
        opened, self.opened, self.direct = self.opened, None, None
        if opened is not None:
            os.close(opened)


@dataclass(frozen=True)
class _Batch:
    """Reads that one thread takes from the queue at a time."""

    reads: tuple[Job, ...]
    ticket: Ticket


class Reader:
    """Threads that read from files.

    files:   descriptors by path; they must stay open until `close`
    threads: how many
    direct:  False reads through the page cache
    what:    subject of the sentence that announces a fallback, with its verb"""

    def __init__(self, files: Mapping[Path, int], threads: int = THREADS, direct: bool = True, what: str = "weights are") -> None:
        self._subject, self.threads = what, threads
        self.traffic = ReadStats()
        self._lock = threading.Lock()
        self._queue_changed, self._read_done = threading.Condition(self._lock), threading.Condition(self._lock)
        self._demand_queue: deque[_Batch] = deque()
        self._prefetch_queue: deque[_Batch] = deque()
        self._num_in_flight, self._noted_at = 0, 0.0
        self._closed = False
        self._announcements: list[str] = []
        self._sources = {file: _Source(fd, direct_descriptor(fd) if direct else None) for file, fd in files.items()}
        if direct:
            for file in (file for file, source in self._sources.items() if source.direct is None):
                self._announce(file)
        self._threads = [threading.Thread(target=self._run_thread, name=f"effllm-disk-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, reads: Sequence[Job], urgent: bool = False, batch_size: int = 1) -> Ticket:
        """Queue reads in this order, after earlier submissions; `urgent` ones before all others.

        A thread takes `batch_size` of them at a time, since handing over a small read costs as much as making it."""
        ticket = Ticket(len(reads))
        self.to_threads(reads, ticket, urgent, batch_size)
        return ticket

    def to_threads(self, reads: Sequence[Job], ticket: Ticket, urgent: bool = False, batch_size: int = 1) -> None:
        """Like `submit`, for reads that `ticket` already counts and that only threads can do."""
        queued = [_Batch(tuple(reads[i : i + batch_size]), ticket) for i in range(0, len(reads), batch_size)]
        with self._lock:
            (self._demand_queue if urgent else self._prefetch_queue).extend(queued)
            self._queue_changed.notify(len(queued))

    def poll(self) -> None:
        """Collect completions and issue more reads; threads do both on their own."""

    def wait(self, ticket: Ticket, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Block until all reads of a ticket are done; those still queued become urgent.

        Raises CheckpointError if one failed, Interrupted if `cancelled()`."""
        started = time.perf_counter()
        with self._lock:
            self._promote(ticket)
            while ticket.left:
                if cancelled():
                    raise Interrupted
                self._read_done.wait(POLL_S)
            self.traffic.wait_s += time.perf_counter() - started
        if ticket.error is not None:
            raise CheckpointError(ticket.error.message, ticket.error.hint) from ticket.error

    def drop(self, ticket: Ticket) -> None:
        """Dequeue the ticket's reads. Those in flight go on: the ticket is settled when none is `left`."""
        with self._lock:
            for queue in (self._demand_queue, self._prefetch_queue):
                remaining = [each for each in queue if each.ticket is not ticket]
                ticket.left -= sum(len(each.reads) for each in queue if each.ticket is ticket)
                queue.clear()
                queue.extend(remaining)

    def add(self, stats: ReadStats, done: Sequence[Ticket] = ()) -> None:
        """Add statistics of reads made elsewhere; each ticket in `done` has one read less to wait for."""
        with self._lock:
            self.traffic.add(stats)
            for ticket in done:
                ticket.left -= 1

    def direct(self, file: Path) -> int | None:
        """The descriptor for direct reads of a file, open until `close`; None where direct reads do not work."""
        return self._sources[file].direct

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or in flight."""
        return not (self._num_in_flight or self._demand_queue or self._prefetch_queue)

    def announcements(self) -> list[str]:
        """Fallbacks since the last call."""
        with self._lock:
            announcements, self._announcements = self._announcements, []
        return announcements

    def close(self) -> None:
        """Stop the threads. One that hangs in a read is abandoned until the process ends."""
        with self._lock:
            self._closed = True
            self._demand_queue.clear()
            self._prefetch_queue.clear()
            self._queue_changed.notify_all()
        deadline = time.monotonic() + 0.5
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            for source in self._sources.values():
                source.close()

    def _promote(self, ticket: Ticket) -> None:
        if any(each.ticket is ticket for each in self._prefetch_queue):
            self._demand_queue.extend(each for each in self._prefetch_queue if each.ticket is ticket)
            remaining = [each for each in self._prefetch_queue if each.ticket is not ticket]
            self._prefetch_queue.clear()
            self._prefetch_queue.extend(remaining)

    def _run_thread(self) -> None:
        request_short_time_slice()
        while True:
            with self._lock:
                while not (self._demand_queue or self._prefetch_queue or self._closed):
                    self._queue_changed.wait()
                if self._closed:
                    return
                batch = (self._demand_queue or self._prefetch_queue).popleft()
                self._note_busy()
                self._num_in_flight += 1
            started, count, error = time.perf_counter(), 0, None
            try:
                for read in batch.reads:
                    count += read.run(self._fill)
            except CheckpointError as failed:
                error = failed
            except BaseException as failed:  # it would end the thread, and waiters would wait forever
                what = f"{type(failed).__name__}: {failed}" if str(failed) else type(failed).__name__
                error = CheckpointError(f"reading from disk failed: {what}", "run it again")
                error.__cause__ = failed
            ended = time.perf_counter()
            with self._lock:
                traffic = self.traffic
                self._note_busy()
                self._num_in_flight -= 1
                traffic.reads += len(batch.reads)
                traffic.nbytes += count
                traffic.read_s += ended - started
                batch.ticket.left -= len(batch.reads)
                batch.ticket.error = batch.ticket.error or error
                self._read_done.notify_all()

    def _note_busy(self) -> None:
        """Add the time since the last call to `busy_s` if reads were in flight; call under the lock."""
        now = time.perf_counter()
        if self._num_in_flight:
            self.traffic.busy_s += now - self._noted_at
        self._noted_at = now

    def _fill(self, read: Read) -> int:
        """Perform one read; returns the bytes read."""
        source, done = self._sources[read.file], 0
        while done < read.needed:
            # Direct reads are block-aligned; if one returned short within a block, the rest goes through the page cache.
            direct = source.direct if done % BLOCK == 0 else None
            try:
                count = os.preadv(source.buffered_fd if direct is None else direct, _remaining_buffers(read, done), read.offset + done)
            except OSError as error:
                if direct is not None and error.errno in (errno.EINVAL, errno.EIO):  # EIO: of a lower layer, or of the disk itself
                    self._fall_back(read.file, source)
                    continue
                raise CheckpointError(f"{read.file} cannot be read: {error.strerror}", "check the disk, then try again") from error
            if count == 0:
                damaged(read.file, "became shorter while it was being read")
            done += count
            if direct is None:
                _forget_pages(source.buffered_fd, read.offset, done)
        return done

    def _fall_back(self, file: Path, source: _Source) -> None:
        with self._lock:
            if source.direct is None:
                return
            source.direct = None  # left open: another thread may be reading from it right now
            self._announce(file)

    def _announce(self, file: Path) -> None:
        self._announcements.append(f"{file.name}: no direct reads on this file system, {self._subject} read through the page cache")


def _remaining_buffers(read: Read, done: int) -> list[memoryview]:
    """The buffers that remain after `done` bytes."""
    rest = [read.out, *read.more]
    while done >= len(rest[0]):
        done -= len(rest[0])
        del rest[0]
    return [rest[0][done:], *rest[1:]]


def direct_descriptor(fd: int) -> int | None:
    """An O_DIRECT descriptor of the same open file; None where the system or the file system does not support it."""
    if sys.platform == "darwin":
        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)  # a property of the descriptor; needs no alignment
        return os.dup(fd)
    try:
        # Through /proc, so that it is the very file whose header was checked, whatever its path names by now.
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None


def _forget_pages(fd: int, offset: int, nbytes: int) -> None:
    if sys.platform == "linux":
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)
