"""The asynchronous reader over a kernel queue: order, cancelled reads, and the fallback to threads."""

import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from effllm.offload import async_reader
from effllm.offload.async_reader import MAX_IN_FLIGHT, MAX_PREFETCHES, AsyncReader
from effllm.offload.checkpoint import CheckpointError
from effllm.offload.direct_io import BLOCK, Interrupted, Read, Ticket
from effllm.offload.linux_aio import AioRead
from effllm.offload.memory import anonymous

BLOCKS = 96


class Patient:
    """A queue that completes reads when released: `let` says how many more of those submitted."""

    def __init__(self, most: int) -> None:
        assert most == MAX_IN_FLIGHT
        self.most, self.waiting, self.left, self.result = most, [], BLOCKS, None
        Patient.made = self

    @property
    def in_flight(self) -> list[object]:
        return [name for name, _ in self.waiting]

    def submit(self, reads: list[tuple[object, AioRead]]) -> int:
        reads = reads[: self.most - len(self.waiting)]
        self.waiting += reads
        return len(reads)

    def collect(self, min_completed: int = 0, timeout_s: float = 0.0) -> list[tuple[object, int]]:
        done, self.waiting = self.waiting[: self.left], self.waiting[self.left :]
        self.left -= len(done)
        for _, asked in done:
            if self.result is None:
                os.preadv(asked.descriptor, [(ctypes.c_ubyte * asked.nbytes).from_address(asked.address)], asked.offset)
        return [(name, asked.nbytes if self.result is None else self.result) for name, asked in done]

    def close(self) -> None:
        self.waiting = []


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, BLOCKS * BLOCK, np.uint8).tobytes())
    return path


@pytest.fixture
def reader(file: Path) -> Iterator[AsyncReader]:
    opened = os.open(file, os.O_RDONLY)
    made = AsyncReader({file: opened})
    if made.direct(file) is None:
        pytest.skip("no direct reads on this file system")
    yield made
    made.close()
    os.close(opened)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> AsyncReader:
    """The same over a queue that completes reads when released."""
    monkeypatch.setattr(async_reader, "AioQueue", Patient)
    return request.getfixturevalue("reader")


class Pieces:
    """Blocks of a file, each with memory of its own."""

    def __init__(self, file: Path) -> None:
        self.file, self.memory = file, anonymous(BLOCKS * BLOCK)

    def reads(self, *blocks: int) -> list[Read]:
        view = memoryview(self.memory)
        return [Read(self.file, block * BLOCK, view[block * BLOCK : (block + 1) * BLOCK], BLOCK) for block in blocks]

    def there(self, *blocks: int) -> bool:
        content = np.frombuffer(self.file.read_bytes(), np.uint8).reshape(BLOCKS, BLOCK)
        return bool((self.memory.reshape(BLOCKS, BLOCK)[list(blocks)] == content[list(blocks)]).all())


def test_many_reads_and_jobs_of_threads_come_together(file: Path, reader: AsyncReader) -> None:
    """More at once than the queue takes: the rest is for threads, and counts in the same ticket."""
    pieces = Pieces(file)
    ahead = [reader.submit(pieces.reads(block)) for block in range(8)]
    reader.wait(reader.submit(pieces.reads(*range(8, BLOCKS)), urgent=True))
    assert pieces.there(*range(8, BLOCKS))
    for ticket in ahead:
        reader.wait(ticket)
    assert pieces.there(*range(BLOCKS)) and reader.idle
    traffic = reader.traffic
    assert (traffic.reads, traffic.nbytes) == (BLOCKS, BLOCKS * BLOCK) and traffic.busy_s > 0


def test_few_reads_ahead_begin_at_a_time_and_what_is_waited_for_at_once(file: Path, patient: AsyncReader) -> None:
    pieces, queue = Pieces(file), Patient.made
    queue.left = 0
    ahead = [patient.submit(pieces.reads(block)) for block in range(6)]
    assert len(queue.waiting) == MAX_PREFETCHES and not patient.idle
    urgent = patient.submit(pieces.reads(10, 11), urgent=True)
    assert len(queue.waiting) == MAX_PREFETCHES + 2
    queue.left = 1
    patient.poll()
    assert ahead[0].left == 0 and len(queue.waiting) == MAX_PREFETCHES + 1, "nothing more ahead while so much is under way"
    queue.left = MAX_PREFETCHES + 1
    patient.poll()
    assert urgent.left == 0 and pieces.there(10, 11) and len(queue.waiting) == 3
    queue.left = BLOCKS
    for ticket in ahead:
        patient.wait(ticket)
    assert pieces.there(*range(6)) and patient.idle


