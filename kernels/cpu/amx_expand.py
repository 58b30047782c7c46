"""Expands rows of a low-bit weight to the bytes that the matrix unit (AMX) multiplies: one byte per weight, or two (`gemm_amx.py`).

A stripe is STRIPE rows by a span of inputs: pairs of row blocks one after the other, each with the quads of a span, 128 bytes each.
"""

from __future__ import annotations

from numpy import int64

from ..lazy_numba import inlined
from ..tiles import CODEBOOK, TILE
from ..tiles import ROWS as TILE_ROWS
from .amx import AMX_ROWS, INPUTS, PAIR_SPAN, QUAD_NBYTES, STEP_NBYTES
from .amx_int16 import pack_rows
from .gemm_dequantize import expand_f32
from .gemm_formats import (
    BITS,
    CODES,
    GROUP,
    SCALES,
    SCHEME,
    TABLES,
    ZEROS,
    constant_zero,
    fill,
    halves_of,
    stored_rows,
    stores_zeros,
    unpack,
)
from .gemm_scaled import signed_blocks, signed_codebook_2, signed_codebook_3, signed_codebook_4, signed_linear
from .gemm_stripes import LIMITS_AT, TILE_AT, ZEROS_AT
from .gemm_tiles import STRIPE
from .intrinsics import f32_at

SPAN = PAIR_SPAN
PAIR = 2 * AMX_ROWS  # rows multiplied together
PAIR_NBYTES = PAIR * SPAN
PLANE_NBYTES = STRIPE * SPAN
FLOATS_PITCH = 4 * SPAN + 64  # row stride in floats, padded so that rows do not map to the same cache sets
FLOATS_NBYTES = TILE_ROWS * FLOATS_PITCH + 4 * AMX_ROWS + STEP_NBYTES  # scratch of `expand_wide`


@inlined()
def tiles_of_stripe(a, matrix, row, span):
    """How many tiles of TILE inputs a stripe from `row` on has in `span` inputs."""
    return min(STRIPE, stored_rows(a, matrix) - row) // TILE_ROWS * (span // TILE)


@inlined()
def expand_narrow(a, matrix, depth, row, start, span, index, up, scratch, number, wide):
    """Expand tile `index` of stripe `number` of a block, which begins at `row`, to one byte per weight. `depth`: inputs as stored; `up`:
    from `up_of`; wide: the stripe; scratch as in `gemm_stripes.py`, with the rows' limits."""
    first, tile = index // (span // TILE) * TILE_ROWS, index % (span // TILE)
    out = wide + first // PAIR * PAIR_NBYTES + 4 * (first % PAIR) + tile * (TILE // 4 * QUAD_NBYTES)
    block, tile, tiles = (row + first) // TILE_ROWS, tile + start // TILE, depth // TILE
    limits, bits, at = scratch + LIMITS_AT + 4 * (number * STRIPE + first), a[matrix + BITS], block * tiles + tile
    if a[matrix + SCHEME] == CODEBOOK:
        source, scales = a[matrix + CODES] + at * bits * (TILE_ROWS * TILE // 8), a[matrix + SCALES] + at * TILE_ROWS
        if bits == 4:
            signed_codebook_4(source, scales, a[matrix + TABLES], limits, up, 1, out)
        elif bits == 3:
            signed_codebook_3(source, scales, a[matrix + TABLES], limits, up, 1, out)
        else:
            signed_codebook_2(source, scales, a[matrix + TABLES], limits, up, 1, out)
        return
    codes, group = scratch + TILE_AT, a[matrix + GROUP]
    unpack(a, matrix, tiles, block, tile, codes)
    at = block * (depth // group) + tile * TILE // group
    zeros = scratch + ZEROS_AT
    if stores_zeros(a[matrix + SCHEME]):
        zeros = a[matrix + ZEROS] + at * TILE_ROWS
    else:
        fill(zeros, constant_zero(a, matrix))
    if halves_of(a[matrix + SCHEME]):
        scales = a[matrix + SCALES] + at * 2 * TILE_ROWS
        signed_blocks(codes, scales, scales, zeros, limits, up, out)
    else:
        scales = a[matrix + SCALES] + at * TILE_ROWS
        signed_linear(codes, scales, scales + (TILE_ROWS if group == 16 else 0), zeros, limits, up, out)


@inlined()
def expand_wide(a, matrix, depth, row, start, count, scratch, floats, factors, wide):
    """Expand `count` inputs of a stripe to two bytes per weight, planes PLANE_NBYTES apart, with its rows' scales. Padding after the last
    input is ignored. floats: FLOATS_NBYTES bytes."""
    span, padded = (count + TILE - 1) // TILE * TILE, (count + INPUTS - 1) // INPUTS * INPUTS
    for first in range(0, min(STRIPE, stored_rows(a, matrix) - row), TILE_ROWS):
        expand_f32(a, matrix, depth, row + first, start, span, scratch + TILE_AT, floats, FLOATS_PITCH)
        for i in range(TILE_ROWS if padded > count else int64(0)):
            for k in range(count, padded):
                f32_at(floats + i * FLOATS_PITCH)[k] = 0.0
        pack_rows(floats, FLOATS_PITCH, padded, floats + TILE_ROWS * FLOATS_PITCH, factors + 4 * first,
                  wide + first // PAIR * PAIR_NBYTES + 4 * (first % PAIR), PLANE_NBYTES)
