"""Disk benchmark: about two seconds of reads from the file itself, for plans that stream weights.

Reads bypass the page cache (O_DIRECT), at random offsets, for four sizes and three queue depths: throughput depends on both. It depends on
the destination too: into small pages a 2 MiB read is 512 segments, and a virtual disk gave 1.0 GB/s where it gave 1.4 to 2.0 into a huge
page (which is what runs read into), and 7% more into 4 MiB that stayed in the CPU's cache than into a ring of 16 MiB; so reads go to a
ring, as in a run. Where the file system refuses direct reads, buffered reads follow a request to drop the file's pages, and the result says
so: memory that was not dropped can serve them.

A pass reads in file order, and the next pass reads the same again. Random offsets say little about that: a spinning disk gives half, and a
virtual disk's host may cache (one gave 0.2 GB/s the first time and 0.9 the second). So a stretch of the file is also read sequentially,
after it has been read once. Pages of a KV cache are checksummed by the reading threads (`checksum.word_sums`), so the stretch is measured
with that as well: 2.9 GB/s on a disk that gave 3.2 without.
"""

import errno
import itertools
import mmap
import os
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from .checksum import word_sums
from .memory import HUGE_PAGE, anonymous

KIB, MIB = 1 << 10, 1 << 20
STREAMED = 2 * MIB  # the size that weight streaming issues
STREAMED_DEPTH = 2  # concurrent reads of page runs
SIZES, DEPTHS = (16 * KIB, 128 * KIB, 512 * KIB, STREAMED), (1, 4, 8)
RING_NBYTES = 16 * MIB
SECONDS = 2.0
ROOT = Path("/")


@dataclass(frozen=True)
class DiskRead:
    """The rate in bytes per second at queue depth `depth` with reads of `nbytes`."""

    nbytes: int
    depth: int
    rate: float


@dataclass(frozen=True)
class Disk:
    """The result of a probe. `direct`: past the page cache; `device` and `file_system` as the system names them. `again`: sequential rate
    when re-reading `stretch` bytes; `checked`: the same with checksums (0: not measured)."""

    device: str
    file_system: str
    direct: bool
    reads: tuple[DiskRead, ...]
    again: float = 0.0
    stretch: int = 0
    checked: float = 0.0

    @property
    def stream_rate(self) -> float:
        """Bytes per second at the read size that streaming issues, or at the largest that the probed file allowed."""
        largest = max((read.nbytes for read in self.reads), default=0)
        return max((read.rate for read in self.reads if read.nbytes == largest), default=0.0)

    @property
    def single_rate(self) -> float:
        """The same at queue depth 1."""
        largest = max((read.nbytes for read in self.reads), default=0)
        return max((read.rate for read in self.reads if read.nbytes == largest and read.depth == 1), default=0.0)

    def rate_again(self, nbytes: int, checked: bool = False) -> float:
        """Bytes per second when every pass re-reads `nbytes` in file order, with or without checksums. Beyond the probed stretch, no cache
        is assumed."""
        known = self.checked if checked and self.checked else self.again
        return known if known and nbytes <= self.stretch else self.stream_rate

    def rate_of(self, nbytes: int) -> float:
        """Bytes per second of many concurrent reads of `nbytes`: a fixed cost plus a cost per byte, interpolated from the measured sizes on
        either side (with one size measured, its rate)."""
        seconds = {size: min(size / read.rate for read in self.reads if read.nbytes == size and read.rate > 0)
                   for size in sorted({read.nbytes for read in self.reads if read.rate > 0})}
        if len(seconds) < 2:
            return self.stream_rate
        sizes = [*seconds]
        low = max([size for size in sizes[:-1] if size <= nbytes], default=sizes[0])
        high = sizes[sizes.index(low) + 1]
        slope = (seconds[high] - seconds[low]) / (high - low)
        return nbytes / max(seconds[low] + (nbytes - low) * slope, nbytes / max(size / own for size, own in seconds.items()))


