"""Attention over the tokens nearby and over keys that are made of several tokens (`compressed_shape.py`), of which keys are values too.

Every query is a job of its own, some heads at a time: what it sees is brought into tiles of PAGE, the tokens within the window first, in
their order, then the keys that are closed, or of many those that were chosen. Each tile gives a partial, and partials merge in order, as
those of pages do (`attention.py`). So a token's bits depend on nothing but its place. """

from __future__ import annotations

from numpy import float32

from ..compile import kernel
from ..deferred import inlined
from ..layout import F32, HEADER_NBYTES, PAGE
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
    _merge,
    _scale_scores,
    _softmax_row,
    _with_sink,
)
from .inner_loops import TILE_COLUMNS, TILE_ROWS, product
from .intrinsics import f32_at, f64_at, fetch_add, i32_at, i64_at

# Slots behind those of `attention.py`: KEYS of RATE tokens each; UNITS int32 [tokens, COUNT] of those that have more than COUNT closed
# ones, 0 for none, where all are seen; the first FIRST tokens see all. LEAD tokens lie before the first page.
KEYS, RATE, UNITS, COUNT, FIRST, LEAD, COMPRESSED_SLOTS = range(ATTEND_SLOTS, ATTEND_SLOTS + 7)
HEADS_AT_ONCE = 16  # of a query: so many share a tile that is brought
TURN = 16  # channels that are turned at once: a cache line of a value


@inlined()
def _bring_tokens(a, first, seen, values, broad):
    """Tokens side by side from `first` on as float32 rows."""
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
    """Keys from the number `first` on, or of those that were chosen, as float32 rows."""
    depth, item = a[HEAD_DIM], 4 if a[DTYPE] == F32 else 2
    for j in range(seen):
        key = first + j
        if units != 0:
            key = i32_at(units)[key]
        expand(a[KEYS] + key * depth * item, a[DTYPE], values + 4 * j * broad, depth)


@inlined()
def _turned(seen, depth, broad, values, keys):
    """Rows VALUES [seen, broad], whose rest is cleared, as KEYS [depth, PAGE] too."""
    for j in range(seen):
        rest = f32_at(values + 4 * j * broad)
        for i in range(depth, broad):
            rest[i] = ZERO
    for begin in range(0, depth, TURN):
        end = min(depth, begin + TURN)
        for j in range(seen):
            own, turned = f32_at(values + 4 * j * broad), f32_at(keys)
            for i in range(begin, end):
                turned[i * PAGE + j] = own[i]


@kernel({"contract"})
def attend_compressed(args, worker, counter):
    """Blocks of work: a token and some of its heads. Scratch per worker, float32: Q[rows, D], K[D, PAGE], V[PAGE, wide D], S[rows, PAGE],
    part[rows, wide D], (m, l)[rows], O[rows, D], (m, l)[rows]."""
    a, reals = i64_at(args), f64_at(args)
    heads, depth = a[HEADS], a[HEAD_DIM]
    broad = (depth + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    padded = (HEADS_AT_ONCE + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    query = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    keys = query + 4 * padded * depth
    values = keys + 4 * depth * PAGE
    scores = values + 4 * PAGE * broad
    part = scores + 4 * padded * PAGE
    stats = f32_at(part + 4 * padded * broad)
    o = part + 4 * padded * (broad + 2)
    total = f32_at(o + 4 * padded * depth)
    groups = (heads + HEADS_AT_ONCE - 1) // HEADS_AT_ONCE
    while True:
        job = fetch_add(counter, 1)
        if job >= groups * a[TOKENS]:
            return
        t, begin = job // groups, job % groups * HEADS_AT_ONCE
        here, position = min(HEADS_AT_ONCE, heads - begin), a[POSITION] + t
        source, q = f32_at(a[Q] + 4 * (t * heads + begin) * depth), f32_at(query)
        for i in range(padded * depth):
            q[i] = source[i] if i < here * depth else ZERO
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
            _turned(seen, depth, broad, values, keys)
            columns = (seen + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
            product(query, 4 * depth, keys, 4 * PAGE, scores, 4 * PAGE, padded, columns, depth)
            _scale_scores(scores, padded, float32(reals[SCALE]), float32(reals[SOFTCAP]))
            for r in range(padded):
                stats[2 * r], stats[2 * r + 1] = _softmax_row(scores + 4 * r * PAGE, 0, seen if r < here else 0)
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


def scratch_floats(head_dim: int) -> int:
    """Floats of scratch per worker."""
    broad = -(-head_dim // TILE_COLUMNS) * TILE_COLUMNS
    padded = -(-HEADS_AT_ONCE // TILE_ROWS) * TILE_ROWS
    return padded * (2 * head_dim + broad + PAGE + 4) + PAGE * (head_dim + broad)
