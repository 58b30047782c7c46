"""How many threads work while other programs need the cores: the rule alone, and in a pool with a thread that is late."""

import time
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from effllm.kernels.compile import kernel
from effllm.kernels.cpu.intrinsics import fetch_add, i64_at, relax
from effllm.kernels.thread_throttle import LONGEST_REST_S, REST_S, WINDOW_S, ThreadThrottle
from effllm.kernels.threads import ThreadPool

PASS_S = 0.02
SLOW = 300_000  # turns of a late thread's block: milliseconds, where the others' take microseconds
END_S = 60


def work(crew: ThreadThrottle, clock: float, seconds: float, free: int) -> Iterator[tuple[float, int]]:
    """Passes of so many seconds on a machine where `free` threads have a core each: a further one is put aside half of the time."""
    end = clock + seconds
    while clock < end:
        clock += PASS_S
        crew.worked(clock, PASS_S, PASS_S / 2 if crew.now > free else 0.0)
        yield clock, crew.now


@pytest.mark.parametrize(("most", "free"), ((2, 1), (8, 7), (8, 5)))
def test_whoever_has_no_core_leaves_and_comes_back(most: int, free: int) -> None:
    crew = ThreadThrottle(most)
    assert {now for _, now in work(crew, 0.0, 1.0, most)} == {most}
    beside = [*work(crew, 1.0, 30.0, free)]
    settled = [now for clock, now in beside if clock > 1.0 + WINDOW_S * (most - free + 2)]
    assert settled.count(free) > 0.9 * len(settled) and set(settled) <= {free, free + 1}, "it looks again, for moments"
    back = next(clock for clock, now in [*work(crew, 31.0, 30.0, most)] if now == most)
    assert back < 31.0 + LONGEST_REST_S + WINDOW_S * (most - free + 1)
    again = [*work(crew, 61.0, 30.0, free)]
    left = next(clock for clock, now in again if now < most)
    looks = next(clock for (_, before), (clock, now) in pairwise(again) if now > before)
    assert looks - left < REST_S + WINDOW_S * (most - free + 2), "its first rest is short again, since the machine was free for a while"


def test_one_hiccup_in_a_second_sends_nobody_away() -> None:
    crew = ThreadThrottle(2)
    for number in range(500):
        crew.worked(number * PASS_S, PASS_S, PASS_S if number % 5 == 0 else 0.0)
        assert crew.now == 2


@given(st.integers(1, 46), st.lists(st.tuples(st.floats(0, 3), st.floats(0, 1)), max_size=60))
def test_somebody_works_whatever_is_told(most: int, passes: list[tuple[float, float]]) -> None:
    crew, clock = ThreadThrottle(most), 0.0
    for spent, share in passes:
        clock += spent
        crew.worked(clock, spent, spent * share)
        assert 1 <= crew.now <= most
    for _ in range(most):
        clock += LONGEST_REST_S + WINDOW_S
        crew.worked(clock, WINDOW_S, 0.0)
    assert crew.now == most


@kernel()
def late_blocks(args, worker, counter):
    """Adds 1 to the slots at address args[1], args[0] of them, one a block; every worker but the first takes args[2] turns for each."""
    a = i64_at(args)
    while True:
        block = fetch_add(counter, 1)
        if block >= a[0]:
            return
        for _ in range(a[2] if worker else 500):
            relax()
        fetch_add(a[1] + 8 * block, 1)


@pytest.mark.slow
def test_a_pool_continues_without_a_thread_that_is_late() -> None:
    """Nobody waits for it then, and all of the work is done as before; where it is no longer late, it comes back."""
    pool, done = ThreadPool(2), np.zeros(4, np.int64)
    args = np.array([4, done.ctypes.data, SLOW], np.int64)
    jobs = np.array([(late_blocks.address, args.ctypes.data, share) for share in (1, 0, 1)], np.int64)
    turns = 0
    for late, wanted in ((SLOW, 1), (0, 2), (SLOW, 1)):
        args[2], end = late, time.monotonic() + END_S
        while pool.at_work != wanted and time.monotonic() < end:
            pool.run_list(jobs)
            pool.run(late_blocks, args.ctypes.data)
            turns += 1
            assert (done == 4 * turns).all()
        assert pool.at_work == wanted
    pool.close()
    assert not any(thread.is_alive() for thread in pool._threads), "the one that rests has ended too"


@pytest.mark.parametrize(("workers", "spins"), ((2, 0), (2, 20_000), (5, 3), (8, 1000)))
def test_every_block_is_done_once_whoever_works(workers: int, spins: int) -> None:
    pool, done, rng = ThreadPool(workers, spins), np.zeros(13, np.int64), np.random.default_rng(0)
    args = np.array([13, done.ctypes.data, 0], np.int64)
    jobs = np.array([(late_blocks.address, args.ctypes.data, share) for share in (1, 0, 1)], np.int64)
    for turn in range(1, 150):
        pool._crew.now = int(rng.integers(1, workers + 1))
        pool._call(pool._crew.now)
        pool.run_list(jobs)
        pool.run(late_blocks, args.ctypes.data)
        if turn % 20 == 0:
            time.sleep(0.005)  # all parked
        assert (done == 4 * turn).all()
    pool.close()
    assert not any(thread.is_alive() for thread in pool._threads)


def test_a_pool_of_one_is_never_judged() -> None:
    pool, done = ThreadPool(1), np.zeros(4, np.int64)
    args = np.array([4, done.ctypes.data, SLOW], np.int64)
    pool.run_list(np.array([(late_blocks.address, args.ctypes.data, 1)], np.int64))
    assert pool.at_work == 1 and (done == 1).all()
    pool.close()
