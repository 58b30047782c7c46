"""Merging partial attention over packed pages: pages into a block's output, blocks into the result.

A running output is float32 [rows, D] with maxima and sums [2, rows] in natural units; rows in whole tiles. A partial in memory has rows of
D + 2. Every merge does the same operations in the same order, whether its page was just processed or is stored as a partial.
"""

from __future__ import annotations

from ...compile import kernel
from ...lazy_numba import inlined
from ..arithmetic import MINUS_INF, ZERO
from ..attention import (
    BLOCKS,
    COLUMNS,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    OUT,
    PARTIALS,
    SCRATCH,
    SCRATCH_STRIDE,
    SEALED,
    TABLE,
    TOKENS,
    _merge,
    _with_sink,
)
from ..inner_loops import DECODE_TILE_ROWS
from ..intrinsics import f32_at, fetch_add, i64_at
from .arguments import BY_PAGE, V_ROTATION, _padded_depth, _rotate_rows
from .softmax_weights import fold_sums

BLOCK_PAGES = 8


@inlined()
def fold(output, m, part, part_stride, sums, factors, rows, padded, depth):
    """Merge an output with (m, l) [2, rows] into the running one."""
    fold_sums(m, m + 4 * padded, sums, sums + 4 * padded, factors, padded)
    for r in range(rows):
        total, partial = f32_at(output + 4 * r * depth), f32_at(part + r * part_stride)
        old_factor, new_factor = f32_at(factors)[r], f32_at(factors)[padded + r]
        for i in range(depth):
            total[i] = total[i] * old_factor + partial[i] * new_factor


@inlined()
def fold_partial(output, m, source, sums, factors, rows, padded, depth):
    """`fold` the stored partial, unless it saw no page."""
    if f32_at(source)[depth + 1] == ZERO:
        return
    for r in range(rows):
        partial = f32_at(source + 4 * r * (depth + 2))
        f32_at(sums)[r], f32_at(sums)[padded + r] = partial[depth], partial[depth + 1]
    fold(output, m, source, 4 * (depth + 2), sums, factors, rows, padded, depth)


@inlined()
def nothing(output, m, padded, depth):
    output_row, stats = f32_at(output), f32_at(m)
    for i in range(padded * depth):
        output_row[i] = ZERO
    for r in range(padded):
        stats[r], stats[padded + r] = MINUS_INF, ZERO


@inlined()
def load_partial(source, output, m, rows, padded, depth):
    for r in range(rows):
        partial, target = f32_at(source + 4 * r * (depth + 2)), f32_at(output + 4 * r * depth)
        for i in range(depth):
            target[i] = partial[i]
        f32_at(m)[r], f32_at(m)[padded + r] = partial[depth], partial[depth + 1]


@inlined()
def store_partial(target, output, m, rows, padded, depth):
    for r in range(rows):
        partial, source = f32_at(target + 4 * r * (depth + 2)), f32_at(output + 4 * r * depth)
        for i in range(depth):
            partial[i] = source[i]
        partial[depth], partial[depth + 1] = f32_at(m)[r], f32_at(m)[padded + r]


@kernel()
def merge_packed(args, worker, counter):
    """Merge the partials into OUT[t, head, :]: exact blocks in table order, packed ones among themselves, rotated back. Blocks of work: a
    token and KV head. Scratch per worker: o and (m, l) of all packed blocks and of one, [rows, D + 2] each, o rotated back [rows, wide D],
    sums and factors [2, rows, 2]."""
    a = i64_at(args)
    tokens, heads, kv_heads, depth, blocks = a[TOKENS], a[HEADS], a[KV_HEADS], a[HEAD_DIM], a[BLOCKS]
    rows = heads // kv_heads
    row_nbytes = 4 * tokens * rows * (depth + 2)  # size of the partials of a table row
    padded = (rows + DECODE_TILE_ROWS - 1) // DECODE_TILE_ROWS * DECODE_TILE_ROWS
    padded_depth = _padded_depth(depth)
    packed = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    packed_m = packed + 4 * padded * depth
    one = packed_m + 8 * padded
    one_m = one + 4 * padded * depth
    back = one_m + 8 * padded
    sums = back + 4 * padded * padded_depth
    factors = sums + 8 * padded
    begin = 0
    while begin < blocks and not i64_at(a[TABLE] + 8 * COLUMNS * begin)[SEALED]:
        begin += 1
    while True:
        job = fetch_add(counter, 1)
        if job >= kv_heads * tokens:
            return
        kv, t = job // tokens, job % tokens
        nothing(packed, packed_m, padded, depth)
        partials = a[PARTIALS] + kv * blocks * row_nbytes + 4 * t * rows * (depth + 2)
        block = begin
        while block < blocks and i64_at(a[TABLE] + 8 * COLUMNS * block)[SEALED]:
            if a[BY_PAGE]:
                nothing(one, one_m, padded, depth)
                for row in range(block, min(blocks, block + BLOCK_PAGES)):
                    if i64_at(a[TABLE] + 8 * COLUMNS * row)[SEALED]:
                        fold_partial(one, one_m, partials + row * row_nbytes, sums, factors, rows, padded, depth)
                store_partial(partials + block * row_nbytes, one, one_m, rows, padded, depth)
            fold_partial(packed, packed_m, partials + block * row_nbytes, sums, factors, rows, padded, depth)
            block += BLOCK_PAGES
        _rotate_rows(padded, packed, a[V_ROTATION] + 4 * kv * depth * padded_depth, back, depth, padded_depth)
        for r in range(rows):
            o = f32_at(a[OUT] + 4 * (t * heads + kv * rows + r) * depth)
            m, l = MINUS_INF, ZERO
            for row in range(blocks):
                if not i64_at(a[TABLE] + 8 * COLUMNS * row)[SEALED]:
                    exact = f32_at(partials + row * row_nbytes + 4 * r * (depth + 2))
                    m, l = _merge(o, m, l, exact, exact[depth], exact[depth + 1], depth)
            m, l = _merge(o, m, l, f32_at(back + 4 * r * padded_depth), f32_at(packed_m)[r], f32_at(packed_m)[padded + r], depth)
            l = _with_sink(a, kv * rows + r, m, l)
            for i in range(depth):
                o[i] = o[i] / l
