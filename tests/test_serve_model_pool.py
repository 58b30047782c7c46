"""Which models a router keeps loaded: workers that hang, write garbage or die during loading, cancelled requests, shutdown during a
request. Workers are real processes of a few milliseconds, which print what a real one does and load nothing."""

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from effllm.cli.server.keep_alive import NEVER
from effllm.cli.server.model_pool import ModelPool, PoolLimits
from effllm.cli.server.model_registry import RegisteredModel
from effllm.cli.server.problems import Problem
from effllm.cli.server.worker_process import WorkerLauncher
from effllm.runtime.events import Progress

CHILD = """#!/bin/sh
case "$*" in
  *--name=hung*) trap '' TERM; exec sleep 60 ;;
  *--name=babbling*) echo no JSON; exec sleep 60 ;;
  *--name=slow*)
    for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35; do
      sleep 0.1; echo '{"progress": {"phase": "loading", "done": 1, "total": 9, "unit": "bytes"}}'; done ;;
esac
read budget
echo '{"planned": {"nbytes": 100}}'
read go
echo '{"listening": {"port": 1, "context": 8, "parallel": 1, "nbytes": 100}}'
read end
"""
SOON_S = 8.0  # less than a child is given to end in order


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is started in the place of Python."""
    path = tmp_path / "child"
    path.write_text(CHILD)
    path.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(path))
    return path


def model(name: str) -> RegisteredModel:
    return RegisteredModel(name, name, Path("/", name))


def run(work: Callable[[ModelPool], Awaitable[None]], notes: list[str], silence_s: float = NEVER, **limits: object) -> None:
    """`work` with a pool, whose processes all end with it."""
    heard: list[Progress] = []

    async def whole() -> None:
        starter = WorkerLauncher([], dict(os.environ), lambda name, event: heard.append(event), lambda name, text: notes.append(text),
                                 silence_s)
        pool = ModelPool(starter, PoolLimits(**limits), notes.append)
        try:
            async with asyncio.timeout(SOON_S):
                await work(pool)
        finally:
            pool.close()
            await pool.closed()

    asyncio.run(whole())
    assert not psutil.Process().children()


async def refused(taking: Awaitable[object]) -> Problem:
    with pytest.raises(Problem) as caught:
        await taking
    return caught.value


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


def test_a_load_that_hangs_is_abandoned_and_the_next_one_begins() -> None:
    notes: list[str] = []

    async def work(pool: ModelPool) -> None:
        hung = asyncio.ensure_future(refused(pool.acquire(model("hung"))))
        await asyncio.sleep(0)
        other = await pool.acquire(model("other"))
        problem = await hung
        assert problem.status == 500 and problem.code == "model_not_loaded" and not problem.headers
        assert "hung cannot be loaded: no progress for 1 second (starting): " in problem.message
        assert "--load-timeout" in problem.message and other.worker.is_alive and pool.loaded() == [other]

    run(work, notes, silence_s=1.0)
    assert [each.partition(":")[0] for each in notes] == ["hung could not be loaded", "other is loaded"]


def test_what_continues_may_take_longer() -> None:
    async def work(pool: ModelPool) -> None:
        began = time.monotonic()
        assert (await pool.acquire(model("slow"))).worker.status == "loading: 1 B of 9 B" and time.monotonic() - began > 3

    run(work, [], silence_s=3.0)


def test_a_child_that_says_what_is_no_word_of_it_is_ended() -> None:
    async def work(pool: ModelPool) -> None:
        assert "babbling cannot be loaded: its process ended by " in (await refused(pool.acquire(model("babbling")))).message

    run(work, [])


def test_a_process_that_cannot_be_started_is_reported(script: Path) -> None:
    async def work(pool: ModelPool) -> None:
        problem = await refused(pool.acquire(model("other")))
        assert (problem.status, problem.message) == \
            (500, "other cannot be loaded: its process cannot be started: Permission denied: the next request tries again")
        script.chmod(0o700)
        assert (await pool.acquire(model("other"))).busy == 1

    script.chmod(0o600)
    run(work, [])


def test_a_model_that_nobody_waits_for_keeps_none_from_answering() -> None:
    """Requests for one whose place another takes wait behind that, but not behind one that has no client left."""
    notes: list[str] = []

    async def work(pool: ModelPool) -> None:
        first = await pool.acquire(model("first"))
        second = asyncio.ensure_future(pool.acquire(model("second")))
        await until(lambda: "second waits for first to finish answers and make room" in notes)
        third = asyncio.ensure_future(pool.acquire(model("first")))
        await asyncio.sleep(0.05)
        assert not third.done()
        second.cancel()
        assert await third is first and first.busy == 2 and pool.loaded() == [first] and not pool.waiting

    run(work, notes, max_models=1)
    assert notes[-1] == "second was not loaded: no request is waiting for it any more"


def test_later_requests_do_not_overtake() -> None:
    """A model that answers is not ended, and the next request for it waits until the one before has had its place."""
    notes: list[str] = []

    async def work(pool: ModelPool) -> None:
        first = await pool.acquire(model("first"))
        second = asyncio.ensure_future(pool.acquire(model("second")))
        await until(lambda: "second waits for first to finish answers and make room" in notes)
        third = asyncio.ensure_future(pool.acquire(model("first")))
        await asyncio.sleep(0.02)
        assert pool.waiting == 2 and not second.done() and not third.done() and first.worker.is_alive
        pool.release(first)
        pool.release(await second)
        again = await third
        assert again is not first and pool.loaded() == [again] and not pool.waiting

    run(work, notes, max_models=1)
    assert [each.partition(":")[0] for each in notes if " waits " not in each] == \
        ["first is loaded", "first is unloaded", "second is loaded", "second is unloaded", "first is loaded"]


def test_what_is_let_go_ends_after_its_answers_however_long_these_wanted_it_to_stay() -> None:
    """Every request of some programs says for how long: the one that was under way took back that another user had ended the model."""
    notes: list[str] = []

    async def work(pool: ModelPool) -> None:
        first = await pool.acquire(model("first"))
        assert await pool.acquire(model("first")) is first and pool.unload_when_idle(model("first"))
        pool.release(first, NEVER)
        assert pool.loaded() == [first] and first.worker.is_alive, "an answer runs"
        pool.release(first, 300.0)
        await until(lambda: not pool.loaded())
        assert (await pool.acquire(model("first"))).keep_s == NEVER, "whoever asks next has it as it was"

    run(work, notes)
    assert [each.partition(":")[0] for each in notes] == ["first is loaded", "first is unloaded", "first is loaded"]


def test_a_child_that_dies_while_it_waits_for_its_place_is_reported_at_once() -> None:
    notes: list[str] = []

    async def work(pool: ModelPool) -> None:
        await pool.acquire(model("first"))
        second = asyncio.ensure_future(refused(pool.acquire(model("second"))))
        await until(lambda: "second waits for first to finish answers and make room" in notes)
        for each in psutil.Process().children():
            if "--name=second" in each.cmdline():
                each.send_signal(signal.SIGKILL)
        assert "its process ended by SIGKILL before it was loaded" in (await second).message

    run(work, notes, max_models=1)


def test_ends_and_requests_that_come_at_once() -> None:
    """Two models by turns in one place, kept for no moment: whoever takes one has a process that lives, until it is given back."""
    notes, chance = [], random.Random(7)

    async def client(pool: ModelPool, number: int) -> None:
        await asyncio.sleep(chance.random() * 0.3)
        taking = asyncio.ensure_future(pool.acquire(model("ab"[number % 2])))
        if number % 5 == 0:  # leaves before
            await asyncio.sleep(0.01)
            if taking.cancel():
                with contextlib.suppress(asyncio.CancelledError):
                    await taking
                return
        loaded = await taking
        for _ in range(3):
            assert loaded.worker.is_alive and loaded.model.name == "ab"[number % 2] and len(pool.loaded()) == 1
            await asyncio.sleep(chance.random() * 0.01)
        pool.release(loaded)

    async def work(pool: ModelPool) -> None:
        await asyncio.gather(*(client(pool, number) for number in range(60)))
        await until(lambda: not pool.loaded() and not pool.waiting)

    run(work, notes, max_models=1, keep_s=0.0, waiting=100)
    count = sum(" is loaded" in each for each in notes)
    assert 2 <= count == sum(" is unloaded: its request has ended" in each or " is unloaded: to make room" in each for each in notes)
