"""The scheduler of concurrent answers: continuous batching over cooperative generators.

An answer is an iterator of events that ends each turn with a `Yield`. All answers that wait for their next token advance together, in one
pass where the model allows; answers that prefill take turns, a chunk each. After a chunk, decoding gets as much time as the chunk took, so
a long prompt costs the others at most half of their speed.
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
    """Unfinished answers by key. `passes` runs the shared passes of their engines, None for one answer at a time; `clock` returns
    seconds."""

    def __init__(self, passes: BatchedPasses | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._passes, self._clock = passes, clock
        self._events: dict[Key, Iterator[Event]] = {}
        self._reading: deque[Key] = deque()
        self._writing: deque[tuple[Key, PendingToken]] = deque()
        self._owed_s = 0.0  # decode time owed since the last prefill chunk

    def __len__(self) -> int:
        return len(self._events)

    def begin(self, key: Key, events: Iterator[Event]) -> None:
        """Add an answer; it does nothing before its turn."""
        self._events[key] = events
        self._reading.append(key)

    def round(self) -> Iterator[tuple[Key, Event | Exception | None]]:
        """Run one turn: yields (key, event), and (key, exception or None) at the end of an answer."""
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
        """Run an answer to the end of its turn."""
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
        except Exception as error:  # of any kind: the others go on
            last = error
        except GeneratorExit:
            raise
        except BaseException as error:  # a native library's panic must end neither the others nor the server
            last = RuntimeError(f"{type(error).__name__}: {error}")
        del self._events[key]
        yield key, last
