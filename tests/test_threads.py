"""The thread pool and the cold start: real threads, real processes."""

import os
import subprocess
import sys
import threading
import time
from importlib import import_module
from pkgutil import walk_packages
from types import SimpleNamespace

import numpy as np
import pytest

from effllm import kernels
from effllm.kernels import compile as compiling
from effllm.kernels import threads, warm
from effllm.kernels.compile import Jit, Kernel, cache_folder, cache_key, kernel
from effllm.kernels.cpu.amx import AMX
from effllm.kernels.cpu.bf16_pairs import HAS_PAIRS
from effllm.kernels.cpu.intrinsics import fetch_add, i64_at, load, relax, store
from effllm.kernels.cpu.jobs import Jobs
from effllm.kernels.cpu.linear_amx import AMX_FLOATS
from effllm.kernels.machine_code import compile_object
from effllm.kernels.threads import MAX_WORKERS, ThreadPool
from effllm.runtime.planning.compile_kernels import compile_needed


@kernel()
def count_blocks(args, worker, counter):
    """Adds 1 to slot b for each block b below args[0]; the slots begin at address args[1]."""
    a = i64_at(args)
    while True:
        block = fetch_add(counter, 1)
        if block >= a[0]:
            return
        i64_at(a[1])[block] = i64_at(a[1])[block] + 1


def run_jobs(pool: ThreadPool, jobs: int, blocks: int, pause: float = 0.0) -> np.ndarray:
    done = np.zeros(blocks, np.int64)
    args = np.array([blocks, done.ctypes.data], np.int64)
    for job in range(jobs):
        pool.run(count_blocks, args.ctypes.data, parallel=job % 7 != 0)
        time.sleep(pause)
    return done


def test_every_block_once_whatever_the_threads_do():
    for workers, spins in ((1, 100), (2, 20_000), (2, 0), (5, 3), (8, 1000)):
        pool = ThreadPool(workers, spins)
        assert (run_jobs(pool, 2000, 13) == 2000).all()
        pool.close()


def test_a_list_of_jobs_wakes_every_worker_there_can_be():
    pool = ThreadPool(MAX_WORKERS + 9, spins=10)
    assert pool.workers == MAX_WORKERS
    done = np.zeros(5, np.int64)
    args = np.array([5, done.ctypes.data], np.int64)
    jobs = np.array([(count_blocks.address, args.ctypes.data, share) for share in (1, 1, 0, 1, 1)], np.int64)
    for turn in range(1, 4):
        time.sleep(0.05)  # all parked
        pool.run_list(jobs)
        assert (done == 5 * turn).all()
    pool.close()


