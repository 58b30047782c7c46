"""Memory read bandwidth of the worker threads when they do nothing else: the roofline of a decode step."""

from __future__ import annotations

import time

import numpy as np

from ..compile import kernel
from ..threads import ThreadPool
from .intrinsics import fetch_add, i64_at

BLOCK = 1 << 20
WORDS, NBYTES, RESULT = 0, 1, 2


@kernel()
def read_words(args, worker, counter):
    """XOR of all words, block by block; the result is stored so that no load can be eliminated."""
    a = i64_at(args)
    blocks = a[NBYTES] // BLOCK
    while True:
        block = fetch_add(counter, 1)
        if block >= blocks:
            return
        words = i64_at(a[WORDS] + block * BLOCK)
        total = 0
        for i in range(BLOCK // 8):
            total ^= words[i]
        i64_at(a[RESULT])[worker] = i64_at(a[RESULT])[worker] ^ total


def read_bandwidth(pool: ThreadPool, *memories: np.ndarray, passes: int = 5) -> float:
    """Bytes per second over `memories` (uint8, together the size of the weights: larger than the caches, initialized), using each one's
    fastest pass."""
    sums = np.zeros(pool.workers, np.int64)
    args = [np.array([memory.ctypes.data, memory.nbytes, sums.ctypes.data], np.int64) for memory in memories]
    fastest = [float("inf")] * len(memories)
    for _ in range(passes):
        for index, block in enumerate(args):
            started = time.perf_counter()
            pool.run(read_words, block.ctypes.data)
            fastest[index] = min(fastest[index], time.perf_counter() - started)
    return sum(memory.nbytes // BLOCK * BLOCK for memory in memories) / sum(fastest)
