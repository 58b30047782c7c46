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

JOB, KERNEL, ARGS, NUM_WORKERS, PREEMPTION_SPINS, WAITED_SPINS, ACTIVE, COUNTER = 0, 64, 72, 80, 88, 96, 128, 192  # byte offsets
STATES = COUNTER + SETS * COUNTERS_NBYTES
RUNNING, PARKED = 0, 1
NO_JOB = 0xFFFF  # instead of a job's index: no job is open
MAX_WORKERS = 46  # a bit per worker has to fit into one integer with a job's index; memory is saturated by far fewer
PREEMPTION_S = 50e-6  # a worker that is waited for longer counts as preempted; a block of work takes less
CALIBRATION_SPINS = 1000  # one spin takes 1 to 100 ns, too short for the clock
# Under a millisecond of `pause`: longer than the gap between two stages of a decode step, shorter than that between two requests.
SPINS_BEFORE_PARKING = 20_000


@jit("int64(int64, int64, int64, int64)")
def _work(control, worker, seen, spins):
    """Worker loop: run jobs until none arrives for `spins` iterations (returns the last job seen) or the pool closes (returns -1)."""
    state = control + STATES + 64 * worker
    while True:
        spun = 0
        while True:
            job = load(control + JOB)
            if job & 1 and job != seen and worker < load(control + NUM_WORKERS):
                break
            relax()
            spun += 1
            if spun > spins:
                store(state, PARKED)
                job = load(control + JOB)
                if not (job & 1 and job != seen and worker < load(control + NUM_WORKERS)) or compare_swap(state, PARKED, RUNNING) == 0:
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
def _wait_idle(control):
    """Wait until no worker is active in a closed job. A wait longer than PREEMPTION_SPINS is added to WAITED_SPINS."""
    spun = 0
    while load(control + ACTIVE) != 0:
        relax()
        spun += 1
    if spun > i64_at(control + PREEMPTION_SPINS)[0]:
        i64_at(control + WAITED_SPINS)[0] += spun


@jit("void(int64, int64)")
def _spin(control, count):
    """Spin `count` times like `_wait_idle`, to measure how long one spin takes."""
    for _ in range(count):
        if load(control + ACTIVE) == 0:
            relax()


@inlined()
def _settle(control, workers):
    """Close a job left open by an exception and wait until no worker is active in it. Returns a bit for every worker, since some may be
    asleep though marked awake; 0 if no job was open.

    A signal handler may raise as soon as Python regains control, before it knows which workers to wake."""
    if load(control + JOB) & 1 == 0:
        return 0
    store(control + JOB, load(control + JOB) + 1)
    _wait_idle(control)
    return (1 << workers) - 2


@jit("int64(int64, int64, int64, int64)")
def _start(control, function, args, workers):
    """Open a job. Returns a bit per worker that must be woken; if there is none, runs worker 0's share and closes the job."""
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
        _wait_idle(control)
    return sleeping


@jit("int64(int64, int64, int64, int64, int64, int64)")
def _start_list(control, jobs, first, count, workers, pause):
    """Run jobs from `first` on of a list of (kernel, args, parallel). Returns -1 when all are done.

    Otherwise the low 16 bits of the result are a job's index and those above a bit per worker to wake. That job is open and worker 0's
    share of it remains to be run (`_finish`). This happens where workers must be woken, and at the first parallel job if `pause` is 1. The
    index is NO_JOB if all jobs are done, but `_settle` found workers to wake.
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
        _wait_idle(control)
    return -1 if lost == 0 else (lost << 16) | NO_JOB


@jit("void(int64, int64, int64)")
def _finish(control, function, args):
    """Run worker 0's share after sleeping workers have been woken, and close the job."""
    call_kernel(function, args, 0, control + COUNTER)
    store(control + JOB, load(control + JOB) + 1)
    _wait_idle(control)


@jit("int64(int64, int64)")
def _settle_job(control, workers):
    """`_settle` for Python."""
    return _settle(control, workers)


@jit("int64(int64, int64, int64, int64)")
def _run_alone(control, function, args, workers):
    """Run a small job on the calling thread only. Returns a bit per worker to wake, from `_settle`."""
    sleeping = _settle(control, workers)
    clear_counters(control + COUNTER)
    call_kernel(function, args, 0, control + COUNTER)
    return sleeping


def thread_limit_notice(threads: int | None) -> list[str]:
    """The notice for requesting more threads than a pool supports."""
    return [f"-t {threads}: at most {MAX_WORKERS} threads, using {MAX_WORKERS}"] if (threads or 0) > MAX_WORKERS else []


