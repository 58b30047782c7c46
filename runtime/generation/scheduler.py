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
        self._prefilling: deque[Key] = deque()
        self._decoding: deque[tuple[Key, PendingToken]] = deque()
        self._decode_owed_s = 0.0  # decode time owed since the last prefill chunk

    def __len__(self) -> int:
        return len(self._events)

    def begin(self, key: Key, events: Iterator[Event]) -> None:
        """Add an answer; it starts at its first turn."""
        self._events[key] = events
        self._prefilling.append(key)

    def step(self) -> Iterator[tuple[Key, Event | Exception | None]]:
        """Run one turn: yields (key, event), and (key, exception or None) at the end of an answer."""
        started = self._clock()
        if self._prefilling and (not self._decoding or self._decode_owed_s <= 0):
            yield from self._advance(self._prefilling.popleft())
            self._decode_owed_s = self._clock() - started
        elif self._decoding:
            batch = [self._decoding.popleft() for _ in range(min(self._passes.max_tokens, len(self._decoding)))]
            self._passes.run([pending for _, pending in batch])
            for key, _ in batch:
                yield from self._advance(key)
            self._decode_owed_s -= self._clock() - started

    def _advance(self, key: Key) -> Iterator[tuple[Key, Event | Exception | None]]:
        """Run an answer to the end of its turn."""
        failure: Exception | None = None
        if self._passes is not None:
            self._passes.is_single = len(self._events) == 1
        try:
            for event in self._events[key]:
                if not isinstance(event, Yield):
                    yield key, event
                elif event.pending is None:
                    self._prefilling.append(key)
                    return
                else:
                    self._decoding.append((key, event.pending))
                    return
        except Exception as error:  # whatever it is, the other answers continue
            failure = error
        except GeneratorExit:
            raise
        except BaseException as error:  # a native library's panic must end neither the others nor the server
            failure = RuntimeError(f"{type(error).__name__}: {error}")
        del self._events[key]
        yield key, failure
