"""The disk probe: real reads of real files, detection of the device under them, and files that are too small."""

import errno
import os
import subprocess
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from effllm.offload import disk_probe
from effllm.offload.disk_probe import Disk, DiskRead, mounted, probe
from effllm.offload.memory import HUGE_PAGE, anonymous

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("disk") / "weights"
    path.write_bytes(os.urandom(3 * MIB + 123))
    return path


def test_every_size_and_depth_is_read(file: Path) -> None:
    found = probe(file, seconds=0.09)
    assert [(read.nbytes, read.depth) for read in found.reads] == list(product(disk_probe.SIZES, disk_probe.DEPTHS))
    assert all(read.rate > 0 for read in found.reads)
    assert found.stream_rate == max(read.rate for read in found.reads if read.nbytes == disk_probe.STREAMED)


def test_the_rate_of_a_size_lies_between_those_measured() -> None:
    reads = [(16 * KIB, 8, 0.4e9), (16 * KIB, 1, 0.1e9), (128 * KIB, 8, 1.0e9), (2 * MIB, 8, 1.2e9), (2 * MIB, 1, 1.1e9)]
    found = disk_probe.Disk("", "", True, tuple(disk_probe.DiskRead(*read) for read in reads))
    assert found.rate_of(16 * KIB) == pytest.approx(0.4e9)
    assert found.rate_of(128 * KIB) == pytest.approx(1.0e9)
    rates = [found.rate_of(size * KIB) for size in (4, 8, 16, 32, 64, 256, 1024, 4096)]
    assert rates == sorted(rates) and rates[-1] <= 1.2e9
    assert replace(found, reads=found.reads[-1:]).rate_of(4096) == 1.1e9


def test_a_stretch_is_read_again_in_its_order_with_checksums_and_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass reads the same again, in order: what a disk then gives is what a run gets, whose threads sum what pages they read."""
    (tmp_path / "weights").write_bytes(os.urandom(9 * MIB))
    seen: list[int] = []
    summed: list[bytes] = []
    real = os.preadv
    monkeypatch.setattr(disk_probe, "word_sums", lambda rows: summed.append(bytes(rows)) or time.sleep(0.01))
    monkeypatch.setattr(disk_probe, "STREAMED_DEPTH", 1)
    monkeypatch.setattr(disk_probe, "_rate", lambda *given: 1.0)
    monkeypatch.setattr(disk_probe, "_opened", lambda file: (os.open(file, os.O_RDONLY), True))
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: seen.append(offset) or real(descriptor, buffers, offset))
    found = probe(tmp_path / "weights", seconds=40.0)
    assert seen == 5 * [2 * MIB * i for i in (2, 3, 0, 1)] and found.stretch == 8 * MIB and found.again > found.checked > 0
    content = (tmp_path / "weights").read_bytes()
    assert summed == 2 * [content[2 * MIB * i : 2 * MIB * (i + 1)] for i in (2, 3, 0, 1)], "what had just come"
    assert found.rate_again(8 * MIB) == found.again and found.rate_again(8 * MIB + 1) == found.stream_rate == 1.0
    assert found.rate_again(8 * MIB, checked=True) == found.checked and found.rate_again(8 * MIB + 1, checked=True) == 1.0
    assert replace(found, checked=0.0).rate_again(1, checked=True) == found.again, "probed by an older version"
    assert replace(found, again=0.0).rate_again(1) == 1.0
    seen.clear()
    short = probe(tmp_path / "weights", seconds=0.0)
    assert seen == 5 * [4 * MIB] and short.stretch == 2 * MIB, "no longer than the time for it"


def test_reads_go_where_those_of_a_run_go(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into huge pages: small ones cut a read into hundreds of pieces, which took a third to a half of a disk's rate. Into a ring, not
    always into what the processor's cache holds."""
    places: dict[int, list[int]] = {}
    rings: list[np.ndarray] = []
    real = os.preadv

    def seen(descriptor: int, buffers: list[object], offset: int) -> int:
        if isinstance(buffers[0], np.ndarray):  # not the look whether direct reads work
            places.setdefault(len(rings), []).append(buffers[0].ctypes.data - rings[-1].ctypes.data)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", seen)
    monkeypatch.setattr(disk_probe, "anonymous", lambda nbytes: rings.append(anonymous(nbytes)) or rings[-1])
    assert probe(file, seconds=0.5).stream_rate > 0
    assert len(places) == len(disk_probe.SIZES) * len(disk_probe.DEPTHS) + 5 and all(ring.ctypes.data % HUGE_PAGE == 0 for ring in rings)
    assert all(len(set(own[:8])) == min(8, len(own)) for own in places.values()), "the same memory again at once"


