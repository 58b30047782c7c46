"""Dequantizes rows of a low-bit weight to float32, exactly: for unrounded products, row norms, and AMX.

The stripes of the int8 product are in `gemm_stripes.py`.
"""

from __future__ import annotations

from numpy import int64, uint32

from ..lazy_numba import inlined
from ..tiles import CODEBOOK, FLOAT, MINIMUM, MXFP, NIBBLE, NVFP, SIGNED, SUPER, TABLE, TILE
from ..tiles import ROWS as TILE_ROWS
from .fp8_loops import fp8_tile_to_f32
from .gemm_expand import block_factors, codebook_factors, exponent_factors, levels_of, linear_factors, small_factors, wide_levels_of
from .gemm_formats import (
    CODES,
    GROUP,
    ROW_SCALES,
    ROWS,
    SCALES,
    SCHEME,
    SPARSE,
    TABLES,
    fill,
    group_of,
    halves_of,
    pairs_at,
    record_of,
    shift_of,
    unpack,
)
from .gemm_super_blocks import (
    floats_of,
    floats_under_wide_rows,
    floats_with_minima,
    minima_factors,
    nibble_factors,
    signed_factors,
    super_factors,
)
from .intrinsics import bits_to_f32, f32_at, u16_at, u32_at

# Scratch of a tile, byte offsets: codes, 16 constant zero points for formats that store none, factors and minima of both halves.
CONSTANTS_AT = TILE_ROWS * TILE
FACTORS_AT = CONSTANTS_AT + 64
MINIMA_AT = FACTORS_AT + 128
TILE_SCRATCH_NBYTES = MINIMA_AT + 128


@inlined()
def _floats_of_tile(a, matrix, depth, block, tile, scratch, out, stride):
    """A tile of 16 rows as float32 rows `stride` bytes apart, without outliers; scratch as for `expand_f32`."""
    scheme, group, tiles, row = a[matrix + SCHEME], a[matrix + GROUP], depth // TILE, block * TILE_ROWS
    codes, zeros, factors, minima = scratch, scratch + CONSTANTS_AT, scratch + FACTORS_AT, scratch + MINIMA_AT
    at, row_scales = block * tiles + tile, a[matrix + ROW_SCALES] + 2 * row
    if scheme == FLOAT:
        scale = a[matrix + SCALES] + 4 * (block * (depth // group) + tile * TILE // group)
        fp8_tile_to_f32(a[matrix + CODES] + at * TILE_ROWS * TILE, scale, a[matrix + ROW_SCALES] + 4 * row, out, stride)
        return
    unpack(a, matrix, tiles, block, tile, codes)
    if scheme == NVFP:
        levels_of(codes, a[matrix + TABLES])
        small_factors(a[matrix + SCALES] + 2 * at * TILE_ROWS, 0, factors, 0)
        small_factors(a[matrix + SCALES] + (2 * at + 1) * TILE_ROWS, 0, factors + 64, 0)
        floats_under_wide_rows(codes, zeros, factors, a[matrix + ROW_SCALES] + 4 * row, out, stride)
        return
    if scheme == MINIMUM or scheme == SUPER or scheme == NIBBLE:
        if scheme == MINIMUM:
            pairs = pairs_at(a, matrix, depth, block, tile)
            minima_factors(pairs, factors, minima)
            minima_factors(pairs, factors + 64, minima + 64)
        else:
            record, pairs = record_of(a, matrix, tiles, block, tile)
            if scheme == SUPER:
                super_factors(record, pairs, factors, minima)
                super_factors(record, pairs, factors + 64, minima + 64)
            else:
                nibble_factors(record, pairs, factors, minima, 64)
        floats_with_minima(codes, minima, factors, row_scales, out, stride)
        return
    if scheme == CODEBOOK:
        levels_of(codes, a[matrix + TABLES])
        codebook_factors(a[matrix + SCALES] + at * TILE_ROWS, a[matrix + TABLES], factors, factors + 64)
    elif scheme == MXFP:
        levels_of(codes, a[matrix + TABLES])
        exponent_factors(a[matrix + SCALES] + at * TILE_ROWS, 0, factors, 0)
        exponent_factors(a[matrix + SCALES] + at * TILE_ROWS, 0, factors + 64, 0)
    elif scheme == SIGNED or scheme == TABLE:
        if scheme == TABLE:
            wide_levels_of(codes, a[matrix + TABLES])
        record, pairs = record_of(a, matrix, tiles, block, tile)
        signed_factors(record, pairs, factors, factors + 64)
    else:
        scales, second, zeros = group_of(a, matrix, depth, block, tile, zeros)
        if halves_of(scheme):
            block_factors(scales, 0, factors, 0)
            block_factors(scales, 0, factors + 64, 0)
        else:
            linear_factors(scales, 0, factors, 0)
            linear_factors(second, 0, factors + 64, 0)
    floats_of(codes, zeros, factors, row_scales, out, stride)


@inlined()
def expand_f32(a, matrix, depth, row, start, span, scratch, out, stride):
    """16 rows from `row` on (a multiple of 16), inputs `start` to `start + span` (multiples of TILE) -> float32 rows `stride` bytes apart.

    The exact weight: row scale * (factor * v), each rounded to float32, plus outliers. `depth`: inputs as stored; scratch:
    TILE_SCRATCH_NBYTES bytes.
    """
    block = row // TILE_ROWS
    fill(scratch + CONSTANTS_AT, shift_of(a, matrix))
    for tile in range(start // TILE, (start + span) // TILE):
        _floats_of_tile(a, matrix, depth, block, tile, scratch, out + 4 * (tile * TILE - start), stride)
    if a[matrix + SPARSE] != 0:
        _add_outliers(a, matrix, block, start, span, out, stride)


@inlined()
def _add_outliers(a, matrix, block, start, span, out, stride):
    """Add the outliers of 16 rows among inputs `start` to `start + span` to float32 rows `stride` bytes apart."""
    first, last, positions, weights = outliers_of(a, matrix, block)
    for i in range(first, last):
        position = int64(u32_at(positions)[i])
        column = (position & 0x0FFFFFFF) - start
        if 0 <= column < span:
            f32_at(out + (position >> 28) * stride)[column] += bits_to_f32(uint32(u16_at(weights)[i]) << uint32(16))


@inlined()
def outliers_of(a, matrix, block):
    """Location of the outliers of 16 rows: begin and end, and the addresses of all positions and all values."""
    blocks = (a[matrix + ROWS] + TILE_ROWS - 1) // TILE_ROWS
    starts, positions = u32_at(a[matrix + SPARSE]), a[matrix + SPARSE] + 4 * (blocks + 1)
    return int64(starts[block]), int64(starts[block + 1]), positions, positions + 4 * int64(starts[blocks])
