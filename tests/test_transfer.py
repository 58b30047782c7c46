"""Transfers without a hub: concurrent threads on one file, forced into one order."""

import hashlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from effllm import EffllmError
from effllm.offload import running_hash
from effllm.offload import transfer as transfer_module
from effllm.offload.partial_file import Digest, PartialFile
from effllm.offload.transfer import PIECE_NBYTES, transfer
from effllm.offload.transfer_types import Complete, Download, RestartFile, Retrying

SECONDS = 60.0  # after which another thread hangs
CONTENT = os.urandom(3 * PIECE_NBYTES)


class Quiet:
    """No network."""

    def cut(self) -> None:
        """Nothing is open."""


class Bytes:
    """A body that sends CONTENT from `begin` on, and calls `then` instead of a second piece."""

    def __init__(self, begin: int, then=None) -> None:
        self.at, self.then = begin, then

    def readinto(self, view: memoryview) -> int:
        if self.then is not None and self.at:
            self.then()
        count = min(len(view), len(CONTENT) - self.at)
        view[:count] = CONTENT[self.at : self.at + count]
        self.at += count
        return count

    def close(self) -> None:
        """Nothing is open."""


class Watched(PartialFile):
    """A part file whose first read, once `pause` is given, begins and ends when `pause` says so."""

    pause = None

    def readinto(self, offset: int, view: memoryview) -> int:
        pause, self.pause = self.pause, None
        if pause is None:
            return super().readinto(offset, view)
        with pause:
            return super().readinto(offset, view)


@pytest.fixture
def part(tmp_path: Path) -> Watched:
    digest = Digest("sha256", hashlib.sha256(CONTENT).hexdigest())
    return Watched(tmp_path / "data", tmp_path / "journal", len(CONTENT), digest)


