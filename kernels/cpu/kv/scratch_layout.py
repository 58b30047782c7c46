"""Layout of a worker's scratch memory in decode attention over packed pages: byte offsets, with rows in whole tiles."""

from __future__ import annotations

from ...kv_layout import GROUP_CHANNELS, MAX_GROUPS
from ...layout import PAGE
from ...lazy_numba import inlined
from ..inner_loops import TILE_COLUMNS
from ..int8_ir import WIDTH
from .arguments import _padded_depth
from .unpack_record import SPANS, unpacked_nbytes

HAS_EIGHT_ROW_TILES = WIDTH == 64
SUMMED_GROUPS = 16  # groups of K over which sums of 16-bit numbers stay below 2^31


@inlined()
def line(address):
    """Round an address up to a cache line."""
    return (address + 63) // 64 * 64


@inlined()
def tile_rows(rows):
    return 8 if HAS_EIGHT_ROW_TILES and rows > 4 else 4


@inlined()
def query_places(rows, depth):
    """Offsets of: rotated queries float32 [rows, padded D]; the same before scaling, 16-bit [tiles, D / 4, R, 4]; their row steps float32
    [rows]; channel maxima float32 [D]; unrotated 16-bit queries [rows, D]; their units float32 [rows]; the remaining scratch."""
    rotated = 4 * rows * depth
    queries = rotated + 4 * rows * _padded_depth(depth)
    steps = line(queries + 2 * rows * depth)
    tops = line(steps + 4 * rows)
    numbers = line(tops + 4 * depth)
    counts = numbers + 2 * rows * depth
    return rotated, queries, steps, tops, numbers, counts, line(counts + 4 * rows)


@inlined()
def row_places(rows, depth):
    """Offsets of: scores float32 [rows, PAGE]; maxima and sums of a page [2, rows]; output of a block [rows, D] and its (m, l) [2, rows];
    factors of the block and of the page [2, rows]; steps of 16-bit numbers [SPANS]; bits of groups [2, MAX_GROUPS]; the remaining scratch.
    """
    sums = 4 * rows * PAGE
    output = line(sums + 8 * rows)
    m = output + 4 * rows * depth
    factors = m + 8 * rows
    steps = line(factors + 8 * rows)
    widths = steps + 64
    return sums, output, m, factors, steps, widths, widths + 2 * MAX_GROUPS


@inlined()
def key_places(depth):
    """Offsets for keys. Per span of tokens: 16-bit scales [SPANS, D]; their units float32 [SPANS]; scaled queries as bytes, or their high
    digits, [SPANS, D / 4, 8, 4]; low digits of the same shape; both as 16-bit numbers; terms float32 [SPANS, 2, 2, 8]. Then temporary
    float32 [2, D]; factors of zero points int32 [G, 2]; bits of groups, bytes [G]; offsets of their codes int32 [G]. G = 2 MAX_GROUPS: a
    group of more than 8 bits counts twice, and so does D."""
    bounds = line(2 * SPANS * depth)
    queries = bounds + 64
    low = queries + 8 * SPANS * depth
    words = low + 8 * SPANS * depth
    terms = words + 16 * SPANS * depth
    scratch_at = terms + 128 * SPANS
    factors = scratch_at + 8 * depth
    bits = factors + 16 * MAX_GROUPS
    return 0, bounds, queries, low, words, terms, scratch_at, factors, bits, bits + 2 * MAX_GROUPS


@inlined()
def value_places(depth):
    """Offsets for values: lowest steps, bytes [PAGE]; their shares of exponents float32 [PAGE]; their factors, 16-bit [PAGE], and the same
    as float32 [PAGE]; 16-bit fractions [groups, PAGE]; zero points, bytes [groups, PAGE]; weights [groups, rows, PAGE], bytes or 16-bit.
    """
    groups = depth // GROUP_CHANNELS
    low = PAGE
    up = low + 4 * PAGE
    rise = up + 2 * PAGE
    fractions = rise + 4 * PAGE
    zeros = fractions + 2 * PAGE * groups
    return 0, low, up, rise, fractions, zeros, zeros + PAGE * groups


def decode_scratch(group: int, head_dim: int) -> int:
    """Floats of scratch per worker for `attend_packed_decode` and `merge_packed`."""
    rows, padded_depth = -(-group // 8) * 8, -(-head_dim // TILE_COLUMNS) * TILE_COLUMNS
    queries = rows * (8 * head_dim + 4 * padded_depth + 8) + 4 * head_dim
    page = 4 * rows * (PAGE + head_dim + 6) + 64 + 2 * MAX_GROUPS
    merging = 4 * rows * (2 * head_dim + padded_depth + 8)
    total, groups = max(queries + page, merging) + 1024, head_dim // GROUP_CHANNELS  # each part is aligned to a cache line
    sides = max(2 * (34 * SPANS + 8) * head_dim + 128 * SPANS, (11 + 3 * groups + 2 * rows * groups) * PAGE) + 26 * MAX_GROUPS + 1024
    return -(-(total + max(sides, unpacked_nbytes(head_dim))) // 4)
