"""Prefill attention over packed pages: a tile of a chunk's tokens for one KV head passes over the blocks in order.

Exact blocks are multiplied as in `attention.attend_prefill`. A packed page is either multiplied in packed form, token by token with the
decode loops, while it is in the L1 cache, or dequantized once per tile and multiplied in float32. With AVX-512 the former takes 0.45 to 0.8
of the time. The choice depends only on a record's bits and on the number of queries per KV head, so a token's bits do not depend on the
tile it is in.
"""

from __future__ import annotations

from numpy import float32

from ...compile import kernel
from ...kv_layout import GROUP_CHANNELS, MAX_GROUPS, ROTATED_K, TAIL_OFFSET
from ...layout import PAGE
from ...lazy_numba import inlined
from ..arithmetic import MINUS_INF, ONE, ZERO
from ..attention import (
    BLOCKS,
    COLUMNS,
    COUNT,
    FIRST,
    FROM,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LONG_CHUNK_TOKENS,
    POSITION,
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
    _capped,
    _end,
    _load_block,
    _load_queries,
    _merge_rows,
    _softmax_row,
    _tile_height,
    _visible,
    _write_rows,
    query_tile,
    tile_height,
)
from ..inner_loops import DECODE_TILE_ROWS, TILE_COLUMNS, TILE_ROWS, product
from ..int8_ir import INSTRUCTION_SET
from ..intrinsics import f32_at, f64_at, fetch_add, i64_at, u8_at
from .arguments import CHANNEL_SCALE, K_ROTATION, TABLES, V_ROTATION, _padded_depth, _parts, _record, _rotate_rows
from .decode import MEAN_K, MEAN_V, attend_page
from .int8_products import MAX_K_BITS, MAX_V_BITS
from .record_attention import header_bits, load_kv, read_widths
from .scratch_layout import line, query_places, row_places, tile_rows
from .unpack_record import float_keys, float_values, open_keys, open_values, opened_end, unpacked_nbytes

# Whether packed pages are multiplied in packed form. With 32-byte vectors a float32 tile for many tokens is faster, as it is if a token
# fills a smaller share (in eighths, for bytes and 16-bit numbers) of its integer tiles (docs/architecture/kv-cache.md).
MULTIPLIES_PACKED = INSTRUCTION_SET == "avx512"
ROWS_OF_EIGHT, ROWS_OF_EIGHT_WIDE = 4, 7


@inlined()
def _multiplies_packed(record, group, padded, groups, widths):
    """Is a record multiplied in packed form, token by token? `widths`: scratch for its groups' bits."""
    if not MULTIPLIES_PACKED or not u8_at(record + TAIL_OFFSET + 2)[0] & ROTATED_K:
        return False
    most_k, most_v = read_widths(record, widths, groups)
    by_bytes = most_k <= MAX_K_BITS and header_bits(record, 0) <= MEAN_K and most_v <= MAX_V_BITS and header_bits(record, 1) <= MEAN_V
    return 8 * group >= (ROWS_OF_EIGHT if by_bytes else ROWS_OF_EIGHT_WIDE) * padded


@inlined()
def _token_by_token(args, block, kv, first, tile_tokens, group, padded, queries, remainder_at, outputs, stats, scale, softcap):
    """Merge a packed page into the outputs float32 [here * group, D] and the (m, l) stored one after the other at `stats`. If the next
    block is packed, it is prefetched alongside the first token."""
    a = i64_at(args)
    depth = a[HEAD_DIM]
    _, at_output, at_m, _, _, _, _ = row_places(padded, depth)
    m, query_nbytes = remainder_at + at_m, query_places(padded, depth)[6]
    entry_at, after_at = a[TABLE] + 8 * COLUMNS * block, a[TABLE] + 8 * COLUMNS * min(block + 1, a[TO] - 1)
    entry = i64_at(entry_at)
    following = after_at if i64_at(after_at)[SEALED] == entry[SEALED] else entry_at
    for t in range(tile_tokens):
        if not _visible(entry[FIRST], entry[COUNT], first + t, 1, a[WINDOW]):
            continue
        outputs_of_token, pairs, halves = outputs + 4 * t * group * depth, f32_at(stats + 8 * t * group), f32_at(m)
        output = outputs_of_token if padded == group else remainder_at + at_output  # whole tiles are written
        for r in range(padded):
            halves[r], halves[padded + r] = MINUS_INF, ZERO
        for r in range(group):
            halves[r], halves[padded + r] = pairs[2 * r], pairs[2 * r + 1]
        if padded != group:
            source, target = f32_at(outputs_of_token), f32_at(output)
            for i in range(padded * depth):
                target[i] = source[i] if i < group * depth else ZERO
        attend_page(args, entry_at, following, kv, first + t, group, padded, queries + t * query_nbytes, remainder_at, output, m, scale,
                    softcap)
        following = entry_at
        for r in range(group):
            pairs[2 * r], pairs[2 * r + 1] = halves[r], halves[padded + r]
        if padded != group:
            source, target = f32_at(output), f32_at(outputs_of_token)
            for i in range(group * depth):
                target[i] = source[i]


