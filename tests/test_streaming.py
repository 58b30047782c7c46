"""The streaming pager: the right bytes in every pass and order of use, read-ahead that overwrites nothing, memory as planned."""

import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from effllm.offload.checkpoint import CheckpointError, TensorInfo, TensorStore
from effllm.offload.direct_io import BLOCK, Interrupted
from effllm.offload.placement import Residency
from effllm.offload.streaming_pager import FETCH_NBYTES, GAP, Part, Range, StreamingPager, lay_out

PREADV = os.preadv
SIZES = (100, 5000, 70_001, 8192, 33, 4096, 200_000, 64_000)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TensorStore]:
    rng = np.random.default_rng(1)
    arrays = {f"t{i}": rng.integers(0, 256, size, dtype=np.uint8) for i, size in enumerate(SIZES)}
    save_file(arrays, tmp_path / "model.safetensors")
    with TensorStore.open(tmp_path) as opened:
        yield opened


def parts_of(store: TensorStore) -> list[Part]:
    """A part for every tensor, in an order that is not the file's, two of them cut into two ranges."""
    found = []
    for name in sorted(store.tensors, reverse=True):
        info = store.tensors[name]
        half = info.nbytes // 2 if info.nbytes > 10_000 else 0
        found.append(Part(tuple(Range(info.file, info.offset + begin, end - begin) for begin, end in ((0, half), (half, info.nbytes))
                                if end > begin)))
    return found


def expected(store: TensorStore, part: Part) -> list[bytes]:
    return [Path(own.file).read_bytes()[own.offset : own.offset + own.nbytes] for own in part.ranges]


def opened(store: TensorStore, parts: Sequence[Part], streamed: Sequence[int], ring: int | None = None, **more: object) -> StreamingPager:
    sizes = [part.nbytes for part in parts]
    pinned = tuple(i for i in range(len(parts)) if i not in streamed)
    room = ring or 2 * max((sizes[i] for i in streamed), default=0)
    pager = StreamingPager(store, {}, parts, Residency(pinned, tuple(streamed), sum(sizes[i] for i in pinned),
                                                       sum(sizes[i] for i in streamed), room), **more)
    list(pager.load())
    return pager


def use(pager: StreamingPager, index: int) -> list[bytes]:
    """What a part holds while it is leased, at the beginning and at the end."""
    views, lease = pager.part(index)
    if lease is None:
        return [view.tobytes() for view in views]
    with lease:
        first = [view.tobytes() for view in views]
        assert [view.tobytes() for view in views] == first
    return first


@pytest.mark.parametrize("direct", (True, False), ids=("direct", "buffered"))
@pytest.mark.parametrize("streamed", ((0, 1, 2, 3, 4, 5, 6, 7), (1, 4, 6), (3,), ()), ids=str)
def test_every_pass_reads_every_byte(store: TensorStore, streamed: tuple[int, ...], direct: bool) -> None:
    parts = parts_of(store)
    pager = opened(store, parts, streamed, direct=direct)
    for _ in range(4):
        for index, part in enumerate(parts):
            assert use(pager, index) == expected(store, part)
    pager.close()


@given(order=st.lists(st.integers(0, 7), min_size=1, max_size=40), ring=st.integers(0, 600_000))
def test_any_order_of_use(tmp_path_factory: pytest.TempPathFactory, order: list[int], ring: int) -> None:
    """Passes that end early, go back, or leave parts out: what was read ahead for nothing is never taken for something else."""
    folder = tmp_path_factory.mktemp("order")
    rng = np.random.default_rng(2)
    save_file({f"t{i}": rng.integers(0, 256, size, dtype=np.uint8) for i, size in enumerate(SIZES)}, folder / "model.safetensors")
    with TensorStore.open(folder) as store:
        parts = parts_of(store)
        pager = opened(store, parts, range(8), max(ring, 2 * max(part.nbytes for part in parts)))
        for index in order:
            assert use(pager, index) == expected(store, parts[index])
        pager.close()


@given(steps=st.lists(st.tuples(st.integers(0, 7), st.booleans()), min_size=1, max_size=40), ring=st.integers(0, 900_000))
def test_what_is_held_together_stays(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, bool]], ring: int) -> None:
    """In any order of joining, waiting and giving back, of parts that have come and parts that have not."""
    folder = tmp_path_factory.mktemp("joined")
    rng = np.random.default_rng(4)
    save_file({f"t{i}": rng.integers(0, 256, size, dtype=np.uint8) for i, size in enumerate(SIZES)}, folder / "model.safetensors")
    with TensorStore.open(folder) as store:
        parts, held = parts_of(store), []
        pager = opened(store, parts, range(8), max(ring, 2 * max(part.nbytes for part in parts)))
        for index, waits in steps:
            if waits:
                settle(pager)
            if not pager.part(index)[1].join():
                for each in held:
                    pager.part(each)[1].__exit__()
                held.clear()
                pager.part(index)[1].__enter__()
            held.append(index)
            for each in held:
                assert [view.tobytes() for view in pager.part(each)[0]] == expected(store, parts[each])
        pager.close()


