"""Attention over a table of KV page blocks, and writing K and V into them.

The cache is a table of blocks in position order: sinks, sealed pages, open pages. Each block yields a partial (o, m, l) for each query row,
with m the block's own maximum, and partials merge in table order. This is the complete definition, so results do not depend on which thread
computed a block or where its bytes are stored. Two kernels implement it: `attend_decode` computes one partial per (KV head, block) and
`merge_decode` merges them (`attention_decode.py`); `attend_prefill` walks the blocks for a tile of queries.

A head may have an attention sink: a learned logit that joins the softmax without a value, once, after the last block.

A call sees rows FROM to TO of the table, so the table can be processed in several calls while pages arrive from disk: partials are stored
by row, and `attend_prefill` resumes where the previous call stopped. Results are bit-identical however the table is divided.

Query rows are ordered token-major within a KV head: row = t * group + g.
"""

from __future__ import annotations

from numpy import float32

from ..compile import kernel
from ..layout import F32, HEADER_NBYTES, PAGE
from ..lazy_numba import inlined
from ..workspace import Dims
from .arithmetic import MINUS_INF, ONE, ZERO, exp, expand, narrow_half
from .inner_loops import DECODE_TILE_ROWS, TILE_COLUMNS, TILE_ROWS, product
from .intrinsics import f32_at, f64_at, fetch_add, i64_at, u16_at
from .softmax import softmax_row

# Slots of the argument block of the attend kernels. The first row changes from call to call; FROM and TO bound the rows of the block table
# that a call processes.
Q, OUT, TOKENS, POSITION, BLOCKS, TABLE, HEADS, FROM, TO = range(9)
KV_HEADS, HEAD_DIM, SCALE, WINDOW, SOFTCAP, DTYPE, SCRATCH, SCRATCH_STRIDE, PARTIALS = range(9, 18)
EXACT, PAGES, PAGE_STRIDE, HEAD_STRIDE, SIDE, ROWS, PART_STRIDE = range(18, 25)  # ROWS: tokens in a part of a page
SINKS = 25  # address of a float32 logit per query head, 0 for none
STATE = 26  # address of the state of `attend_prefill` between calls, if a table is processed in several; 0 for a single call
LAST_VISIBLE = 27  # address of the last visible position int64 of each query, for `attend_prefill` only; 0: its own position
# With LAST_VISIBLE, address of an int64 per token of the call: is the token visible to earlier queries? 0: all are.
VISIBLE, ATTEND_SLOTS = 28, 29
# Columns of the block table: sealed or exact, index of the page or slot, first position, tokens held.
SEALED, INDEX, FIRST, COUNT, COLUMNS = range(5)
SKIPPED = -1  # value of SEALED for a row whose partial is left unchanged
QUERY_TILE = 32
MASKED_SCORE = float32(-1e30)  # has no weight next to any real score
# If few query heads share a KV head, tiles of long chunks have more tokens, so that a block is widened or unpacked less often.
LONG_TILE_ROWS, LONG_CHUNK_TOKENS = 128, 256  # query rows of such a tile; chunks from this many tokens on
# From this many query values per token on, prefill tiles have fewer tokens, and at most this many query rows.
WIDE_QUERY_VALUES, WIDE_TILE_ROWS = 4096, 192


@inlined()
def _keys_of(a, entry, kv):
    """Address of a block's keys for one KV head; the values are SIDE bytes further."""
    base = a[PAGES] if entry[SEALED] else a[EXACT]
    return base + entry[INDEX] * a[PAGE_STRIDE] + kv * a[HEAD_STRIDE] + HEADER_NBYTES


@inlined()
def _visible(first, count, position, tokens, window):
    """Can any of `tokens` queries from `position` on see this block?"""
    if first > position + tokens - 1:
        return False
    return window == 0 or first + count - 1 > position - window