@inlined()
def _clear(outputs, stats, capacity, depth):
    """Reset outputs of exact and packed blocks, and their (m, l)."""
    zeros, pairs = f32_at(outputs), f32_at(stats)
    for i in range(2 * capacity * depth):
        zeros[i] = ZERO
    for r in range(2 * capacity):
        pairs[2 * r], pairs[2 * r + 1] = MINUS_INF, ZERO


@inlined()
def _unpack_page(a, record, kv, opened, steps, scale, keys, values, padded_depth):
    """Dequantize a packed page to float32: K [D, PAGE], V [PAGE, wide D]. Returns whether its keys are in the rotated basis."""
    depth, parts = a[HEAD_DIM], _parts(a, kv)
    is_turned = open_keys(record, parts, depth, opened, a[TABLES], scale, a[CHANNEL_SCALE] + 4 * kv * depth, steps)
    float_keys(opened, depth, steps, keys)
    open_values(record, parts, depth, opened, a[TABLES], steps)
    float_values(opened, depth, steps, values, padded_depth)
    return is_turned


@inlined()
def _weigh(a, entry, scores, position, group, rows, padded, scale, block_stats):
    """`attention._weigh` with a causal mask per token."""
    first, count, stats = entry[FIRST], entry[COUNT], f32_at(block_stats)
    for r in range(padded):
        p = position + r // group
        begin, end = _begin(first, count, p, a[WINDOW]), _end(first, count, p)
        stats[2 * r], stats[2 * r + 1] = _softmax_row(scores + 4 * r * PAGE, begin, end if r < rows else 0, scale)


