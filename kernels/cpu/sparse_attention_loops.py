"""Sparse attention over tokens selected by an indexer, separately for each query (`indexer_loops.py`).

A query's tokens are gathered from the pages into tiles of PAGE tokens, in text order. Each tile yields a partial (o, m, l) for the queries
of one KV head, and partials merge in order, as those of pages do (`attention.py`). Only selected tokens are read. In decode threads share a
token's partials; in prefill one thread computes each token; results are bit-identical.

Latent attention's keys double as values. They are then read in value layout, where rows are contiguous, and transposed.
"""

from __future__ import annotations

from numpy import float32

from ..compile import kernel
from ..layout import F32, HEADER_NBYTES, PAGE
from ..lazy_numba import inlined
from .arithmetic import MINUS_INF, ZERO, expand
from .attention import (
    ATTEND_SLOTS,
    COLUMNS,
    DTYPE,
    EXACT,
    HEAD_DIM,
    HEAD_STRIDE,
    HEADS,
    INDEX,
    KV_HEADS,
    PAGE_STRIDE,
    PAGES,
    PART_STRIDE,
    PARTIALS,
    POSITION,
    ROWS,
    SCALE,
    SCRATCH,
    SCRATCH_STRIDE,
    SEALED,
    SIDE,
    SOFTCAP,
    TABLE,
    TOKENS,
    _capped,
    _load_queries,
    _merge_rows,
    _softmax_row,
    _write_rows,
)
from .inner_loops import TILE_COLUMNS, TILE_ROWS, product
from .intrinsics import f32_at, f64_at, fetch_add, i32_at, i64_at

# Slots after those of `attention.py`. UNITS int32 [tokens, GROUPS, COUNT], of GRAIN tokens each. SINK_TOKENS: tokens before the first page.
# KEYS_ARE_VALUES: 0 or 1.
UNITS, COUNT, GROUPS, GRAIN, SINK_TOKENS, KEYS_ARE_VALUES, CHOSEN_SLOTS = range(ATTEND_SLOTS, ATTEND_SLOTS + 7)
TRANSPOSE_WIDTH = 16  # channels transposed at once: a cache line of a value


