"""Spill files of KV pages: the right bytes whatever is read ahead, unlinked, and nothing left behind by a killed run."""

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from effllm import EffllmError
from effllm.offload.page_pool import DiskTier, PagePool
from effllm.offload.page_stream import PageStream, Run, run_pages
from effllm.offload.spill_file import SpillFile


def stream_of(folder: Path, sizes: tuple[int, ...] = (70_000, 4096, 99), pages: int = 40, first: int = 2, **more: object) -> PageStream:
    return PageStream(SpillFile(folder), sizes, pages, first, **more)


def fill(stream: PageStream, pages: range, seed: int = 0) -> dict[tuple[int, int], np.ndarray]:
    found = {}
    for page in pages:
        for layer, memory in enumerate(stream.staging):
            memory[:] = np.random.default_rng((seed, page, layer)).integers(0, 256, len(memory))
            found[layer, page] = memory.copy()
        stream.write(page)
    return found


def read(stream: PageStream, run: Run) -> np.ndarray:
    with stream.lease(run) as where:
        at = where - stream._ring.ctypes.data
        return stream._ring[at : at + (run.end - run.begin) * stream.page_nbytes[run.layer]].copy()


def check_pass(stream: PageStream, pages: dict[tuple[int, int], np.ndarray]) -> None:
    for layer in range(len(stream.page_nbytes)):
        for run in stream.runs(layer):
            wanted = np.concatenate([pages[layer, page] for page in range(run.begin, run.end)])
            assert np.array_equal(read(stream, run), wanted), run


