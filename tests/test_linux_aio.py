"""Reads through Linux AIO: the same bytes as by threads, and reads that fail or never complete."""

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from effllm.offload.async_reads import MAX_SYNCHRONOUS, MIN_READS, AsyncReads
from effllm.offload.checkpoint import CheckpointError
from effllm.offload.direct_io import BLOCK, Interrupted, Read, Reader, direct_descriptor
from effllm.offload.linux_aio import CALLS, AioQueue, AioRead
from effllm.offload.memory import anonymous
from effllm.offload.page_slots import PageSlots

PAGES = 24


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pages"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, PAGES * BLOCK, np.uint8).tobytes())
    return path


@pytest.fixture
def descriptor(file: Path) -> Iterator[int]:
    opened = os.open(file, os.O_RDONLY)
    direct = direct_descriptor(opened)
    if direct is None:
        pytest.skip("no direct reads on this file system")
    yield direct
    os.close(direct)
    os.close(opened)


@pytest.fixture
def queue(descriptor: int) -> Iterator[AioQueue]:
    try:
        made = AioQueue(16)
    except OSError as error:
        pytest.skip(f"no queue for reads here: {error}")
    yield made
    made.close()


@pytest.fixture
def reader(file: Path) -> Iterator[Reader]:
    opened = os.open(file, os.O_RDONLY)
    made = Reader({file: opened}, threads=2)
    yield made
    made.close()
    os.close(opened)


def collected(queue: AioQueue) -> dict[object, int]:
    done: dict[object, int] = {}
    while queue.in_flight:
        done |= dict(queue.collect(len(queue.in_flight), 1.0))
    return done


def test_the_bytes_are_those_of_the_file(file: Path, queue: AioQueue, descriptor: int) -> None:
    memory, content = anonymous(PAGES * BLOCK), file.read_bytes()
    pages = [7, 0, 23, 8, 3, 21]
    for _ in range(5):  # places are used again
        reads = [(page, AioRead(descriptor, memory.ctypes.data + i * BLOCK, page * BLOCK, BLOCK)) for i, page in enumerate(pages)]
        assert queue.submit(reads) == len(pages)
        assert collected(queue) == dict.fromkeys(pages, BLOCK)
        for i, page in enumerate(pages):
            assert memory[i * BLOCK : (i + 1) * BLOCK].tobytes() == content[page * BLOCK : (page + 1) * BLOCK]
        pages = [(page + 5) % PAGES for page in pages]
    assert not queue.collect() and not queue.collect(3, 1.0), "nothing is waited for that was not asked"


def test_no_more_are_taken_than_there_is_room_for(queue: AioQueue, descriptor: int) -> None:
    memory = anonymous(PAGES * BLOCK)
    reads = [(page, AioRead(descriptor, memory.ctypes.data + page * BLOCK, page * BLOCK, BLOCK)) for page in range(PAGES)]
    assert queue.submit(reads) == 16 and len(queue.in_flight) == 16 and queue.submit(reads[16:]) == 0
    assert collected(queue) == dict.fromkeys(range(16), BLOCK)
    assert queue.submit(reads[16:]) == 8 and len(collected(queue)) == 8


def test_what_lies_after_the_end_is_told_as_missing(queue: AioQueue, descriptor: int) -> None:
    memory = anonymous(4 * BLOCK)
    assert queue.submit([("across", AioRead(descriptor, memory.ctypes.data, (PAGES - 1) * BLOCK, 2 * BLOCK))]) == 1
    assert collected(queue) == {"across": BLOCK}


def test_a_read_that_the_system_refuses_is_not_taken(queue: AioQueue, descriptor: int) -> None:
    closed, memory = os.dup(descriptor), anonymous(BLOCK)
    os.close(closed)
    assert queue.submit([(0, AioRead(closed, memory.ctypes.data, 0, BLOCK))]) == 0 and not queue.in_flight


def test_systems_without_a_queue_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(OSError) as caught:
        AioQueue(4)
    assert caught.value.errno == errno.ENOSYS
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(OSError):
        AioQueue(4)
    assert "riscv64" not in CALLS


