"""Kernels of a lightning indexer (`indexer_shape.py`): storing keys, scoring them, and selecting the best.

Every score is one chain of fused multiply-adds over a head's channels, then over heads in order, whichever thread computes it; selection
works on integers. So results depend neither on threads nor on how many tokens a pass has. In decode blocks of keys are distributed over
threads, in prefill the tokens.
"""

from __future__ import annotations

from numpy import float32, int32, int64, uint32

from ..compile import kernel
from ..layout import F32, NORM_RMS_PLUS_ONE, PAGE
from ..lazy_numba import inlined
from .arithmetic import INFINITY, MINUS_INF, ONE, ZERO, expand, narrow_half, normalise_here
from .inner_loops import DECODE_TILE_ROWS, TILE_COLUMNS, TILE_ROWS, low_tile_product, product
from .intrinsics import f32_at, f32_to_bits, f64_at, fetch_add, i32_at, i64_at, u16_at

# Slots of `note_keys`: K [TOKENS, WIDTH] is written to KEYS from POSITION on.
N_K, N_TOKENS, N_POSITION, N_WIDTH, N_DTYPE, N_KEYS, NOTE_SLOTS = range(7)
# Slots of `note_means`: K [TOKENS, WIDTH] is written to ROWS from POSITION on. The mean of every complete run of RATE rows is written to
# KEYS, normed by WEIGHT and EPS, its first TURNED channels rotated by COS and SIN [keys, TURNED / 2] of keys that may become complete.
# Scratch of a worker: a row, and the mean.
(M_K, M_TOKENS, M_POSITION, M_WIDTH, M_DTYPE, M_KEYS, M_ROWS, M_RATE, M_WEIGHT, M_COS, M_SIN, M_TURNED, M_SCRATCH, M_STRIDE, M_EPS,
 MEAN_SLOTS) = range(16)
# Slots of the others: Q [TOKENS, HEADS * WIDTH]; WEIGHTS [TOKENS, HEADS], 0 if heads select separately (PER_HEAD) or count alike; CHOSEN
# int32 [TOKENS, groups, LISTED], of which the first COUNT are selected. SCORES: a row of ROW floats per token and group, read by
# `select_decode`. Scratch of `select_prefill`, per worker, float32: Q[padded heads, WIDTH] of each token of a tile, K[WIDTH, PAGE],
# S[padded heads, PAGE], int64 [256], score rows of each token of a tile.
Q, WEIGHTS, TOKENS, POSITION, CHOSEN, HEADS, WIDTH, COUNT, GRAIN, PER_HEAD, NEAR, KEYS, DTYPE = range(13)
SCORES, ROW, SCRATCH, STRIDE, RATE, LISTED, SLOTS = range(13, 20)  # RATE: tokens of a key
BINS, BYTE, TOP_BIT = 256, int64(255), uint32(1 << 31)
TILE_QUERIES = 64  # approximate number of query rows in a tile


@inlined()
def put_kept(source, target, width, step, item):
    """Store `width` float32 of `source` at address `target`, `step` values apart, as floats or halves."""
    if item == 4:
        wide = f32_at(target)
        for i in range(width):
            wide[i * step] = source[i]
    else:
        narrow = u16_at(target)
        for i in range(width):
            narrow[i * step] = narrow_half(source[i])


@kernel()
def note_keys(args, worker, counter):
    """Store keys in the index's type. Blocks are PAGE tokens."""
    a = i64_at(args)
    width, item = a[N_WIDTH], 4 if a[N_DTYPE] == F32 else 2
    while True:
        begin = PAGE * fetch_add(counter, 1)
        if begin >= a[N_TOKENS]:
            return
        for t in range(begin, min(begin + PAGE, a[N_TOKENS])):
            at, source = a[N_POSITION] + t, f32_at(a[N_K] + 4 * t * width)
            block = a[N_KEYS] + at // PAGE * PAGE * width * item
            at %= PAGE
            put_kept(source, block + at * item, width, PAGE, item)


@inlined({"contract"})
def _turn_halves(row, cos, sin, half):
    y, z, c, s = f32_at(row), f32_at(row + 4 * half), f32_at(cos), f32_at(sin)
    for i in range(half):
        low, high = y[i], z[i]
        y[i] = low * c[i] - high * s[i]
        z[i] = high * c[i] + low * s[i]


@inlined()
def _mean(args, group, row, mean):
    """The key of a complete group of rows: rows are added in order, in their stored precision."""
    a = i64_at(args)
    width, rate, item = a[M_WIDTH], a[M_RATE], 4 if a[M_DTYPE] == F32 else 2
    one, total = f32_at(row), f32_at(mean)
    for i in range(width):
        total[i] = ZERO
    for t in range(group * rate, (group + 1) * rate):
        expand(a[M_ROWS] + t * width * item, a[M_DTYPE], row, width)
        for i in range(width):
            total[i] += one[i]
    share = ONE / float32(rate)
    for i in range(width):
        total[i] *= share
    normalise_here(mean, width, NORM_RMS_PLUS_ONE, a[M_WEIGHT], 0, float32(f64_at(args)[M_EPS]))


