"""Accessors for a low-bit matrix in an argument block, for products with many columns: codes, scales, zero points and constant shifts."""

from __future__ import annotations

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
    NIBBLE_TILE_NBYTES,
    NVFP,
    OFFSET,
    SIGNED,
    SIGNED_HEADER_NBYTES,
    SIGNED_NBYTES,
    SIGNED_TILE_NBYTES,
    SUPER,
    SUPER_BLOCK,
    SUPER_HEADER_NBYTES,
    SUPER_NBYTES,
    SUPER_TILE_NBYTES,
    TABLE,
    TABLE_LEVEL_SHIFT,
    TERNARY,
    TILE,
)
from ..tiles import ROWS as TILE_ROWS
from .gemm_expand import codes_of
from .intrinsics import u8_at
from .lut_layout import expand_tiles, pair_at

# Slots of a matrix: addresses of a blob's sections (SPARSE 0: no outliers), the format, 1 for codes in lookup layout, then as for other
# matrices.
CODES, SCALES, ZEROS, ROW_SCALES, TABLES, SPARSE, BITS, SCHEME, GROUP, LOOKED_UP, ROWS, BIAS, OUT, OUT_STRIDE, FIELDS = range(15)

_codes_2, _codes_3, _codes_4, _codes_5, _codes_6, _codes_8 = (codes_of(bits) for bits in (2, 3, 4, 5, 6, 8))


@inlined()
def unpack(a, matrix, tiles, block, tile, out):
    """A tile's codes, 512 bytes at `out`."""
    bits = a[matrix + BITS]
    source = a[matrix + CODES] + (block * tiles + tile) * bits * (TILE_ROWS * TILE // 8)
    if a[matrix + LOOKED_UP] != 0:
        expand_tiles(bits, a[matrix + CODES] + pair_at(bits, tiles, block, tile), 1, out)
    elif bits == 4:
        _codes_4(source, out)
    elif bits == 8:
        _codes_8(source, out)
    elif bits == 3:
        _codes_3(source, out)
    elif bits == 2:
        _codes_2(source, out)
    elif bits == 6:
        _codes_6(source, out)
    else:
        _codes_5(source, out)


@inlined()
def stored_depth(a, matrix, depth):
    """Inputs as stored."""
    unit = max(TILE, a[matrix + GROUP])
    if a[matrix + SCHEME] == SUPER or a[matrix + SCHEME] == SIGNED or (
            a[matrix + SCHEME] == TABLE or a[matrix + SCHEME] == NIBBLE):
        unit = SUPER_BLOCK
    return (depth + unit - 1) // unit * unit


@inlined()
def stored_rows(a, matrix):
    return (a[matrix + ROWS] + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS


@inlined()
def constant_zero(a, matrix):
    if a[matrix + SCHEME] == SUPER or a[matrix + SCHEME] == NIBBLE or a[matrix + SCHEME] == MINIMUM:
        return 0
    if a[matrix + SCHEME] == TABLE:
        return TABLE_LEVEL_SHIFT
    return 1 if a[matrix + SCHEME] == TERNARY else 1 << (a[matrix + BITS] - 1)


@inlined()
def shift_of(a, matrix):
    """What is subtracted from the codes of a format without zero points of its own."""
    scheme = a[matrix + SCHEME]
    return LEVEL_SHIFT if scheme == CODEBOOK or scheme == MXFP or scheme == NVFP else constant_zero(a, matrix)


@inlined()
def halves_of(scheme):
    """Are scales half-precision floats?"""
    return scheme == BLOCK or scheme == OFFSET


@inlined()
def stores_zeros(scheme):
    return scheme == AFFINE or scheme == OFFSET


@inlined()
def group_of(a, matrix, depth, block, tile, constants):
    """For a tile: address of its group's scales, of its second half's group, and of its zeros, or `constants` for a format without stored
    zeros."""
    scheme, group = a[matrix + SCHEME], a[matrix + GROUP]
    first = (block * (depth // group) + tile * TILE // group) * TILE_ROWS
    scales = a[matrix + SCALES] + first * (2 if halves_of(scheme) else 1)
    zeros = a[matrix + ZEROS] + first if stores_zeros(scheme) else constants
    return scales, scales + (TILE_ROWS if group == 16 else 0), zeros


@inlined()
def pairs_at(a, matrix, depth, block, tile):
    """Address of the scales of a tile's group, for formats that store minima next to them."""
    group = a[matrix + GROUP]
    return a[matrix + SCALES] + (block * (depth // group) + tile * TILE // group) * 4 * TILE_ROWS


@inlined()
def record_of(a, matrix, tiles, block, tile):
    """Address of a super-block's scales, and the tile's codes among them."""
    at = block * (tiles >> 3) + (tile >> 3)
    if a[matrix + SCHEME] == SUPER:
        record = a[matrix + SCALES] + at * SUPER_NBYTES
        return record, record + SUPER_HEADER_NBYTES + (tile & 7) * SUPER_TILE_NBYTES
    if a[matrix + SCHEME] == NIBBLE:
        record = a[matrix + SCALES] + at * NIBBLE_NBYTES
        return record, record + SUPER_HEADER_NBYTES + (tile & 7) * NIBBLE_TILE_NBYTES
    record = a[matrix + SCALES] + at * SIGNED_NBYTES
    return record, record + SIGNED_HEADER_NBYTES + (tile & 7) * SIGNED_TILE_NBYTES


@inlined()
def fill(address, value):
    """16 bytes."""
    for i in range(TILE_ROWS):
        u8_at(address)[i] = value
