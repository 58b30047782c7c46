"""Direct reads: every byte, in the right order, whatever the disk does meanwhile."""

import ctypes
import errno
import os
import platform
import re
import struct
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from effllm.offload import direct_io
from effllm.offload.checkpoint import CheckpointError
from effllm.offload.direct_io import BLOCK, Interrupted, Read, Reader
from effllm.offload.memory import anonymous
from effllm.offload.time_slice import ATTRIBUTES, SET_ATTRIBUTES, SLICE_NS

PREADV = os.preadv
SIZE = 5 * BLOCK + 123


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes())
    return path


@pytest.fixture
def reader_of(file: Path):
    """Makes readers of the file, which are closed at the end."""
    opened: list[tuple[Reader, int]] = []

    def make(threads: int = 1, direct: bool = True) -> Reader:
        fd = os.open(file, os.O_RDONLY)
        opened.append((Reader({file: fd}, threads, direct), fd))
        return opened[-1][0]

    yield make
    for reader, fd in opened:
        reader.close()
        os.close(fd)


def reads(file: Path, memory: np.ndarray, size: int = 2 * BLOCK) -> list[Read]:
    """The whole file in reads of `size`."""
    view = memoryview(memory)
    return [Read(file, at, view[at : at + size], min(size, SIZE - at)) for at in range(0, SIZE, size)]


def everything(reader: Reader, file: Path) -> bytes:
    memory = anonymous(6 * BLOCK)
    reader.wait(reader.submit(reads(file, memory)))
    return memory[:SIZE].tobytes()


@pytest.mark.parametrize("mode", (True, False), ids=("direct", "buffered"))
@pytest.mark.parametrize("threads", (1, 4))
def test_every_byte_arrives_and_is_counted(file: Path, reader_of: Callable, mode: bool, threads: int) -> None:
    reader, started = reader_of(threads, mode), time.perf_counter()
    assert everything(reader, file) == file.read_bytes()
    took = time.perf_counter() - started
    assert (reader.traffic.reads, reader.traffic.nbytes) == (3, SIZE)
    assert reader.traffic.read_s > 0 and 0 < (busy := reader.traffic.busy_s) <= took
    time.sleep(0.2)  # of an idle disk
    assert everything(reader, file) == file.read_bytes()
    assert busy < reader.traffic.busy_s <= time.perf_counter() - started - 0.2
    assert reader.announcements() == []


@pytest.mark.parametrize("most", (1000, BLOCK, BLOCK + 1))
@pytest.mark.parametrize("mode", (True, False), ids=("direct", "buffered"))
def test_short_reads_continue(file: Path, reader_of: Callable, monkeypatch: pytest.MonkeyPatch, most: int, mode: bool) -> None:
    """A read that ends within a block cannot be continued by a direct one."""

    def some(fd: int, buffers: list, offset: int) -> int:
        count = min(PREADV(fd, buffers, offset), most)
        buffers[0][count:] = b"\xee" * (len(buffers[0]) - count)
        return count

    monkeypatch.setattr(os, "preadv", some)
    assert everything(reader_of(direct=mode), file) == file.read_bytes()


