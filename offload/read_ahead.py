"""Reads ahead for passes that read the same parts in the same order, again and again: what is in memory, what is next, what was given up.

What is read next is known from the order, so reading goes on over the end of a pass. The memory is the owner's: it is asked for the
reads of the next place in the order, and declines while something that is still needed, or still being written, is where they would go.
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
    """A place of the order that has been asked for: its number in the endless order, where it lies, its reads."""

    number: int
    where: Hashable
    ticket: Ticket


class ReadAhead:
    """`ask(place, taken)` gives (where, reads) for a place of the order, or None while no memory is free beside what is `taken`, the
    `where` of others. `count`: places of the order. `cancelled` is asked while somebody waits."""

    def __init__(self, reader: Reader, ask: Callable[[int, Sequence[Hashable]], tuple[Hashable, Sequence[Read]] | None],
                 cancelled: Callable[[], bool], count: int = 0) -> None:
        self._reader, self._ask, self._cancelled, self.count = reader, ask, cancelled, count
        self._turns: deque[Pending] = deque()  # in memory or on their way, in order; the first may be in use
        self._stale: list[Pending] = []  # given up while a read was under way
        self._next = 0  # the number of the next to be read
        self._entered = 0  # of `_turns`, those in use

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._turns)

    def enter(self, place: int) -> Pending:
        """Wait for a place of the order and for nothing else; until `leave` it stays. Raises CheckpointError, Interrupted."""
        self._entered = 0
        first = self._turns[0].number if self._turns else self._next
        wanted = first + (place - first) % self.count
        # Those that are passed over (a pass that ended early, a pass without a head) are given up.
        while self._turns and self._turns[0].number < wanted:
            self._give_up(self._turns.popleft())
        if not self._turns:
            self._next = wanted
        self.read_ahead()
        while not self._turns:  # what was given up is still being written where this one goes
            with suppress(CheckpointError):
                self.wait(self._stale[0].ticket)
            self.read_ahead()
        try:
            self.wait(self._turns[0].ticket)
        except CheckpointError:
            self.keep(0)  # what was read ahead may have failed as well; who tries again reads again
            raise
        except BaseException:
            self._give_up(self._turns.popleft())
            raise
        self._entered = 1
        return self._turns[0]

    def join(self, place: int) -> bool:
        """Enter what follows those that were entered, if it is this place of the order, its reads are made, and no more than half of what
        is in memory is in use then: the disk needs the rest. Waits for nothing; whoever was cancelled has to `enter`, and hears of it."""
        if 2 * (self._entered + 1) > len(self._turns) or self._cancelled():
            return False
        turn = self._turns[self._entered]
        if turn.number % self.count != place or turn.ticket.left or turn.ticket.error is not None:
            return False
        self._entered += 1
        return True

    def come(self, most: int) -> list[Pending]:
        """The one that was entered and those behind it whose reads are made, at most `most`; they stay until as many `leave`."""
        come = takewhile(lambda turn: not turn.ticket.left and turn.ticket.error is None, islice(self._turns, 1, most))
        return [self._turns[0], *come]

    def leave(self, count: int = 1) -> None:
        """Those in use are not needed any more."""
        for _ in range(count):
            self._turns.popleft()
        self._entered = max(0, self._entered - count)
        self.read_ahead()

    def keep(self, count: int) -> None:
        """Give up all but the first `count`."""
        while len(self._turns) > count:
            turn = self._turns.pop()
            self._next = turn.number
            self._give_up(turn)

    def reorder(self, count: int) -> None:
        """Another order of `count` places begins, with those that are held as its first."""
        self.count = count
        for number, turn in enumerate(self._turns):
            turn.number = number
        self._next = len(self._turns)

    def read_ahead(self) -> None:
        """Ask for what comes next as long as there is memory that nobody needs."""
        self._stale = [turn for turn in self._stale if turn.ticket.left]
        while len(self._turns) < self.count:
            asked = self._ask(self._next % self.count, [turn.where for turn in (*self._turns, *self._stale)])
            if asked is None:
                return
            where, reads = asked
            self._turns.append(Pending(self._next, where, self._reader.submit(reads)))
            self._next += 1

    def wait(self, ticket: Ticket) -> None:
        """For reads of any kind. Raises CheckpointError, Interrupted."""
        if self._cancelled():
            raise Interrupted
        self._reader.wait(ticket, self._cancelled)

    def _give_up(self, turn: Pending) -> None:
        self._reader.drop(turn.ticket)
        if turn.ticket.left:
            self._stale.append(turn)
