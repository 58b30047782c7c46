"""Estimates of the contribution of on-disk pages to one token's attention, from in-memory summaries: first their share, then their output.

The summary of a page and KV head is the mean key in 8 bits; for every token, the sign of the key's difference from the mean along each
direction of a fixed random basis (one bit each, as in RaBitQ, arXiv:2405.12497) and its distance from the mean; and the mean value of every
32 tokens in 8 bits. A query is rotated into that basis once, which gives each token a score of its own (`sign_products.py`); the summed
weights of a chunk are multiplied by its mean value.

There are two steps, since the first determines which pages are worth reading and the disk need not wait for more. `estimate_pages` leaves
each partial's (m, l) in place, with the chunk weights where the tail of its output goes. `estimate_outputs` merges the outputs of pages
that are not read, RUN at a time on a grid starting at the first page, into one partial stored at the first of them; the others get empty
partials. Results do not depend on which thread computed what.
"""

from __future__ import annotations

from numpy import float32

from ...compile import kernel
from ...layout import PAGE
from ...lazy_numba import inlined
from ..arithmetic import MINUS_INF, ZERO, exp
from ..attention import _cap
from ..inner_loops import DECODE_TILE_ROWS, TILE_COLUMNS, low_tile_product
from ..intrinsics import f32_at, f64_at, fetch_add, i8_at, i64_at, u8_at
from .arguments import _padded_depth, _rotate_rows
from .chunk_softmax import CHUNKS, weigh_chunks
from .sign_products import PAIR, TABLE, make_tables, sign_scores_1, sign_scores_4

RUN = 8  # pages of a block of work, whose outputs are merged if none of them is read
# Slots of the argument block. FIRST: the page of the first of COUNT abstracts. FROM, TO: pages to estimate. LEAD: table rows before page 0.
# PICKED uint8 [TO - FROM]: is the page read? SIDES uint8 [KVH, pages, pairs, PAGE]: signs of PAIR directions of a token, lowest bit first.
# FAR uint8 [KVH, pages, PAGE], MEANS int8 [KVH, pages, D], VALUES int8 [KVH, pages, CHUNKS, D]; STEPS float32 [KVH, pages, STEP_SLOTS]:
# units of FAR, of means, and of the values of each chunk. TURN float32 [D, padded D]: rotation into the basis of keys. SCALE and SOFTCAP
# are float64.
(E_Q, E_HEADS, E_BLOCKS, E_FROM, E_TO, E_KV_HEADS, E_DIM, E_FIRST, E_COUNT, E_LEAD, E_PARTIALS, E_PICKED, E_SIDES, E_FAR, E_MEANS,
 E_VALUES, E_STEPS, E_TURN, E_SCALE, E_SOFTCAP, E_SCRATCH, E_SCRATCH_STRIDE, ESTIMATE_SLOTS) = range(23)
FAR_STEP, MEAN_STEP, VALUE_STEPS, STEP_SLOTS = 0, 1, 2, 2 + CHUNKS


@inlined({"contract", "reassoc", "nsz"})
def _of_mean(query, codes, depth):
    """Dot product of float32 x [D] and int8 c [D]."""
    q, c = f32_at(query), i8_at(codes)
    total = ZERO
    for i in range(depth):
        total += q[i] * float32(c[i])
    return total


@inlined()
def _capped(row, softcap):
    for t in range(PAGE):
        row[t] = _cap(row[t], softcap)


@inlined()
def _partials_of(a, kv, page, rows, depth):
    return a[E_PARTIALS] + 4 * (kv * a[E_BLOCKS] + a[E_LEAD] + page) * rows * (depth + 2)


@inlined()
def _abstract_address(a, kv, page):
    """Index of the summary of a page and KV head."""
    return kv * a[E_COUNT] + page - a[E_FIRST]


@kernel({"contract"})
def estimate_pages(args, worker, counter):
    """(m, l) and chunk weights of every page. Blocks of work: (KV head, RUN pages). Scratch per worker, less than that of `attend_decode`:
    float32 Q[rows, D], rotated Q[rows, wide D], S[rows, PAGE], steps and means [rows], bytes T[rows, pairs, TABLE]."""
    a = i64_at(args)
    heads, kv_heads, depth, pages = a[E_HEADS], a[E_KV_HEADS], a[E_DIM], a[E_TO] - a[E_FROM]
    rows, padded_depth, pairs = heads // kv_heads, _padded_depth(depth), (depth + PAIR - 1) // PAIR
    padded, runs = (rows + DECODE_TILE_ROWS - 1) // DECODE_TILE_ROWS * DECODE_TILE_ROWS, (pages + RUN - 1) // RUN
    scale, softcap = float32(f64_at(args)[E_SCALE]), float32(f64_at(args)[E_SOFTCAP])
    plain = a[E_SCRATCH] + worker * a[E_SCRATCH_STRIDE]
    query = plain + 4 * padded * depth
    scores = query + 4 * padded * padded_depth
    own_steps = scores + 4 * padded * PAGE
    products, tables = own_steps + 8 * padded, own_steps + 16 * padded
    loaded = -1
    while True:
        job = fetch_add(counter, 1)
        if job >= kv_heads * runs:
            return
        kv, begin = job // runs, a[E_FROM] + job % runs * RUN
        if loaded != kv:
            source, copied = f32_at(a[E_Q] + 4 * kv * rows * depth), f32_at(plain)
            for i in range(padded * depth):
                copied[i] = source[i] if i < rows * depth else ZERO
            _rotate_rows(padded, plain, a[E_TURN], query, depth, padded_depth)
            for r in range(rows):
                f32_at(own_steps)[r] = scale * make_tables(query + 4 * r * padded_depth, tables + r * pairs * TABLE, depth)
            loaded = kv
        for page in range(begin, min(begin + RUN, a[E_TO])):
            abstract = _abstract_address(a, kv, page)
            sides, far, at_steps = a[E_SIDES] + abstract * pairs * PAGE, a[E_FAR] + abstract * PAGE, a[E_STEPS] + 4 * abstract * STEP_SLOTS
            steps, value_steps = f32_at(at_steps), at_steps + 4 * VALUE_STEPS
            step, more = f32_at(products), f32_at(products + 4 * padded)
            for r in range(rows):
                step[r] = f32_at(own_steps)[r] * steps[FAR_STEP]
                more[r] = scale * steps[MEAN_STEP] * _of_mean(query + 4 * r * padded_depth, a[E_MEANS] + abstract * depth, depth)
            r = 0
            while r < rows:
                at = tables + r * pairs * TABLE, products + 4 * r, products + 4 * (padded + r), scores + 4 * r * PAGE
                if rows - r > 2:
                    sign_scores_4(sides, far, *at, pairs)
                    r += 4
                else:
                    sign_scores_1(sides, far, *at, pairs)
                    r += 1
            partials = _partials_of(a, kv, page, rows, depth)
            for r in range(rows):
                row, o = scores + 4 * r * PAGE, partials + 4 * r * (depth + 2)
                if softcap != ZERO:
                    _capped(f32_at(row), softcap)
                m, l = weigh_chunks(row, value_steps, o + 4 * (depth - CHUNKS))
                f32_at(o)[depth], f32_at(o)[depth + 1] = m, l