def test_a_fresh_start_while_the_bytes_before_it_are_hashed(part: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is empty for a moment, and whoever hashes it reads in that moment."""
    hashing, emptied, hashed = threading.Event(), threading.Event(), threading.Event()

    class Pause:
        def __enter__(self) -> None:
            hashing.set()
            assert emptied.wait(SECONDS)

        def __exit__(self, *_: object) -> None:
            hashed.set()

    ftruncate, bodies = os.ftruncate, []

    def truncating(fd: int, nbytes: int) -> None:
        ftruncate(fd, nbytes)
        if fd == part._fd and not nbytes:
            emptied.set()
            assert hashed.wait(SECONDS)

    def changed() -> None:
        assert hashing.wait(SECONDS)
        monkeypatch.setattr(os, "ftruncate", truncating)
        raise RestartFile("it changed on the server")

    def opened(name: str, begin: int, end: int) -> Bytes:
        bodies.append((name, begin, end))
        return Bytes(begin, changed if len(bodies) == 1 else None)

    monkeypatch.setattr(transfer_module, "FIRST_NBYTES", len(CONTENT))  # one range
    part.pause = Pause()
    events = list(transfer([Download("weights", part)], opened, Quiet()))
    assert [event.text for event in events if isinstance(event, Retrying)] == [
        "weights: it changed on the server; downloading it from the beginning"]
    assert sum(isinstance(event, Complete) for event in events) == 1
    assert part.path.read_bytes() == CONTENT and hashed.is_set() and len(bodies) == 2
    part.close()


def test_what_comes_slowly_is_written_and_told_as_it_comes(part: Watched, tmp_path: Path) -> None:
    """Less than a chunk in seconds: nothing of it was on the disk, nor in the amount that the user sees."""

    class Slow(Bytes):
        def readinto(self, view: memoryview) -> int:
            time.sleep(0.05)
            return super().readinto(view[: PIECE_NBYTES // 50])

    events, told = transfer([Download("weights", part)], lambda name, begin, end: Slow(begin), Quiet()), []
    until = time.monotonic() + SECONDS
    while len(told) < 4 and time.monotonic() < until:
        told.append(next(events).nbytes)
        told = sorted({*told} - {0})
    again = PartialFile(part.path, tmp_path / "journal", part.size, part.digest)  # as after a kill
    events.close()
    assert told[0] < told[3] <= again.received_nbytes < PIECE_NBYTES and part.received_nbytes < PIECE_NBYTES
    assert told[1] - told[0] >= PIECE_NBYTES // 50
    again.close()
    part.close()


def test_a_file_that_somebody_cuts_is_reported(part: Watched) -> None:
    class Cut:
        def __enter__(self) -> None:
            deadline = time.monotonic() + SECONDS
            while part.received_nbytes < part.size and time.monotonic() < deadline:  # what is written later would lengthen it again
                time.sleep(0.001)
            os.truncate(part.path, 0)

        def __exit__(self, *_: object) -> None:
            """The file stays as it is."""

    part.pause = Cut()
    with pytest.raises(EffllmError, match="data became shorter while it was being written"):
        list(transfer([Download("weights", part)], lambda name, begin, end: Bytes(begin), Quiet(), connections=1))
    part.close()


def slow_to_hash(monkeypatch: pytest.MonkeyPatch, behind: list[int], received: Callable[[], int]) -> None:
    """A hash that takes its time, and notes how many bytes wait for it."""
    made = running_hash.new_hash

    class Slow:
        def __init__(self, digest: Digest, size: int) -> None:
            self.hash, self.at = made(digest, size), 0

        def update(self, data: memoryview) -> None:
            time.sleep(0.02)
            self.hash.update(data)
            self.at += len(data)
            behind.append(received() - self.at)

        def hexdigest(self) -> str:
            return self.hash.hexdigest()

    monkeypatch.setattr(running_hash, "new_hash", Slow)
    monkeypatch.setattr(running_hash, "HASH_NBYTES", 64 << 10)
    for name, value in {"RANGE_NBYTES": 64 << 10, "FIRST_NBYTES": 16 << 10, "PIECE_NBYTES": 16 << 10, "BACKLOG_NBYTES": 256 << 10}.items():
        monkeypatch.setattr(transfer_module, name, value)


def test_receivers_wait_for_a_hash_that_is_far_behind(part: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it has the processor, and what it reads is still in memory."""
    behind: list[int] = []
    slow_to_hash(monkeypatch, behind, lambda: part.received_nbytes)
    events = transfer([Download("file", part)], lambda name, begin, end: Bytes(begin), Quiet(), connections=1)  # nothing before it is late
    assert Complete in {type(event) for event in events}
    assert 0 <= max(behind) <= (256 << 10) + (64 << 10) + (16 << 10), "what may wait, what is being hashed, and one more piece"


def test_receivers_do_not_wait_while_an_earlier_run_s_bytes_are_hashed(part: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hash and network work side by side then: the rest is here long before the hash has come as far."""
    for at in range(0, 2 * PIECE_NBYTES, PIECE_NBYTES):
        part.write(at, CONTENT[at : at + PIECE_NBYTES])
    behind: list[int] = []
    slow_to_hash(monkeypatch, behind, lambda: part.received_nbytes)
    assert Complete in {type(event) for event in transfer([Download("file", part)], lambda name, begin, end: Bytes(begin), Quiet())}
    all_here = next(n for n, waiting in enumerate(behind, 1) if waiting == len(CONTENT) - n * (64 << 10))
    assert all_here * (64 << 10) <= 1.25 * PIECE_NBYTES, "the hash had come as far as this run's bytes are many, not past the earlier ones"


def test_a_host_that_does_not_answer_holds_up_nobody_who_leaves(part: Watched) -> None:
    """A connection that is being made can only be left to itself; what it brings when all has stopped is written nowhere."""
    waiting, answered, closed = threading.Event(), threading.Event(), threading.Event()

    class Late(Bytes):
        def close(self) -> None:
            closed.set()

    def opened(name: str, begin: int, end: int) -> Bytes:
        waiting.set()
        assert answered.wait(SECONDS)
        return Late(begin)

    events = transfer([Download("weights", part)], opened, Quiet())
    next(events)
    assert waiting.wait(SECONDS)
    began = time.monotonic()
    events.close()
    assert time.monotonic() - began < transfer_module.JOIN_TIMEOUT_S / 2
    answered.set()
    assert closed.wait(SECONDS) and part.received_nbytes == 0
    part.close()


def test_nor_is_a_file_begun_again_when_all_has_stopped(part: Watched) -> None:
    waiting, answered, restarted = threading.Event(), threading.Event(), []

    def opened(name: str, begin: int, end: int) -> Bytes:
        waiting.set()
        assert answered.wait(SECONDS)
        raise RestartFile("it changed on the server")

    part.restart = lambda: restarted.append(True)
    events = transfer([Download("weights", part)], opened, Quiet(), connections=1)
    next(events)
    assert waiting.wait(SECONDS)
    events.close()
    answered.set()
    for thread in threading.enumerate():
        if thread.name.startswith("effllm-receive"):
            thread.join(SECONDS)
    assert not restarted
    part.close()