def test_what_is_wanted_after_all_begins_before_the_rest(file: Path, patient: AsyncReader) -> None:
    pieces, queue = Pieces(file), Patient.made
    queue.left = 0
    ahead = [patient.submit(pieces.reads(block)) for block in range(MAX_PREFETCHES + 3)]
    ended = []
    with pytest.raises(Interrupted):
        patient.wait(ahead[-1], lambda: bool(ended) or ended.append(None))
    assert queue.waiting[-1][0].ticket is ahead[-1] and len(queue.waiting) == MAX_PREFETCHES + 1
    queue.left = BLOCKS
    patient.wait(ahead[-1])
    assert pieces.there(MAX_PREFETCHES + 2)


def test_what_has_not_begun_is_taken_back(file: Path, patient: AsyncReader) -> None:
    pieces, queue = Pieces(file), Patient.made
    queue.left = 0
    ahead = [patient.submit(pieces.reads(block)) for block in range(MAX_PREFETCHES + 2)]
    for ticket in ahead:
        patient.drop(ticket)
    assert [ticket.left for ticket in ahead] == [1] * MAX_PREFETCHES + [0, 0], "the system still writes where those under way go"
    queue.left = BLOCKS
    patient.poll()
    assert not any(ticket.left for ticket in ahead) and patient.idle and patient.traffic.reads == MAX_PREFETCHES


def test_threads_read_what_the_queue_fails_with_and_all_after_it(file: Path, patient: AsyncReader) -> None:
    pieces, queue = Pieces(file), Patient.made
    queue.result = -errno.EIO
    patient.wait(patient.submit(pieces.reads(0, 1, 2), urgent=True))
    assert pieces.there(0, 1, 2)
    queue.submit = None
    patient.wait(patient.submit(pieces.reads(3), urgent=True))
    ticket = patient.submit(pieces.reads(4))
    patient.wait(ticket)
    assert pieces.there(3, 4)


def test_guesses_stay_behind_what_is_waited_for_where_the_queue_failed(
        file: Path, patient: AsyncReader, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, handed = Pieces(file), []
    Patient.made.result = -errno.EIO
    patient.wait(patient.submit(pieces.reads(0), urgent=True))
    own = patient.to_threads
    monkeypatch.setattr(patient, "to_threads", lambda reads, ticket, urgent: handed.append(urgent) or own(reads, ticket, urgent))
    ahead, urgent = patient.submit(pieces.reads(1)), patient.submit(pieces.reads(2), urgent=True)
    for ticket in (ahead, urgent):
        patient.wait(ticket)
    assert handed == [False, True] and pieces.there(1, 2)


def test_a_file_that_became_shorter_is_named(file: Path, reader: AsyncReader) -> None:
    pieces = Pieces(file)
    os.truncate(file, 10 * BLOCK)
    with pytest.raises(CheckpointError, match="became shorter while it was being read"):
        reader.wait(reader.submit(pieces.reads(3, 40), urgent=True))
    reader.wait(reader.submit(pieces.reads(4), urgent=True))
    assert pieces.memory.reshape(BLOCKS, BLOCK)[4].any()


def test_jobs_that_are_more_than_reads_are_done_by_threads(file: Path, reader: AsyncReader) -> None:
    by: list[str] = []

    class Job:
        def run(self, fill) -> int:
            by.append(threading.current_thread().name)
            return fill(pieces.reads(7)[0])

    pieces = Pieces(file)
    ticket = reader.submit([*pieces.reads(1), Job()], urgent=True)
    reader.wait(ticket)
    assert pieces.there(1, 7) and by[0].startswith("effllm-disk") and isinstance(ticket, Ticket)


def test_file_systems_without_direct_reads_and_systems_without_a_queue(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, pieces = os.open(file, os.O_RDONLY), Pieces(file)
    buffered = AsyncReader({file: opened}, direct=False)
    buffered.wait(buffered.submit(pieces.reads(1), urgent=True))

    def without_queue(most: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(async_reader, "AioQueue", without_queue)
    threads = AsyncReader({file: opened})
    threads.wait(threads.submit(pieces.reads(2)))
    threads.poll()
    assert pieces.there(1, 2) and buffered.traffic.read_s > 0 and threads.traffic.read_s > 0
    for made in (buffered, threads):
        made.close()
    os.close(opened)