def probe(file: Path, seconds: float = SECONDS, sizes: Sequence[int] = SIZES, depths: Sequence[int] = DEPTHS) -> Disk:
    """Measure on `file`, with equal time for each (size, depth); sizes larger than the file are skipped, and a file smaller than all of
    them is read whole. Then re-read a stretch sequentially, five times, for about a third of the time each. Raises OSError."""
    nbytes = os.stat(file).st_size
    fitting = [size for size in sizes if size <= nbytes] or [max(mmap.PAGESIZE, nbytes // mmap.PAGESIZE * mmap.PAGESIZE)]
    device, file_system = mounted(file)
    descriptor, direct = _opened(file)
    try:
        each = seconds / (len(fitting) * len(depths))
        reads = [DiskRead(size, depth, _rate(descriptor, nbytes, size, depth, each, direct)) for size in fitting for depth in depths]
        again, checked, stretch = _again(descriptor, nbytes, fitting[-1], seconds / 3) if direct else (0.0, 0.0, 0)
    finally:
        os.close(descriptor)
    return Disk(device, file_system, direct, tuple(reads), again, stretch, checked)


def mounted(file: Path, root: Path = ROOT) -> tuple[str, str]:
    """(device, file system) of a file, as "8:1 /dev/sda1" and "ext4"; the device number and "unknown" where the system does not list its
    mounts."""
    number = os.stat(file).st_dev
    numbers = f"{os.major(number)}:{os.minor(number)}"
    try:
        lines = (root / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return numbers, "unknown"
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == numbers:
            kind, source = after.split()[:2]
            return f"{numbers} {source}", kind
    return numbers, "unknown"


def _opened(file: Path) -> tuple[int, bool]:
    """A descriptor, and whether its reads bypass the page cache: a trial read decides, since some file systems refuse only then."""
    if flag := getattr(os, "O_DIRECT", 0):
        try:
            descriptor = os.open(file, os.O_RDONLY | flag)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            try:
                with mmap.mmap(-1, mmap.PAGESIZE) as page:
                    os.preadv(descriptor, [page], 0)
                return descriptor, True
            except OSError:
                os.close(descriptor)
    return os.open(file, os.O_RDONLY), False


def _rate(descriptor: int, nbytes: int, size: int, depth: int, seconds: float, direct: bool) -> float:
    """Bytes per second with `depth` threads for about `seconds`, counting completed reads."""
    blocks = list(range(0, nbytes - size + 1, size)) or [0]
    random.Random(size + depth).shuffle(blocks)
    if not direct and sys.platform == "linux":
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    # A file that is re-read through the page cache would show the speed of memory.
    done, took, _ = _read(descriptor, blocks, size, depth, seconds, around=direct)
    return done / took


def _again(descriptor: int, nbytes: int, size: int, seconds: float) -> tuple[float, float, int]:
    """(rate of a sequential re-read, the same with checksums, bytes of the stretch). The stretch is what about `seconds` read the first
    time, from the middle of the file. Each rate is the mean of two, since other readers of the disk will be there in a run as well."""
    blocks = list(range(0, nbytes - size + 1, size)) or [0]
    blocks = blocks[len(blocks) // 2 :] + blocks[: len(blocks) // 2]
    _, _, count = _read(descriptor, blocks, size, STREAMED_DEPTH, seconds)
    readings = [_read(descriptor, blocks[:count], size, STREAMED_DEPTH, 2 * seconds, summed=number % 2 == 1) for number in range(4)]
    plain, checked = (sum(done for done, _, _ in some) / sum(took for _, took, _ in some) for some in (readings[::2], readings[1::2]))
    return plain, checked, min(done for done, _, _ in readings)


def _read(descriptor: int, blocks: Sequence[int], size: int, depth: int, seconds: float, around: bool = False,
          summed: bool = False) -> tuple[int, float, int]:
    """`depth` threads read `size` bytes at each of `blocks` in turn, for about `seconds` or until all are read (`around`: then start over),
    checksumming where `summed`. Returns (bytes, seconds, blocks read)."""
    rounded = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    places = max(depth, RING_NBYTES // rounded)
    ring = anonymous(max(places * rounded, HUGE_PAGE))
    ring.fill(0)  # first-touch faults are not part of a run's reads
    turns, started = itertools.count(), time.perf_counter()

    def worker(_: int) -> tuple[int, int]:
        done = count = 0
        for turn in turns:  # shared, so that the blocks read are a prefix
            if turn >= len(blocks) and not around:
                break
            buffer = ring[turn % places * rounded :][:rounded]
            done += os.preadv(descriptor, [buffer], blocks[turn % len(blocks)])
            count += 1
            if summed:
                word_sums(buffer[None])
            if time.perf_counter() > started + seconds:
                break
        return done, count

    with ThreadPoolExecutor(depth, "effllm-probe") as pool:
        each = list(pool.map(worker, range(depth)))
    return sum(done for done, _ in each), time.perf_counter() - started, sum(count for _, count in each)
