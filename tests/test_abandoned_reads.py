"""Reads no longer wanted but still under way into memory that has been reused: their failure is ignored."""

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from effllm.offload.checkpoint import CheckpointError
from effllm.offload.direct_io import BLOCK, Read, Reader
from effllm.offload.memory import anonymous
from effllm.offload.page_slots import PageSlots, slot_nbytes
from effllm.offload.read_ahead import ReadAhead

PREADV = os.preadv
PLACES = 4


class Disk:
    """Completes reads when released; reads at the offsets of `bad` fail."""

    def __init__(self) -> None:
        self.open, self.reached, self.bad = threading.Event(), threading.Event(), set()
        self.asked: list[int] = []

    def preadv(self, fd: int, buffers: list, offset: int) -> int:
        self.asked.append(offset)
        self.reached.set()
        assert self.open.wait(30)
        if offset in self.bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return PREADV(fd, buffers, offset)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk()
    monkeypatch.setattr(os, "preadv", made.preadv)
    yield made
    made.open.set()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, PLACES * BLOCK, np.uint8).tobytes())
    return path


@pytest.fixture
def reader(file: Path, disk: Disk) -> Iterator[Reader]:
    fd = os.open(file, os.O_RDONLY)
    made = Reader({file: fd}, threads=1)
    yield made
    disk.open.set()
    made.close()
    os.close(fd)


def block(file: Path, place: int) -> bytes:
    return file.read_bytes()[place * BLOCK : (place + 1) * BLOCK]


def meanwhile(disk: Disk, wanted: Callable[[], object]) -> object:
    """What `wanted` gives where the disk answers a moment after it began to wait."""
    opening = threading.Timer(0.2, disk.open.set)
    opening.start()
    try:
        return wanted()
    finally:
        opening.join()


@pytest.fixture
def turns(reader: Reader, file: Path) -> tuple[ReadAhead, np.ndarray]:
    """An order of four blocks that share memory for one."""
    memory = anonymous(BLOCK)

    def ask(place: int, taken: Sequence[object]) -> tuple[str, list[Read]] | None:
        return None if taken else ("the only place", [Read(file, place * BLOCK, memoryview(memory), BLOCK)])

    return ReadAhead(reader, ask, lambda: False, PLACES), memory


@pytest.mark.parametrize("fails", (False, True))
def test_a_place_waits_for_what_was_given_up_and_not_for_its_outcome(disk, file, turns, fails):
    order, memory = turns
    disk.bad = {0} if fails else set()
    order.read_ahead()
    assert disk.reached.wait(30)  # the first is under way when the third is wanted
    turn = meanwhile(disk, lambda: order.enter(2))
    assert turn.number == 2 and memory.tobytes() == block(file, 2)
    order.leave()
    order.enter(3)
    assert memory.tobytes() == block(file, 3)


def test_an_error_of_what_is_wanted_is_reported_and_read_again(disk, file, turns):
    order, memory = turns
    disk.open.set()
    disk.bad = {BLOCK}
    with pytest.raises(CheckpointError, match="Input/output error"):
        order.enter(1)
    disk.bad = set()
    assert order.enter(1).ticket.error is None and memory.tobytes() == block(file, 1)


@pytest.fixture
def slots(reader: Reader, file: Path) -> PageSlots:
    """One slot for four pages of a block."""
    return PageSlots(BLOCK, 1, reader, lambda page, memory: [Read(file, page * BLOCK, memoryview(memory)[:BLOCK], BLOCK)],
                     lambda page: page * BLOCK, lambda: False)


def held(slots: PageSlots, page: int) -> bytes:
    """A page's bytes as they lie where `fetch` says."""
    [[(found, address)]] = slots.fetch([page])
    start = address - slots._memory.ctypes.data
    assert found == page and start % slot_nbytes(BLOCK) == 0
    return slots._memory[start : start + BLOCK].tobytes()


