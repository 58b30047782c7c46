"""The thread pool: workers wait inside compiled code and run kernels without the GIL.

The main thread is worker 0. The others spin on the job word for a while and then park on a lock. A job is opened, worked on and closed.
Blocks of work are drawn from a shared counter, or from one per region of the job (`cpu/work_distribution.py`); blocks are a function of the
shape alone, so results depend neither on the number of threads nor on which thread computed what. A worker enters a job by counting itself
active while the job is open: a worker that is preempted before that never enters, and nobody waits for it. A worker preempted inside a job
is waited for; if this happens too often, fewer are used (`thread_throttle.py`).

Control block, in cache lines (8 int64): job word (odd: open) | kernel, args, participating workers, spins after which a wait counts as
preemption, spins of such waits | active | counters, 4 lines | state of worker 0, 1, ...
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from .compile import Kernel, jit
from .cpu.intrinsics import call_kernel, compare_swap, fetch_add, i64_at, load, relax, store
from .cpu.work_distribution import COUNTERS_NBYTES, SETS, clear_counters
from .lazy_numba import inlined
from .thread_throttle import ThreadThrottle

JOB, KERNEL, ARGS, CREW, PATIENCE, WAITED, ACTIVE, COUNTER = 0, 64, 72, 80, 88, 96, 128, 192  # byte offsets
STATES = COUNTER + SETS * COUNTERS_NBYTES
RUNNING, PARKED = 0, 1
AT_END = 0xFFFF  # in the place of a job's number: none is open
MOST_WORKERS = 46  # their bits fit beside a job's number in one integer; memory is saturated long before
PATIENCE_S = 50e-6  # some blocks
TURNS = 1000  # by which a clock tells how long one takes: 1 to 100 ns
SPINS = 20_000  # under a millisecond of `pause`: longer than the gap between two stages of a decode step, shorter than a person's pause


@jit("int64(int64, int64, int64, int64)")
def _work(control, worker, seen, spins):
    """Worker loop: run jobs until none arrives for `spins` iterations (returns the last job seen) or the pool closes (returns -1)."""
    state = control + STATES + 64 * worker
    while True:
        turn = 0
        while True:
            job = load(control + JOB)
            if job & 1 and job != seen and worker < load(control + CREW):
                break
            relax()
            turn += 1
            if turn > spins:
                store(state, PARKED)
                job = load(control + JOB)
                if not (job & 1 and job != seen and worker < load(control + CREW)) or compare_swap(state, PARKED, RUNNING) == 0:
                    return seen
        fetch_add(control + ACTIVE, 1)
        if load(control + JOB) == job:
            function = i64_at(control + KERNEL)[0]
            if function == 0:
                fetch_add(control + ACTIVE, -1)
                return -1
            call_kernel(function, i64_at(control + ARGS)[0], worker, control + COUNTER)
        fetch_add(control + ACTIVE, -1)
        seen = job


@inlined()
def _ended(control):
    """Wait until nobody works on a closed job; count the spins if it takes longer than a block does."""
    turns = 0
    while load(control + ACTIVE) != 0:
        relax()
        turns += 1
    if turns > i64_at(control + PATIENCE)[0]:
        i64_at(control + WAITED)[0] += turns


@jit("void(int64, int64)")
def _turns(control, count):
    """Spin `count` times as in such a wait, to calibrate it against a clock."""
    for _ in range(count):
        if load(control + ACTIVE) == 0:
            relax()


@inlined()
def _settle(control, workers):
    """Close a job left open by an exception: a signal handler may raise as soon as Python regains control, before it knows which workers to
    wake. Waits until nobody works on it. Then returns a bit for every worker, since some may be asleep though marked awake; otherwise 0."""
    if load(control + JOB) & 1 == 0:
        return 0
    store(control + JOB, load(control + JOB) + 1)
    _ended(control)
    return (1 << workers) - 2


@jit("int64(int64, int64, int64, int64)")
def _start(control, function, args, workers):
    """Open a job. Returns a bit per worker that must be woken; if none, does worker 0's share and closes the job."""
    sleeping = _settle(control, workers)
    i64_at(control + KERNEL)[0] = function
    i64_at(control + ARGS)[0] = args
    clear_counters(control + COUNTER)
    store(control + JOB, load(control + JOB) + 1)
    for worker in range(1, workers):
        if compare_swap(control + STATES + 64 * worker, PARKED, RUNNING) == 1:
            sleeping |= 1 << worker
    if sleeping == 0 and function != 0:
        call_kernel(function, args, 0, control + COUNTER)
        store(control + JOB, load(control + JOB) + 1)
        _ended(control)
    return sleeping


