"""Shared by all attention over packed pages: the argument block, record addresses, and rotation between bases.

Packed keys and values are stored in rotated bases (`quant/kv_basis.py`): queries are rotated once, outputs rotated back once. Exact blocks
are merged as in `attention.py`; packed pages are merged separately in page order, rotated back, and added at the end. So results do not
depend on which thread processed which page. For a few tokens `attend_decode` skips packed pages and `attend_packed_decode` the exact ones
(`decode.py`); both store partials for `merge_packed`. Prompt chunks are processed by `prefill.py`.
"""

from __future__ import annotations

from ...lazy_numba import inlined
from ..attention import ATTEND_SLOTS, INDEX
from ..inner_loops import LOW_ROWS, TILE_COLUMNS, low_tile_product
from ..intrinsics import i64_at

# Slots behind those of `attention.py`: packed pages and their stride, where each head's record begins and where its five parts do (int64
# [KVH, HEAD_SLOTS]: in the page, its bytes, the parts), the bases as float32 (K's inverse and V's transposed inverse [KVH, D, wide D], K's
# channel scales [KVH, D]), `softmax_weights.tables`, what attends to a page (`decode.py`), and whether each page's partial is to be kept.
(PACKED, PACKED_STRIDE, RECORDS, TURN, BACK, CHANNEL_SCALE, TABLES, PAGE_OF_FOUR, PAGE_OF_EIGHT, BY_PAGE,
 PACKED_SLOTS) = range(ATTEND_SLOTS, ATTEND_SLOTS + 11)
HEAD_SLOTS, PARTS = 7, 2


@inlined()
def _broad(depth):
    return (depth + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS


@inlined()
def _turn(rows, source, matrix, target, depth, broad):
    """target[R, broad] = source[R, D] @ matrix[D, broad]; R in multiples of LOW_ROWS."""
    for r in range(0, rows, LOW_ROWS):
        for i in range(0, broad, TILE_COLUMNS):
            low_tile_product(source + 4 * r * depth, 4 * depth, matrix + 4 * i, 4 * broad,
                             target + 4 * (r * broad + i), 4 * broad, depth, 0)


@inlined()
def _record(a, entry, kv):
    return a[PACKED] + entry[INDEX] * a[PACKED_STRIDE] + i64_at(a[RECORDS] + 8 * HEAD_SLOTS * kv)[0]


@inlined()
def _parts(a, kv):
    """Offsets of the five parts of a head's records."""
    return i64_at(a[RECORDS] + 8 * (HEAD_SLOTS * kv + PARTS))
