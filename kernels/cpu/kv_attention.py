"""Attention over packed pages: integer products for the few queries of a decode step, opened pages and float32 tiles for a prompt.

Packed keys and values lie in bases of their own (`quant/kv_basis.py`): queries are turned once, outputs turned back once. Beside the
exact blocks, which are merged as in `attention.py`, packed pages are merged in page order among themselves, turned back, and added at
the end: an answer does not depend on which thread saw which page. `attend_few` leaves packed pages out and `attend_packed` the exact ones;
both put their partials where `merge_packed` finds them.
"""

from __future__ import annotations

from numpy import float32

from ..compile import kernel
from ..deferred import inlined
from ..layout import PAGE
from .arithmetic import MINUS_INF, ZERO
from .attention import (
    ATTEND_SLOTS,
    BLOCKS,
    COLUMNS,
    COUNT,
    FIRST,
    FROM,
    HEAD_DIM,
    HEADS,
    INDEX,
    KV_HEADS,
    OUT,
    POSITION,
    QUERY_TILE,
    SCALE,
    SCRATCH,
    SCRATCH_STRIDE,
    SEALED,
    SOFTCAP,
    STATE,
    TABLE,
    TO,
    TOKENS,
    WINDOW,
    _begin,
    _end,
    _load_block,
    _load_queries,
    _merge,
    _scale_scores,
    _softmax_row,
    _visible,
    _with_sink,
)
from .inner_loops import LOW_ROWS, TILE_COLUMNS, TILE_ROWS, low_tile_product, product
from .intrinsics import f32_at, f64_at, fetch_add, i64_at
from .kv_record import float_keys, float_values, open_keys, open_values, opened_nbytes

# Slots behind those of `attention.py`: packed pages and their stride, where each head's record begins and where its five parts do (int64
# [KVH, HEAD_SLOTS]: in the page, its bytes, the parts), the bases as float32 (K's inverse and V's transposed inverse [KVH, D, wide D], K's
# channel scales [KVH, D]), `kv_weights.tables`, and whether each page's partial is to be kept.
PACKED, PACKED_STRIDE, RECORDS, TURN, BACK, CHANNEL_SCALE, TABLES, BY_PAGE, PACKED_SLOTS = range(ATTEND_SLOTS, ATTEND_SLOTS + 9)
HEAD_SLOTS, PARTS = 7, 2


