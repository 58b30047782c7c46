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

# Slots behind those of `attention.py`: UNITS int32 [tokens, GROUPS, COUNT], each GRAIN tokens; LEAD tokens lie before the first page; SAME:
# keys are values.
UNITS, COUNT, GROUPS, GRAIN, LEAD, SAME, CHOSEN_SLOTS = range(ATTEND_SLOTS, ATTEND_SLOTS + 7)
TURN = 16  # channels that are turned at once: a cache line of a value


@inlined()
def _token(a, units, place):
    """The position of the selected token number `place`."""
    return units[place // a[GRAIN]] * a[GRAIN] + place % a[GRAIN]


@inlined()
def _seen(a, units, tile, position):
    """How many tokens of a tile a query at `position` sees: positions ascend, so it is a prefix."""
    begin, end = tile * PAGE, min((tile + 1) * PAGE, a[COUNT] * a[GRAIN])
    if a[GRAIN] == 1:
        return end - begin
    seen = 0
    while begin + seen < end and _token(a, units, begin + seen) <= position:
        seen += 1
    return seen


@inlined()
def _gather(a, units, tile, seen, kv, keys, values, broad):
    """The selected tokens of a tile as float32: K[D, PAGE] and V[seen, wide D]. Adjacent tokens are read together."""
    depth, part, item, lead = a[HEAD_DIM], a[ROWS], 4 if a[DTYPE] == F32 else 2, a[LEAD]
    j = 0
    while j < seen:
        at = _token(a, units, tile * PAGE + j)
        block, row = 0, at
        if at >= lead:
            block, row = (at - lead) // PAGE + (1 if lead > 0 else 0), (at - lead) % PAGE
        entry = i64_at(a[TABLE] + 8 * COLUMNS * block)
        most, run = min(seen - j, part - row % part), 1
        if at < lead:
            most = min(most, lead - at)
        while run < most and _token(a, units, tile * PAGE + j + run) == at + run:
            run += 1
        base = a[PAGES] if entry[SEALED] else a[EXACT]
        source = base + entry[INDEX] * a[PAGE_STRIDE] + kv * a[HEAD_STRIDE] + row // part * a[PART_STRIDE] + HEADER_NBYTES
        row %= part
        for i in range(run):
            expand(source + a[SIDE] + (row + i) * depth * item, a[DTYPE], values + 4 * (j + i) * broad, depth)
            rest = f32_at(values + 4 * (j + i) * broad)
            for k in range(depth, broad):
                rest[k] = ZERO
        if a[SAME] == 0:
            for i in range(depth):
                expand(source + (i * part + row) * item, a[DTYPE], keys + 4 * (i * PAGE + j), run)
        j += run
    if a[SAME]:
        for first in range(0, depth, TURN):
            last = min(depth, first + TURN)
            for j in range(seen):
                own, turned = f32_at(values + 4 * j * broad), f32_at(keys)
                for i in range(first, last):
                    turned[i * PAGE + j] = own[i]


@inlined()
def _scratch_of(a, worker, padded, broad):
    """A worker's scratch, float32: Q[rows, D], K[D, PAGE], V[PAGE, wide D], S[rows, PAGE], part[rows, wide D], (m, l)[rows] of a tile,
    O[rows, D] and (m, l)[rows] of all tiles so far."""
    depth, query = a[HEAD_DIM], a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    keys = query + 4 * padded * depth
    values = keys + 4 * depth * PAGE
    scores = values + 4 * PAGE * broad
    part = scores + 4 * padded * PAGE
    found = part + 4 * padded * broad
    outputs = found + 8 * padded
    return query, keys, values, scores, part, found, outputs, outputs + 4 * padded * depth


@inlined()
def _partial(args, seen, query, keys, values, scores, part, found, group, broad):
    """A tile's partial for a token's queries: `part` [rows, wide D], with (m, l) of each at `found`."""
    depth, reals, stats = i64_at(args)[HEAD_DIM], f64_at(args), f32_at(found)
    padded = (group + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    columns = (seen + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    product(query, 4 * depth, keys, 4 * PAGE, scores, 4 * PAGE, padded, columns, depth)
    left = _capped(scores, padded, float32(reals[SCALE]), float32(reals[SOFTCAP]))
    for r in range(padded):
        m, l = _softmax_row(scores + 4 * r * PAGE, 0, seen if r < group else 0, left)
        stats[2 * r], stats[2 * r + 1] = m, l
    product(scores, 4 * PAGE, values, 4 * broad, part, 4 * broad, padded, broad, seen)


@kernel({"contract"})
def attend_sparse_decode(args, worker, counter):
    """Partials of one token, which `attention_decode.merge_decode` merges. Blocks of work: a KV head and a tile."""
    a = i64_at(args)
    kv_heads, depth, group = a[KV_HEADS], a[HEAD_DIM], a[HEADS] // a[KV_HEADS]
    broad, padded = (depth + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS, (group + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    query, keys, values, scores, part, found, _, _ = _scratch_of(a, worker, padded, broad)
    stats = f32_at(found)
    tiles, loaded = (a[COUNT] * a[GRAIN] + PAGE - 1) // PAGE, -1
    while True:
        job = fetch_add(counter, 1)
        if job >= kv_heads * tiles:
            return
        kv, tile = job // tiles, job % tiles
        units = i32_at(a[UNITS] + 4 * (kv * a[GROUPS] // kv_heads) * a[COUNT])
        partial = a[PARTIALS] + 4 * (kv * tiles + tile) * group * (depth + 2)
        seen = _seen(a, units, tile, a[POSITION])
        if seen == 0:
            for r in range(group):
                f32_at(partial)[r * (depth + 2) + depth] = MINUS_INF
                f32_at(partial)[r * (depth + 2) + depth + 1] = ZERO
            continue
        if loaded != kv:
            _load_queries(a, query, kv, 0, group, padded)
            loaded = kv
        _gather(a, units, tile, seen, kv, keys, values, broad)
        _partial(args, seen, query, keys, values, scores, part, found, group, broad)
        for r in range(group):
            o, source = f32_at(partial + 4 * r * (depth + 2)), f32_at(part + 4 * r * broad)
            for i in range(depth):
                o[i] = source[i]
            o[depth], o[depth + 1] = stats[2 * r], stats[2 * r + 1]


@kernel({"contract"})
def attend_sparse_prefill(args, worker, counter):
    """Many tokens. Blocks of work: a token and a KV head."""
    a = i64_at(args)
    kv_heads, depth, group = a[KV_HEADS], a[HEAD_DIM], a[HEADS] // a[KV_HEADS]
    broad, padded = (depth + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS, (group + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    query, keys, values, scores, part, found, outputs, stats = _scratch_of(a, worker, padded, broad)
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
            seen = _seen(a, units, tile, a[POSITION] + t)
            if seen == 0:
                continue
            _gather(a, units, tile, seen, kv, keys, values, broad)
            _partial(args, seen, query, keys, values, scores, part, found, group, broad)
            _merge_rows(group, depth, outputs, stats, part, broad, found)
        _write_rows(a, kv, t, group, outputs, stats)


def scratch_floats(heads: int, kv_heads: int, head_dim: int) -> int:
    """Floats of scratch per worker."""
    broad, group = -(-head_dim // TILE_COLUMNS) * TILE_COLUMNS, heads // kv_heads
    padded = -(-group // TILE_ROWS) * TILE_ROWS
    return padded * (2 * head_dim + broad + PAGE + 4) + PAGE * (head_dim + broad)
