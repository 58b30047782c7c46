"""Decode attention over pages stored as 32- or 16-bit floats: partials of every block, and merging them.

See `attention.py` for the definition. A page is multiplied in its stored type (`page_products.py`).
"""

from __future__ import annotations

from numpy import float32, int64

from ..compile import kernel
from ..layout import F32, PAGE, PageLayout
from ..lazy_numba import inlined
from .arithmetic import MINUS_INF, ZERO, expand
from .attention import (
    BLOCKS,
    COLUMNS,
    COUNT,
    DTYPE,
    FIRST,
    FROM,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    OUT,
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
    SKIPPED,
    SOFTCAP,
    TABLE,
    TO,
    TOKENS,
    WINDOW,
    _begin,
    _capped,
    _end,
    _keys_of,
    _load_queries,
    _merge,
    _softmax_row,
    _visible,
    _with_sink,
    sealed_rows,
)
from .inner_loops import DECODE_TILE_ROWS, TILE_COLUMNS, VECTOR
from .intrinsics import f32_at, f64_at, fetch_add, i64_at
from .page_products import stored_outputs, stored_scores, transpose_rows
from .work_distribution import first_region, take_block

RUN = 4  # page blocks of a block of work; all but the first are prefetched
MAX_QUERY_ROWS = 64  # query rows multiplied by a page while it is in the L1 cache
FEW_BLOCKS = 36  # up to this many table blocks (4,608 tokens) there is space for the partials of several tokens


@inlined()
def _clear(address, count):
    values = f32_at(address)
    for i in range(count):
        values[i] = ZERO


@inlined()
def _scores_of(a, entry, kv, query, rows, count, scores):
    """Queries times the keys of a block in their stored type; its values are prefetched meanwhile. Scores beyond the held tokens are left
    undefined: they are masked later."""
    depth, part, item, source = a[HEAD_DIM], a[ROWS], 4 if a[DTYPE] == F32 else 2, _keys_of(a, entry, kv)
    _clear(scores, rows * PAGE)
    for begin in range(0, count, part):
        columns = (min(part, count - begin) + VECTOR - 1) // VECTOR * VECTOR
        stored_scores(query, source, part * item, a[DTYPE], scores + 4 * begin, 4 * PAGE, rows, columns, depth, source + a[SIDE])
        source += a[PART_STRIDE]


@inlined()
def _outputs_of(a, entry, kv, weights, rows, count, values, padded_depth, out, ahead):
    """Weights times the values of a block -> [rows, broad]; as much from `ahead` on is prefetched meanwhile. `values`: scratch for values
    whose rows are not whole vectors."""
    depth, part, item, source = a[HEAD_DIM], a[ROWS], 4 if a[DTYPE] == F32 else 2, _keys_of(a, entry, kv) + a[SIDE]
    _clear(out, rows * padded_depth)
    for begin in range(0, count, part):
        part_tokens, dtype, at, stride, columns = min(part, count - begin), a[DTYPE], source, depth * item, depth
        if depth % VECTOR != 0:
            dtype, at, stride, columns = F32, values, 4 * padded_depth, padded_depth
            for j in range(part_tokens):
                row = f32_at(values + 4 * j * padded_depth)
                expand(source + j * depth * item, a[DTYPE], values + 4 * j * padded_depth, depth)
                for i in range(depth, padded_depth):
                    row[i] = ZERO
        stored_outputs(weights + 4 * begin, at, stride, dtype, out, 4 * padded_depth, rows, columns, part_tokens, ahead)
        source, ahead = source + a[PART_STRIDE], ahead + depth * part * item


