"""Shared by all attention over packed pages: the argument block, record addresses, and rotation between bases.

Packed keys and values are stored in rotated bases (`quant/kv_basis.py`): queries are rotated once, outputs rotated back once. Exact blocks
are merged as in `attention.py`; packed pages are merged separately in page order, rotated back, and added at the end. So results do not
depend on which thread processed which page. For a few tokens `attend_decode` skips packed pages and `attend_packed_decode` the exact ones
(`decode.py`); both store partials for `merge_packed`. Prompt chunks are processed by `prefill.py`.
"""

from __future__ import annotations

from ...lazy_numba import inlined
from ..attention import ATTEND_SLOTS, INDEX
from ..inner_loops import DECODE_TILE_ROWS, TILE_COLUMNS, low_tile_product
from ..intrinsics import i64_at

# Slots after those of `attention.py`: packed pages and their stride; RECORDS int64 [KVH, HEAD_SLOTS]: offset of each head's record in a
# page, its size, and the offsets of its five parts; rotations as float32 (inverse of K's and transposed inverse of V's, [KVH, D, padded D])
# and K's channel scales [KVH, D]; `softmax_weights.tables`; the functions that attend to a page (`decode.py`); BY_PAGE: keep the partial of
# each page.
(PACKED, PACKED_STRIDE, RECORDS, K_ROTATION, V_ROTATION, CHANNEL_SCALE, TABLES, PAGE_OF_FOUR, PAGE_OF_EIGHT, BY_PAGE,
 PACKED_SLOTS) = range(ATTEND_SLOTS, ATTEND_SLOTS + 11)
HEAD_SLOTS, PARTS = 7, 2


@inlined()
def _padded_depth(depth):
    return (depth + TILE_COLUMNS - 1) // TILE_COLUMNS * TILE_COLUMNS


@inlined()
def _rotate_rows(rows, source, matrix, target, depth, padded_depth):
    """target[R, broad] = source[R, D] @ matrix[D, broad]; R in multiples of DECODE_TILE_ROWS."""
    for r in range(0, rows, DECODE_TILE_ROWS):
        for i in range(0, padded_depth, TILE_COLUMNS):
            low_tile_product(source + 4 * r * depth, 4 * depth, matrix + 4 * i, 4 * padded_depth,
                             target + 4 * (r * padded_depth + i), 4 * padded_depth, depth, 0)


@inlined()
def _record(a, entry, kv):
    return a[PACKED] + entry[INDEX] * a[PACKED_STRIDE] + i64_at(a[RECORDS] + 8 * HEAD_SLOTS * kv)[0]


@inlined()
def _parts(a, kv):
    """Offsets of the five parts of a head's records."""
    return i64_at(a[RECORDS] + 8 * (HEAD_SLOTS * kv + PARTS))