@pytest.mark.parametrize("fails", (False, True))
def test_a_page_waits_for_what_was_given_up_and_not_for_its_outcome(disk, file, slots, fails):
    disk.bad = {0} if fails else set()
    slots.prefetch([0], ())
    assert disk.reached.wait(30)
    assert meanwhile(disk, lambda: held(slots, 2)) == block(file, 2)
    disk.bad = set()
    assert held(slots, 0) == block(file, 0) and held(slots, 2) == block(file, 2)


@pytest.fixture
def wide(file: Path, disk: Disk) -> Iterator[PageSlots]:
    """Three slots for the pages, read by two threads."""
    fd = os.open(file, os.O_RDONLY)
    reader = Reader({file: fd}, threads=2)
    yield PageSlots(BLOCK, 3, reader, lambda page, memory: [Read(file, page * BLOCK, memoryview(memory)[:BLOCK], BLOCK)],
                    lambda page: page * BLOCK, lambda: False)
    disk.open.set()
    reader.close()
    os.close(fd)


def all_held(slots: PageSlots, pages: Sequence[int]) -> dict[int, bytes]:
    start, memory = slots._memory.ctypes.data, slots._memory
    return {page: memory[address - start : address - start + BLOCK].tobytes() for come in slots.fetch(pages) for page, address in come}


def test_pages_are_handed_over_in_a_portion_for_each_thread(disk, file, wide, monkeypatch):
    disk.open.set()
    submit, handed = wide._reader.submit, []
    monkeypatch.setattr(wide._reader, "submit", lambda reads, *more, **how: (handed.append(len(reads)), submit(reads, *more, **how))[1])
    assert all_held(wide, (3, 0, 1)) == {page: block(file, page) for page in (0, 1, 3)} and sorted(handed) == [1, 2]
    assert all_held(wide, (2, 0, 1)) == {page: block(file, page) for page in (0, 1, 2)} and len(handed) == 3
    assert (wide.num_requested, wide.num_hits) == (6, 2) and sorted(disk.asked) == [place * BLOCK for place in range(4)]


def test_a_page_beside_one_that_cannot_be_read_ahead(disk, file, wide):
    disk.open.set()
    disk.bad = {0}
    wide.prefetch([0, 1, 2], ())  # two of them in one portion
    assert all_held(wide, (1, 2)) == {page: block(file, page) for page in (1, 2)}
    with pytest.raises(CheckpointError, match="Input/output error"):
        all_held(wide, (1, 0))
    disk.bad = set()
    assert all_held(wide, (0, 1)) == {page: block(file, page) for page in (0, 1)}


def test_reading_ahead_waits_for_nothing_and_drops_nothing_under_way(disk, file, slots):
    slots.prefetch([0], ())
    assert disk.reached.wait(30)
    slots.prefetch([1], ())
    assert list(slots._pages) == [0]
    assert meanwhile(disk, lambda: held(slots, 0)) == block(file, 0) and disk.asked == [0]


def test_what_nobody_wants_any_more_is_not_begun(disk, file, wide):
    """Both threads are busy; of the portions behind them one is given up."""
    blockers = [wide._reader.submit([Read(file, 3 * BLOCK, memoryview(anonymous(BLOCK)), BLOCK)]) for _ in range(2)]
    wide.prefetch([0, 1, 2], ())
    for page in (0, 1, 2):
        wide.forget(page)
    assert meanwhile(disk, lambda: all_held(wide, (3,))) == {3: block(file, 3)}
    for blocker in blockers:
        wide._reader.wait(blocker)
    assert disk.asked == [3 * BLOCK] * 3


def test_a_page_that_was_read_ahead_in_vain_is_read_again(disk, file, slots):
    """Its error is reported once, to whoever asks for it, and not forever."""
    disk.open.set()
    disk.bad = {BLOCK}
    slots.prefetch([1], ())
    with pytest.raises(CheckpointError, match="Input/output error"):
        held(slots, 1)
    disk.bad = set()
    assert held(slots, 1) == block(file, 1)
