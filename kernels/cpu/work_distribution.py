"""How the workers of a job share what lies in memory one after the other: each reads a long stretch of its own.

Blocks of work drawn in turn from one counter make every worker jump: it reads 64 KiB, then others read, then it goes on elsewhere. Two
threads of a Zen 5 read 4-bit weights at 0.80 of the read roof that way and at 0.92 if each goes through half of them. So the blocks are cut
into REGIONS, each with a counter of its own. Workers begin far from one another, go on in the next region where theirs has come to its end,
and so help whoever is late. Who computes what is a matter of chance, as ever; what comes out is not.

The counters of each half of a job share a cache line: two workers take no line from one another before one of them helps, which between two
dies is 1.01 of the rate, and one that looks for what is left finds it with two lines.
"""

from __future__ import annotations

from numpy import int64

from ..lazy_numba import inlined
from .intrinsics import fetch_add, i64_at

REGIONS, OF_A_LINE = 8, 4  # counters of a cache line
COUNTERS_NBYTES = 64 * REGIONS // OF_A_LINE
SETS = 2  # of counters that a job of the pool has, behind one another: for two kernels that need not wait for one another


@inlined()
def _counter_of(counter, region):
    """Where a region's counter lies."""
    return counter + 64 * (region // OF_A_LINE) + 8 * (region % OF_A_LINE)


@inlined()
def clear_regions(counter):
    """No block of a job has been taken."""
    for region in range(REGIONS):
        i64_at(_counter_of(counter, region))[0] = 0


@inlined()
def clear_counters(counter):
    """`clear_regions` for all kernels of a job."""
    for own in range(SETS):
        clear_regions(counter + own * COUNTERS_NBYTES)


@inlined()
def matrix_of(a, block, first, count, fields, rows, unit):
    """Of a block of a job over `count` matrices, each cut into blocks of `unit` rows: the slot where its matrix begins, -1 behind the last,
    and the block among that one's. first: slot of the first matrix; fields: from one to the next; rows: which of them counts rows."""
    matrix = int64(first)
    for _ in range(count):
        here = (a[matrix + rows] + unit - 1) // unit
        if block < here:
            return matrix, block
        block -= here
        matrix += fields
    return int64(-1), block


@inlined()
def first_region(worker):
    """Two workers begin half of the job apart, four a quarter: the bits of the worker's number from behind."""
    return (worker & 1) << 2 | (worker & 2) | (worker & 4) >> 2


@inlined()
def take_block(counter, region, ended, blocks):
    """A worker's next block of so many, -1 where all are taken, with the region that it is in and how many had come to their end."""
    while ended < REGIONS:
        first = blocks * region // REGIONS
        block = first + fetch_add(_counter_of(counter, region), 1)
        if block < blocks * (region + 1) // REGIONS:
            return block, region, ended
        region, ended = (region + 1) % REGIONS, ended + 1
    return int64(-1), region, ended
