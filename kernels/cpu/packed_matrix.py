"""The fields of a low-bit matrix in an argument block, and the addresses of its parts."""

from __future__ import annotations

from numpy import int64

from ..lazy_numba import inlined
from ..tiles import (
    AFFINE,
    BLOCK,
    CODEBOOK,
    LEVEL_SHIFT,
    MINIMUM,
    MXFP,
    NIBBLE,
    NIBBLE_NBYTES,
    NVFP,
    OFFSET,
    ROWS,
    SCHEME_MASK,
    SCHEME_SHIFT,
    SIGNED,
    SIGNED_NBYTES,
    SUPER,
    SUPER_NBYTES,
    TABLE,
    TERNARY,
    TILE,
)
from .intrinsics import f32_at, u8_at
from .packed_vectors import scale_rows

# Fields of a matrix, from slot FIRST on. KIND is `kind_of` the format. Addresses are 0 for parts that a format lacks. A group is 32 <<
# SHIFT inputs; SHIFT -1: half a tile. LOOPS: address of the format's loop table (`packed_formats.py`).
(WEIGHT, KIND, ROW_COUNT, BIAS, OUT, OUT_STRIDE, TILES, SHIFT, SCALES, ZEROS, ROW_SCALES, TABLES, SPARSE, SPARSE_COUNT, LOOPS,
 FIELDS) = range(16)
# How sums are scaled: per tile, per tile of a codebook, per half tile, per half tile in a loop for single columns.
WHOLE_TILE, CODEBOOK_TILE, HALF_TILE, HALF_TILE_SINGLE = range(4)


def kind_of(bits: int, scheme: int) -> int:
    """A format's number."""
    return bits << SCHEME_SHIFT | scheme


@inlined()
def scaling_of(a, m):
    """How a matrix's sums are scaled."""
    scheme = a[m + KIND] & SCHEME_MASK
    if scheme == CODEBOOK or scheme == SIGNED or scheme == TABLE:
        return CODEBOOK_TILE
    if scheme == NVFP:
        return HALF_TILE_SINGLE
    return HALF_TILE if a[m + SHIFT] < 0 else WHOLE_TILE


def seed_scaling(scheme: str, group: int) -> int:
    """How the seeds of a format are made, as in `scaling_of`; the matrices of a gated pair must agree."""
    if scheme in ("codebook", "signed", "table", "nvfp"):
        return HALF_TILE_SINGLE if scheme == "nvfp" else CODEBOOK_TILE
    return HALF_TILE if group < TILE else WHOLE_TILE


@inlined()
def tile_nbytes_of(a, m):
    """Bytes of a tile's codes."""
    return a[m + KIND] >> SCHEME_SHIFT << 6


@inlined()
def scales_nbytes_of(a, m):
    """Bytes of a row block's scales."""
    way, scheme = scaling_of(a, m), a[m + KIND] & SCHEME_MASK
    if scheme == SUPER:
        return (a[m + TILES] >> 3) * SUPER_NBYTES
    if scheme == NIBBLE:
        return (a[m + TILES] >> 3) * NIBBLE_NBYTES
    if scheme == SIGNED or scheme == TABLE:
        return (a[m + TILES] >> 3) * SIGNED_NBYTES
    if scheme == MINIMUM:
        return (a[m + TILES] >> a[m + SHIFT]) * 4 * ROWS
    if scheme == BLOCK or scheme == OFFSET:
        return (a[m + TILES] >> a[m + SHIFT]) * 2 * ROWS
    if way == WHOLE_TILE:
        return (a[m + TILES] >> a[m + SHIFT]) * ROWS
    return a[m + TILES] * (ROWS if way == CODEBOOK_TILE else 2 * ROWS)


@inlined()
def codes_at(a, m, block):
    """Address of a row block's codes."""
    return a[m + WEIGHT] + block * a[m + TILES] * tile_nbytes_of(a, m)


@inlined()
def zeros_of(a, m, block, constant_at):
    """Address of a row block's zero points and the shift from a tile's index to theirs; constants for formats that store none."""
    scheme = a[m + KIND] & SCHEME_MASK
    if scheme == AFFINE or scheme == OFFSET:
        return a[m + ZEROS] + block * (a[m + TILES] >> a[m + SHIFT]) * ROWS, a[m + SHIFT]
    zero, value = u8_at(constant_at), 1 << ((a[m + KIND] >> SCHEME_SHIFT) - 1)
    if scheme == TERNARY or scheme == MXFP or scheme == NVFP:
        value = 1 if scheme == TERNARY else LEVEL_SHIFT
    for row in range(ROWS):
        zero[row] = value
    return constant_at, int64(62)


@inlined()
def scale_block(a, m, block, sums):
    """A row block's 16 float32 at `sums` times the scales of its rows."""
    if a[m + KIND] & SCHEME_MASK == NVFP:
        value, scale = f32_at(sums), f32_at(a[m + ROW_SCALES] + 4 * ROWS * block)
        for row in range(ROWS):
            value[row] *= scale[row]
    else:
        scale_rows(sums, a[m + ROW_SCALES] + 2 * ROWS * block)