@pytest.mark.parametrize("direct", (True, False))
def test_passes_over_growing_extents(tmp_path, direct):
    stream, pages = stream_of(tmp_path, direct=direct), {}
    for end in (3, 4, 7, 30, 31):
        pages |= fill(stream, range(len(pages) // 3 + 2, end))
        for _ in range(2):
            stream.begin([(2, end)] * 3)
            check_pass(stream, pages)
    stream.begin([(20, 31), (2, 31), (31, 31)])
    check_pass(stream, pages)
    stream.close()


def test_the_next_pass_comes_by_itself_and_reads_nothing_twice(tmp_path):
    stream = stream_of(tmp_path, sizes=(300_000,))
    pages = fill(stream, range(2, 40))
    stream.begin([(2, 40)])
    check_pass(stream, pages)
    length = run_pages(300_000, 40)
    assert length == 5 and [(run.begin, run.end) for run in (turn.destination.run for turn in stream._read_ahead)][:3] == [
        (2, 5), (5, 10), (10, 15)]
    assert len(stream._read_ahead) == 8
    for turn in stream._read_ahead:
        stream._reader.wait(turn.ticket)
    before = stream.traffic.reads
    stream.begin([(2, 40)])
    assert stream.traffic.reads == before and len(stream._read_ahead) == 8
    stream.begin([(2, 39)])  # a page was forgotten: one run is another
    for turn in stream._read_ahead:
        stream._reader.wait(turn.ticket)
    assert list(stream._read_ahead)[-1].destination.run == Run(0, 35, 39) and stream.traffic.reads == before + 1
    check_pass(stream, pages)
    stream.close()


def test_a_pass_that_ends_early(tmp_path):
    stream = stream_of(tmp_path)
    pages = fill(stream, range(2, 40))
    for stop in (1, 3, 2, 0, 4):
        stream.begin([(2, 40)] * 3)
        for run in [run for layer in range(3) for run in stream.runs(layer)][:stop]:
            read(stream, run)
        stream.begin([(2, 40)] * 3)
        check_pass(stream, pages)
    stream.close()


# -- the file ------------------------------------------------------------------------------------------------------------------


def nameless_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without O_TMPFILE."""
    opened = os.open

    def refusing(path, flags, *more, **named):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refusing)


@pytest.mark.parametrize("nameless", (True, False))
def test_the_file_has_no_name_and_is_private(tmp_path, monkeypatch, nameless):
    if not nameless:
        nameless_refused(monkeypatch)
    file = SpillFile(tmp_path / "made")
    file.write([(5, np.arange(100, dtype=np.uint8))])
    found = os.fstat(file.descriptor)
    assert not list((tmp_path / "made").iterdir()) and stat.S_IMODE(found.st_mode) == 0o600 and found.st_nlink == 0
    assert os.pread(file.descriptor, 200, 5) == bytes(range(100)) and file.nbytes == 100
    file.close()


def test_a_page_that_is_made_again_takes_no_more_room(tmp_path):
    stream = stream_of(tmp_path)
    for seed in range(3):
        fill(stream, range(2, 12), seed)
    assert stream.spill.nbytes == 10 * sum(stream.page_nbytes)
    stream.close()


KILLED = """
import errno, os, signal, sys
import numpy as np
from pathlib import Path
from effllm.offload import spill_file
def refusing(*more, **named):
    raise OSError(errno.EOPNOTSUPP, "no")
os.unlink, del_flag = refusing, os.__dict__.pop("O_TMPFILE", None)
file = spill_file.SpillFile(Path(sys.argv[1]))
file.write([(0, np.ones(8192, np.uint8))])
print("written", flush=True)
signal.pause()
"""


def test_a_killed_run_leaves_nothing_after_the_next_start(tmp_path):
    """Where names cannot be taken away."""
    child = subprocess.Popen([sys.executable, "-P", "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "written\n"
    (left,) = tmp_path.iterdir()
    SpillFile(tmp_path).close()
    assert list(tmp_path.iterdir()) == [left], "its run is alive"
    child.kill()
    child.communicate()
    SpillFile(tmp_path).close()
    assert not list(tmp_path.iterdir())


def test_what_a_user_has_in_the_folder_stays(tmp_path):
    """A folder of --spill-dir may be anybody's: a name that begins alike is not enough."""
    for name in ("effllm-kv-results.csv", "effllm-kv-notes"):
        (tmp_path / name).write_text("mine")
    SpillFile(tmp_path).close()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_named_file_goes_with_its_run(tmp_path, monkeypatch):
    nameless_refused(monkeypatch)
    unlink = os.unlink
    monkeypatch.setattr(os, "unlink", lambda *more, **named: (_ for _ in ()).throw(OSError(errno.EBUSY, "busy")))
    file = SpillFile(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    monkeypatch.setattr(os, "unlink", unlink)
    file.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_takes_no_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EffllmError, match="no file for the KV cache in .*file") as caught:
        SpillFile(tmp_path / "file")
    assert "--spill-dir" in caught.value.hint


def test_what_does_not_reach_the_disk_is_reported_with_the_next_page(tmp_path, monkeypatch):
    def failing(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", failing)
    file, told = SpillFile(tmp_path), threading.Event()
    file.write([(0, np.ones(100, np.uint8))])
    for _ in range(600):
        if file._error is not None:
            break
        told.wait(0.05)
    with pytest.raises(EffllmError, match="cannot be written .*Input/output error"):
        file.write([(100, np.ones(100, np.uint8))])
    file.close()


def test_pages_come_and_go_by_their_places(tmp_path):
    """As those do who keep pages elsewhere: they write to places, and read what is there."""
    with_disk, without = PagePool(6, (5000, 64), DiskTier(tmp_path, 2)), PagePool(6, (5000, 64))
    for pool in (with_disk, without):
        for index in range(6):
            for layer in range(2):
                place = pool.place(layer, index)
                place[:] = 10 * layer + index
            pool.keep(index)
    for layer in range(2):
        for index in range(6):
            kept = without.page(layer, index)
            assert np.array_equal(with_disk.page(layer, index), kept) and kept[0] == 10 * layer + index
    assert with_disk.extent(0).nbytes == 2 * 5000
    with_disk.close()


@pytest.mark.parametrize("most,firsts", ((None, (2, 1, 0, 0)), (5 * 5064 + 99, (3, 3)), (4 * 5064, (4, 4)), (0, (4, 4))))
def test_no_more_goes_to_the_disk_than_it_may_take(tmp_path, most, firsts):
    """Where memory grows short: eight pages, of which the last four were planned to lie there."""
    pool = PagePool(8, (5000, 64), DiskTier(tmp_path, 4, max_nbytes=most))
    for index in range(7):
        pool.keep(index)
    for first in firsts:
        before = pool.first
        assert pool.shed(7) == (before - first) * 5064 and pool.first == pool.stream.first == first
        assert pool.stream.spill.nbytes == (7 - first) * 5064
    pool.close()
