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

# Slots behind those of `attention.py`: KEYS of RATE tokens each; UNITS int32 [tokens, COUNT] of those that have more than COUNT closed
# ones, 0 for none, where all are seen; the first FIRST tokens see all. LEAD tokens lie before the first page. AT_ONCE heads of a token are
# a job.
KEYS, RATE, UNITS, COUNT, FIRST, LEAD, AT_ONCE, COMPRESSED_SLOTS = range(ATTEND_SLOTS, ATTEND_SLOTS + 8)
MOST_AT_ONCE, FEWEST_AT_ONCE = 64, 16  # heads of a query that share a tile that is brought
KEY_ROWS = (PAGE + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
TURN = 16  # numbers that are turned at once: a cache line


@inlined()
def _bring_tokens(a, first, seen, values, broad):
    """Consecutive tokens from `first` on as float32 rows."""
    depth, part, item, lead = a[HEAD_DIM], a[ROWS], 4 if a[DTYPE] == F32 else 2, a[LEAD]
    for j in range(seen):
        at, block, row = first + j, 0, first + j
        if at >= lead:
            block, row = (at - lead) // PAGE + (1 if lead > 0 else 0), (at - lead) % PAGE
        entry = i64_at(a[TABLE] + 8 * COLUMNS * block)
        base = a[PAGES] if entry[SEALED] else a[EXACT]
        source = base + entry[INDEX] * a[PAGE_STRIDE] + row // part * a[PART_STRIDE] + HEADER_NBYTES
        expand(source + a[SIDE] + row % part * depth * item, a[DTYPE], values + 4 * j * broad, depth)


@inlined()
def _bring_keys(a, units, first, seen, values, broad):
    """Keys from number `first` on, or of those selected, as float32 rows."""
    depth, item = a[HEAD_DIM], 4 if a[DTYPE] == F32 else 2
    for j in range(seen):
        key = first + j
        if units != 0:
            key = i32_at(units)[key]
        expand(a[KEYS] + key * depth * item, a[DTYPE], values + 4 * j * broad, depth)


@inlined()
def _turned_queries(source, here, depth, queries, columns):
    """Transpose rows [here, depth] -> QUERIES [depth, columns], zero-padded."""
    for begin in range(0, depth, TURN):
        end = min(depth, begin + TURN)
        for r in range(here):
            own, turned = f32_at(source + 4 * r * depth), f32_at(queries)
            for i in range(begin, end):
                turned[i * columns + r] = own[i]
    for i in range(depth):
        rest = f32_at(queries + 4 * i * columns)
        for r in range(here, columns):
            rest[r] = ZERO


@inlined()
def _turned_scores(found, seen, here, columns, scores):
    """Transpose scores by key [seen, columns] -> rows of PAGE, one for each of `here` heads."""
    for begin in range(0, here, TURN):
        end = min(here, begin + TURN)
        for j in range(seen):
            own, turned = f32_at(found + 4 * j * columns), f32_at(scores)
            for r in range(begin, end):
                turned[r * PAGE + j] = own[r]


@kernel({"contract"})
def attend_compressed(args, worker, counter):
    """Blocks of work: a token and some of its heads. Scratch per worker, float32: Q[D, heads], V[PAGE and a few rows, wide D], scores by
    key, S[heads, PAGE], part[heads, wide D], (m, l)[heads], O[heads, D], (m, l)[heads].

    Scores are a key row times the query columns, transposed once, and outputs a head's row times value columns: keys are stored like
    values.
    """
    a, reals = i64_at(args), f64_at(args)
    heads, depth, most = a[HEADS], a[HEAD_DIM], a[AT_ONCE]
    broad, columns = (depth + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS, (most + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    padded = (most + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    queries = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    values = queries + 4 * depth * columns
    found = values + 4 * KEY_ROWS * broad
    scores = found + 4 * KEY_ROWS * columns
    part = scores + 4 * padded * PAGE
    stats = f32_at(part + 4 * padded * broad)
    o = part + 4 * padded * (broad + 2)
    total = f32_at(o + 4 * padded * depth)
    groups = (heads + most - 1) // most
    rest = f32_at(values)
    for i in range(KEY_ROWS * broad):  # what no key fills is multiplied too, and left
        rest[i] = ZERO
    while True:
        job = fetch_add(counter, 1)
        if job >= groups * a[TOKENS]:
            return
        t, begin = job // groups, job % groups * most
        here, position = min(most, heads - begin), a[POSITION] + t
        _turned_queries(a[Q] + 4 * (t * heads + begin) * depth, here, depth, queries, columns)
        for r in range(here):
            total[2 * r], total[2 * r + 1] = MINUS_INF, ZERO
        near = min(position + 1, a[WINDOW])
        closed, units = (position + 1) // a[RATE], 0
        if a[COUNT] > 0 and closed > a[COUNT]:
            closed, units = a[COUNT], a[UNITS] + 4 * (t - a[FIRST]) * a[COUNT]
        windows = (near + PAGE - 1) // PAGE
        for tile in range(windows + (closed + PAGE - 1) // PAGE):
            if tile < windows:
                seen = min(PAGE, near - tile * PAGE)
                _bring_tokens(a, position + 1 - near + tile * PAGE, seen, values, broad)
            else:
                first = (tile - windows) * PAGE
                seen = min(PAGE, closed - first)
                _bring_keys(a, units, first, seen, values, broad)
            rows = (seen + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
            product(values, 4 * broad, queries, 4 * columns, found, 4 * columns, rows, columns, depth)
            _turned_scores(found, seen, here, columns, scores)
            left = _capped(scores, here, float32(reals[SCALE]), float32(reals[SOFTCAP]))
            for r in range(padded):
                stats[2 * r], stats[2 * r + 1] = _softmax_row(scores + 4 * r * PAGE, 0, seen if r < here else 0, left)
            product(scores, 4 * PAGE, values, 4 * broad, part, 4 * broad, padded, broad, seen)
            for r in range(here):
                m, l = _merge(f32_at(o + 4 * r * depth), total[2 * r], total[2 * r + 1], f32_at(part + 4 * r * broad), stats[2 * r],
                              stats[2 * r + 1], depth)
                total[2 * r], total[2 * r + 1] = m, l
        for r in range(here):
            target, result = f32_at(a[OUT] + 4 * (t * heads + begin + r) * depth), f32_at(o + 4 * r * depth)
            l = _with_sink(a, begin + r, total[2 * r], total[2 * r + 1])
            for i in range(depth):
                target[i] = result[i] / l


def heads_per_job(heads: int, tokens: int, workers: int) -> int:
    """Heads per job: all that share the gathered rows, unless that leaves a worker idle. A head's bits do not depend on it."""
    most = min(heads, MOST_AT_ONCE)
    while most > FEWEST_AT_ONCE and tokens * -(-heads // most) < workers:
        most = max(FEWEST_AT_ONCE, most // 2)
    return most


def scratch_floats(heads: int, head_dim: int) -> int:
    """Floats of scratch per worker."""
    most = min(heads, MOST_AT_ONCE)
    broad, columns = -(-head_dim // TILE_COLUMNS) * TILE_COLUMNS, -(-most // TILE_COLUMNS) * TILE_COLUMNS
    padded = -(-most // TILE_ROWS) * TILE_ROWS
    return head_dim * columns + KEY_ROWS * (broad + columns) + padded * (PAGE + broad + head_dim + 4)
