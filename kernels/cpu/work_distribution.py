"""Distribution of a job's blocks over workers, so that each reads a long contiguous stretch of memory.

Drawing blocks from a single counter makes every worker jump: it reads 64 KiB, then others read, then it continues elsewhere. Two threads of
a Zen 5 read 4-bit weights at 0.80 of the memory bandwidth that way, and at 0.92 if each goes through half of them. So the blocks are cut
into REGIONS, each with a counter of its own. Workers start far from one another, move on to the next region when theirs is finished, and so
help slower ones. Which worker computes what is arbitrary; results do not depend on it.

The counters of each half of a job share a cache line: two workers take no line from each other before one of them helps (between two dies
this is 1.01 of the rate), and a worker looking for remaining blocks finds them in two lines.
"""

from __future__ import annotations

from numpy import int64

from ..lazy_numba import inlined
from .intrinsics import fetch_add, i64_at

REGIONS, OF_A_LINE = 8, 4  # counters per cache line
COUNTERS_NBYTES = 64 * REGIONS // OF_A_LINE
SETS = 2  # sets of counters per job, for two kernels that run as one job


@inlined()
def _counter_of(counter, region):
    """Address of a region's counter."""
    return counter + 64 * (region // OF_A_LINE) + 8 * (region % OF_A_LINE)


@inlined()
def clear_regions(counter):
    """Reset the counters: no block has been taken."""
    for region in range(REGIONS):
        i64_at(_counter_of(counter, region))[0] = 0


@inlined()
def clear_counters(counter):
    """`clear_regions` for all kernels of a job."""
    for index in range(SETS):
        clear_regions(counter + index * COUNTERS_NBYTES)


@inlined()
def matrix_of(a, block, first, count, fields, rows, unit):
    """For a block of a job over `count` matrices, each cut into blocks of `unit` rows: the slot where its matrix begins, -1 past the last,
    and the block's number within that matrix. first: slot of the first matrix; fields: distance between matrices; rows: index of the field
    with the row count."""
    matrix = int64(first)
    for _ in range(count):
        num_blocks = (a[matrix + rows] + unit - 1) // unit
        if block < num_blocks:
            return matrix, block
        block -= num_blocks
        matrix += fields
    return int64(-1), block


@inlined()
def first_region(worker):
    """Start region: two workers start half of the job apart, four a quarter (the worker number's bits reversed)."""
    return (worker & 1) << 2 | (worker & 2) | (worker & 4) >> 2


@inlined()
def take_block(counter, region, ended, blocks):
    """A worker's next block, -1 if all are taken, with its region and the number of finished regions."""
    while ended < REGIONS:
        first = blocks * region // REGIONS
        block = first + fetch_add(_counter_of(counter, region), 1)
        if block < blocks * (region + 1) // REGIONS:
            return block, region, ended
        region, ended = (region + 1) % REGIONS, ended + 1
    return int64(-1), region, ended
