"""Which answer goes on next when several are written at once.

An answer is an iterator of events; it ends its turn with a `Turn`. All that wait for a pass over a token go on together, by one pass where
the model allows; those that read a prompt go on one at a time, a piece of it each. Between two pieces the others write for as long as the
piece took, so that a long prompt leaves them half of the time, whatever it costs to read.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Generic, TypeVar

from ..events import Event, Yield

if TYPE_CHECKING:
    from .batching import BatchedPasses, PendingToken

Key = TypeVar("Key", bound=Hashable)


class Scheduler(Generic[Key]):
    """Answers that have begun and not ended, each by a key. `passes` are those of their engines, None for one answer at a time; `clock`
    tells seconds."""

    def __init__(self, passes: BatchedPasses | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._passes, self._clock = passes, clock
        self._events: dict[Key, Iterator[Event]] = {}
        self._reading: deque[Key] = deque()
        self._writing: deque[tuple[Key, PendingToken]] = deque()
        self._owed_s = 0.0  # to those that write, since a piece of a prompt was read

    def __len__(self) -> int:
        return len(self._events)

    def begin(self, key: Key, events: Iterator[Event]) -> None:
        """One more answer, which does nothing before its turn."""
        self._events[key] = events
        self._reading.append(key)

    def round(self) -> Iterator[tuple[Key, Event | Exception | None]]:
        """The next turn: events by whose they are, an exception or None behind the last of an answer."""
        started = self._clock()
        if self._reading and (not self._writing or self._owed_s <= 0):
            yield from self._goes_on(self._reading.popleft())
            self._owed_s = self._clock() - started
        elif self._writing:
            together = [self._writing.popleft() for _ in range(min(self._passes.most, len(self._writing)))]
            self._passes.run([want for _, want in together])
            for key, _ in together:
                yield from self._goes_on(key)
            self._owed_s -= self._clock() - started

    def _goes_on(self, key: Key) -> Iterator[tuple[Key, Event | Exception | None]]:
        """An answer to the end of its turn."""
        last: Exception | None = None
        if self._passes is not None:
            self._passes.is_alone = len(self._events) == 1
        try:
            for event in self._events[key]:
                if not isinstance(event, Yield):
                    yield key, event
                elif event.want is None:
                    self._reading.append(key)
                    return
                else:
                    self._writing.append((key, event.want))
                    return
        except Exception as error:  # of whatever kind: the others go on
            last = error
        except GeneratorExit:
            raise
        except BaseException as error:  # a library's panic ends neither the others nor whoever asks
            last = RuntimeError(f"{type(error).__name__}: {error}")
        del self._events[key]
        yield key, last
