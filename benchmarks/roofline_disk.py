"""Disk roofline: direct reads by read size and queue depth.

`preadv` with O_DIRECT into aligned buffers from a few threads, in random order over a file of incompressible bytes, no block twice within
one measurement: the page cache plays no part, as it plays none when weights larger than memory are streamed from a file. (In a virtual
machine the host's cache is below all this and cannot be bypassed.)
"""

import mmap
import os
import random
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from report import GIB, Figure

KIB, MIB = 1 << 10, 1 << 20
# Read size -> numbers of reads under way.
DEPTHS = {4 * KIB: (1, 8, 32), 32 * KIB: (1, 8, 32), 128 * KIB: (1, 8), MIB: (1, 4), 4 * MIB: (1, 4)}
SECONDS = 1.0


def measure(folder: Path, nbytes: int = GIB) -> Iterator[Figure]:
    """Yields nothing if the folder's file system does not support direct reads (tmpfs)."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix="effllm-disk-") as file:
        try:
            descriptor = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
        except OSError:
            return
        try:
            _fill(file.fileno(), nbytes)
            for size, depths in DEPTHS.items():
                for depth in depths:
                    rate = _read(descriptor, nbytes, size, depth) / 1e9
                    conditions = f"{_size(size)}, {depth} at once, direct, random order"
                    yield Figure(f"disk_gbps_{_size(size).replace(' ', '')}_x{depth}", "disk read", conditions, rate, "GB/s")
        finally:
            os.close(descriptor)


def _fill(descriptor: int, nbytes: int) -> None:
    for _ in range(0, nbytes, 4 * MIB):
        os.write(descriptor, os.urandom(4 * MIB))
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def _read(descriptor: int, nbytes: int, size: int, depth: int) -> float:
    """Bytes per second while `depth` threads each read blocks of their own share, for about a second."""
    blocks = list(range(0, nbytes, size))
    random.Random(1).shuffle(blocks)
    deadline = time.perf_counter() + SECONDS

    def worker(share: list[int]) -> int:
        # An anonymous map begins on a page, which is the alignment that O_DIRECT asks for.
        with mmap.mmap(-1, size) as buffer:
            done = 0
            for offset in share:
                done += os.preadv(descriptor, [buffer], offset)
                if time.perf_counter() > deadline:
                    break
        return done

    shares = [blocks[index::depth] for index in range(depth)]
    with ThreadPoolExecutor(depth) as pool:
        start = time.perf_counter()
        done = sum(pool.map(worker, shares))
        return done / (time.perf_counter() - start)


def _size(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"