def test_a_failing_disk_is_an_error_of_one_line_and_no_end(file: Path, reader_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of()

    def fail(fd: int, buffers: list, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fail)
        with pytest.raises(CheckpointError, match="weights cannot be read: Input/output error") as caught:
            everything(reader, file)
        assert len(caught.value.message.splitlines()) == 1 and caught.value.hint
    assert everything(reader, file) == file.read_bytes()


def test_a_refused_direct_read_falls_back_once_and_says_so(file: Path, reader_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems open a file for direct reads and refuse each of them."""
    reader = reader_of(threads=2)
    refused = []

    def refuse(fd: int, buffers: list, offset: int) -> int:
        if fd == reader._sources[file].opened:
            refused.append(offset)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return PREADV(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", refuse)
    assert everything(reader, file) == file.read_bytes()
    assert 1 <= len(refused) <= 2
    tried = len(refused)
    assert everything(reader, file) == file.read_bytes() and len(refused) == tried
    said = reader.announcements()
    assert len(said) == 1 and "weights" in said[0] and "page cache" in said[0]
    assert reader.announcements() == []


def test_a_file_system_without_direct_reads(file: Path, reader_of: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.open

    def refuse(path: str, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return before(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    reader = reader_of()
    assert everything(reader, file) == file.read_bytes()
    assert len(reader.announcements()) == 1


@pytest.mark.parametrize("mode", (True, False), ids=("direct", "buffered"))
def test_a_file_that_is_cut(file: Path, reader_of: Callable, mode: bool) -> None:
    reader = reader_of(direct=mode)
    os.truncate(file, 3 * BLOCK + 7)
    with pytest.raises(CheckpointError, match="became shorter while it was being read"):
        everything(reader, file)


def test_a_file_that_is_gone_is_read_on(file: Path, reader_of: Callable) -> None:
    content = file.read_bytes()
    reader = reader_of()
    file.rename(file.with_name("moved"))
    file.write_bytes(b"\0" * SIZE)
    assert everything(reader, file) == content


class Gate:
    """A disk that completes reads when released, and records what was requested."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.open, self.reached = threading.Event(), threading.Event()

    def preadv(self, fd: int, buffers: list, offset: int) -> int:
        self.asked.append(offset)
        self.reached.set()
        assert self.open.wait(30)
        return PREADV(fd, buffers, offset)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch):
    made = Gate()
    monkeypatch.setattr(os, "preadv", made.preadv)
    yield made
    made.open.set()


def test_what_is_waited_for_comes_before_what_is_read_ahead(file: Path, reader_of: Callable, gate: Gate) -> None:
    reader = reader_of(threads=1)
    ahead = reads(file, anonymous(6 * BLOCK), BLOCK)
    first, second, third = (reader.submit([read]) for read in ahead[:3])
    assert gate.reached.wait(30)  # the first is under way, nothing overtakes it
    now = reader.submit([ahead[4]], urgent=True)
    gate.open.set()
    reader.wait(third)  # it overtakes the second
    reader.wait(now)
    reader.wait(second)
    reader.wait(first)
    assert gate.asked.index(4 * BLOCK) < gate.asked.index(BLOCK)


def test_what_is_taken_back_is_not_read(file: Path, reader_of: Callable, gate: Gate) -> None:
    reader = reader_of(threads=1)
    under_way, *queued = (reader.submit([read]) for read in reads(file, anonymous(6 * BLOCK), BLOCK))
    assert gate.reached.wait(30)
    for ticket in (under_way, *queued):
        reader.drop(ticket)
    assert under_way.left == 1 and not any(ticket.left for ticket in queued)
    gate.open.set()
    reader.wait(under_way)
    assert gate.asked == [0]


def test_a_wait_for_a_disk_that_hangs_can_be_ended(file: Path, reader_of: Callable, gate: Gate) -> None:
    reader = reader_of(threads=1)
    ticket = reader.submit(reads(file, anonymous(6 * BLOCK)))
    asked = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) > 3

    with pytest.raises(Interrupted):
        reader.wait(ticket, cancelled)
    reader.close()  # comes back although a thread does not
    assert any(thread.name.startswith("effllm-disk") for thread in threading.enumerate())
    gate.open.set()
    for thread in reader._threads:
        thread.join(30)
        assert not thread.is_alive() and thread.daemon


@pytest.mark.parametrize("failed", (MemoryError(), ValueError("too long"), SystemExit(3)), ids=lambda each: type(each).__name__)
def test_the_error_of_a_job_is_raised_in_its_waiter(file: Path, reader_of: Callable, failed: BaseException) -> None:
    class Fails:
        def run(self, fill: Callable[[Read], int]) -> int:
            raise failed

    reader, until = reader_of(threads=1), time.monotonic() + 60
    ticket = reader.submit([Fails()])
    with pytest.raises(CheckpointError, match=f"{type(failed).__name__}.*{failed}") as error:
        reader.wait(ticket, lambda: time.monotonic() > until)
    assert error.value.__cause__.__cause__ is failed and not ticket.left and reader.idle
    assert everything(reader, file) == file.read_bytes()  # the thread goes on


def test_reads_are_of_a_size_that_a_disk_likes() -> None:
    assert 1 << 20 <= direct_io.READ_NBYTES <= 4 << 20 and direct_io.READ_NBYTES % BLOCK == 0


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() not in SET_ATTRIBUTES, reason="elsewhere threads stay as they are")
def test_threads_that_read_are_not_kept_waiting_by_those_that_compute(reader_of: Callable) -> None:
    """They ask for short turns, and keep their niceness."""
    found, reader = [], reader_of()

    class Asked:
        def run(self, fill: Callable[[Read], int]) -> int:
            memory = ctypes.create_string_buffer(struct.calcsize(ATTRIBUTES))
            got = ctypes.CDLL(None).syscall(SET_ATTRIBUTES[platform.machine()] + 1, 0, memory, len(memory), 0)  # sched_getattr
            found.append((got, struct.unpack(ATTRIBUTES, memory.raw), os.getpriority(os.PRIO_PROCESS, 0)))
            return 0

    reader.wait(reader.submit([Asked()]))
    ((got, (_, policy, _, nice, _, runtime, _, _), own),) = found
    assert got == 0 and policy == os.SCHED_OTHER and nice == own == os.getpriority(os.PRIO_PROCESS, 0)
    version = tuple(map(int, re.match(r"(\d+)\.(\d+)", platform.release()).groups()))
    assert runtime == (SLICE_NS if version >= (6, 12) else 0)