@jit("int64(int64, int64, int64, int64, int64, int64)")
def _start_list(control, jobs, first, count, workers, pause):
    """Run jobs `first`... of a list of (kernel, args, share it?). Returns -1 at the end, or AT_END and a bit per worker to wake above it.

    Where workers must be woken, and at the first shared job if `pause` is 1, it returns the job (16 bits) and a bit per worker to wake
    above it, with that job open and worker 0's share of it still to do (`_finish`).
    """
    lost = _settle(control, workers)
    for index in range(first, count):
        job = i64_at(jobs + 24 * index)
        clear_counters(control + COUNTER)
        if job[2] == 0:
            call_kernel(job[0], job[1], 0, control + COUNTER)
            continue
        i64_at(control + KERNEL)[0] = job[0]
        i64_at(control + ARGS)[0] = job[1]
        store(control + JOB, load(control + JOB) + 1)
        sleeping = lost
        for worker in range(1, workers):
            if compare_swap(control + STATES + 64 * worker, PARKED, RUNNING) == 1:
                sleeping |= 1 << worker
        if sleeping != 0 or pause == 1:
            return (sleeping << 16) | index
        call_kernel(job[0], job[1], 0, control + COUNTER)
        store(control + JOB, load(control + JOB) + 1)
        _ended(control)
    return -1 if lost == 0 else (lost << 16) | AT_END


@jit("void(int64, int64, int64)")
def _finish(control, function, args):
    """Do worker 0's share after the sleepers have been woken, and close the job."""
    call_kernel(function, args, 0, control + COUNTER)
    store(control + JOB, load(control + JOB) + 1)
    _ended(control)


@jit("int64(int64, int64)")
def _quiet(control, workers):
    """`_settle` for Python."""
    return _settle(control, workers)


@jit("int64(int64, int64, int64, int64)")
def _alone(control, function, args, workers):
    """Run a small job on the calling thread only. Returns the result of `_settle`."""
    sleeping = _settle(control, workers)
    clear_counters(control + COUNTER)
    call_kernel(function, args, 0, control + COUNTER)
    return sleeping


def thread_limit_notice(threads: int | None) -> list[str]:
    """The notice for requesting more threads than a pool supports."""
    return [f"-t {threads}: at most {MOST_WORKERS} threads, using {MOST_WORKERS}"] if (threads or 0) > MOST_WORKERS else []


