"""The queue in front of the engine: who holds a place, who is batched with whom, and when a place is released."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from server_process import MINUTE
from test_serve_units import DONE

from effllm.cli.server.answer_queue import AnswerQueue
from effllm.cli.server.problems import Problem
from effllm.runtime.events import Event, TextDelta, Yield


def test_who_reads_the_end_finds_the_place_free(answer_queue: AnswerQueue) -> None:
    """What the engine puts down behind its last event is put down when that is told: the next request may look."""
    put_down = threading.Event()

    def answer(left: Callable[[], bool]) -> Iterator[Event]:
        yield TextDelta("yes")
        yield DONE
        time.sleep(0.05)
        put_down.set()

    async def test() -> None:
        job = answer_queue.submit(answer)
        assert [await job.next(MINUTE), await job.next(MINUTE)] == [TextDelta("yes"), DONE]
        assert put_down.is_set() and job not in answer_queue._jobs and answer_queue.running == 0

    asyncio.run(test())


def test_a_client_that_does_not_read_keeps_no_place_in_the_line(answer_queue: AnswerQueue) -> None:
    async def test() -> None:
        job = answer_queue.submit(lambda left: iter([TextDelta("yes"), DONE]))
        end = time.monotonic() + MINUTE
        while job in answer_queue._jobs and time.monotonic() < end:
            await asyncio.sleep(0.01)
        assert not answer_queue._jobs and [await job.next(MINUTE), await job.next(MINUTE)] == [TextDelta("yes"), DONE]

    asyncio.run(test())


def test_several_are_written_at_once_and_the_next_begins_where_one_ends() -> None:
    several, began = AnswerQueue(max_waiting=1, parallel=2), []

    def answer(name: str, ends: threading.Event, left: Callable[[], bool]) -> Iterator[Event]:
        began.append(name)
        while not ends.is_set() and not left():
            yield TextDelta(name)
            yield Yield()
        yield DONE

    async def test() -> None:
        ends = [threading.Event() for _ in range(3)]
        one, two, three = (several.submit(partial(answer, name, end)) for name, end in zip("abc", ends, strict=True))
        assert [job.ahead for job in (one, two, three)] == [0, 0, 1] and several.waiting == 1
        with pytest.raises(Problem, match="the queue is full .1 waiting"):
            several.submit(partial(answer, "d", ends[0]))
        for _ in range(3):  # side by side
            assert [await job.next(MINUTE) for job in (one, two)] == [TextDelta("a"), TextDelta("b")]
        assert began == ["a", "b"]
        ends[1].set()
        assert await three.next(MINUTE) == TextDelta("c") and several.waiting == 0 and three.ahead == 0
        one.abandon()
        three.abandon()
        end = time.monotonic() + MINUTE
        while several._scheduler and time.monotonic() < end:
            await asyncio.sleep(0.01)
        assert not several._scheduler

    try:
        asyncio.run(test())
    finally:
        several.close()
    assert several.join(MINUTE)
