"""The events of responses in the background, which their programs may ask for again from any of them on. They lie in memory, so there is
a bound: the oldest make room for new ones, and who asks for those is told so."""

from __future__ import annotations

from collections.abc import Iterable

from .problems import Problem
from .store_limits import MAX_STORE_NBYTES, nbytes_of
from .streams import encoded

AT_ONCE = 8  # of this many parts of the events one goes at a time: each costs as much as all that stay


class EventLog:
    """Of one response, each as it is sent, by its number: those before `first` have made room."""

    def __init__(self) -> None:
        self.first, self.nbytes, self._held = 0, 0, []

    def __len__(self) -> int:
        """How many there have been."""
        return self.first + len(self._held)

    def add(self, events: Iterable[bytes]) -> None:
        more = [*events]
        self._held += more
        self.nbytes += sum(map(nbytes_of, more))

    def make_room(self) -> None:
        """The oldest go."""
        dropped = self._held[: -(-len(self._held) // AT_ONCE)]
        del self._held[: len(dropped)]
        self.first += len(dropped)
        self.nbytes -= sum(map(nbytes_of, dropped))

    def behind(self, number: int, name: str) -> bytes:
        """Those from a number on, as they are sent. Raises Problem where some of them have gone."""
        if number < self.first:
            raise Problem(400, f"the events of {name:.60} up to {self.first - 1} have made room for newer ones", param="starting_after",
                          code="events_gone", hint=f"GET /v1/responses/{name:.60} has all that was said; later events: starting_after="
                                                   f"{self.first - 1}")
        return b"".join(self._held[number - self.first :])


class EventLogs:
    """What all that have not ended have together."""

    def __init__(self, most: int = MAX_STORE_NBYTES) -> None:
        self._most, self._all = most, []

    def begin(self) -> EventLog:
        self._all.append(made := EventLog())
        return made

    def end(self, events: EventLog) -> None:
        """It is kept elsewhere, or not at all."""
        self._all.remove(events)

    def add(self, events: EventLog, more: Iterable[bytes]) -> None:
        """Who has most gives way."""
        events.add(more)
        while sum(each.nbytes for each in self._all) > self._most:
            max(self._all, key=lambda each: each.nbytes).make_room()


def event_gone(problem: Problem, number: int) -> bytes:
    """The event that ends a stream for a client that comes too late for one of that number."""
    told = {"type": "error", "sequence_number": number, "code": problem.code, "message": problem.message, "param": problem.param}
    return b"event: error\ndata: " + encoded(told) + b"\n\n"