@pytest.mark.parametrize("spins", (0, 20_000))
def test_a_job_that_an_exception_left_open_is_closed_by_the_next(spins: int) -> None:
    """A handler of a signal that raises between two calls of compiled code: nobody is woken, and worker 0's share is not done."""
    pool = ThreadPool(4, spins)
    left, lost = np.zeros(3, np.int64), np.zeros(5, np.int64)
    args, others = np.array([3, left.ctypes.data], np.int64), np.array([5, lost.ctypes.data], np.int64)
    jobs = np.array([(count_blocks.address, others.ctypes.data, share) for share in (1, 0, 1)], np.int64)
    first = np.array([(wait_a_little.address, args.ctypes.data, 1)], np.int64)
    for turn in range(1, 60):
        time.sleep(0.005 if turn % 10 == 0 else 0)  # some parked
        if turn % 2:
            pool._start(pool._control, wait_a_little.address, args.ctypes.data, pool.workers)  # with sleepers, returns with the job open
            if pool._memory[(pool._control - pool._memory.ctypes.data) // 8] & 1 == 0:
                pool._memory[(pool._control - pool._memory.ctypes.data) // 8] += 1  # there were none: open it again
        else:
            pool._start_list(pool._control, first.ctypes.data, 0, 1, pool.workers, 1)
        lost[:] = 0
        if turn % 4 == 0:
            pool.settle()
        if turn % 3 == 0:
            pool.run(count_blocks, others.ctypes.data)
            assert (lost == 1).all()
        elif turn % 3 == 1:
            pool.run(count_blocks, others.ctypes.data, parallel=False)
            assert (lost == 1).all()
        else:
            pool.run_list(jobs)
            assert (lost == 3).all()
    pool._start_list(pool._control, first.ctypes.data, 0, 1, pool.workers, 1)
    began = time.monotonic()
    pool.close()
    assert time.monotonic() - began < 4 and not any(thread.is_alive() for thread in pool._threads), "waited for workers that slept"
    pool.settle()  # what is closed stays so, and is not waited for


@kernel()
def wait_a_little(args, worker, counter):
    """Every block of args[0] takes some microseconds."""
    while fetch_add(counter, 1) < i64_at(args)[0]:
        for _ in range(50):
            relax()


@kernel()
def wait_for_flag(args, worker, counter):
    """Whoever comes first writes its number plus 1 to address args[0], and waits until the word at args[1] is set."""
    a = i64_at(args)
    if fetch_add(counter, 1) == 0:
        store(a[0], worker + 1)
        while load(a[1]) == 0:
            relax()


@pytest.mark.parametrize("spins", (0, 20_000))
def test_a_list_runs_while_its_caller_does_something_else(spins: int) -> None:
    """The other worker is at the first shared job meanwhile: it waits for what only the caller does."""
    pool, done, who, flag = ThreadPool(2, spins), np.zeros(3, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)
    counts, waits = np.array([3, done.ctypes.data], np.int64), np.array([who.ctypes.data, flag.ctypes.data], np.int64)
    jobs = np.array([(count_blocks.address, counts.ctypes.data, 0), (wait_for_flag.address, waits.ctypes.data, 1),
                     (count_blocks.address, counts.ctypes.data, 1)], np.int64)
    seen: list[list[int]] = []

    def meanwhile() -> None:
        deadline = time.monotonic() + 60
        while not who[0] and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append([*done.tolist(), int(who[0])])
        flag[0] = 1

    pool.run_list(jobs, meanwhile)
    assert seen == [[1, 1, 1, 2]], "called once, after what is not shared, while worker 1 is at the job that is"
    assert done.tolist() == [2, 2, 2]
    pool.close()


@pytest.mark.parametrize("workers", (1, 2))
def test_what_goes_wrong_meanwhile_leaves_no_job_open(workers: int) -> None:
    pool, done = ThreadPool(workers), np.zeros(3, np.int64)
    args = np.array([3, done.ctypes.data], np.int64)
    jobs = np.array([(count_blocks.address, args.ctypes.data, 1)] * 2, np.int64)

    def fails() -> None:
        raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        pool.run_list(jobs, fails)
    assert done.tolist() == [1, 1, 1], "the job that was open is done, the others are not begun"
    pool.run_list(jobs, lambda: done.__iadd__(10))
    assert done.tolist() == [13, 13, 13]
    alone, called = np.array([(count_blocks.address, args.ctypes.data, 0)], np.int64), []
    for some in (alone, alone[:0]):
        pool.run_list(some, lambda: called.append(done.tolist()))
    assert called == 2 * [[14, 14, 14]], "there is no job to do it beside"
    pool.close()


def test_parked_workers_wake_up():
    pool = ThreadPool(3, spins=10)
    assert (run_jobs(pool, 20, 50, pause=0.005) == 20).all()
    assert sum(thread.name.startswith("effllm-") for thread in threading.enumerate()) >= 2
    pool.close()
    pool.close()
    assert not any(thread.is_alive() for thread in pool._threads)


def test_a_waiting_worker_does_not_hold_the_interpreter():
    """Python code runs at full speed while the workers spin."""
    pool = ThreadPool(2, spins=2_000_000_000)
    run_jobs(pool, 10, 10)
    ticks = []
    ticker = threading.Thread(target=lambda: [ticks.append(i) for i in range(1000)])
    ticker.start()
    ticker.join(10)
    assert len(ticks) == 1000
    pool.close()


def cold(folder) -> subprocess.Popen:
    code = ("from effllm.kernels import warm\nassert warm.is_cold(['raw'])\nprint([p for p in warm.warm(['raw'])][-1])\n"
            "assert not warm.is_cold(['raw']) and warm.is_cold(['raw', 'low-bit'])")
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "XDG_CACHE_HOME": str(folder)}, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_cold_starts_at_once_share_one_compilation(tmp_path):
    both = [cold(tmp_path), cold(tmp_path)]
    count = len(warm.compiled_functions([warm.RAW]))
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and f"({count}, {count})" in out, err[-2000:]
    stamped = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.o")}
    third = cold(tmp_path)
    _, err = third.communicate(timeout=120)
    assert "AssertionError" in err  # it is warm now
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.o")} == stamped and len(stamped) == count


def test_a_cache_folder_that_cannot_be_written_only_costs_time(tmp_path):
    (tmp_path / "file").write_text("in the way")
    code = ("from effllm.kernels import compile, warm, threads\nassert compile.cache_folder() is None and not warm.is_cold()\n"
            "p = threads.ThreadPool(2); p.close(); print('ran')")
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "file")},
                          capture_output=True, text=True)
    assert done.stdout == "ran\n", done.stderr


