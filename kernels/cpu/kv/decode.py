"""Decode attention over packed pages: each record is read once for all query heads of its KV head and multiplied in integers.

Pages are processed in blocks of BLOCK_PAGES, on a grid that starts at the first page. Pages are merged in order within a block, then the
blocks in order (`merge.py`). So results depend neither on which thread computed what nor on how the table was divided.
"""

from __future__ import annotations

from numpy import float32, int64

from ...compile import Jit, jit, kernel
from ...kv_layout import GROUP_CHANNELS, ROTATED_K, TAIL_OFFSET
from ...layout import PAGE
from ...lazy_numba import inlined
from ..arithmetic import MINUS_INF, ZERO
from ..attention import (
    BLOCKS,
    COLUMNS,
    COUNT,
    FIRST,
    FROM,
    HEAD_DIM,
    HEADS,
    INDEX,
    KV_HEADS,
    PARTIALS,
    POSITION,
    SCALE,
    SCRATCH,
    SCRATCH_STRIDE,
    SEALED,
    SKIPPED,
    SOFTCAP,
    TABLE,
    TO,
    TOKENS,
    WINDOW,
    _begin,
    _cap,
    _visible,
    sealed_rows,
)
from ..intrinsics import call, f32_at, f64_at, i64_at, u8_at
from ..work_distribution import first_region, take_block
from .arguments import BY_PAGE, CHANNEL_SCALE, HEAD_SLOTS, PAGE_OF_EIGHT, PAGE_OF_FOUR, RECORDS, TABLES, _parts, _record
from .int8_products import MAX_K_BITS, MAX_V_BITS
from .merge import BLOCK_PAGES, load_partial, nothing, store_partial
from .record_attention import LN2, LOG2E, header_bits, load_kv, read_widths, record_products, scores_by_numbers
from .scratch_layout import HAS_EIGHT_ROW_TILES, line, query_places, row_places, tile_rows
from .unpack_loops import prefetch

# Bits up to which K and V are multiplied as bytes: with more, the rounding of the other factor would be visible next to the codec's.
MEAN_K, MEAN_V = 5, 4


