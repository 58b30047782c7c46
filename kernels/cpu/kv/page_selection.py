"""Selection of the on-disk pages that a token reads, from their estimated (m, l) and those of the exact blocks.

The disk is idle until pages are selected. So selection does not wait for attention over packed pages in memory; it proceeds as if there
were none. Pages on disk then seem to have a larger share, so if anything too many are read. This is a compiled function, since every layer
of a pass calls it.
"""

from __future__ import annotations

import numpy as np
from numpy import float32

from ...compile import REASSOCIATE, jit
from ...lazy_numba import inlined
from ..arithmetic import MINUS_INF, ZERO, exp
from ..intrinsics import f32_at, i64_at

SELECTED = np.float32(-1.0)  # below all sums: marks selected pages


@inlined()
def _gather(partials, kv_heads, blocks, rows, width, left_from, left_to, m, l):
    """The last two numbers of every partial, [KVH, blocks, rows, width] -> float32 [blocks, KVH * rows] each; blocks [left_from, left_to)
    count as empty."""
    for kv in range(kv_heads):
        for block in range(blocks):
            source, at = f32_at(partials + 4 * (kv * blocks + block) * rows * width), (block * kv_heads + kv) * rows
            for r in range(rows):
                if left_from <= block < left_to:
                    m[at + r], l[at + r] = MINUS_INF, ZERO
                else:
                    m[at + r], l[at + r] = source[(r + 1) * width - 2], source[(r + 1) * width - 1]


@inlined({"contract"})
def _shares(m, l, blocks, count, maxima, total):
    """Each block's share of every row's attention, [blocks, count], stored over `m`; `maxima` and `total` are scratch for [count]. Empty
    blocks have a share of zero."""
    for i in range(count):
        maxima[i], total[i] = m[i], ZERO
    for block in range(1, blocks):
        for i in range(count):
            maxima[i] = max(maxima[i], m[block * count + i])
    for block in range(blocks):
        for i in range(count):
            mass = l[block * count + i] * exp(m[block * count + i] - maxima[i])
            m[block * count + i] = mass
            total[i] += mass
    for block in range(blocks):
        for i in range(count):
            m[block * count + i] /= total[i]


@inlined(REASSOCIATE)
def _roots(share, count):
    total = ZERO
    for i in range(count):
        total += np.sqrt(share[i])
    return total


@inlined()
def _largest(values, count):
    largest = values[0]
    for i in range(1, count):
        largest = max(largest, values[i])
    return largest


@jit("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64, float64, int64, int64)")
def choose_blocks(partials, kv_heads, blocks, rows, width, unknown, begin, end, max_blocks, left, order, scratch):
    """Selects among blocks [begin, end) those with the largest sum over rows of the square root of their shares (so that a little attention
    by many rows counts as well as much by one). Writes the `max_blocks` best, at most as many as there are, largest first, as int64 to
    `order`, counted from `begin`; returns how many are needed until no row has more than `left` of its attention in the others. Blocks
    [unknown, begin) are ignored. `partials`: float32 [KVH, blocks, rows, width], with (m, l) the last two; `scratch`: `room_floats`
    float32."""
    count, limit = kv_heads * rows, float32(left)
    m, l = f32_at(scratch), f32_at(scratch + 4 * blocks * count)
    sums = f32_at(scratch + 8 * blocks * count)
    remaining, picks = f32_at(scratch + 4 * blocks * (2 * count + 1)), i64_at(order)
    total = f32_at(scratch + 4 * blocks * (2 * count + 1) + 4 * count)
    _gather(partials, kv_heads, blocks, rows, width, unknown, begin, m, l)
    _shares(m, l, blocks, count, remaining, total)
    for i in range(count):
        remaining[i] = ZERO
    for block in range(begin, end):
        roots = _roots(f32_at(scratch + 4 * block * count), count)
        sums[block] = roots if roots == roots else ZERO
        for i in range(count):
            remaining[i] += m[block * count + i]
    target_count = 0 if _largest(remaining, count) <= limit else -1
    for index in range(max_blocks):
        best = begin
        for block in range(begin + 1, end):
            if sums[block] > sums[best]:
                best = block
        picks[index], sums[best] = best - begin, SELECTED
        if target_count < 0:
            for i in range(count):
                remaining[i] -= m[best * count + i]
            if _largest(remaining, count) <= limit:
                target_count = index + 1
    return target_count if target_count >= 0 else max_blocks


def room_floats(blocks: int, count: int) -> int:
    """Scratch of `choose_blocks` in floats."""
    return blocks * (2 * count + 1) + 2 * count