class ThreadPool:
    """`workers` threads including the caller. `run(kernel, args)` returns when every block is done. One job at a time."""

    def __init__(self, workers: int, spins: int = SPINS_BEFORE_PARKING) -> None:
        self.workers = min(MAX_WORKERS, max(1, workers))
        self._memory = np.zeros(STATES // 8 + 8 * self.workers + 8, np.int64)
        self._control = (self._memory.ctypes.data + 63) // 64 * 64
        self._locks = [threading.Lock() for _ in range(self.workers)]
        self._spins, self._throttle = spins, ThreadThrottle(self.workers)
        self._closed = False
        # Compile here, not inside the first worker.
        self._work, self._start, self._finish, self._run_alone = (function.compiled for function in (_work, _start, _finish, _run_alone))
        self._start_list, self._settle, spin = _start_list.compiled, _settle_job.compiled, _spin.compiled
        started = time.perf_counter()
        spin(self._control, CALIBRATION_SPINS)
        self._spin_s = (time.perf_counter() - started) / CALIBRATION_SPINS
        self._control_words = self._memory[(self._control - self._memory.ctypes.data) // 8 :]
        self._control_words[PREEMPTION_SPINS // 8] = int(PREEMPTION_S / self._spin_s)
        self._set_workers(self.workers)
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
        """Run one kernel. `address`: of its argument block. `parallel=False`: on this thread only, for jobs too small to share."""
        function = kernel.address
        try:
            if not parallel or self.workers == 1:
                self._wake(self._run_alone(self._control, function, address, self.workers))
            elif sleeping := self._start(self._control, function, address, self._throttle.active):
                self._wake(sleeping)
                self._finish(self._control, function, address)
        except BaseException:  # Ctrl-C while the job is open: the caller may free its arguments
            self.settle()
            raise

    def run_list(self, jobs: np.ndarray, meanwhile: Callable[[], object] | None = None) -> None:
        """Run jobs in sequence without returning to Python: int64 `[n, 3]` of kernel address, argument block, and 1 for a parallel job.
        `meanwhile` is called once, while the other workers run the first parallel job if there is one; it must not run jobs itself.

        At most 65,535 jobs; at most MAX_WORKERS workers.
        """
        try:
            self._run_list(jobs, meanwhile)
        except BaseException:
            self.settle()
            raise

    def _run_list(self, jobs: np.ndarray, meanwhile: Callable[[], object] | None) -> None:
        list_address, first, count, started = jobs.ctypes.data, 0, len(jobs), time.perf_counter()
        while (state := self._start_list(self._control, list_address, first, count, self._throttle.active, meanwhile is not None)) != -1:
            index, sleeping = state & 0xFFFF, state >> 16
            self._wake(sleeping)
            if index == NO_JOB:
                break
            callback, meanwhile = meanwhile, None
            try:
                if callback is not None:
                    callback()
            finally:  # the job is open
                self._finish(self._control, int(jobs[index, 0]), int(jobs[index, 1]))
            first = index + 1
        if meanwhile is not None:
            meanwhile()
        if self.workers > 1:
            self._adapt_workers(started)

    def _adapt_workers(self, started: float) -> None:
        """Adapt the number of workers after the jobs that started at `started`."""
        now, spun = time.perf_counter(), int(self._control_words[WAITED_SPINS // 8])
        self._control_words[WAITED_SPINS // 8] = 0
        self._throttle.report(now, now - started, spun * self._spin_s)
        self._set_workers(self._throttle.active)

    def _set_workers(self, workers: int) -> None:
        """Set the number of workers for the next job; none may be open."""
        self._control_words[NUM_WORKERS // 8] = workers

    @property
    def active_workers(self) -> int:
        """Workers currently in use: fewer than the pool has while other programs compete for the cores."""
        return self._throttle.active

    def settle(self) -> None:
        """Close a job left open by an exception; afterwards no worker reads or writes its arguments."""
        if not self._closed:  # the job that ends the workers stays open
            self._wake(self._settle(self._control, self.workers))

    def _wake(self, sleeping: int) -> None:
        if sleeping == 0:
            return
        for worker in range(1, self.workers):
            # The bit may be set for a worker that is awake: it passes its lock once and looks for a job again.
            if sleeping >> worker & 1 and self._locks[worker].locked():
                self._locks[worker].release()

    def close(self) -> None:
        """Stop the workers. Safe to call twice."""
        if not self._closed:
            self._closed = True
            if self.workers > 1:
                self._set_workers(self.workers)
                self._wake(self._start(self._control, 0, 0, self.workers))
            deadline = time.monotonic() + 5
            for thread in self._threads:
                thread.join(max(0.0, deadline - time.monotonic()))
