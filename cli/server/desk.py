"""Who is answered when: one model, so many answers at a time, the others in the order in which they came.

The model works in a thread of its own, so that the loop goes on reading requests and telling clients that they are not forgotten. What
it yields comes to the loop event by event. A client that goes away leaves its job: a running answer ends behind its current token, one
that waits never begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ...runtime.events import Done, Event
from ...runtime.generation.rounds import Rounds
from .problems import AGAIN, BUSY, Problem, closing

Start = Callable[[Callable[[], bool]], Iterator[Event]]
END = object()


class Job:
    """One answer that was asked for. `start` begins it, given what says whether it was left."""

    def __init__(self, desk: Desk, start: Start) -> None:
        self._desk, self._start, self._loop = desk, start, asyncio.get_running_loop()
        self._events: asyncio.Queue[object] = asyncio.Queue()
        self._left = False
        self._last: Done | None = None

    @property
    def before(self) -> int:
        """How many answers come first, running ones among them."""
        return self._desk.place(self)

    async def next(self, seconds: float | None = None) -> Event | None:
        """The next event; None if none has come in so many seconds. Raises StopAsyncIteration behind the last, and what the engine
        raised."""
        try:
            async with asyncio.timeout(seconds):  # `wait_for` of Python 3.11 loses a cancellation that comes with an event
                item = await self._events.get()
        except TimeoutError:
            return None
        if item is END:
            raise StopAsyncIteration
        if isinstance(item, BaseException):
            raise item
        return item

    def leave(self) -> None:
        """Nobody waits for it any more."""
        self._left = True
        self._desk.forget(self)

    def end(self, problem: Problem) -> None:
        """End it now, whatever the engine is at."""
        self.leave()
        self._events.put_nowait(problem)

    @property
    def is_left(self) -> bool:
        return self._left

    def events(self) -> Iterator[Event]:
        """The answer, for the thread of the engine; none where nobody waits for it when its turn comes."""
        if not self._left:
            yield from self._start(lambda: self._left)

    def told(self, item: Event | Exception | None) -> None:
        """Another event, or how it ended; by the thread of the engine. The end of the answer is told when the engine has put it down, or
        whoever asks next would find the sequence taken."""
        if isinstance(item, Done):
            self._last = item
            return
        if item is None or isinstance(item, Exception):
            self._on_loop(self._desk.forget, self)  # its place is another's, however slowly a client reads
            if self._last is not None:
                self._tell(self._last)
        self._tell(END if item is None else item)

    def _tell(self, item: object) -> None:
        self._on_loop(self._events.put_nowait, item)

    def _on_loop(self, call: Callable[[Any], object], item: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call, item)


class Desk:
    """`parallel` answers are written at once, by `rounds`, and `most_waiting` wait at most for one of them to end. All but the thread's own
    work happens on the loop."""

    def __init__(self, most_waiting: int, parallel: int = 1, rounds: Rounds[Job] | None = None) -> None:
        self.most_waiting, self.parallel, self.is_closed = most_waiting, parallel, False
        self._rounds: Rounds[Job] = Rounds() if rounds is None else rounds
        self._jobs: list[Job] = []  # not ended, in order
        self._line: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="effllm-answers", daemon=True)
        self._thread.start()

    def ask(self, start: Start) -> Job:
        """Take a place in the line. Raises Problem where there is none."""
        if self.is_closed:
            raise closing()
        if len(self._jobs) >= self.parallel + self.most_waiting:
            raise Problem(503, f"{self.waiting} answers wait already, which is the most here (--queue)", BUSY, code="queue_full",
                          headers={"retry-after": "1"}, hint=AGAIN)
        job = Job(self, start)
        self._jobs.append(job)
        self._line.put(job)
        return job

    @property
    def waiting(self) -> int:
        return max(0, len(self._jobs) - self.parallel)

    @property
    def running(self) -> int:
        return len(self._jobs) - self.waiting

    def place(self, job: Job) -> int:
        """How many of the jobs before it have to end before it begins."""
        return max(0, self._jobs.index(job) - self.parallel + 1) if job in self._jobs else 0

    def forget(self, job: Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)

    def close(self) -> None:
        """Take no more, and end what there is."""
        self.is_closed = True
        for job in [*self._jobs]:
            job.end(closing())
        self._line.put(None)

    def ended(self, seconds: float) -> bool:
        """Wait for the engine to have put down its work; False if it has not in so many seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        rounds, is_open = self._rounds, True
        while is_open or len(rounds):
            while is_open and len(rounds) < self.parallel:
                try:
                    job = self._line.get(block=not len(rounds))
                except queue.Empty:
                    break
                if job is None:
                    is_open = False
                elif not job.is_left:
                    rounds.begin(job, job.events())
            for job, item in rounds.round():
                job.told(item)