def test_a_cold_start_is_seen_while_its_first_function_compiles(monkeypatch, tmp_path):
    """Or waits for another that compiles: for seconds, on busy cores for half a minute, nothing was to be seen."""
    child, seen = tmp_path / "python", tmp_path / "seen"
    child.write_text(f"#!/bin/sh\nuntil [ -e '{seen}' ]; do sleep 0.02; done\necho 'a 2'\necho 'b 2'\n")
    child.chmod(0o755)
    monkeypatch.setattr(warm.sys, "executable", str(child))
    telling, total = warm.warm((warm.RAW,)), len(warm.compiled_functions((warm.RAW,)))
    assert [next(telling) for _ in range(2)] == [(0, total)] * 2
    seen.touch()
    assert [*telling][-1] == (2, total)


def test_compiling_that_nothing_keeps_shows_how_far_it_is(monkeypatch):
    """It takes as long as a first run, on every run, and went by without a word."""
    monkeypatch.setattr(warm, "cache_folder", lambda: None)
    events = list(compile_needed((warm.RAW,)))
    assert {event.phase for event in events} == {"compiling kernels (not cached)"}
    functions = warm.compiled_functions((warm.RAW,))
    assert [event.done for event in events] == [*range(1, len(functions) + 1)] and {event.total for event in events} == {len(functions)}