@kernel({"contract"})
def attend_packed_prefill(args, worker, counter):
    """`attention.attend_prefill` for packed sealed pages. If split over several calls, O and the (m, l) after it are kept in STATE.

    Scratch per worker: Q[rows, D], rotated Q[rows, wide D], K[D, PAGE], V[PAGE, wide D], S[rows, PAGE], part[rows, wide D], O exact and
    packed [rows, D] each, (m, l)[rows] of exact blocks, packed ones, the last; steps[MAX_GROUPS], a dequantized record, the queries of
    every token as `load_kv` leaves them. The further scratch of `attend_page` shares K's space: it needs at most a third of K, V and S, for
    any shape.
    """
    a = i64_at(args)
    tokens, heads, kv_heads, depth = a[TOKENS], a[HEADS], a[KV_HEADS], a[HEAD_DIM]
    group = heads // kv_heads
    scale, softcap = float32(f64_at(args)[SCALE]), float32(f64_at(args)[SOFTCAP])
    padded_depth = _padded_depth(depth)
    height = tile_height(group, 0, tokens)
    capacity = (height * group + TILE_ROWS * DECODE_TILE_ROWS - 1) // (TILE_ROWS * DECODE_TILE_ROWS) * (TILE_ROWS * DECODE_TILE_ROWS)
    query = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    rotated = query + 4 * capacity * depth
    keys = rotated + 4 * capacity * padded_depth
    values = keys + 4 * depth * PAGE
    scores = values + 4 * PAGE * padded_depth
    part = scores + 4 * capacity * PAGE
    steps = part + 4 * capacity * padded_depth + 8 * capacity * depth + 24 * capacity
    opened = steps + 4 * MAX_GROUPS
    own_tile = tile_rows(group)
    own_rows, remainder_at, own_queries = (group + own_tile - 1) // own_tile * own_tile, line(keys), line(opened + opened_end(depth))
    query_nbytes, widths = query_places(own_rows, depth)[6], remainder_at + row_places(own_rows, depth)[5]
    tiles = (tokens + height - 1) // height
    while True:
        job = fetch_add(counter, 1)
        if job >= kv_heads * tiles:
            return
        kv, tile, begin_token, tile_tokens = query_tile(job, kv_heads, tokens, height)
        rows = tile_tokens * group
        padded = (rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
        _load_queries(a, query, kv, begin_token, rows, capacity)
        _rotate_rows(capacity, query, a[K_ROTATION] + 4 * kv * depth * padded_depth, rotated, depth, padded_depth)
        exact, loaded = part + 4 * capacity * padded_depth, False
        if a[STATE] != 0:
            exact = a[STATE] + 4 * (kv * tiles + tile) * capacity * (2 * depth + 6)
        packed, exact_stats = exact + 4 * capacity * depth, exact + 8 * capacity * depth
        packed_stats, block_stats = exact_stats + 8 * capacity, exact_stats + 16 * capacity
        if a[FROM] == 0:
            _clear(exact, exact_stats, capacity, depth)
        position = a[POSITION] + begin_token
        for block in range(a[FROM], a[TO]):
            entry = i64_at(a[TABLE] + 8 * COLUMNS * block)
            if not _visible(entry[FIRST], entry[COUNT], position, tile_tokens, a[WINDOW]):
                continue
            source, stride = query, depth
            if entry[SEALED]:
                record = _record(a, entry, kv)
                if _multiplies_packed(record, group, own_rows, depth // GROUP_CHANNELS, widths):
                    for t in range(0 if loaded else tile_tokens):
                        load_kv(a, kv, begin_token + t, own_queries + t * query_nbytes, group, own_rows, depth, scale)
                    loaded = True
                    _token_by_token(args, block, kv, position, tile_tokens, group, own_rows, own_queries, remainder_at, packed,
                                    packed_stats, scale,
                                    softcap)
                    continue
                if _unpack_page(a, record, kv, opened, steps, scale, keys, values, padded_depth):
                    source, stride = rotated, padded_depth
            else:
                _load_block(a, entry, kv, keys, values, padded_depth)
            product(source, 4 * stride, keys, 4 * PAGE, scores, 4 * PAGE, padded, PAGE, depth)
            left = _capped(scores, padded, ONE if entry[SEALED] else scale, softcap)  # unpacked keys include the scale
            _weigh(a, entry, scores, position, group, rows, padded, left, block_stats)
            product(scores, 4 * PAGE, values, 4 * padded_depth, part, 4 * padded_depth, padded, padded_depth, PAGE)
            outputs, stats = (packed, packed_stats) if entry[SEALED] else (exact, exact_stats)
            _merge_rows(rows, depth, outputs, stats, part, padded_depth, block_stats)
        if a[TO] >= a[BLOCKS]:
            _rotate_rows(capacity, packed, a[V_ROTATION] + 4 * kv * depth * padded_depth, part, depth, padded_depth)
            _merge_rows(rows, depth, exact, exact_stats, part, padded_depth, packed_stats)
            _write_rows(a, kv, begin_token, rows, exact, exact_stats)


def prefill_scratch(heads: int, kv_heads: int, head_dim: int) -> int:
    """Floats of scratch per worker for `attend_packed_prefill`."""
    padded_depth, group = -(-head_dim // TILE_COLUMNS) * TILE_COLUMNS, heads // kv_heads
    unit, height = TILE_ROWS * DECODE_TILE_ROWS, _tile_height(group, 0, LONG_CHUNK_TOKENS)
    capacity = -(-height * group // unit) * unit
    record, own_scratch = -(-unpacked_nbytes(head_dim) // 4) + MAX_GROUPS + 16, 0
    tile = 8 if group > 4 else 4
    rows = -(-group // tile) * tile
    if MULTIPLIES_PACKED and 8 * group >= ROWS_OF_EIGHT * rows:
        own_scratch = height * (rows * (8 * head_dim + 4 * padded_depth + 8) + 4 * head_dim + 256) // 4 + 16
    return capacity * (3 * head_dim + 2 * padded_depth + PAGE + 6) + PAGE * (head_dim + padded_depth) + record + own_scratch
