"""Read-ahead for passes that read the same parts in the same cyclic order: what is in memory, what comes next, what was cancelled.

The order is known, so read-ahead continues past the end of a pass. The memory belongs to the owner, which is asked for the reads of the
next position and declines while data that is still needed, or still being written, occupies their destination.
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
    """A requested position of the cyclic order: its sequence number, its destination, its reads."""

    number: int
    where: Hashable
    ticket: Ticket


class ReadAhead:
    """`ask(place, taken)` returns (where, reads) for a position, or None if no memory is free beside `taken`, the `where` of others.
    `count`: positions in the order. `cancelled` is polled while waiting."""

    def __init__(self, reader: Reader, ask: Callable[[int, Sequence[Hashable]], tuple[Hashable, Sequence[Read]] | None],
                 cancelled: Callable[[], bool], count: int = 0) -> None:
        self._reader, self._ask, self._cancelled, self.count = reader, ask, cancelled, count
        self._turns: deque[Pending] = deque()  # in memory or in flight, in order; the first ones may be in use
        self._stale: list[Pending] = []  # cancelled while a read was in flight
        self._next = 0  # sequence number of the next to be read
        self._entered = 0  # how many of `_turns` are in use

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._turns)

    def enter(self, place: int) -> Pending:
        """Wait for a position; it stays valid until `leave`. Raises CheckpointError, Interrupted."""
        self._entered = 0
        first = self._turns[0].number if self._turns else self._next
        wanted = first + (place - first) % self.count
        # Skipped ones (a pass that ended early, a pass without a head) are cancelled.
        while self._turns and self._turns[0].number < wanted:
            self._give_up(self._turns.popleft())
        if not self._turns:
            self._next = wanted
        self.read_ahead()
        while not self._turns:  # a cancelled read still writes to this one's destination
            with suppress(CheckpointError):
                self.wait(self._stale[0].ticket)
            self.read_ahead()
        try:
            self.wait(self._turns[0].ticket)
        except CheckpointError:
            self.keep(0)  # prefetches may have failed as well; a retry reads everything again
            raise
        except BaseException:
            self._give_up(self._turns.popleft())
            raise
        self._entered = 1
        return self._turns[0]

    def join(self, place: int) -> bool:
        """Also enter the position after those entered, if it is this one, its reads are done, and at most half of the memory is then in
        use: the disk needs the rest. Never waits; a cancelled caller learns of it in `enter`."""
        if 2 * (self._entered + 1) > len(self._turns) or self._cancelled():
            return False
        turn = self._turns[self._entered]
        if turn.number % self.count != place or turn.ticket.left or turn.ticket.error is not None:
            return False
        self._entered += 1
        return True

    def come(self, most: int) -> list[Pending]:
        """The entered position and those after it whose reads are done, at most `most`; they stay valid until as many `leave`."""
        come = takewhile(lambda turn: not turn.ticket.left and turn.ticket.error is None, islice(self._turns, 1, most))
        return [self._turns[0], *come]

    def leave(self, count: int = 1) -> None:
        """Release positions in use."""
        for _ in range(count):
            self._turns.popleft()
        self._entered = max(0, self._entered - count)
        self.read_ahead()

    def keep(self, count: int) -> None:
        """Cancel all but the first `count`."""
        while len(self._turns) > count:
            turn = self._turns.pop()
            self._next = turn.number
            self._give_up(turn)

    def reorder(self, count: int) -> None:
        """Begin a new order of `count` positions, whose first ones are those held."""
        self.count = count
        for number, turn in enumerate(self._turns):
            turn.number = number
        self._next = len(self._turns)

    def read_ahead(self) -> None:
        """Request the next positions while memory is free."""
        self._stale = [turn for turn in self._stale if turn.ticket.left]
        while len(self._turns) < self.count:
            asked = self._ask(self._next % self.count, [turn.where for turn in (*self._turns, *self._stale)])
            if asked is None:
                return
            where, reads = asked
            self._turns.append(Pending(self._next, where, self._reader.submit(reads)))
            self._next += 1

    def wait(self, ticket: Ticket) -> None:
        """Wait for any reads. Raises CheckpointError, Interrupted."""
        if self._cancelled():
            raise Interrupted
        self._reader.wait(ticket, self._cancelled)

    def _give_up(self, turn: Pending) -> None:
        self._reader.drop(turn.ticket)
        if turn.ticket.left:
            self._stale.append(turn)
