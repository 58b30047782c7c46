"""The stored events of background responses, which clients may request again from any number on. They are kept in memory within a budget:
the oldest events are dropped first, and a client that asks for those gets an error."""

from __future__ import annotations

from collections.abc import Iterable

from .problems import Problem
from .store_limits import MAX_STORE_NBYTES, nbytes_of
from .streams import encode_json

DROP_SHARE = 8  # a share of this size is dropped at a time: each time costs a move of all that stay


class EventLog:
    """The events of one response, each as it is sent, by number: those before `first` were dropped."""

    def __init__(self) -> None:
        self.first, self.nbytes, self._events = 0, 0, []

    def __len__(self) -> int:
        """How many there have been, dropped ones included."""
        return self.first + len(self._events)

    def add(self, events: Iterable[bytes]) -> None:
        added = [*events]
        self._events += added
        self.nbytes += sum(map(nbytes_of, added))

    def make_room(self) -> None:
        """Drop the oldest."""
        dropped = self._events[: -(-len(self._events) // DROP_SHARE)]
        del self._events[: len(dropped)]
        self.first += len(dropped)
        self.nbytes -= sum(map(nbytes_of, dropped))

    def since(self, number: int, name: str) -> bytes:
        """The events from a number on, as they are sent. Raises Problem if some of them were dropped."""
        if number < self.first:
            raise Problem(400, f"the events of {name:.60} up to {self.first - 1} were dropped for newer ones", param="starting_after",
                          code="events_gone", hint=f"GET /v1/responses/{name:.60} has the whole text; later events: starting_after="
                                                   f"{self.first - 1}")
        return b"".join(self._events[number - self.first :])


class EventLogs:
    """The logs of all running background responses, within one budget of bytes."""

    def __init__(self, max_nbytes: int = MAX_STORE_NBYTES) -> None:
        self._max_nbytes, self._logs = max_nbytes, []

    def begin(self) -> EventLog:
        self._logs.append(log := EventLog())
        return log

    def end(self, events: EventLog) -> None:
        """The response has ended: its log is stored elsewhere, or not at all."""
        self._logs.remove(events)

    def add(self, events: EventLog, added: Iterable[bytes]) -> None:
        """Add events; the largest logs make room for them."""
        events.add(added)
        while sum(each.nbytes for each in self._logs) > self._max_nbytes:
            max(self._logs, key=lambda each: each.nbytes).make_room()


def event_gone(problem: Problem, number: int) -> bytes:
    """The last event of a stream whose client asks for an event that was dropped."""
    error = {"type": "error", "sequence_number": number, "code": problem.code, "message": problem.message, "param": problem.param}
    return b"event: error\ndata: " + encode_json(error) + b"\n\n"
