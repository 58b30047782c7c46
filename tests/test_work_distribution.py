"""How workers share a job's rows: every block exactly once, each worker's own contiguous."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy import int64

from effllm.kernels.compile import kernel
from effllm.kernels.cpu.intrinsics import i64_at
from effllm.kernels.cpu.work_distribution import REGIONS, first_region, take_block
from effllm.kernels.threads import ThreadPool


@kernel()
def note_blocks(args, worker, counter):
    """How often each block below args[0] is taken, and as which of its worker's: int64 [blocks][2] at args[1]."""
    a = i64_at(args)
    region, ended, taken = first_region(worker), int64(0), 0
    while True:
        block, region, ended = take_block(counter, region, ended, a[0])
        if block < 0:
            return
        noted = i64_at(a[1] + 16 * block)
        noted[0], noted[1] = noted[0] + 1, taken
        taken += 1


def taken(pool: ThreadPool, blocks: int) -> np.ndarray:
    noted = np.zeros((blocks, 2), np.int64)
    args = np.array([blocks, noted.ctypes.data], np.int64)
    pool.run(note_blocks, args.ctypes.data)
    return noted


@given(blocks=st.integers(0, 300))
def test_a_worker_alone_goes_through_all_blocks_in_their_order(blocks):
    pool = ThreadPool(1)
    noted = taken(pool, blocks)
    assert noted[:, 0].tolist() == [1] * blocks and noted[:, 1].tolist() == list(range(blocks))
    pool.close()


@pytest.mark.parametrize("workers", [2, 3, 5, 12])
def test_every_block_is_taken_once_whoever_comes(workers):
    pool = ThreadPool(workers)
    for blocks in (1, 2, 7, 8, 9, 63, 64, 1000):
        for _ in range(50):
            assert (taken(pool, blocks)[:, 0] == 1).all()
    pool.close()


def test_workers_begin_as_far_apart_as_they_can():
    starts = [first_region(worker) for worker in range(2 * REGIONS)]
    assert starts[:4] == [0, 4, 2, 6] and sorted(starts[:REGIONS]) == list(range(REGIONS)) and starts[REGIONS:] == starts[:REGIONS]