def test_parts_that_have_come_are_held_together_up_to_half_of_the_ring(store: TensorStore) -> None:
    parts = parts_of(store)
    pager = opened(store, parts, range(8), ring=1 << 20)  # room for everything
    leases = [pager.part(index)[1] for index in range(8)]
    for _ in range(2):
        settle(pager)
        assert not leases[1].join(), "not the next one"
        assert [lease.join() for lease in leases[:5]] == [True] * 4 + [False]
        for lease in leases[:4]:
            lease.__exit__()
        with leases[4]:
            assert not leases[6].join(), "one was left out"
        assert [use(pager, index) for index in (5, 6, 7)] == [expected(store, part) for part in parts[5:]]
    pager.close()


def test_a_ring_of_two_joins_nothing_to_what_is_held(store: TensorStore) -> None:
    parts = parts_of(store)
    pager = opened(store, parts, (1, 4), ring=2 * max(part.nbytes for part in parts))
    settle(pager)
    assert [pager.part(index)[1].join() for index in (1, 4)] == [True, False]
    pager.part(1)[1].__exit__()
    assert use(pager, 4) == expected(store, parts[4])
    pager.close()


def test_a_part_lies_at_one_address(store: TensorStore) -> None:
    parts = parts_of(store)
    pager = opened(store, parts, (0, 2, 4, 5))
    before = [[view.ctypes.data for view in pager.part(i)[0]] for i in range(len(parts))]
    for _ in range(3):
        for index in range(len(parts)):
            use(pager, index)
    assert [[view.ctypes.data for view in pager.part(i)[0]] for i in range(len(parts))] == before
    assert [pager.part(i)[1] is pager.part(i)[1] for i in (0, 2)] == [True, True]
    pager.close()


def test_the_first_parts_of_the_next_pass_come_by_themselves(store: TensorStore) -> None:
    parts = parts_of(store)
    pager = opened(store, parts, range(8), ring=1 << 20)  # room for everything
    for index in range(8):
        use(pager, index)
    for turn in list(pager._turns):
        pager._reader.wait(turn.ticket)
    read = pager.traffic.nbytes
    use(pager, 0)
    assert next(iter(pager._turns)).number == 9 and read >= 9 * min(part.nbytes for part in parts)
    pager.close()


def test_bytes_read_are_counted(store: TensorStore) -> None:
    """As the system counts them."""
    parts = parts_of(store)
    pager = opened(store, parts, (0,))

    def by_the_system() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    if not Path("/proc/self/io").exists():
        pytest.skip("this system does not count")
    used = expected(store, parts[0])
    settle(pager)
    counted, system = pager.disk_nbytes, by_the_system()
    for _ in range(5):
        assert use(pager, 0) == used
        settle(pager)
    counted, system = pager.disk_nbytes - counted, by_the_system() - system
    assert counted >= 5 * sum(map(len, used))
    assert counted <= system <= counted + 4096, "what /proc itself takes comes on top"
    pager.close()


def settle(pager: StreamingPager) -> None:
    for turn in list(pager._turns):
        pager._reader.wait(turn.ticket)


