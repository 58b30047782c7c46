"""Anonymous memory for large, long-lived data: weights, KV pages.

From 2 MiB up it is aligned to a huge page, and its whole huge pages are madvised; the tail stays on small pages, so that filling `nbytes`
costs `nbytes` rounded up to a small page, whatever the system's default for huge pages.
"""

import ctypes
import mmap
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

HUGE_PAGE = 2 << 20
RATED_NBYTES, RATED_S = 128 << 20, 0.3  # memory to read, and for how long, to measure bandwidth


def anonymous(nbytes: int) -> np.ndarray:
    """Zeroed private memory as uint8, at least page-aligned; the system backs a page when it is first touched."""
    if nbytes < HUGE_PAGE:
        return np.frombuffer(_private(max(nbytes, 1)), np.uint8, nbytes)
    # Older kernels map at any small-page boundary: reserve one more huge page (of address space, not memory) and align by hand.
    area = _private(nbytes + HUGE_PAGE)
    begin = -np.frombuffer(area, np.uint8).ctypes.data % HUGE_PAGE
    if sys.platform == "linux":
        _advise(area, mmap.MADV_NOHUGEPAGE, 0, len(area))
        _advise(area, mmap.MADV_HUGEPAGE, begin, nbytes // HUGE_PAGE * HUGE_PAGE)
    return np.frombuffer(area, np.uint8, nbytes, begin)


def discard(memory: np.ndarray) -> None:
    """Return whole pages of anonymous memory to the system; they read as zero afterwards."""
    begin = memory.ctypes.data
    skip = -begin % mmap.PAGESIZE
    nbytes = (len(memory) - skip) // mmap.PAGESIZE * mmap.PAGESIZE
    if nbytes > 0 and sys.platform == "linux":
        _libc().madvise(ctypes.c_void_p(begin + skip), ctypes.c_size_t(nbytes), mmap.MADV_DONTNEED)


def read_rate(threads: int) -> float:
    """Memory read bandwidth with `threads` threads in bytes per second, the best pass within RATED_S seconds; needs no compiled kernel,
    which may reach somewhat more."""
    area = anonymous(RATED_NBYTES).view(np.uint64)
    area[:] = 1  # untouched memory maps to a single shared zero page
    best, parts = 0.0, np.array_split(area, max(1, threads))
    until = time.perf_counter() + RATED_S
    with ThreadPoolExecutor(len(parts)) as pool:
        while not best or time.perf_counter() < until:
            began = time.perf_counter()
            list(pool.map(np.maximum.reduce, parts))
            best = max(best, RATED_NBYTES / (time.perf_counter() - began))
    return best


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _private(nbytes: int) -> mmap.mmap:
    # mmap's default for anonymous memory is shared, which is accounted as shmem and gets no huge pages.
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _advise(area: mmap.mmap, advice: int, begin: int, nbytes: int) -> None:
    try:
        area.madvise(advice, begin, nbytes)
    except OSError:
        # A kernel built without huge pages rejects the advice; small pages work as well.
        return