@inlined()
def _broad(depth):
    return (depth + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS


@inlined()
def _turn(rows, source, matrix, target, depth, broad):
    """target[R, broad] = source[R, D] @ matrix[D, broad]; R in multiples of LOW_ROWS."""
    for r in range(0, rows, LOW_ROWS):
        for i in range(0, broad, TILE_COLUMNS):
            low_tile_product(source + 4 * r * depth, 4 * depth, matrix + 4 * i, 4 * broad,
                             target + 4 * (r * broad + i), 4 * broad, depth, 0)


@inlined()
def _record(a, entry, kv):
    return a[PACKED] + entry[INDEX] * a[PACKED_STRIDE] + i64_at(a[RECORDS] + 8 * HEAD_SLOTS * kv)[0]


@inlined()
def _parts(a, kv):
    """Offsets of the five parts of a head's records."""
    return i64_at(a[RECORDS] + 8 * (HEAD_SLOTS * kv + PARTS))


@kernel({"contract"})
def attend_packed_many(args, worker, counter):
    """`attention.attend_many` where sealed pages are packed: they are opened as floats, for a tile of QUERY_TILE tokens of one KV head.
    In turns, O and the (m, l) behind it lie in STATE.

    Scratch per worker: Q[rows, D], turned Q[rows, wide D], K[D, PAGE], V[PAGE, wide D], S[rows, PAGE], part[rows, wide D], O exact and
    packed [rows, D] each, (m, l)[rows] of exact blocks, packed ones, the last; steps[20], an opened record.
    """
    a = i64_at(args)
    tokens, heads, kv_heads, depth = a[TOKENS], a[HEADS], a[KV_HEADS], a[HEAD_DIM]
    group = heads // kv_heads
    scale, softcap = float32(f64_at(args)[SCALE]), float32(f64_at(args)[SOFTCAP])
    broad = _broad(depth)
    capacity = (QUERY_TILE * group + TILE_ROWS * LOW_ROWS - 1) // (TILE_ROWS * LOW_ROWS) * (TILE_ROWS * LOW_ROWS)
    query = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    turned = query + 4 * capacity * depth
    keys = turned + 4 * capacity * broad
    values = keys + 4 * depth * PAGE
    scores = values + 4 * PAGE * broad
    part = scores + 4 * capacity * PAGE
    steps = part + 4 * capacity * broad + 8 * capacity * depth + 24 * capacity
    opened = steps + 128
    tiles = (tokens + QUERY_TILE - 1) // QUERY_TILE
    while True:
        job = fetch_add(counter, 1)
        if job >= kv_heads * tiles:
            return
        # Later tiles see more blocks: handing them out first keeps the threads even.
        kv, tile = job % kv_heads, tiles - 1 - job // kv_heads
        begin_token = tile * QUERY_TILE
        here = min(QUERY_TILE, tokens - begin_token)
        rows = here * group
        padded = (rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
        _load_queries(a, query, kv, begin_token, rows, capacity)
        _turn(capacity, query, a[TURN] + 4 * kv * depth * broad, turned, depth, broad)
        outputs = part + 4 * capacity * broad
        if a[STATE] != 0:
            outputs = a[STATE] + 4 * (kv * tiles + tile) * capacity * (2 * depth + 6)
        stats = f32_at(outputs + 8 * capacity * depth)
        if a[FROM] == 0:
            zeros = f32_at(outputs)
            for i in range(2 * capacity * depth):
                zeros[i] = ZERO
            for r in range(2 * capacity):
                stats[2 * r], stats[2 * r + 1] = MINUS_INF, ZERO
        position = a[POSITION] + begin_token
        for block in range(a[FROM], a[TO]):
            entry = i64_at(a[TABLE] + 8 * COLUMNS * block)
            first, count, sealed = entry[FIRST], entry[COUNT], entry[SEALED]
            if not _visible(first, count, position, here, a[WINDOW]):
                continue
            source, stride = query, depth
            if sealed:
                record, parts = _record(a, entry, kv), _parts(a, kv)
                if open_keys(record, parts, depth, opened, a[TABLES], scale, a[CHANNEL_SCALE] + 4 * kv * depth, steps):
                    source, stride = turned, broad
                float_keys(opened, depth, steps, keys)
                open_values(record, parts, depth, opened, a[TABLES], steps)
                float_values(opened, depth, steps, values, broad)
            else:
                _load_block(a, entry, kv, keys, values, broad)
            product(source, 4 * stride, keys, 4 * PAGE, scores, 4 * PAGE, padded, PAGE, depth)
            _scale_scores(scores, padded, float32(1.0) if sealed else scale, softcap)
            for r in range(padded):
                p = position + r // group
                m, l = _softmax_row(scores + 4 * r * PAGE, _begin(first, count, p, a[WINDOW]), _end(first, count, p) if r < rows else 0)
                stats[4 * capacity + 2 * r], stats[4 * capacity + 2 * r + 1] = m, l
            product(scores, 4 * PAGE, values, 4 * broad, part, 4 * broad, padded, broad, PAGE)
            side = capacity if sealed else 0
            for r in range(rows):
                m, l = _merge(f32_at(outputs + 4 * (side + r) * depth), stats[2 * (side + r)], stats[2 * (side + r) + 1],
                              f32_at(part + 4 * r * broad), stats[4 * capacity + 2 * r], stats[4 * capacity + 2 * r + 1], depth)
                stats[2 * (side + r)], stats[2 * (side + r) + 1] = m, l
        if a[TO] < a[BLOCKS]:
            continue
        _turn(capacity, outputs + 4 * capacity * depth, a[BACK] + 4 * kv * depth * broad, part, depth, broad)
        for r in range(rows):
            result = f32_at(outputs + 4 * r * depth)
            m, l = _merge(result, stats[2 * r], stats[2 * r + 1], f32_at(part + 4 * r * broad), stats[2 * (capacity + r)],
                          stats[2 * (capacity + r) + 1], depth)
            head = kv * group + r % group
            l = _with_sink(a, head, m, l)
            target = f32_at(a[OUT] + 4 * ((begin_token + r // group) * heads + head) * depth)
            for i in range(depth):
                target[i] = result[i] / l


def packed_scratch(heads: int, kv_heads: int, head_dim: int) -> int:
    """Floats of scratch per worker for `attend_packed_many`."""
    broad, group = -(-head_dim // TILE_COLUMNS) * TILE_COLUMNS, heads // kv_heads
    unit = TILE_ROWS * LOW_ROWS
    capacity = -(-QUERY_TILE * group // unit) * unit
    record = -(-opened_nbytes(head_dim) // 4) + 48
    return capacity * (3 * head_dim + 2 * broad + PAGE + 6) + PAGE * (head_dim + broad) + record