def test_neighbours_are_one_read_and_distant_ranges_are_not(tmp_path: Path) -> None:
    file = tmp_path / "f"
    near, far = Range(file, 5000, 100), Range(file, 5000 + 3 * GAP, 50)
    extents, nbytes, places = lay_out((far, near, Range(file, 5200, 1000)))
    assert [(extent.offset, extent.needed) for extent in extents] == [(4096, 2104), ((5000 + 3 * GAP) // BLOCK * BLOCK, 954)]
    assert nbytes == 2 * BLOCK and places == [BLOCK + 904, 904, 1104]
    assert all(extent.at % BLOCK == 0 and extent.nbytes % BLOCK == 0 for extent in extents)


def test_rows_out_of_turn(store: TensorStore) -> None:
    pager = opened(store, parts_of(store), range(8))
    info = store.tensors["t6"]
    ranges = [Range(info.file, info.offset + at, 77) for at in (150_000, 3, 90_000)]
    whole = store.read(info).tobytes()
    for _ in range(3):
        with pager.fetch(ranges) as views:
            assert [view.tobytes() for view in views] == [whole[at : at + 77] for at in (150_000, 3, 90_000)]
    with pytest.raises(ValueError, match="at most"), pager.fetch([Range(info.file, 0, FETCH_NBYTES + 1)]):
        pytest.fail("more was fetched than there is memory for")
    pager.close()


def test_many_rows_near_one_another_are_fetched_without_what_lies_between(tmp_path: Path) -> None:
    """As many as are asked for at once, every sixteenth of a wide table: with the gaps they would take five times the memory."""
    rows = np.random.default_rng(3).integers(0, 256, (16 * 300, 4096), dtype=np.uint8)
    save_file({"table": rows}, tmp_path / "model.safetensors")
    with TensorStore.open(tmp_path) as store:
        pager = StreamingPager(store, {}, (), Residency((), (), 0, 0, 0))
        info = store.tensors["table"]
        ranges = [Range(info.file, info.offset + 4096 * row, 4096) for row in range(0, len(rows), 16)]
        assert len(ranges) * (4096 + 2 * BLOCK) <= FETCH_NBYTES < lay_out(ranges)[1]
        with pager.fetch(ranges) as views:
            assert np.array_equal(views, rows[::16])
        pager.close()


@given(starts=st.lists(st.integers(0, 400_000), min_size=1, max_size=40), nbytes=st.integers(1, 9000))
def test_without_gaps_a_range_takes_its_bytes_and_two_blocks_at_most(starts: list[int], nbytes: int) -> None:
    ranges = [Range(Path("f"), start, nbytes) for start in starts]
    extents, total, places = lay_out(ranges, gap=0)
    assert total == sum(extent.nbytes for extent in extents) <= len(ranges) * (nbytes + 2 * BLOCK)
    for own, place in zip(ranges, places, strict=True):
        (extent,) = (each for each in extents if each.at <= place < each.at + each.nbytes)
        assert place - extent.at == own.offset - extent.offset and place + nbytes <= extent.at + extent.needed


def test_memory_is_what_was_planned(store: TensorStore) -> None:
    parts = parts_of(store)
    sizes = [part.nbytes for part in parts]
    placed = Residency((0, 2, 3, 4, 6, 7), (1, 5), sum(sizes) - sizes[1] - sizes[5], sizes[1] + sizes[5], 2 * max(sizes))
    always: dict[str, list[TensorInfo]] = {"outer": [store.tensors["t0"]]}
    pager = StreamingPager(store, always, parts, placed)
    progress = list(pager.load())
    assert progress[-1][0] == progress[-1][1] == placed.pinned_nbytes + SIZES[0]
    assert pager.nbytes == placed.pinned_nbytes + placed.ring_nbytes + 4096 + FETCH_NBYTES
    assert pager._ring.nbytes == placed.ring_nbytes and sum(memory.nbytes for memory in pager._pinned) == placed.pinned_nbytes
    with pager.lease("outer") as raw:
        assert raw["t0"].tobytes() == store.read(store.tensors["t0"]).tobytes()
    pager.close()


def test_a_file_that_is_cut_while_parts_are_used(store: TensorStore) -> None:
    """An error of one line, and again an error when it is tried again; bytes that are there still come."""
    parts = parts_of(store)
    pager = opened(store, parts, range(8))
    for index in range(3):
        use(pager, index)
    path = store.files[0]
    os.truncate(path, path.stat().st_size - 60_000)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="became shorter"):
            for index in (*range(8), *range(8)):  # what was read ahead is still whole
                use(pager, index)
    assert use(pager, 7) == expected(store, parts[7])
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        pager.check_unchanged()
    pager.close()


def test_a_disk_that_hangs_can_be_left_and_taken_up_again(store: TensorStore, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, opens, ended = parts_of(store), threading.Event(), []
    opens.set()

    def preadv(fd: int, buffers: list, offset: int) -> int:
        assert opens.wait(30)
        return PREADV(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    pager = opened(store, parts, range(8), cancelled=lambda: bool(ended))
    use(pager, 0)
    settle(pager)
    opens.clear()
    assert pager.part(1)[1].join()
    pager.part(1)[1].__exit__()
    ended.append(True)
    assert not any(pager.part(index)[1].join() for index in range(8)), "who was cancelled is told by the wait"
    with pytest.raises(Interrupted):
        for index in range(2, 8):
            use(pager, index)
    with pytest.raises(Interrupted), pager.fetch(parts[7].ranges):
        pytest.fail("nothing can have come")
    ended.clear()
    opens.set()
    for _ in range(2):
        for index, part in enumerate(parts):
            assert use(pager, index) == expected(store, part)
    with pager.fetch(parts[7].ranges) as views:
        assert [view.tobytes() for view in views] == expected(store, parts[7])
    pager.close()