@inlined()
def _token(a, units, index):
    """The position of the selected token number `index`."""
    return units[index // a[GRAIN]] * a[GRAIN] + index % a[GRAIN]


@inlined()
def _num_visible(a, units, tile, position):
    """How many tokens of a tile a query at `position` sees: positions ascend, so it is a prefix."""
    begin, end = tile * PAGE, min((tile + 1) * PAGE, a[COUNT] * a[GRAIN])
    if a[GRAIN] == 1:
        return end - begin
    count = 0
    while begin + count < end and _token(a, units, begin + count) <= position:
        count += 1
    return count


@inlined()
def _gather(a, units, tile, count, kv, keys, values, padded_depth):
    """The selected tokens of a tile as float32: K[D, PAGE] and V[seen, wide D]. Adjacent tokens are read together."""
    depth, part, item, sink_tokens = a[HEAD_DIM], a[ROWS], 4 if a[DTYPE] == F32 else 2, a[SINK_TOKENS]
    j = 0
    while j < count:
        at = _token(a, units, tile * PAGE + j)
        block, row = 0, at
        if at >= sink_tokens:
            block, row = (at - sink_tokens) // PAGE + (1 if sink_tokens > 0 else 0), (at - sink_tokens) % PAGE
        entry = i64_at(a[TABLE] + 8 * COLUMNS * block)
        run_limit, run = min(count - j, part - row % part), 1
        if at < sink_tokens:
            run_limit = min(run_limit, sink_tokens - at)
        while run < run_limit and _token(a, units, tile * PAGE + j + run) == at + run:
            run += 1
        base = a[PAGES] if entry[SEALED] else a[EXACT]
        source = base + entry[INDEX] * a[PAGE_STRIDE] + kv * a[HEAD_STRIDE] + row // part * a[PART_STRIDE] + HEADER_NBYTES
        row %= part
        for i in range(run):
            expand(source + a[SIDE] + (row + i) * depth * item, a[DTYPE], values + 4 * (j + i) * padded_depth, depth)
            padding = f32_at(values + 4 * (j + i) * padded_depth)
            for k in range(depth, padded_depth):
                padding[k] = ZERO
        if a[KEYS_ARE_VALUES] == 0:
            for i in range(depth):
                expand(source + (i * part + row) * item, a[DTYPE], keys + 4 * (i * PAGE + j), run)
        j += run
    if a[KEYS_ARE_VALUES]:
        for first in range(0, depth, TRANSPOSE_WIDTH):
            last = min(depth, first + TRANSPOSE_WIDTH)
            for j in range(count):
                value_rows, transposed = f32_at(values + 4 * j * padded_depth), f32_at(keys)
                for i in range(first, last):
                    transposed[i * PAGE + j] = value_rows[i]


@inlined()
def _scratch_of(a, worker, padded, padded_depth):
    """A worker's scratch, float32: Q[rows, D], K[D, PAGE], V[PAGE, wide D], S[rows, PAGE], part[rows, wide D], (m, l)[rows] of a tile,
    O[rows, D] and (m, l)[rows] of all tiles so far."""
    depth, query = a[HEAD_DIM], a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    keys = query + 4 * padded * depth
    values = keys + 4 * depth * PAGE
    scores = values + 4 * PAGE * padded_depth
    part = scores + 4 * padded * PAGE
    block_stats = part + 4 * padded * padded_depth
    outputs = block_stats + 8 * padded
    return query, keys, values, scores, part, block_stats, outputs, outputs + 4 * padded * depth


@inlined()
def _partial(args, count, query, keys, values, scores, part, block_stats, group, padded_depth):
    """A tile's partial for a token's queries: `part` [rows, wide D], with (m, l) of each at `block_stats`."""
    depth, reals, stats = i64_at(args)[HEAD_DIM], f64_at(args), f32_at(block_stats)
    padded = (group + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    columns = (count + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    product(query, 4 * depth, keys, 4 * PAGE, scores, 4 * PAGE, padded, columns, depth)
    left = _capped(scores, padded, float32(reals[SCALE]), float32(reals[SOFTCAP]))
    for r in range(padded):
        m, l = _softmax_row(scores + 4 * r * PAGE, 0, count if r < group else 0, left)
        stats[2 * r], stats[2 * r + 1] = m, l
    product(scores, 4 * PAGE, values, 4 * padded_depth, part, 4 * padded_depth, padded, padded_depth, count)


@kernel({"contract"})
def attend_sparse_decode(args, worker, counter):
    """Partials of one token, which `attention_decode.merge_decode` merges. Blocks of work: a KV head and a tile."""
    a = i64_at(args)
    kv_heads, depth, group = a[KV_HEADS], a[HEAD_DIM], a[HEADS] // a[KV_HEADS]
    padded_depth, padded = (depth + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS, (group + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    query, keys, values, scores, part, block_stats, _, _ = _scratch_of(a, worker, padded, padded_depth)
    stats = f32_at(block_stats)
    tiles, loaded = (a[COUNT] * a[GRAIN] + PAGE - 1) // PAGE, -1
    while True:
        job = fetch_add(counter, 1)
        if job >= kv_heads * tiles:
            return
        kv, tile = job // tiles, job % tiles
        units = i32_at(a[UNITS] + 4 * (kv * a[GROUPS] // kv_heads) * a[COUNT])
        partial = a[PARTIALS] + 4 * (kv * tiles + tile) * group * (depth + 2)
        count = _num_visible(a, units, tile, a[POSITION])
        if count == 0:
            for r in range(group):
                f32_at(partial)[r * (depth + 2) + depth] = MINUS_INF
                f32_at(partial)[r * (depth + 2) + depth + 1] = ZERO
            continue
        if loaded != kv:
            _load_queries(a, query, kv, 0, group, padded)
            loaded = kv
        _gather(a, units, tile, count, kv, keys, values, padded_depth)
        _partial(args, count, query, keys, values, scores, part, block_stats, group, padded_depth)
        for r in range(group):
            o, source = f32_at(partial + 4 * r * (depth + 2)), f32_at(part + 4 * r * padded_depth)
            for i in range(depth):
                o[i] = source[i]
            o[depth], o[depth + 1] = stats[2 * r], stats[2 * r + 1]


@kernel({"contract"})
def attend_sparse_prefill(args, worker, counter):
    """Many tokens. Blocks of work: a token and a KV head."""
    a = i64_at(args)
    kv_heads, depth, group = a[KV_HEADS], a[HEAD_DIM], a[HEADS] // a[KV_HEADS]
    padded_depth, padded = (depth + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS, (group + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    query, keys, values, scores, part, block_stats, outputs, stats = _scratch_of(a, worker, padded, padded_depth)
    tiles = (a[COUNT] * a[GRAIN] + PAGE - 1) // PAGE
    while True:
        job = fetch_add(counter, 1)
        if job >= kv_heads * a[TOKENS]:
            return
        t, kv = job // kv_heads, job % kv_heads
        units = i32_at(a[UNITS] + 4 * (t * a[GROUPS] + kv * a[GROUPS] // kv_heads) * a[COUNT])
        _load_queries(a, query, kv, t, group, padded)
        for r in range(group):
            f32_at(stats)[2 * r], f32_at(stats)[2 * r + 1] = MINUS_INF, ZERO
        for tile in range(tiles):
            count = _num_visible(a, units, tile, a[POSITION] + t)
            if count == 0:
                continue
            _gather(a, units, tile, count, kv, keys, values, padded_depth)
            _partial(args, count, query, keys, values, scores, part, block_stats, group, padded_depth)
            _merge_rows(group, depth, outputs, stats, part, padded_depth, block_stats)
        _write_rows(a, kv, t, group, outputs, stats)


def scratch_floats(heads: int, kv_heads: int, head_dim: int) -> int:
    """Floats of scratch per worker."""
    padded_depth, group = -(-head_dim // TILE_COLUMNS) * TILE_COLUMNS, heads // kv_heads
    padded = -(-group // TILE_ROWS) * TILE_ROWS
    return padded * (2 * head_dim + padded_depth + PAGE + 4) + PAGE * (head_dim + padded_depth)