@inlined()
def _cap(score, softcap):
    """softcap * tanh(score / softcap)."""
    if softcap == ZERO:
        return score
    doubled = exp(min((score + score) / softcap, float32(80.0)))  # in this order NaN stays NaN
    return softcap * (ONE - float32(2.0) / (doubled + ONE))


@inlined()
def _softmax_row(address, visible_from, visible_to, scale):
    """PAGE scores of one row, to be multiplied by `scale` -> weights exp(s - m) in place, 0 where masked. Returns (m, l); m is -inf if
    nothing is visible."""
    if visible_from >= visible_to:
        row = f32_at(address)
        for j in range(PAGE):
            row[j] = ZERO
        return MINUS_INF, ZERO
    return softmax_row(address, visible_from, visible_to, scale)


@inlined()
def _begin(first, count, position, window):
    """First row of a block that a query at `position` sees."""
    return 0 if window == 0 else min(count, max(0, position - window + 1 - first))


@inlined()
def _end(first, count, position):
    """One past the last row of a block that a query at `position` sees."""
    return max(0, min(count, position + 1 - first))


@inlined()
def _load_queries(a, query, kv, begin_token, rows, padded):
    """Query rows of one KV head side by side; padding rows are zero."""
    depth, heads = a[HEAD_DIM], a[HEADS]
    group = heads // a[KV_HEADS]
    q = f32_at(query)
    for r in range(padded):
        source = f32_at(a[Q] + 4 * ((begin_token + r // group) * heads + kv * group + r % group) * depth)
        for i in range(depth):
            q[r * depth + i] = source[i] if r < rows else ZERO


@inlined()
def _load_parts(a, source, count, item, keys, values, padded_depth):
    """`_load_block` for a slot in parts. Keys of a part without tokens are skipped: their scores are masked."""
    depth, part = a[HEAD_DIM], a[ROWS]
    for begin in range(0, count, part):
        for i in range(depth):
            expand(source + i * part * item, a[DTYPE], keys + 4 * (i * PAGE + begin), part)
        for j in range(begin, min(count, begin + part)):
            expand(source + a[SIDE] + (j - begin) * depth * item, a[DTYPE], values + 4 * j * padded_depth, depth)
            row = f32_at(values + 4 * j * padded_depth)
            for i in range(depth, padded_depth):
                row[i] = ZERO
        source += a[PART_STRIDE]
    padding = f32_at(values)
    for i in range(count * padded_depth, PAGE * padded_depth):
        padding[i] = ZERO


@inlined()
def _load_block(a, entry, kv, keys, values, padded_depth):
    """A block of one KV head as float32: K in stored order, V with rows `padded_depth` apart, zero beyond the held tokens."""
    depth = a[HEAD_DIM]
    item = 4 if a[DTYPE] == F32 else 2
    source = _keys_of(a, entry, kv)
    if a[ROWS] != PAGE:
        _load_parts(a, source, entry[COUNT], item, keys, values, padded_depth)
        return
    expand(source, a[DTYPE], keys, depth * PAGE)
    if padded_depth == depth:
        expand(source + a[SIDE], a[DTYPE], values, depth * entry[COUNT])
        padding = f32_at(values)
        for i in range(depth * entry[COUNT], depth * PAGE):
            padding[i] = ZERO
        return
    for j in range(PAGE):
        if j < entry[COUNT]:
            expand(source + a[SIDE] + j * depth * item, a[DTYPE], values + 4 * j * padded_depth, depth)
        row = f32_at(values + 4 * j * padded_depth)
        for i in range(depth if j < entry[COUNT] else 0, padded_depth):
            row[i] = ZERO


@inlined({"contract"})
def _capped(scores, rows, scale, softcap):
    """Apply the logit softcap to a block's scores, if there is one. Returns the remaining factor, which softmax applies."""
    if softcap == ZERO:
        return scale
    s = f32_at(scores)
    for j in range(rows * PAGE):
        s[j] *= scale
    for j in range(rows * PAGE):
        s[j] = _cap(s[j], softcap)
    return ONE


@inlined()
def sealed_rows(a):
    """Begin and end of the sealed pages among the table rows that a call sees."""
    begin = a[FROM]
    while begin < a[TO] and not i64_at(a[TABLE] + 8 * COLUMNS * begin)[SEALED]:
        begin += 1
    end = begin
    while end < a[TO] and i64_at(a[TABLE] + 8 * COLUMNS * end)[SEALED]:
        end += 1
    return begin, end


@inlined()
def _merge(o, m, l, part, part_m, part_l, depth):
    """Merge a partial into the running (o, m, l): o in place, returns (m, l)."""
    if part_l == ZERO:
        return m, l
    if l == ZERO:
        for i in range(depth):
            o[i] = part[i]
        return part_m, part_l
    keep, take = ONE, ONE  # factor of the larger maximum: e**0; if one maximum is NaN, both factors become NaN
    if m >= part_m:
        take = exp(part_m - m)
    else:
        keep = exp(m - part_m)
    for i in range(depth):
        o[i] = o[i] * keep + part[i] * take
    return max(m, part_m), l * keep + part_l * take


@inlined()
def _merge_rows(rows, depth, outputs, stats, part, padded_depth, block_stats):
    """Merge a block's partial float32 [rows, wide D] into outputs [rows, D]: their (m, l) at `stats`, the block's at `block_stats`."""
    running, block = f32_at(stats), f32_at(block_stats)
    for r in range(rows):
        m, l = _merge(f32_at(outputs + 4 * r * depth), running[2 * r], running[2 * r + 1], f32_at(part + 4 * r * padded_depth),
                      block[2 * r],
                      block[2 * r + 1], depth)
        running[2 * r], running[2 * r + 1] = m, l


@inlined()
def _with_sink(a, head, m, l):
    """A row's l including its head's sink, if there is one. A sink far above all scores leaves them almost no weight."""
    return l + exp(f32_at(a[SINKS])[head] - m) if a[SINKS] != 0 else l


@inlined()
def query_tile(job, kv_heads, tokens, height=QUERY_TILE):
    """The KV head, the tile of `height` tokens, its first token and its number of tokens for a prefill block of work. Later tiles see more
    blocks: handing them out first balances the threads."""
    tile = (tokens + height - 1) // height - 1 - job // kv_heads
    return job % kv_heads, tile, tile * height, min(height, tokens - tile * height)


def _tile_height(group: int, depth: int, tokens: int) -> int:
    """Tokens per tile for a chunk: fewer if a KV head has so many queries that QUERY_TILE of them would overflow the caches and leave
    threads idle. For packed pages never fewer, indicated by a depth of 0."""
    if group * depth > WIDE_QUERY_VALUES:
        return max(1, min(QUERY_TILE, WIDE_TILE_ROWS // group))
    return max(QUERY_TILE, LONG_TILE_ROWS // group) if tokens >= LONG_CHUNK_TOKENS else QUERY_TILE


tile_height = inlined()(_tile_height)


@inlined()
def _last_visible(a, token):
    """The last position that a query sees."""
    return a[POSITION] + token if a[LAST_VISIBLE] == 0 else i64_at(a[LAST_VISIBLE])[token]


@inlined()
def _mask_scores(a, scores, first, position, end):
    """Mask scores float32 [PAGE] of a query at `position`, up to row `end`: those of later rows that it may not see become hugely negative.
    A block without visible rows then has no weight next to the query's own."""
    row, visible = f32_at(scores), i64_at(a[VISIBLE])
    for j in range(max(0, position + 1 - first), end):
        if visible[first + j - a[POSITION]] == 0:
            row[j] = MASKED_SCORE


@inlined()
def _block_weights(a, entry, scores, begin_token, group, rows, padded, scale, block_stats):
    """Scores [padded, PAGE] of a block, to be multiplied by `scale` -> weights, with their (m, l) at `block_stats`; padding rows see
    nothing."""
    first, count, stats = entry[FIRST], entry[COUNT], f32_at(block_stats)
    for r in range(padded):
        token = begin_token + r // group
        last = _last_visible(a, begin_token + min(r, rows - 1) // group)
        begin, end = _begin(first, count, a[POSITION] + token, a[WINDOW]), _end(first, count, last)
        if a[VISIBLE] != 0 and r < rows:
            _mask_scores(a, scores + 4 * r * PAGE, first, a[POSITION] + token, end)
        stats[2 * r], stats[2 * r + 1] = _softmax_row(scores + 4 * r * PAGE, begin, end if r < rows else 0, scale)


@inlined()
def _write_rows(a, kv, begin_token, rows, outputs, stats):
    """Outputs [rows, D] divided by their sums, including the head's sink, to OUT."""
    depth, heads, pairs = a[HEAD_DIM], a[HEADS], f32_at(stats)
    group = heads // a[KV_HEADS]
    for r in range(rows):
        head = kv * group + r % group
        target = f32_at(a[OUT] + 4 * ((begin_token + r // group) * heads + head) * depth)
        result, l = f32_at(outputs + 4 * r * depth), _with_sink(a, head, pairs[2 * r], pairs[2 * r + 1])
        for i in range(depth):
            target[i] = result[i] / l


@kernel({"contract"})
def attend_prefill(args, worker, counter):
    """One tile of tokens of one KV head at a time, over all blocks in order.

    Scratch per worker, float32: Q[rows, D], K[D, PAGE], V[PAGE, wide D], S[rows, PAGE], part[rows, wide D], O[rows, D], (m, l)[rows] of all
    blocks so far, (m, l)[rows] of the last. If split over several calls, the last three are in STATE, for every tile.
    """
    a = i64_at(args)
    tokens, heads, kv_heads, depth = a[TOKENS], a[HEADS], a[KV_HEADS], a[HEAD_DIM]
    group = heads // kv_heads
    scale, softcap = float32(f64_at(args)[SCALE]), float32(f64_at(args)[SOFTCAP])
    padded_depth = (depth + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
    height = tile_height(group, depth, tokens)
    capacity = (height * group + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    query = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    keys = query + 4 * capacity * depth
    values = keys + 4 * depth * PAGE
    scores = values + 4 * PAGE * padded_depth
    part = scores + 4 * capacity * PAGE
    tiles = (tokens + height - 1) // height
    while True:
        job = fetch_add(counter, 1)
        if job >= kv_heads * tiles:
            return
        kv, tile, begin_token, tile_tokens = query_tile(job, kv_heads, tokens, height)
        rows = tile_tokens * group
        padded = (rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
        o = part + 4 * capacity * padded_depth
        if a[STATE] != 0:
            o = a[STATE] + 4 * (kv * tiles + tile) * capacity * (depth + 4)
        stats = o + 4 * capacity * depth
        block_stats = stats + 8 * capacity
        _load_queries(a, query, kv, begin_token, rows, padded)
        if a[FROM] == 0:
            for r in range(rows):
                f32_at(stats)[2 * r], f32_at(stats)[2 * r + 1] = MINUS_INF, ZERO
        position = a[POSITION] + begin_token
        last_visible = _last_visible(a, begin_token)
        for token in range(begin_token + 1, begin_token + tile_tokens):
            last_visible = max(last_visible, _last_visible(a, token))
        for block in range(a[FROM], a[TO]):
            entry = i64_at(a[TABLE] + 8 * COLUMNS * block)
            first, count = entry[FIRST], entry[COUNT]
            if not _visible(first, count, position, last_visible - position + 1, a[WINDOW]):
                continue
            _load_block(a, entry, kv, keys, values, padded_depth)
            visible_rows = _end(first, count, last_visible)  # weights of later rows are exactly zero
            columns = (visible_rows + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS
            product(query, 4 * depth, keys, 4 * PAGE, scores, 4 * PAGE, padded, columns, depth)
            _block_weights(a, entry, scores, begin_token, group, rows, padded, _capped(scores, padded, scale, softcap), block_stats)
            product(scores, 4 * PAGE, values, 4 * padded_depth, part, 4 * padded_depth, padded, padded_depth, visible_rows)
            _merge_rows(rows, depth, o, stats, part, padded_depth, block_stats)
        if a[TO] >= a[BLOCKS]:
            _write_rows(a, kv, begin_token, rows, o, stats)


def attend_prefill_scratch(heads: int, kv_heads: int, head_dim: int) -> int:
    """Floats of scratch per worker for `attend_prefill`."""
    padded_depth, group = -(-head_dim // TILE_COLUMNS) * TILE_COLUMNS, heads // kv_heads
    capacity = -(-_tile_height(group, head_dim, LONG_CHUNK_TOKENS) * group // TILE_ROWS) * TILE_ROWS
    return capacity * (2 * head_dim + padded_depth + PAGE + 4) + PAGE * (head_dim + padded_depth)


def attend_prefill_state(tokens: int, dims: Dims) -> int:
    """Floats that a prefill chunk of up to `tokens` tokens keeps between calls, here or in `kv/prefill.py`."""
    group, unit = dims.num_attention_heads // dims.num_key_value_heads, TILE_ROWS * DECODE_TILE_ROWS if dims.packed_kv else TILE_ROWS
    max_rows = 0
    for count in {tokens, min(tokens, LONG_CHUNK_TOKENS - 1)}:  # longer chunks have taller tiles, which may need less
        height = _tile_height(group, 0 if dims.packed_kv else dims.head_dim, count)
        max_rows = max(max_rows, -(-count // height) * (-(-height * group // unit) * unit))
    return dims.num_key_value_heads * max_rows * (2 * dims.head_dim + 6 if dims.packed_kv else dims.head_dim + 4)


# Slots of `write_kv`: K and V [T, kv_heads * head_dim]; W_SLOTS and W_ROWS: exact slot and row of each token.
W_K, W_V, W_TOKENS, W_SLOTS, W_ROWS = range(5)  # change from call to call
W_HEADS, W_DIM, W_DTYPE, W_EXACT, W_PAGE_STRIDE, W_HEAD_STRIDE, W_SIDE, W_ROWS_OF_PART, W_PART_STRIDE, WRITE_SLOTS = range(5, 15)


@kernel()
def write_kv(args, worker, counter):
    """Write new keys and values into their open pages in the cache's stored type. Blocks of work are PAGE tokens: keys of neighboring
    tokens share cache lines."""
    a = i64_at(args)
    heads, depth, stride, part = a[W_HEADS], a[W_DIM], a[W_HEAD_STRIDE], a[W_ROWS_OF_PART]
    while True:
        begin = PAGE * fetch_add(counter, 1)
        if begin >= a[W_TOKENS]:
            return
        for head in range(heads):  # all tokens of a head first: their keys share cache lines
            for t in range(begin, min(begin + PAGE, a[W_TOKENS])):
                row = i64_at(a[W_ROWS])[t]
                page = a[W_EXACT] + i64_at(a[W_SLOTS])[t] * a[W_PAGE_STRIDE] + row // part * a[W_PART_STRIDE] + HEADER_NBYTES
                row %= part
                k, v = f32_at(a[W_K] + 4 * (t * heads + head) * depth), f32_at(a[W_V] + 4 * (t * heads + head) * depth)
                keys, values = page + head * stride, page + head * stride + a[W_SIDE]
                if a[W_DTYPE] == F32:
                    wide_k, wide_v = f32_at(keys), f32_at(values)
                    for i in range(depth):
                        wide_k[i * part + row], wide_v[row * depth + i] = k[i], v[i]
                else:
                    narrow_k, narrow_v = u16_at(keys), u16_at(values + 2 * row * depth)
                    for i in range(depth):  # V is contiguous and vectorizes; K is written channel by channel
                        narrow_v[i] = narrow_half(v[i])
                    for i in range(depth):
                        narrow_k[i * part + row] = narrow_half(k[i])
