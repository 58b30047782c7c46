"""Read-ahead for passes that read the same parts in the same cyclic order: what is in memory, what comes next, what was cancelled.

The order is known, so read-ahead continues past the end of a pass. The owner has the memory: a callback returns the reads of the next
position, or none while data that is still needed, or still being written, occupies their destination.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile

from .checkpoint import CheckpointError
from .direct_io import Interrupted, Read, Reader, Ticket


@dataclass
class Pending:
    """A position of the cyclic order that is in memory or being read."""

    number: int  # in sequence; the position is `number % count`
    destination: Hashable  # the owner's name for its memory
    ticket: Ticket  # its reads


class ReadAhead:
    """Reads positions of a cyclic order before they are needed.

    next_reads: called with a position and the destinations in use; returns (destination, reads), None if no memory is free
    cancelled:  polled while waiting
    count:      positions in the order"""

    def __init__(self, reader: Reader, next_reads: Callable[[int, Sequence[Hashable]], tuple[Hashable, Sequence[Read]] | None],
                 cancelled: Callable[[], bool], count: int = 0) -> None:
        self._reader, self._next_reads, self._cancelled, self.count = reader, next_reads, cancelled, count
        self._pending: deque[Pending] = deque()  # in memory or in flight, in order; the first ones may be in use
        self._cancelled_in_flight: list[Pending] = []  # cancelled while a read was in flight
        self._next_number = 0  # sequence number of the next to be read
        self._num_in_use = 0  # how many of `_pending` are in use

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._pending)

    def enter(self, position: int) -> Pending:
        """Wait for a position; it stays valid until `leave`. Raises CheckpointError, Interrupted."""
        self._num_in_use = 0
        first = self._pending[0].number if self._pending else self._next_number
        wanted = first + (position - first) % self.count
        # Skipped ones (a pass that ended early, a pass without a head) are cancelled.
        while self._pending and self._pending[0].number < wanted:
            self._cancel(self._pending.popleft())
        if not self._pending:
            self._next_number = wanted
        self.read_ahead()
        while not self._pending:  # a cancelled read still writes to this one's destination
            with suppress(CheckpointError):
                self.wait(self._cancelled_in_flight[0].ticket)
            self.read_ahead()
        try:
            self.wait(self._pending[0].ticket)
        except CheckpointError:
            self.keep(0)  # prefetches may have failed as well; a retry reads everything again
            raise
        except BaseException:
            self._cancel(self._pending.popleft())
            raise
        self._num_in_use = 1
        return self._pending[0]

    def join(self, position: int) -> bool:
        """Also enter the position after those entered, if it is this one, its reads are done, and at most half of the memory is then in
        use: the disk needs the rest. Never waits; a cancelled caller learns of it in `enter`."""
        if 2 * (self._num_in_use + 1) > len(self._pending) or self._cancelled():
            return False
        pending = self._pending[self._num_in_use]
        if pending.number % self.count != position or pending.ticket.left or pending.ticket.error is not None:
            return False
        self._num_in_use += 1
        return True

    def ready(self, limit: int) -> list[Pending]:
        """The entered position and those after it whose reads are done, at most `limit`; they stay valid until as many `leave`."""
        ready = takewhile(lambda pending: not pending.ticket.left and pending.ticket.error is None, islice(self._pending, 1, limit))
        return [self._pending[0], *ready]

    def leave(self, count: int = 1) -> None:
        """Release positions in use."""
        for _ in range(count):
            self._pending.popleft()
        self._num_in_use = max(0, self._num_in_use - count)
        self.read_ahead()

    def keep(self, count: int) -> None:
        """Cancel all but the first `count`."""
        while len(self._pending) > count:
            pending = self._pending.pop()
            self._next_number = pending.number
            self._cancel(pending)

    def reorder(self, count: int) -> None:
        """Begin a new order of `count` positions, whose first ones are those held."""
        self.count = count
        for number, pending in enumerate(self._pending):
            pending.number = number
        self._next_number = len(self._pending)

    def read_ahead(self) -> None:
        """Request the next positions while memory is free."""
        self._cancelled_in_flight = [pending for pending in self._cancelled_in_flight if pending.ticket.left]
        while len(self._pending) < self.count:
            occupied = [pending.destination for pending in (*self._pending, *self._cancelled_in_flight)]
            request = self._next_reads(self._next_number % self.count, occupied)
            if request is None:
                return
            destination, reads = request
            self._pending.append(Pending(self._next_number, destination, self._reader.submit(reads)))
            self._next_number += 1

    def wait(self, ticket: Ticket) -> None:
        """Wait for any reads. Raises CheckpointError, Interrupted."""
        if self._cancelled():
            raise Interrupted
        self._reader.wait(ticket, self._cancelled)

    def _cancel(self, pending: Pending) -> None:
        self._reader.drop(pending.ticket)
        if pending.ticket.left:
            self._cancelled_in_flight.append(pending)
