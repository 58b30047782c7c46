"""The stored events of background responses, which clients may request again from any number on. They are kept in memory within a budget:
the oldest events are dropped first, and a client that asks for those gets an error."""

from __future__ import annotations

from collections.abc import Iterable

from .problems import Problem
from .store_limits import MAX_STORE_NBYTES, nbytes_of
from .streams import encoded

AT_ONCE = 8  # a share of this size is dropped at a time: each time costs a move of all that stay


class EventLog:
    """The events of one response, each as it is sent, by number: those before `first` were dropped."""

    def __init__(self) -> None:
        self.first, self.nbytes, self._held = 0, 0, []

    def __len__(self) -> int:
        """How many there have been, dropped ones included."""
        return self.first + len(self._held)

    def add(self, events: Iterable[bytes]) -> None:
        more = [*events]
        self._held += more
        self.nbytes += sum(map(nbytes_of, more))

    def make_room(self) -> None:
        """Drop the oldest."""
        dropped = self._held[: -(-len(self._held) // AT_ONCE)]
        del self._held[: len(dropped)]
        self.first += len(dropped)
        self.nbytes -= sum(map(nbytes_of, dropped))

    def behind(self, number: int, name: str) -> bytes:
        """The events from a number on, as they are sent. Raises Problem if some of them were dropped."""
        if number < self.first:
            raise Problem(400, f"the events of {name:.60} up to {self.first - 1} were dropped for newer ones", param="starting_after",
                          code="events_gone", hint=f"GET /v1/responses/{name:.60} has the whole text; later events: starting_after="
                                                   f"{self.first - 1}")
        return b"".join(self._held[number - self.first :])


class EventLogs:
    """The logs of all running background responses, within one budget of bytes."""

    def __init__(self, most: int = MAX_STORE_NBYTES) -> None:
        self._most, self._all = most, []

    def begin(self) -> EventLog:
        self._all.append(made := EventLog())
        return made

    def end(self, events: EventLog) -> None:
        """The response has ended: its log is stored elsewhere, or not at all."""
        self._all.remove(events)

    def add(self, events: EventLog, more: Iterable[bytes]) -> None:
        """Add events; the largest logs make room for them."""
        events.add(more)
        while sum(each.nbytes for each in self._all) > self._most:
            max(self._all, key=lambda each: each.nbytes).make_room()


def event_gone(problem: Problem, number: int) -> bytes:
    """The last event of a stream whose client asks for an event that was dropped."""
    told = {"type": "error", "sequence_number": number, "code": problem.code, "message": problem.message, "param": problem.param}
    return b"event: error\ndata: " + encoded(told) + b"\n\n"
