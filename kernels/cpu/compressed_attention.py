"""Attention over nearby tokens and over compressed keys (`compressed_shape.py`), where keys double as values.

Every query is a job of its own covering all heads, unless that leaves workers idle. What it sees is gathered into tiles of PAGE rows:
tokens within the window first, in order, then the completed keys, or those selected. Each tile yields a partial, and partials merge in
order, as those of pages do (`attention.py`). So a token's bits depend on nothing but its position.
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
    HEADS,
    INDEX,
    OUT,
    PAGE_STRIDE,
    PAGES,
    PART_STRIDE,
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
    WINDOW,
    Q,
    _capped,
    _merge,
    _softmax_row,
    _with_sink,
)
from .inner_loops import TILE_COLUMNS, TILE_ROWS, product
from .intrinsics import f32_at, f64_at, fetch_add, i32_at, i64_at

# Slots after those of `attention.py`. KEYS: of RATE tokens each. UNITS int32 [tokens, COUNT]: keys selected for tokens that see more than
# COUNT complete keys, 0 if every token sees all; the first FIRST tokens see all. SINK_TOKENS: tokens before the first page. HEADS_AT_ONCE:
# heads of a token per job.
KEYS, RATE, UNITS, COUNT, FIRST, SINK_TOKENS, HEADS_AT_ONCE, COMPRESSED_SLOTS = range(ATTEND_SLOTS, ATTEND_SLOTS + 8)
MAX_HEADS_AT_ONCE, MIN_HEADS_AT_ONCE = 64, 16  # heads of a query that share a gathered tile of keys
KEY_ROWS = (PAGE + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
TRANSPOSE_WIDTH = 16  # values transposed at once: a cache line


@inlined()
def _gather_tokens(a, first, count, values, padded_depth):
    """Consecutive tokens from `first` on as float32 rows."""
    depth, part, item, sink_tokens = a[HEAD_DIM], a[ROWS], 4 if a[DTYPE] == F32 else 2, a[SINK_TOKENS]
    for j in range(count):
        at, block, row = first + j, 0, first + j
        if at >= sink_tokens:
            block, row = (at - sink_tokens) // PAGE + (1 if sink_tokens > 0 else 0), (at - sink_tokens) % PAGE
        entry = i64_at(a[TABLE] + 8 * COLUMNS * block)
        base = a[PAGES] if entry[SEALED] else a[EXACT]
        source = base + entry[INDEX] * a[PAGE_STRIDE] + row // part * a[PART_STRIDE] + HEADER_NBYTES
        expand(source + a[SIDE] + row % part * depth * item, a[DTYPE], values + 4 * j * padded_depth, depth)


@inlined()
def _gather_keys(a, units, first, count, values, padded_depth):
    """Keys from number `first` on, or of those selected, as float32 rows."""
    depth, item = a[HEAD_DIM], 4 if a[DTYPE] == F32 else 2
    for j in range(count):
        key = first + j
        if units != 0:
            key = i32_at(units)[key]
        expand(a[KEYS] + key * depth * item, a[DTYPE], values + 4 * j * padded_depth, depth)


@inlined()
def _transposed_queries(source, num_heads, depth, queries, columns):
    """Transpose rows [here, depth] -> QUERIES [depth, columns], zero-padded."""
    for begin in range(0, depth, TRANSPOSE_WIDTH):
        end = min(depth, begin + TRANSPOSE_WIDTH)
        for r in range(num_heads):
            source_row, transposed = f32_at(source + 4 * r * depth), f32_at(queries)
            for i in range(begin, end):
                transposed[i * columns + r] = source_row[i]
    for i in range(depth):
        padding = f32_at(queries + 4 * i * columns)
        for r in range(num_heads, columns):
            padding[r] = ZERO


@inlined()
def _transposed_scores(products, count, num_heads, columns, scores):
    """Transpose scores by key [seen, columns] -> rows of PAGE, one for each of `num_heads` heads."""
    for begin in range(0, num_heads, TRANSPOSE_WIDTH):
        end = min(num_heads, begin + TRANSPOSE_WIDTH)
        for j in range(count):
            product, score_row = f32_at(products + 4 * j * columns), f32_at(scores)
            for r in range(begin, end):
                score_row[r * PAGE + j] = product[r]


@kernel({"contract"})
def attend_compressed(args, worker, counter):
    """Blocks of work: a token and some of its heads. Scratch per worker, float32: Q[D, heads], V[PAGE and a few rows, wide D], scores by
    key, S[heads, PAGE], part[heads, wide D], (m, l)[heads], O[heads, D], (m, l)[heads].

    Scores are a key row times the query columns, transposed once, and outputs a head's row times value columns: keys are stored like
    values.
    """
    a, reals = i64_at(args), f64_at(args)
    heads, depth, heads_at_once = a[HEADS], a[HEAD_DIM], a[HEADS_AT_ONCE]
    padded_depth = (depth + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    columns = (heads_at_once + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    padded = (heads_at_once + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    queries = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    values = queries + 4 * depth * columns
    products = values + 4 * KEY_ROWS * padded_depth
    scores = products + 4 * KEY_ROWS * columns
    part = scores + 4 * padded * PAGE
    stats = f32_at(part + 4 * padded * padded_depth)
    o = part + 4 * padded * (padded_depth + 2)
    total = f32_at(o + 4 * padded * depth)
    groups = (heads + heads_at_once - 1) // heads_at_once
    padding = f32_at(values)
    for i in range(KEY_ROWS * padded_depth):  # unused key rows are multiplied too, and their results ignored
        padding[i] = ZERO
    while True:
        job = fetch_add(counter, 1)
        if job >= groups * a[TOKENS]:
            return
        t, begin = job // groups, job % groups * heads_at_once
        num_heads, position = min(heads_at_once, heads - begin), a[POSITION] + t
        _transposed_queries(a[Q] + 4 * (t * heads + begin) * depth, num_heads, depth, queries, columns)
        for r in range(num_heads):
            total[2 * r], total[2 * r + 1] = MINUS_INF, ZERO
        near = min(position + 1, a[WINDOW])
        closed, units = (position + 1) // a[RATE], 0
        if a[COUNT] > 0 and closed > a[COUNT]:
            closed, units = a[COUNT], a[UNITS] + 4 * (t - a[FIRST]) * a[COUNT]
        windows = (near + PAGE - 1) // PAGE
        for tile in range(windows + (closed + PAGE - 1) // PAGE):
            if tile < windows:
                count = min(PAGE, near - tile * PAGE)
                _gather_tokens(a, position + 1 - near + tile * PAGE, count, values, padded_depth)
            else:
                first = (tile - windows) * PAGE
                count = min(PAGE, closed - first)
                _gather_keys(a, units, first, count, values, padded_depth)
            rows = (count + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
            product(values, 4 * padded_depth, queries, 4 * columns, products, 4 * columns, rows, columns, depth)
            _transposed_scores(products, count, num_heads, columns, scores)
            left = _capped(scores, num_heads, float32(reals[SCALE]), float32(reals[SOFTCAP]))
            for r in range(padded):
                stats[2 * r], stats[2 * r + 1] = _softmax_row(scores + 4 * r * PAGE, 0, count if r < num_heads else 0, left)
            product(scores, 4 * PAGE, values, 4 * padded_depth, part, 4 * padded_depth, padded, padded_depth, count)
            for r in range(num_heads):
                m, l = _merge(f32_at(o + 4 * r * depth), total[2 * r], total[2 * r + 1], f32_at(part + 4 * r * padded_depth), stats[2 * r],
                              stats[2 * r + 1], depth)
                total[2 * r], total[2 * r + 1] = m, l
        for r in range(num_heads):
            target, result = f32_at(a[OUT] + 4 * (t * heads + begin + r) * depth), f32_at(o + 4 * r * depth)
            l = _with_sink(a, begin + r, total[2 * r], total[2 * r + 1])
            for i in range(depth):
                target[i] = result[i] / l


def heads_per_job(heads: int, tokens: int, workers: int) -> int:
    """Heads per job: all that share the gathered rows, unless that leaves a worker idle. A head's bits do not depend on it."""
    max_heads = min(heads, MAX_HEADS_AT_ONCE)
    while max_heads > MIN_HEADS_AT_ONCE and tokens * -(-heads // max_heads) < workers:
        max_heads = max(MIN_HEADS_AT_ONCE, max_heads // 2)
    return max_heads


def scratch_floats(heads: int, head_dim: int) -> int:
    """Floats of scratch per worker."""
    max_heads = min(heads, MAX_HEADS_AT_ONCE)
    padded_depth, columns = -(-head_dim // TILE_COLUMNS) * TILE_COLUMNS, -(-max_heads // TILE_COLUMNS) * TILE_COLUMNS
    padded = -(-max_heads // TILE_ROWS) * TILE_ROWS
    return head_dim * columns + KEY_ROWS * (padded_depth + columns) + padded * (PAGE + padded_depth + head_dim + 4)