class ThreadPool:
    """`workers` threads including the caller. `run(kernel, args)` returns when every block is done. One job at a time."""

    def __init__(self, workers: int, spins: int = SPINS) -> None:
        self.workers = min(MOST_WORKERS, max(1, workers))
        self._memory = np.zeros(STATES // 8 + 8 * self.workers + 8, np.int64)
        self._control = (self._memory.ctypes.data + 63) // 64 * 64
        self._locks = [threading.Lock() for _ in range(self.workers)]
        self._spins, self._crew = spins, ThreadThrottle(self.workers)
        self._closed = False
        # compiled here, not inside the first worker
        self._work, self._start, self._finish, self._alone = (function.compiled for function in (_work, _start, _finish, _alone))
        self._start_list, self._quiet, turns = _start_list.compiled, _quiet.compiled, _turns.compiled
        began = time.perf_counter()
        turns(self._control, TURNS)
        self._turn_s = (time.perf_counter() - began) / TURNS
        self._words = self._memory[(self._control - self._memory.ctypes.data) // 8 :]
        self._words[PATIENCE // 8] = int(PATIENCE_S / self._turn_s)
        self._call(self.workers)
        self._threads = [threading.Thread(target=self._serve, args=(worker,), name=f"effllm-{worker}", daemon=True)
                         for worker in range(1, self.workers)]
        for worker, thread in enumerate(self._threads, 1):
            self._locks[worker].acquire()
            thread.start()

    def _serve(self, worker: int) -> None:
        seen = 0
        while (seen := self._work(self._control, worker, seen, self._spins)) >= 0:
            self._locks[worker].acquire()

    def run(self, kernel: Kernel, address: int, parallel: bool = True) -> None:
        """Run one kernel. `address`: its argument block; `parallel=False` keeps a job too small to share on this thread."""
        function = kernel.address
        try:
            if not parallel or self.workers == 1:
                self._wake(self._alone(self._control, function, address, self.workers))
            elif sleeping := self._start(self._control, function, address, self._crew.now):
                self._wake(sleeping)
                self._finish(self._control, function, address)
        except BaseException:  # Ctrl-C, before the job was ended: who called frees what it reads
            self.settle()
            raise

    def run_list(self, jobs: np.ndarray, meanwhile: Callable[[], object] | None = None) -> None:
        """Run jobs in sequence without returning to Python: int64 `[n, 3]` of kernel address, argument block, and 1 to share the job.
        `meanwhile` is called once, while the other workers are at the first shared job, if there is one; it must not run jobs itself.

        At most 65,535 jobs; at most MOST_WORKERS workers.
        """
        try:
            self._run_list(jobs, meanwhile)
        except BaseException:
            self.settle()
            raise

    def _run_list(self, jobs: np.ndarray, meanwhile: Callable[[], object] | None) -> None:
        at, done, count, began = jobs.ctypes.data, 0, len(jobs), time.perf_counter()
        while (state := self._start_list(self._control, at, done, count, self._crew.now, meanwhile is not None)) != -1:
            index, sleeping = state & 0xFFFF, state >> 16
            self._wake(sleeping)
            if index == AT_END:
                break
            called, meanwhile = meanwhile, None
            try:
                if called is not None:
                    called()
            finally:  # the job is open
                self._finish(self._control, int(jobs[index, 0]), int(jobs[index, 1]))
            done = index + 1
        if meanwhile is not None:
            meanwhile()
        if self.workers > 1:
            self._judge(began)

    def _judge(self, began: float) -> None:
        """Adapt the number of workers after the jobs that started at `began`."""
        now, turns = time.perf_counter(), int(self._words[WAITED // 8])
        self._words[WAITED // 8] = 0
        self._crew.worked(now, now - began, turns * self._turn_s)
        self._call(self._crew.now)

    def _call(self, workers: int) -> None:
        """Set the number of workers for the next job; none may be open."""
        self._words[CREW // 8] = workers

    @property
    def at_work(self) -> int:
        """Workers currently in use: fewer than the pool has while other programs compete for the cores."""
        return self._crew.now

    def settle(self) -> None:
        """End a job left open by an exception; afterwards nobody reads or writes its arguments."""
        if not self._closed:  # the last job stays open
            self._wake(self._quiet(self._control, self.workers))

    def _wake(self, sleeping: int) -> None:
        if sleeping == 0:
            return
        for worker in range(1, self.workers):
            if sleeping >> worker & 1 and self._locks[worker].locked():  # one that is awake finds its lock open once, and looks again
                self._locks[worker].release()

    def close(self) -> None:
        """Stop the workers. Safe to call twice."""
        if not self._closed:
            self._closed = True
            if self.workers > 1:
                self._call(self.workers)
                self._wake(self._start(self._control, 0, 0, self.workers))
            deadline = time.monotonic() + 5
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