def test_a_cache_folder_on_a_full_disk_is_said_to_take_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "cache_root", lambda: tmp_path)
    free = compiling.MIN_FREE_NBYTES - 1
    monkeypatch.setattr(compiling.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    assert compiling.cache_folder.__wrapped__() is None
    folder = tmp_path / "kernels" / cache_key()
    compiling.completion_marker(folder, "raw").touch()  # filled before the disk was
    assert compiling.cache_folder.__wrapped__() == folder


def test_every_kernel_of_a_run_is_compiled_before_it():
    """A kernel in no list would be compiled in the middle of a prompt, silently, and the compiler's memory is in no plan."""
    listed = {id(function) for function in warm.compiled_functions()}
    modules = [import_module(found.name) for found in walk_packages(kernels.__path__, f"{kernels.__name__}.") if ".cuda" not in found.name]
    unlisted = {value.name for module in modules for value in vars(module).values()
                if isinstance(value, Kernel | Jit) and id(value) not in listed}
    others = {"gemm.pack_tokens", "gemm.multiply"} if AMX else {"gemm_amx.pack_tokens", "gemm_amx.multiply"}  # or the other way round
    others |= set() if AMX_FLOATS else {"linear_amx.pack_columns", "linear_amx.multiply"}
    others |= set() if HAS_PAIRS else {"linear_bf16.pack_columns", "linear_bf16.multiply", "linear_fp8.multiply"}
    quantizing = {"weight_error.squared_error"}
    assert unlisted == quantizing | others, "what quantizing alone needs, and products of other processors"


def test_the_cache_is_named_by_all_kernel_sources():
    folder = cache_folder()
    assert folder is not None and folder.name == cache_key() and len(cache_key()) == 16


@pytest.mark.slow
@pytest.mark.parametrize("damage", [lambda found: b"", lambda found: found[: len(found) // 2], lambda found: found[:-9] + bytes(9)])
def test_a_damaged_cache_file_costs_time_once(tmp_path, damage):
    run = ("from effllm.kernels import warm, threads\nimport sys\n"
           "for name in ('_work', '_start', '_start_list', '_finish', '_run_alone', '_settle_job', '_spin'):\n"
           "    getattr(threads, name).load()\n"
           "threads.ThreadPool(2).close()\nprint('numba' in sys.modules)")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    for compiles in (True, False, True, False):
        done = subprocess.run([sys.executable, "-c", run], env=environment, capture_output=True, text=True)
        assert done.stdout == f"{compiles}\n", done.stderr[-1500:]
        if not compiles:
            for path in tmp_path.rglob("*.o"):
                path.write_bytes(damage(path.read_bytes()))
    assert len(list(tmp_path.rglob("*.o"))) == 7


def test_a_full_cache_folder_costs_time_alone(tmp_path, monkeypatch):
    """What cannot be kept runs all the same, and no half of a file stays."""
    monkeypatch.setattr(compiling, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(type(tmp_path), "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    fresh = Jit(threads._run_alone.body, threads._run_alone.signature, False)
    fresh.name = "threads.unkept"
    fresh.load()
    assert not list(tmp_path.iterdir()) and fresh.compiled is not None


def test_a_cache_folder_of_a_read_only_system_costs_time_alone(tmp_path, monkeypatch):
    """There even the removal of a file that does not exist is refused."""
    def refused(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(compiling, "cache_folder", lambda: tmp_path)
    for way in ("write_bytes", "unlink"):
        monkeypatch.setattr(type(tmp_path), way, refused)
    fresh = Jit(threads._run_alone.body, threads._run_alone.signature, False)
    fresh.name = "threads.refused"
    fresh.load()
    assert fresh.compiled is not None


def test_a_fault_in_a_kernel_ends_the_process():
    """No kernel raises; one that did must not hand back what it had not finished."""
    code = ("from effllm.kernels.compile import jit\n"
            "@jit('int64(int64)')\ndef third(many):\n    for _ in range(0, 3, many):\n        many += 0\n    return many\n"
            "print(third(1), flush=True)\nprint(third(0))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode < 0 and done.stdout == "1\n"


def test_what_a_run_without_numba_lacks_is_refused_where_it_is_compiled():
    def body(size):
        return np.zeros(size).sum()

    with pytest.raises(RuntimeError, match="calls .*NRT_.*, which a run without Numba lacks"):
        Jit(body, "float64(int64)", False).load()


def test_functions_of_one_name_are_distinguished():
    """Those of other modules than kernels are not kept, so each has code of its own."""
    made = [Jit(eval(f"lambda x: x + {add}"), "int64(int64)", False) for add in (1, 2)]
    assert [each(np.int32(40)) for each in made] == [41, 42] and made[0].name == made[1].name
    names = [each.name for each in warm.compiled_functions()]
    assert len(set(names)) == len(names), "files of the cache"


def test_threads_that_ask_for_one_function_compile_it_once():
    times, together = [], threading.Barrier(4)

    def compiled(body, signature, fastmath, name):
        times.append(name)
        return compile_object(body, signature, fastmath, name)

    asked = Jit(lambda x: x + 7, "int64(int64)", False)

    def ask(answers):
        together.wait()
        answers.append(asked(35))

    answers = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "compile_object", compiled)
        threads_of_four = [threading.Thread(target=ask, args=(answers,)) for _ in range(4)]
        for each in threads_of_four:
            each.start()
        for each in threads_of_four:
            each.join()
    assert answers == [42] * 4 and len(times) == 1


def test_jobs_that_are_noted_aside_run_when_they_are_asked_for() -> None:
    jobs, done = Jobs(ThreadPool(2)), np.zeros(3, np.int64)
    args = np.array([3, done.ctypes.data], np.int64)
    with jobs.deferring() as own:  # nothing is collected
        jobs.run(count_blocks, args.ctypes.data)
    assert done.tolist() == [1, 1, 1] and not own
    with jobs.collecting():
        with jobs.deferring() as own:
            jobs.run(count_blocks, args.ctypes.data)
        jobs.flush()
        assert done.tolist() == [1, 1, 1] and own == [(count_blocks.address, args.ctypes.data, True)]
        jobs.enqueue(own)
        jobs.flush(lambda: done.__iadd__(0))
        assert done.tolist() == [2, 2, 2]
        jobs.run(count_blocks, args.ctypes.data)
    assert done.tolist() == [3, 3, 3]
    jobs.pool.close()