@kernel()
def note_means(args, worker, counter):
    """Store the tokens' contributions to means, and the means that become complete. Blocks are the tokens of one key."""
    a = i64_at(args)
    width, rate, item, half = a[M_WIDTH], a[M_RATE], 4 if a[M_DTYPE] == F32 else 2, a[M_TURNED] // 2
    begin, end = a[M_POSITION], a[M_POSITION] + a[M_TOKENS]
    first, row = begin // rate, a[M_SCRATCH] + worker * a[M_STRIDE]
    mean = row + 4 * width
    while True:
        group = first + fetch_add(counter, 1)
        if group * rate >= end:
            return
        for t in range(max(begin, group * rate), min(end, (group + 1) * rate)):
            source, target = f32_at(a[M_K] + 4 * (t - begin) * width), a[M_ROWS] + t * width * item
            put_kept(source, target, width, 1, item)
        if (group + 1) * rate > end:
            continue
        _mean(args, group, row, mean)
        _turn_halves(mean, a[M_COS] + 4 * (group - first) * half, a[M_SIN] + 4 * (group - first) * half, half)
        mean_row, block, at = f32_at(mean), a[M_KEYS] + group // PAGE * PAGE * width * item, group % PAGE
        put_kept(mean_row, block + at * item, width, PAGE, item)