@pytest.mark.parametrize("nbytes", (1, 4096, 5000, 300 * KIB))
def test_a_file_smaller_than_the_reads(tmp_path: Path, nbytes: int) -> None:
    (tmp_path / "small").write_bytes(b"x" * nbytes)
    found = probe(tmp_path / "small", seconds=0.02, depths=(1, 2))
    assert all(read.rate > 0 for read in found.reads)
    assert {read.nbytes for read in found.reads} == ({16 * KIB, 128 * KIB} if nbytes > 128 * KIB else {4096})


def test_where_direct_reads_are_refused_it_says_so(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As some file systems refuse them: when opening, or no sooner than at the first read."""
    real = os.open

    def refuses(path: object, flags: int, *more: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *more)

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", refuses)
        found = probe(file, seconds=0.02)
    assert not found.direct and found.stream_rate > 0 and found.again == 0, "a second time they would come from memory"
    reads = os.preadv

    def refuses_to_read(descriptor: int, buffers: list[object], offset: int) -> int:
        import fcntl

        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return reads(descriptor, buffers, offset)

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", refuses_to_read)
        assert not probe(file, seconds=0.02).direct


def test_buffered_reads_go_through_the_file_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second time they would be answered from memory, and show its speed."""
    monkeypatch.delattr(os, "O_DIRECT")
    seen: list[int] = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: seen.append(offset) or real(descriptor, buffers, offset))
    found = probe(file, seconds=5.0, sizes=(512 * KIB,), depths=(1,))
    assert not found.direct and sorted(seen) == [512 * KIB * i for i in range(6)]


def test_an_absent_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        probe(tmp_path / "absent")


def test_the_disk_under_a_file_is_the_one_that_the_system_names(file: Path) -> None:
    device, kind = mounted(file)
    told = subprocess.run(["stat", "-f", "-c", "%T", file], capture_output=True, text=True, check=True).stdout
    assert device.split()[0] == f"{os.major(file.stat().st_dev)}:{os.minor(file.stat().st_dev)}"
    assert kind[:3] in told or kind in ("overlay", "overlayfs", "unknown", "btrfs", "zfs", "9p", "virtiofs")


def test_a_system_without_a_list_of_mounts(file: Path, tmp_path: Path) -> None:
    assert mounted(file, tmp_path)[1] == "unknown"
    numbers = f"{os.major(file.stat().st_dev)}:{os.minor(file.stat().st_dev)}"
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text(f"1 1 0:999 / / rw - proc proc rw\n22 27 {numbers} / /data rw,relatime shared:1 - xfs "
                                                  "/dev/sdb1 rw\n")
    assert mounted(file, tmp_path) == (f"{numbers} /dev/sdb1", "xfs")


def test_an_empty_probe_has_no_rate() -> None:
    assert Disk("8:1", "ext4", True, ()).stream_rate == 0.0
    assert Disk("8:1", "ext4", True, (DiskRead(4096, 1, 5.0), DiskRead(MIB, 4, 2.0), DiskRead(MIB, 1, 3.0))).stream_rate == 3.0