def _page_of(tile: int) -> Jit:
    """Attention over one page, for tiles of 4 or 8 rows."""
    scores_of, output_of = record_products(tile)

    def body(args, entry_at, following_at, kv, position, rows, padded, queries, begin_of, output, m, scale, softcap):
        a, entry, following = i64_at(args), i64_at(entry_at), i64_at(following_at)
        depth = a[HEAD_DIM]
        _, _, _, _, at_steps, at_widths, remainder_at = row_places(padded, depth)
        scores, widths, more = begin_of, begin_of + at_widths, begin_of + remainder_at
        record, parts, tables, nbytes = _record(a, entry, kv), _parts(a, kv), a[TABLES], i64_at(a[RECORDS] + 8 * HEAD_SLOTS * kv)[1]
        ahead, half = _record(a, following, kv), (nbytes // 2 + 63) // 64 * 64
        most_k, most_v = read_widths(record, widths, depth // GROUP_CHANNELS)
        if u8_at(record + TAIL_OFFSET + 2)[0] & ROTATED_K:
            fits_int8 = most_k <= MAX_K_BITS and header_bits(record, 0) <= MEAN_K
            scores_of(record, parts, depth, rows, padded, queries, scores, widths, more, tables, fits_int8, ahead, half)
        else:
            prefetch(ahead, half)
            scores_by_numbers(record, parts, depth, rows, padded, queries, scores, begin_of + at_steps, more, tables, scale,
                              a[CHANNEL_SCALE] + 4 * kv * depth)
        begin, s = _begin(entry[FIRST], entry[COUNT], position, a[WINDOW]), f32_at(scores)
        if softcap != ZERO:
            for t in range(rows * PAGE):
                s[t] = _cap(s[t] * LN2, softcap) * LOG2E
        if begin > 0:
            for r in range(rows):
                for t in range(begin):
                    s[r * PAGE + t] = MINUS_INF
        fits_int8 = most_v <= MAX_V_BITS and header_bits(record, 1) <= MEAN_V
        output_of(record, parts, depth, rows, padded, scores, begin_of, output, m, more, tables, fits_int8, ahead + half, nbytes - half)

    body.__name__ = {4: "page_of_four", 8: "page_of_eight"}[tile]
    return jit(f"void({', '.join(['int64'] * 11)}, float32, float32)", {"contract"})(body)


page_of_four = _page_of(4)
page_of_eight = _page_of(8) if HAS_EIGHT_ROW_TILES else page_of_four


@inlined()
def attend_page(args, entry, following, kv, position, rows, padded, queries, begin_of, output, m, scale, softcap):
    """Merge a page into the running `output` [padded, D] with its (m, l) [2, padded] at `m`, for the queries that `load_kv` left at
    `queries`; `begin_of`: address of the `row_places` scratch. `entry` and `following` are addresses of table rows. The page of row
    `following` is prefetched meanwhile, half of it alongside each of the two products: all of it alongside K's would take longer than the
    product."""
    a = i64_at(args)
    page = a[PAGE_OF_EIGHT] if tile_rows(rows) == 8 else a[PAGE_OF_FOUR]
    call(page, (args, entry, following, kv, position, rows, padded, queries, begin_of, output, m, scale, softcap))


@kernel({"contract"})
def attend_packed_decode(args, worker, counter):
    """Partials of the packed pages for each of a few tokens. Blocks of work: (KV head, token, block of pages); the partial is stored in the
    row of the block's first page. With BY_PAGE every page keeps its own, and rows may be SKIPPED."""
    a = i64_at(args)
    tokens, heads, kv_heads, depth = a[TOKENS], a[HEADS], a[KV_HEADS], a[HEAD_DIM]
    rows = heads // kv_heads
    tile = tile_rows(rows)
    padded = (rows + tile - 1) // tile * tile
    scale, softcap = float32(f64_at(args)[SCALE]), float32(f64_at(args)[SOFTCAP])
    scratch = line(a[SCRATCH] + worker * a[SCRATCH_STRIDE])
    remainder_at = scratch + query_places(padded, depth)[6]
    _, at_output, at_m, _, _, _, _ = row_places(padded, depth)
    output, m = remainder_at + at_output, remainder_at + at_m
    # With BY_PAGE, pages in between may be missing, so every row is examined and there is no fixed grid of blocks.
    begin, end = (a[FROM], a[TO]) if a[BY_PAGE] else sealed_rows(a)
    if begin == end:
        return
    # the table row of page 0, even if it is not in this table
    sink_tokens = begin if a[BY_PAGE] else begin - i64_at(a[TABLE] + 8 * COLUMNS * begin)[INDEX]
    first_block = (begin - sink_tokens) // BLOCK_PAGES
    blocks = (end - sink_tokens + BLOCK_PAGES - 1) // BLOCK_PAGES - first_block
    loaded, region, ended = -1, first_region(worker), int64(0)
    while True:
        job, region, ended = take_block(counter, region, ended, kv_heads * tokens * blocks)
        if job < 0:
            return
        query, block = job // blocks, sink_tokens + BLOCK_PAGES * (first_block + job % blocks)
        kv, t = query // tokens, query % tokens
        if loaded != query:
            load_kv(a, kv, t, scratch, rows, padded, depth, scale)
            loaded = query
        position = a[POSITION] + t
        partial = a[PARTIALS] + 4 * ((kv * a[BLOCKS] + block) * tokens + t) * rows * (depth + 2)
        if block < begin and not a[BY_PAGE]:
            load_partial(partial, output, m, rows, padded, depth)  # an earlier call has begun the block
        else:
            nothing(output, m, padded, depth)
        for row in range(max(begin, block), min(end, block + BLOCK_PAGES)):
            entry = i64_at(a[TABLE] + 8 * COLUMNS * row)
            if not entry[SEALED] or entry[SEALED] == SKIPPED:
                continue
            if _visible(entry[FIRST], entry[COUNT], position, 1, a[WINDOW]):
                following = a[TABLE] + 8 * COLUMNS * min(row + 1, end - 1)
                attend_page(args, a[TABLE] + 8 * COLUMNS * row, following, kv, position, rows, padded, scratch, remainder_at, output, m,
                            scale,
                            softcap)
            if a[BY_PAGE]:
                partial_of_row = a[PARTIALS] + 4 * ((kv * a[BLOCKS] + row) * tokens + t) * rows * (depth + 2)
                store_partial(partial_of_row, output, m, rows, padded, depth)
                nothing(output, m, padded, depth)
        if not a[BY_PAGE]:
            store_partial(partial, output, m, rows, padded, depth)
