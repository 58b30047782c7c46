"""Where attention over packed pages for one token keeps what in a worker's scratch memory: places in bytes, tiles of rows whole."""

from __future__ import annotations

from ..deferred import inlined
from ..kv_layout import CHANNELS, MOST_GROUPS
from ..layout import PAGE
from .inner_loops import TILE_COLUMNS
from .int8_ir import WIDTH
from .kv_attention import _broad
from .kv_record import SPANS, opened_nbytes

EIGHT = WIDTH == 64  # are there tiles of eight rows?


@inlined()
def line(address):
    """The next address on a cache line."""
    return (address + 63) // 64 * 64


@inlined()
def tile_rows(rows):
    return 8 if EIGHT and rows > 4 else 4


@inlined()
def query_places(rows, depth):
    """(turned queries float32 [rows, wide D], 16-bit queries for bytes [tiles, D / 4, R, 4], their rows' steps float32 [rows], the largest
    of a channel float32 [D], 16-bit queries turned and not [2, rows, D], what these count in float32 [2, rows], the rest)."""
    turned = 4 * rows * depth
    queries = turned + 4 * rows * _broad(depth)
    steps = line(queries + 2 * rows * depth)
    tops = line(steps + 4 * rows)
    numbers = line(tops + 4 * depth)
    counts = numbers + 4 * rows * depth
    return turned, queries, steps, tops, numbers, counts, line(counts + 8 * rows)


@inlined()
def row_places(rows, depth):
    """(scores float32 [rows, PAGE], output of a page [rows, D] and (m, l) [2, rows], of a block [rows, D], [rows], [rows], what the block
    and what the page is multiplied by [2, rows], steps of 16-bit numbers [32], a row of 16-bit weights [PAGE], bits of groups [2,
    MOST_GROUPS], the rest)."""
    part = 4 * rows * PAGE
    sums = part + 4 * rows * depth
    output = line(sums + 8 * rows)
    m = output + 4 * rows * depth
    factors = m + 8 * rows
    steps = line(factors + 8 * rows)
    rounded = steps + 128
    widths = rounded + 2 * PAGE
    return part, sums, output, m, factors, steps, rounded, widths, widths + 2 * MOST_GROUPS + 32


@inlined()
def key_places(rows, depth):
    """Of keys as bytes, for every span of tokens: 16-bit scales [SPANS, D], what their steps count in float32 [SPANS], scaled queries bytes
    [SPANS, D / 4, 8, 4], terms float32 [SPANS, 2, 8]; then room float32 [D] and factors of zeros int32 [MOST_GROUPS, 2]."""
    bounds = line(2 * SPANS * depth)
    queries = bounds + 64
    terms = queries + 8 * SPANS * depth
    room = terms + 64 * SPANS
    return 0, bounds, queries, terms, room, room + 4 * depth


@inlined()
def value_places(rows, depth):
    """Of values as bytes: (lowest steps bytes [PAGE], what they take from exponents float32 [PAGE], what they multiply by, 16-bit [PAGE],
    16-bit fractions [groups, PAGE], zeros bytes [groups, PAGE], weights bytes [groups, rows, PAGE])."""
    groups = depth // CHANNELS
    low = PAGE
    up = low + 4 * PAGE
    fractions = up + 2 * PAGE
    zeros = fractions + 2 * PAGE * groups
    return 0, low, up, fractions, zeros, zeros + PAGE * groups


def few_scratch(group: int, head_dim: int) -> int:
    """Floats of scratch per worker for `attend_packed` and `merge_packed`."""
    rows, broad = -(-group // 8) * 8, -(-head_dim // TILE_COLUMNS) * TILE_COLUMNS
    kept = 4 * rows * (3 * head_dim + 2 * broad + PAGE + 16) + 6 * rows * head_dim + 4 * head_dim + 2 * PAGE + 1024
    by_bytes = max((10 * SPANS + 4) * head_dim + 64 * SPANS, (9 + 3 * head_dim // CHANNELS + rows * head_dim // CHANNELS) * PAGE) + 1024
    return -(-(kept + max(by_bytes, opened_nbytes(head_dim))) // 4)