@kernel({"contract"})
def attend_decode(args, worker, counter):
    """Partials for few tokens. Blocks of work: a KV head and RUN page blocks. Without PAGES, sealed blocks are left to another kernel.

    Scratch per worker, float32: Q[rows, D], V[PAGE, wide D], S[rows, PAGE], part[rows, wide D]; rows in multiples of DECODE_TILE_ROWS.
    """
    a = i64_at(args)
    tokens, heads, kv_heads, depth, num_blocks = a[TOKENS], a[HEADS], a[KV_HEADS], a[HEAD_DIM], a[TO] - a[FROM]
    group = heads // kv_heads
    rows = tokens * group
    padded = (rows + DECODE_TILE_ROWS - 1) // DECODE_TILE_ROWS * DECODE_TILE_ROWS
    padded_depth = (depth + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    scale, softcap = float32(f64_at(args)[SCALE]), float32(f64_at(args)[SOFTCAP])
    query = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    values = query + 4 * padded * depth
    scores = values + 4 * PAGE * padded_depth
    part = scores + 4 * padded * PAGE
    sealed_from, sealed_to = (a[TO], a[TO]) if a[PAGES] else sealed_rows(a)
    num_blocks -= sealed_to - sealed_from
    runs, loaded = (num_blocks + RUN - 1) // RUN, -1
    region, ended = first_region(worker), int64(0)
    while True:
        job, region, ended = take_block(counter, region, ended, kv_heads * runs)
        if job < 0:
            return
        kv, begin = job // runs, job % runs * RUN
        if loaded != kv:
            _load_queries(a, part, kv, 0, rows, padded)
            transpose_rows(part, padded, depth, query)
            loaded = kv
        for index in range(begin, min(begin + RUN, num_blocks)):
            block = a[FROM] + index
            if block >= sealed_from:
                block += sealed_to - sealed_from
            entry = i64_at(a[TABLE] + 8 * COLUMNS * block)
            if entry[SEALED] == SKIPPED:
                continue
            first, count = entry[FIRST], entry[COUNT]
            partial = a[PARTIALS] + 4 * (kv * a[BLOCKS] + block) * rows * (depth + 2)
            if not _visible(first, count, a[POSITION], tokens, a[WINDOW]):
                for r in range(rows):
                    f32_at(partial)[r * (depth + 2) + depth] = MINUS_INF
                    f32_at(partial)[r * (depth + 2) + depth + 1] = ZERO
                continue
            last = block + 1 >= a[TO] or block + 1 == sealed_from  # the following block is not known
            following = entry if last else i64_at(a[TABLE] + 8 * COLUMNS * (block + 1))
            _scores_of(a, entry, kv, query, padded, count, scores)
            left = _capped(scores, padded, scale, softcap)
            for r in range(padded):
                position = a[POSITION] + r // group
                m, l = _softmax_row(scores + 4 * r * PAGE, _begin(first, count, position, a[WINDOW]),
                                    _end(first, count, position) if r < rows else 0, left)
                if r < rows:
                    o = f32_at(partial + 4 * r * (depth + 2))
                    o[depth], o[depth + 1] = m, l
            _outputs_of(a, entry, kv, scores, padded, count, values, padded_depth, part, _keys_of(a, following, kv))
            for r in range(rows):
                o, source = f32_at(partial + 4 * r * (depth + 2)), f32_at(part + 4 * r * padded_depth)
                for i in range(depth):
                    o[i] = source[i]


@kernel()
def merge_decode(args, worker, counter):
    """Merge `attend_decode`'s partials in table order into OUT[t, head, :]. Blocks of work: rows of a KV head."""
    a = i64_at(args)
    tokens, heads, kv_heads, depth, blocks = a[TOKENS], a[HEADS], a[KV_HEADS], a[HEAD_DIM], a[BLOCKS]
    group = heads // kv_heads
    rows = tokens * group
    while True:
        job = fetch_add(counter, 1)
        if job >= kv_heads * rows:
            return
        kv, r = job // rows, job % rows
        t, g = r // group, r % group
        o = f32_at(a[OUT] + 4 * (t * heads + kv * group + g) * depth)
        m, l = MINUS_INF, ZERO
        for block in range(blocks):
            part = f32_at(a[PARTIALS] + 4 * ((kv * blocks + block) * rows + r) * (depth + 2))
            m, l = _merge(o, m, l, part, part[depth], part[depth + 1], depth)
        l = _with_sink(a, kv * group + g, m, l)
        for i in range(depth):
            o[i] = o[i] / l


def max_tokens(floats: int, heads: int, layout: PageLayout, blocks: int) -> int:
    """Number of tokens whose partials fit into `floats`, among those that `attend_decode` takes at once; at least 1."""
    return max(1, min(_tokens_of_rows(heads // layout.kv_heads), floats // (heads * blocks * (layout.head_dim + 2))))


def partials_floats(tokens: int, heads: int, head_dim: int, blocks: int) -> int:
    """Floats for the partials of `tokens` tokens if a table has few blocks, of one token if it has `blocks`."""
    return max(blocks, tokens * min(blocks, FEW_BLOCKS)) * heads * (head_dim + 2)


def _tokens_of_rows(group: int) -> int:
    return max(1, MAX_QUERY_ROWS // group)


def attend_decode_scratch(tokens: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """Floats of scratch per worker for `attend_decode`, which takes fewer tokens at once if query heads share a KV head."""
    tokens = min(tokens, _tokens_of_rows(heads // kv_heads))
    padded_depth = -(-head_dim // TILE_COLUMNS) * TILE_COLUMNS
    rows = -(-tokens * (heads // kv_heads) // DECODE_TILE_ROWS) * DECODE_TILE_ROWS
    return rows * (head_dim + PAGE + padded_depth) + PAGE * padded_depth
