"""The queue of answers of one model: `parallel` of them are generated at a time, the others wait first come, first served.

The engine runs in a thread of its own, so that the event loop goes on reading requests and sending keep-alives. Events cross to the loop
one by one. A client that disconnects abandons its job: a running answer stops after its current token, a waiting one never starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ...runtime.events import Done, Event
from ...runtime.generation.scheduler import Scheduler
from .problems import BUSY, RETRY, Problem, closing

Start = Callable[[Callable[[], bool]], Iterator[Event]]  # starts an answer, given a function that says whether it was cancelled
END = object()


class Job:
    """One queued or running answer, and the queue of its events."""

    def __init__(self, answer_queue: AnswerQueue, start: Start) -> None:
        self._answer_queue, self._start, self._loop = answer_queue, start, asyncio.get_running_loop()
        self._events: asyncio.Queue[object] = asyncio.Queue()
        self._abandoned = False
        self._done: Done | None = None

    @property
    def ahead(self) -> int:
        """How many answers have to end before this one starts."""
        return self._answer_queue.ahead_of(self)

    async def next(self, seconds: float | None = None) -> Event | None:
        """The next event; None on a timeout. Raises StopAsyncIteration after the last one, and whatever the engine raised."""
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

    def abandon(self) -> None:
        """Cancel it: no client waits for it any more."""
        self._abandoned = True
        self._answer_queue.remove(self)

    def fail(self, problem: Problem) -> None:
        """Cancel it and raise `problem` in `next`, without waiting for the engine."""
        self.abandon()
        self._events.put_nowait(problem)

    @property
    def is_abandoned(self) -> bool:
        return self._abandoned

    def events(self) -> Iterator[Event]:
        """The events of the answer, for the engine's thread; none if it was abandoned before its turn."""
        if not self._abandoned:
            yield from self._start(lambda: self._abandoned)

    def deliver(self, item: Event | Exception | None) -> None:
        """Called by the engine's thread with each event, then with the exception or None at the end. `Done` is held back until the engine
        has released the sequence: a client that sends its next request on reading it would find none free."""
        if isinstance(item, Done):
            self._done = item
            return
        if item is None or isinstance(item, Exception):
            self._on_loop(self._answer_queue.remove, self)  # frees its place, however slowly the client reads
            if self._done is not None:
                self._put(self._done)
        self._put(END if item is None else item)

    def _put(self, item: object) -> None:
        self._on_loop(self._events.put_nowait, item)

    def _on_loop(self, call: Callable[[Any], object], item: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call, item)


class AnswerQueue:
    """Runs `parallel` answers at once by `rounds`, with at most `max_waiting` others queued. All methods but `_serve` run on the event
    loop."""

    def __init__(self, max_waiting: int, parallel: int = 1, rounds: Scheduler[Job] | None = None) -> None:
        self.max_waiting, self.parallel, self.is_closed = max_waiting, parallel, False
        self._scheduler: Scheduler[Job] = Scheduler() if rounds is None else rounds
        self._jobs: list[Job] = []  # running and waiting, in order of arrival
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="effllm-answers", daemon=True)
        self._thread.start()

    def submit(self, start: Start) -> Job:
        """Queue an answer. Raises Problem if the queue is full or closed."""
        if self.is_closed:
            raise closing()
        if len(self._jobs) >= self.parallel + self.max_waiting:
            raise Problem(503, f"the queue is full ({self.waiting} waiting, --queue)", BUSY, code="queue_full",
                          headers={"retry-after": "1"}, hint=RETRY)
        job = Job(self, start)
        self._jobs.append(job)
        self._waiting.put(job)
        return job

    @property
    def waiting(self) -> int:
        return max(0, len(self._jobs) - self.parallel)

    @property
    def running(self) -> int:
        return len(self._jobs) - self.waiting

    def ahead_of(self, job: Job) -> int:
        """How many jobs have to end before this one starts."""
        return max(0, self._jobs.index(job) - self.parallel + 1) if job in self._jobs else 0

    def remove(self, job: Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)

    def close(self) -> None:
        """Accept no more jobs, and fail those that are running or waiting."""
        self.is_closed = True
        for job in [*self._jobs]:
            job.fail(closing())
        self._waiting.put(None)

    def join(self, seconds: float) -> bool:
        """Wait for the engine's thread to end; False on a timeout."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        rounds, is_open = self._scheduler, True
        while is_open or len(rounds):
            while is_open and len(rounds) < self.parallel:
                try:
                    job = self._waiting.get(block=not len(rounds))
                except queue.Empty:
                    break
                if job is None:
                    is_open = False
                elif not job.is_abandoned:
                    rounds.begin(job, job.events())
            for job, item in rounds.step():
                job.deliver(item)
