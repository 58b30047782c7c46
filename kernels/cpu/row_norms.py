"""Row norms of a stored weight plus a thin product, |W + B A| row by row (for DoRA).

BLOCK rows are dequantized, DEPTH_BLOCK inputs at a time, to floats that stay in the L2 cache; there B A is added by the register tile of
`inner_loops.py` and the squares are summed. So the weight is read once and never written. Sums are float32 over DEPTH_BLOCK inputs and
float64 over those, in order: a row's bits depend on neither threads nor other rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy import float64

from ..compile import kernel
from ..layout import F32, STORED_TYPES, align
from ..lazy_numba import inlined
from ..tiles import ROWS as TILE_ROWS
from ..tiles import TILE
from ..workspace import address
from .arithmetic import expand, squares_of
from .gemm_dequantize import TILE_SCRATCH_NBYTES, expand_f32
from .gemm_formats import BITS, CODES, FIELDS, ROWS, stored_depth
from .inner_loops import TILE_COLUMNS, tile_product
from .inner_loops import TILE_ROWS as FLOAT_ROWS
from .intrinsics import f32_at, f64_at, fetch_add, i64_at
from .linear import DEPTH_BLOCK
from .low_bit import gemm_fields

if TYPE_CHECKING:
    from ...quant.weight import Weight
    from ..threads import ThreadPool

BLOCK = 48  # rows, a multiple of the rows of weight tiles and float tiles on every target
# Slots of the argument block; the matrix follows, as in `gemm_formats.py`; with IS_RAW its address is in CODES and its stored type in BITS.
DEPTH, SCRATCH, SCRATCH_STRIDE, IS_RAW, PAIRS, FIRST = range(6)
# Then per pair: A float32 [rank, PITCH / 4], B [rows, rank], both zero-padded to whole blocks, squared norms float64 [rows].
A, PITCH, B, RANK, SQUARES, PAIR_FIELDS = range(6)
BUFFER = 4 * BLOCK * DEPTH_BLOCK  # bytes


def squared_row_norms(pool: ThreadPool, weight: Weight, pairs: Mapping[int, tuple[np.ndarray, np.ndarray]]) -> dict[int, np.ndarray]:
    """Squared norms of the rows of W [N, K] + B A, float64 [N], for each pair of A [r, K] and B [N, r], float32."""
    height, depth = weight.shape
    stride = 2 * BUFFER + align(TILE_SCRATCH_NBYTES)
    scratch = np.empty(pool.workers * stride + 64, np.uint8)
    fields = ([weight.address, 0, 0, 0, 0, 0, STORED_TYPES[weight.spec.scheme], 0, 0, 0, height, 0] if weight.spec.is_raw
              else gemm_fields(weight))
    block = [depth, align(address(scratch)), stride, weight.spec.is_raw, len(pairs), *fields, 0, 0]
    arrays, addresses = [], {}
    for number, (a, b) in pairs.items():
        wide = np.zeros((len(a), align(depth, DEPTH_BLOCK)), np.float32)
        high = np.zeros((align(height, BLOCK), b.shape[1]), np.float32)
        wide[:, :depth], high[:height], addresses[number] = a, b, np.empty(height)
        block += [address(wide), wide.strides[0], address(high), len(a), address(addresses[number])]
        arrays += [wide, high]
    args = np.array(block, np.int64)
    pool.run(squares, address(args))
    del arrays, scratch
    return addresses


@inlined()
def _opened(a, matrix, first, rows, start, span, tile_scratch, wide):
    """Dequantize rows `first` to `first + rows`, inputs `start` to `start + span`, to float32 rows of DEPTH_BLOCK."""
    depth = a[DEPTH]
    if a[IS_RAW] != 0:
        item = 4 if a[matrix + BITS] == F32 else 2
        for row in range(rows):
            expand(a[matrix + CODES] + item * ((first + row) * depth + start), a[matrix + BITS], wide + 4 * row * DEPTH_BLOCK, span)
        return
    stored = stored_depth(a, matrix, depth)
    for row in range(0, rows, TILE_ROWS):
        expand_f32(a, matrix, stored, first + row, start, (span + TILE - 1) // TILE * TILE, tile_scratch, wide + 4 * row * DEPTH_BLOCK,
                   4 * DEPTH_BLOCK)


@kernel()
def squares(args, worker, counter):
    """SQUARES of each pair. Blocks of work are BLOCK rows."""
    a, matrix = i64_at(args), FIRST
    depth, matrix_at = a[DEPTH], FIRST + FIELDS
    wide = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    other, tile_scratch = wide + BUFFER, wide + 2 * BUFFER
    while True:
        first = fetch_add(counter, 1) * BLOCK
        if first >= a[matrix + ROWS]:
            return
        rows = min(BLOCK, a[matrix + ROWS] - first)
        for pair in range(a[PAIRS]):
            for row in range(rows):
                f64_at(a[matrix_at + pair * PAIR_FIELDS + SQUARES])[first + row] = 0.0
        for start in range(0, depth, DEPTH_BLOCK):
            span = min(DEPTH_BLOCK, depth - start)
            _opened(a, matrix, first, rows, start, span, tile_scratch, wide)
            for pair in range(a[PAIRS]):
                p = matrix_at + pair * PAIR_FIELDS
                row_at = wide
                if pair + 1 < a[PAIRS]:  # the result of the last one replaces the rows themselves
                    row_at = other
                    for i in range(rows * DEPTH_BLOCK):
                        f32_at(other)[i] = f32_at(wide)[i]
                rank = a[p + RANK]
                for row in range(0, rows, FLOAT_ROWS):
                    for column in range(0, span, TILE_COLUMNS):
                        tile_product(a[p + B] + 4 * (first + row) * rank, 4 * rank, a[p + A] + 4 * (start + column), a[p + PITCH],
                                     row_at + 4 * (row * DEPTH_BLOCK + column), 4 * DEPTH_BLOCK, rank, 1)
                for row in range(rows):
                    at = f64_at(a[p + SQUARES] + 8 * (first + row))
                    at[0] += float64(squares_of(f32_at(row_at + 4 * row * DEPTH_BLOCK), span))