@inlined()
def _padded(heads):
    return (heads + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS


@inlined()
def _load_query(a, t, query):
    """A token's index queries, zero-padded to whole tiles."""
    heads, width = a[HEADS], a[WIDTH]
    source, target = f32_at(a[Q] + 4 * t * heads * width), f32_at(query)
    for i in range(heads * width):
        target[i] = source[i]
    for i in range(heads * width, _padded(heads) * width):
        target[i] = ZERO


@inlined({"contract"})
def _add_weighed(row, scores, weight):
    """ROW[PAGE] += weight * max(SCORES[PAGE], 0)."""
    for j in range(PAGE):
        row[j] += weight * max(scores[j], ZERO)


@inlined()
def _score(a, t, block, query, keys, products, rows):
    """Scores of a block of keys, widened in KEYS, for token `t` with queries in QUERY, into its rows."""
    heads, width, position = a[HEADS], a[WIDTH], a[POSITION] + t
    if heads <= DECODE_TILE_ROWS:
        for j in range(0, PAGE, TILE_COLUMNS):
            low_tile_product(query, 4 * width, keys + 4 * j, 4 * PAGE, products + 4 * j, 4 * PAGE, width, 0)
    else:
        product(query, 4 * width, keys, 4 * PAGE, products, 4 * PAGE, _padded(heads), PAGE, width)
    if a[PER_HEAD] == 0:
        row, weights = f32_at(rows + 4 * block * PAGE), f32_at(a[WEIGHTS] + 4 * t * heads)
        for j in range(PAGE):
            row[j] = ZERO
        for head in range(heads):
            _add_weighed(row, f32_at(products + 4 * head * PAGE), weights[head] if a[WEIGHTS] != 0 else ONE)
        return
    grain = a[GRAIN]
    visible = min(PAGE, position + 1 - block * PAGE)
    for head in range(heads):
        head_scores = f32_at(products + 4 * head * PAGE)
        for begin in range(0, visible, grain):
            unit, best = (block * PAGE + begin) // grain, MINUS_INF
            for j in range(begin, min(begin + grain, visible)):
                best = max(best, head_scores[j])
            last_unit = position // grain
            f32_at(rows + 4 * head * a[ROW])[unit] = INFINITY if last_unit - a[NEAR] < unit and unit <= last_unit else best


@inlined()
def _load_keys(a, block, keys):
    width, item = a[WIDTH], 4 if a[DTYPE] == F32 else 2
    expand(a[KEYS] + block * PAGE * width * item, a[DTYPE], keys, width * PAGE)


@inlined()
def _rank(row, i):
    """An integer that increases with a score."""
    bits = f32_to_bits(row[i])
    return int64(~bits if bits & TOP_BIT else bits | TOP_BIT)


@inlined()
def _choose(row, units, count, bins, out):
    """Select the `count` best scores, ascending by position, ties going to the earlier: the threshold rank is found by a byte-wise radix
    search."""
    threshold, remaining = int64(0), count
    for shift in (24, 16, 8, 0):
        for i in range(BINS):
            bins[i] = 0
        for i in range(units):
            rank = _rank(row, i)
            if rank >> (shift + 8) == threshold >> (shift + 8):
                bins[(rank >> shift) & BYTE] += 1
        digit_shift = BYTE
        while digit_shift > 0 and bins[digit_shift] < remaining:
            remaining -= bins[digit_shift]
            digit_shift -= 1
        threshold |= digit_shift << shift
    counted = 0
    for i in range(units):
        rank = _rank(row, i)
        if rank > threshold or (rank == threshold and remaining > 0):
            if rank == threshold:
                remaining -= 1
            out[counted] = int32(i)
            counted += 1


@inlined()
def _keys_at(a, t):
    """How many keys token t sees."""
    return (a[POSITION] + t + 1) // a[RATE]


@inlined()
def _choices(a, t, rows, bins):
    """The selection of a token from its rows of scores."""
    groups = a[HEADS] if a[PER_HEAD] else 1
    units = (_keys_at(a, t) - 1) // a[GRAIN] + 1
    for group in range(groups):
        out = i32_at(a[CHOSEN] + 4 * (t * groups + group) * a[LISTED])
        _choose(f32_at(rows + 4 * group * a[ROW]), units, a[COUNT], bins, out)
        if a[LISTED] > a[COUNT]:  # the unit whose key is incomplete
            out[a[COUNT]] = int32(_keys_at(a, t))


@kernel()
def score_decode(args, worker, counter):
    """Scores of few tokens. Blocks of work are blocks of keys."""
    a = i64_at(args)
    width, groups = a[WIDTH], a[HEADS] if a[PER_HEAD] else 1
    query = a[SCRATCH] + worker * a[STRIDE]
    keys = query + 4 * _padded(a[HEADS]) * width
    products = keys + 4 * width * PAGE
    blocks, loaded = (_keys_at(a, a[TOKENS] - 1) + PAGE - 1) // PAGE, -1
    while True:
        block = fetch_add(counter, 1)
        if block >= blocks:
            return
        _load_keys(a, block, keys)
        for t in range(a[TOKENS]):
            if block * PAGE >= _keys_at(a, t):
                continue
            if loaded != t:
                _load_query(a, t, query)
                loaded = t
            _score(a, t, block, query, keys, products, a[SCORES] + 4 * t * groups * a[ROW])


@kernel()
def select_decode(args, worker, counter):
    """Selections of few tokens, from the scores of `score_decode`. Blocks of work are tokens."""
    a = i64_at(args)
    groups = a[HEADS] if a[PER_HEAD] else 1
    bins = i64_at(a[SCRATCH] + worker * a[STRIDE])
    while True:
        t = fetch_add(counter, 1)
        if t >= a[TOKENS]:
            return
        _choices(a, t, a[SCORES] + 4 * t * groups * a[ROW], bins)


def _height_of(heads: int) -> int:
    """Tokens per widened block of keys: more if few heads read it."""
    return max(1, TILE_QUERIES // heads)


tile_height = inlined()(_height_of)


@kernel()
def select_prefill(args, worker, counter):
    """Scores and selections of many tokens. Blocks of work are tiles of tokens, last ones first: they see more."""
    a = i64_at(args)
    width, groups, height = a[WIDTH], a[HEADS] if a[PER_HEAD] else 1, tile_height(a[HEADS])
    query, padded = a[SCRATCH] + worker * a[STRIDE], _padded(a[HEADS])
    keys = query + 4 * height * padded * width
    products = keys + 4 * width * PAGE
    bins = products + 4 * padded * PAGE
    rows = bins + 8 * BINS
    while True:
        first = ((a[TOKENS] + height - 1) // height - 1 - fetch_add(counter, 1)) * height
        if first < 0:
            return
        tile_tokens = min(height, a[TOKENS] - first)
        for i in range(tile_tokens):
            _load_query(a, first + i, query + 4 * i * padded * width)
        for block in range((_keys_at(a, first + tile_tokens - 1) - 1) // PAGE + 1):
            _load_keys(a, block, keys)
            for i in range(tile_tokens):
                if block * PAGE < _keys_at(a, first + i):
                    _score(a, first + i, block, query + 4 * i * padded * width, keys, products, rows + 4 * i * groups * a[ROW])
        for i in range(tile_tokens):
            _choices(a, first + i, rows + 4 * i * groups * a[ROW], i64_at(bins))


def scratch_floats(heads: int, width: int, rows: int) -> int:
    """Floats of scratch per worker; `rows`: those of a token's scores, all groups."""
    padded, height = -(-heads // TILE_ROWS) * TILE_ROWS, _height_of(heads)
    return padded * (height * width + PAGE) + width * PAGE + 2 * BINS + height * rows
