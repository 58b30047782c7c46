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
from effllm.kernels.thread_throttle import BACKOFF_S, MAX_BACKOFF_S, WINDOW_S, ThreadThrottle
from effllm.kernels.threads import ThreadPool

PASS_S = 0.02
SLOW = 300_000  # turns of a late thread's block: milliseconds, where the others' take microseconds
END_S = 60


def work(throttle: ThreadThrottle, clock: float, seconds: float, free: int) -> Iterator[tuple[float, int]]:
    """Passes of so many seconds on a machine where `free` threads have a core each: a further one is put aside half of the time."""
    end = clock + seconds
    while clock < end:
        clock += PASS_S
        throttle.report(clock, PASS_S, PASS_S / 2 if throttle.active > free else 0.0)
        yield clock, throttle.active


@pytest.mark.parametrize(("most", "free"), ((2, 1), (8, 7), (8, 5)))
def test_whoever_has_no_core_leaves_and_comes_back(most: int, free: int) -> None:
    throttle = ThreadThrottle(most)
    assert {now for _, now in work(throttle, 0.0, 1.0, most)} == {most}
    beside = [*work(throttle, 1.0, 30.0, free)]
    settled = [now for clock, now in beside if clock > 1.0 + WINDOW_S * (most - free + 2)]
    assert settled.count(free) > 0.9 * len(settled) and set(settled) <= {free, free + 1}, "it looks again, for moments"
    back = next(clock for clock, now in [*work(throttle, 31.0, 30.0, most)] if now == most)
    assert back < 31.0 + MAX_BACKOFF_S + WINDOW_S * (most - free + 1)
    again = [*work(throttle, 61.0, 30.0, free)]
    left = next(clock for clock, now in again if now < most)
    looks = next(clock for (_, before), (clock, now) in pairwise(again) if now > before)
    assert looks - left < BACKOFF_S + WINDOW_S * (most - free + 2), "its first rest is short again, since the machine was free for a while"


def test_one_hiccup_in_a_second_sends_nobody_away() -> None:
    throttle = ThreadThrottle(2)
    for number in range(500):
        throttle.report(number * PASS_S, PASS_S, PASS_S if number % 5 == 0 else 0.0)
        assert throttle.active == 2


@given(st.integers(1, 46), st.lists(st.tuples(st.floats(0, 3), st.floats(0, 1)), max_size=60))
def test_somebody_works_whatever_is_told(most: int, passes: list[tuple[float, float]]) -> None:
    throttle, clock = ThreadThrottle(most), 0.0
    for spent, share in passes:
        clock += spent
        throttle.report(clock, spent, spent * share)
        assert 1 <= throttle.active <= most
    for _ in range(most):
        clock += MAX_BACKOFF_S + WINDOW_S
        throttle.report(clock, WINDOW_S, 0.0)
    assert throttle.active == most


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
        while pool.active_workers != wanted and time.monotonic() < end:
            pool.run_list(jobs)
            pool.run(late_blocks, args.ctypes.data)
            turns += 1
            assert (done == 4 * turns).all()
        assert pool.active_workers == wanted
    pool.close()
    assert not any(thread.is_alive() for thread in pool._threads), "the one that rests has ended too"


@pytest.mark.parametrize(("workers", "spins"), ((2, 0), (2, 20_000), (5, 3), (8, 1000)))
def test_every_block_is_done_once_whoever_works(workers: int, spins: int) -> None:
    pool, done, rng = ThreadPool(workers, spins), np.zeros(13, np.int64), np.random.default_rng(0)
    args = np.array([13, done.ctypes.data, 0], np.int64)
    jobs = np.array([(late_blocks.address, args.ctypes.data, share) for share in (1, 0, 1)], np.int64)
    for turn in range(1, 150):
        pool._throttle.active = int(rng.integers(1, workers + 1))
        pool._set_workers(pool._throttle.active)
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
    assert pool.active_workers == 1 and (done == 1).all()
    pool.close()