@inlined()
def _highest(a, kv, begin, end, rows, depth, maxima):
    """The largest m of each row among pages that are not read, to `maxima`; returns the first of these pages, `end` if there is none."""
    first, picked = end, u8_at(a[E_PICKED])
    for r in range(rows):
        maxima[r] = MINUS_INF
    for page in range(begin, end):
        if not picked[page - a[E_FROM]]:
            first = min(first, page)
            for r in range(rows):
                m = f32_at(_partials_of(a, kv, page, rows, depth) + 4 * r * (depth + 2))[depth]
                maxima[r] = m if m != m else max(maxima[r], m)
    return first


@kernel({"contract"})
def estimate_outputs(args, worker, counter):
    """Partials of the pages that are not read, after `estimate_pages`. Blocks of work: (KV head, RUN pages). Scratch per worker, float32,
    less than that of `attend_decode`: weights[rows, RUN * CHUNKS], V[RUN * CHUNKS, wide D], part[rows, wide D], (m, l)[2, rows]."""
    a = i64_at(args)
    heads, kv_heads, depth, pages = a[E_HEADS], a[E_KV_HEADS], a[E_DIM], a[E_TO] - a[E_FROM]
    rows, padded_depth, picked = heads // kv_heads, _padded_depth(depth), u8_at(a[E_PICKED])
    padded, runs = (rows + DECODE_TILE_ROWS - 1) // DECODE_TILE_ROWS * DECODE_TILE_ROWS, (pages + RUN - 1) // RUN
    weights = a[E_SCRATCH] + worker * a[E_SCRATCH_STRIDE]
    values = weights + 4 * padded * RUN * CHUNKS
    part = values + 4 * RUN * CHUNKS * padded_depth
    maxima, total = f32_at(part + 4 * padded * padded_depth), f32_at(part + 4 * padded * (padded_depth + 1))
    for i in range(padded * RUN * CHUNKS):
        f32_at(weights)[i] = ZERO
    while True:
        job = fetch_add(counter, 1)
        if job >= kv_heads * runs:
            return
        kv, begin = job // runs, a[E_FROM] + job % runs * RUN
        end = min(begin + RUN, a[E_TO])
        first, used = _highest(a, kv, begin, end, rows, depth, maxima), 0
        for r in range(rows):
            total[r] = ZERO
        for page in range(begin, end):
            if picked[page - a[E_FROM]]:
                continue
            codes = a[E_VALUES] + _abstract_address(a, kv, page) * CHUNKS * depth
            for chunk in range(CHUNKS):
                chunk_codes, wide = i8_at(codes + chunk * depth), f32_at(values + 4 * (used + chunk) * padded_depth)
                for i in range(depth):
                    wide[i] = float32(chunk_codes[i])
            for r in range(rows):
                o, row = f32_at(_partials_of(a, kv, page, rows, depth) + 4 * r * (depth + 2)), f32_at(weights + 4 * r * RUN * CHUNKS)
                factor = exp(o[depth] - maxima[r])
                total[r] += factor * o[depth + 1]
                for chunk in range(CHUNKS):
                    row[used + chunk] = factor * o[depth - CHUNKS + chunk]
                o[depth], o[depth + 1] = MINUS_INF, ZERO
            used += CHUNKS
        if not used:
            continue
        for r in range(0, padded, DECODE_TILE_ROWS):
            for i in range(0, padded_depth, TILE_COLUMNS):
                low_tile_product(weights + 4 * r * RUN * CHUNKS, 4 * RUN * CHUNKS, values + 4 * i, 4 * padded_depth,
                                 part + 4 * (r * padded_depth + i), 4 * padded_depth, used, 0)
        for r in range(rows):
            source, o = f32_at(part + 4 * r * padded_depth), f32_at(_partials_of(a, kv, first, rows, depth) + 4 * r * (depth + 2))
            for i in range(depth):
                o[i] = source[i]
            o[depth], o[depth + 1] = maxima[r], total[r]