def slots_of(file: Path, reader: Reader, queue: object, count: int = 12, nbytes: int = BLOCK,
             cancelled: Callable[[], bool] = lambda: False) -> PageSlots:
    """Pages of a block, or of other sizes that begin on one, through a queue."""

    def reads(page: int, memory: np.ndarray) -> list[Read]:
        return [Read(file, page * BLOCK, memoryview(memory)[: -(-nbytes // BLOCK) * BLOCK], nbytes)]

    return PageSlots(nbytes, count, reader, reads, lambda page: page * BLOCK, cancelled, AsyncReads(queue, reader), reader.direct(file))


def fetched(slots: PageSlots, pages: list[int]) -> dict[int, bytes]:
    start, memory = slots._memory.ctypes.data, slots._memory
    return {page: memory[address - start : address - start + BLOCK].tobytes() for come in slots.fetch(pages) for page, address in come}


def blocks(file: Path, pages: list[int]) -> dict[int, bytes]:
    content = file.read_bytes()
    return {page: content[page * BLOCK : (page + 1) * BLOCK] for page in pages}


def test_pages_that_are_waited_for_need_no_thread(file: Path, reader: Reader, queue: AioQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "preadv")
    slots = slots_of(file, reader, queue)
    for pages in ([3, 1, 4, 15, 9, 2, 6, 5], [3, 5, 8, 9, 7, 20], [0, 1], [11, 23, 3]):
        assert fetched(slots, pages) == blocks(file, pages)
    traffic = reader.traffic
    assert traffic.nbytes == traffic.reads * BLOCK > 0 and 0 < traffic.busy_s and traffic.read_s == 0
    assert traffic.reads == slots.num_requested - slots.num_hits


def test_a_file_that_became_shorter_is_named(file: Path, reader: Reader, queue: AioQueue) -> None:
    slots = slots_of(file, reader, queue)
    os.truncate(file, 10 * BLOCK)
    with pytest.raises(CheckpointError, match="became shorter while it was being read"):
        fetched(slots, [2, 17, 4])
    assert fetched(slots, [2, 4, 9]) == blocks(file, [2, 4, 9])
    assert not queue.in_flight and reader.traffic.read_s > 0, "threads have taken over"


def test_the_last_page_may_end_within_a_block(file: Path, reader: Reader, queue: AioQueue) -> None:
    slots = slots_of(file, reader, queue, nbytes=BLOCK + 700)
    os.truncate(file, 23 * BLOCK + 700)
    wanted = file.read_bytes()[22 * BLOCK :]
    [[(page, address)]] = slots.fetch([22])
    begin = address - slots._memory.ctypes.data
    assert page == 22 and slots._memory[begin : begin + len(wanted)].tobytes() == wanted and reader.traffic.read_s == 0


class Failing:
    """A queue whose reads all fail, or never end, or are made by the call that begins them."""

    def __init__(self, result: int | None) -> None:
        self.result, self.names, self.calls = result, [], 0

    @property
    def in_flight(self) -> list[object]:
        return self.names

    def submit(self, reads: list[tuple[object, AioRead]]) -> int:
        self.names += [name for name, _ in reads]
        self.calls += 1
        return len(reads)

    def collect(self, min_completed: int = 0, timeout_s: float = 0.0) -> list[tuple[object, int]]:
        if self.result is None:
            return []
        done, self.names = [(name, self.result) for name in self.names], []
        return done


def test_reads_that_fail_are_made_by_threads_and_so_are_all_after_them(file: Path, reader: Reader) -> None:
    queue = Failing(-errno.EIO)
    slots = slots_of(file, reader, queue)
    for pages in ([1, 2, 3], [4, 5], [1, 6]):
        assert fetched(slots, pages) == blocks(file, pages)
    assert queue.calls == 1


def test_reads_that_never_end_can_be_left(file: Path, reader: Reader) -> None:
    queue, ended = Failing(None), [False, False, True]
    slots = slots_of(file, reader, queue, 3, cancelled=lambda: ended.pop(0))
    with pytest.raises(Interrupted):
        fetched(slots, [1, 2])
    assert not slots._pages and len(slots._evicted_in_flight) == 2, "their memory is not given to others"
    queue.result, ended[:] = BLOCK, [False] * 9
    for name in queue.names:
        assert name.is_dropped
    slots.forget(1)
    slots._release_evicted()
    assert len(slots._free_slots) == 3


def test_a_queue_that_only_looks_like_one_is_abandoned(file: Path, reader: Reader) -> None:
    """Every call reads all that it is handed: threads would do that at the same time."""
    queue = Failing(BLOCK)
    slots = slots_of(file, reader, queue)
    for turn in range(2 * MAX_SYNCHRONOUS):
        pages = [(MIN_READS * turn + i) % PAGES for i in range(MIN_READS)]
        assert set(fetched(slots, pages)) == set(pages)
    assert queue.calls == MAX_SYNCHRONOUS
    assert fetched(slots, [0, 12]) == blocks(file, [0, 12])
