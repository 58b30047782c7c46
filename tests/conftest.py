"""Shared by all tests: folders isolated from the user's own, a hub on the loopback, and a simulated user at the terminal."""

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # read where a kernel is defined, Triton's own when it is first imported, by whatever library

sys.path.insert(0, str(Path(__file__).parent))  # what files of tests share lies beside them
from hub_server import Hub, running
from hub_user import HubUser
from server_process import MINUTE, ServerProcess, serving

from effllm.cli.server.answer_queue import AnswerQueue
from effllm.kernels import blas, warm
from effllm.kernels.threads import ThreadPool
from effllm.runtime.conversion import bit_search_cache
from effllm.runtime.library import ollama

# Sixteen thousand tests and the libraries that they import stay until the end. By Python's own numbers a collector goes through all of
# them so often that a third of the time until the first test, and a tenth of that behind it, is its.
gc.set_threshold(10_000, 20, 20)

# Without the slow tests a property is tried with a few examples, new ones each time; how long one takes says what else the machine does.
settings.register_profile("quick", max_examples=25, deadline=None)
settings.register_profile("whole", max_examples=150, deadline=None)
NO_PROFILE = "EFFLLM_NO_KV_PROFILE"  # `quantize` would take most of a minute for each of the models that tests make
TERMINAL_VARIABLES = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
FOLDER_VARIABLES = ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("quick" if config.option.markexpr == "not slow" else "whole")


def pytest_collection_finish() -> None:
    """Objects that exist before the first test are frozen, so that garbage collection skips them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries count their leftover objects when Python exits, and complain."""
    gc.unfreeze()


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    """Two kernel threads."""
    threads = ThreadPool(2)
    yield threads
    threads.close()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """A server of fable, shared by all tests of a file."""
    with serving() as started:
        yield started


@pytest.fixture(scope="session", autouse=True)
def isolated_user_folders() -> Iterator[None]:
    """Isolated folders: models, aliases and stored conversations written by tests are visible to tests only. The cache of compiled kernels
    is the machine's."""
    before = {name: os.environ.get(name) for name in (*FOLDER_VARIABLES, NO_PROFILE)}
    with tempfile.TemporaryDirectory(prefix="effllm-tests-") as folder:
        os.environ.update({name: str(Path(folder) / name) for name in FOLDER_VARIABLES})
        os.environ[NO_PROFILE] = "1"
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ollama, "SERVICE_FOLDER", Path(folder) / "no-service")
            patched.delenv("OLLAMA_MODELS", raising=False)
            yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(scope="module", autouse=True)
def remove_temporary_files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of a module whose tests passed: what all of them write would be 16 GB."""
    base, failed = tmp_path_factory.getbasetemp(), request.session.testsfailed
    before = {*base.iterdir()}
    yield
    if request.session.testsfailed == failed:
        for path in {*base.iterdir()} - before:
            shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def fixed_terminal() -> Iterator[None]:
    """A fixed terminal width and color mode, wherever the suite itself was started."""
    with pytest.MonkeyPatch.context() as patched:
        for name in TERMINAL_VARIABLES:
            patched.delenv(name, raising=False)
        yield


@pytest.fixture(autouse=True)
def empty_bit_search_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clean format search cache for every test."""
    folders: list[Path] = []
    monkeypatch.setattr(bit_search_cache, "folder",
                        lambda: folders[0] if folders else folders.append(tmp_path_factory.mktemp("damage")) or folders[0])


@pytest.fixture(scope="session", autouse=True)
def default_signal_handlers() -> Iterator[None]:
    """Restores signal handling, so that programs started by tests can be ended: what a shell starts in the background ignores Ctrl-C, what
    `nohup` starts ignores hangups, and children inherit both."""
    defaults = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.getsignal(number) for number in defaults}
    for number, handler in defaults.items():
        if before[number] is signal.SIG_IGN:
            signal.signal(number, handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session", autouse=True)
def single_threaded_oracles() -> Iterator[None]:
    """NumPy and torch serve as references here: their small products, split over threads that spin next to another test, take twice the
    time."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    with blas.one_thread():
        yield


@pytest.fixture(scope="session", autouse=True)
def fsync_disabled() -> Iterator[None]:
    """Disables fsync: a conversion waits for every tensor to survive a power cut, which no test has, ten thousand times in some files. What
    is synced, and in which order, is checked by tests that patch in their own listener; child processes of tests do sync."""
    with pytest.MonkeyPatch.context() as patched:
        for name in ("fsync", "fdatasync"):
            if hasattr(os, name):
                patched.setattr(os, name, lambda fd: os.fstat(fd) and None)  # which fails as well where nothing is open
        yield


@pytest.fixture(scope="session", autouse=True)
def compile_kernels_once() -> None:
    """Two test workers with a cold cache would compile the same functions in parallel, each on one core; this makes them wait for one that
    uses both."""
    if "PYTEST_XDIST_WORKER" in os.environ and warm.is_cold():
        list(warm.warm())


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, ThreadPool]]:
    """Thread pools by number of workers."""
    pools_by_size = {workers: ThreadPool(workers) for workers in (1, 2, 3)}
    yield pools_by_size
    for thread_pool in pools_by_size.values():
        thread_pool.close()


@pytest.fixture
def answer_queue() -> Iterator[AnswerQueue]:
    answer_queue = AnswerQueue(max_waiting=8)
    yield answer_queue
    answer_queue.close()
    assert answer_queue.join(MINUTE)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running() as hub:
        yield hub


@pytest.fixture
def user(tmp_path: Path, hub: Hub) -> HubUser:
    return HubUser(tmp_path, hub.endpoint)
