"""Single rows of a low-bit weight as float32: what an embedding lookup needs. A row lies spread over its block, so this reads code
by code."""

from __future__ import annotations

import numpy as np
from numba import float32, int32, int64

from ..compile import inlined, kernel
from ..tiles import (
    AFFINE,
    BLOCK,
    CODEBOOK,
    LEVELS_NBYTES,
    MXFP,
    OFFSET,
    ROWS,
    SCHEME_MASK,
    SCHEME_SHIFT,
    SIGNED,
    SIGNED_HEAD,
    SIGNED_NBYTES,
    SIGNED_TILE,
    SUPER,
    SUPER_HEAD,
    SUPER_NBYTES,
    SUPER_TILE,
    TERNARY,
    TILE,
)
from .intrinsics import bits_to_f32, f32_at, fetch_add, i8_at, i64_at, u8_at, u16_at, u32_at
from .packed import (
    FIELDS,
    KIND,
    OUT,
    OUT_STRIDE,
    ROW_COUNT,
    ROW_SCALES,
    SCALES,
    SHIFT,
    SPARSE,
    SPARSE_COUNT,
    TABLES,
    TILES,
    WEIGHT,
    ZEROS,
)

# Slots of the argument block; the matrix's fields follow at MATRIX.
IDS, COUNT, DEPTH, FACTOR, MATRIX = range(5)
BLOCK_SIZE = MATRIX + FIELDS


@inlined()
def half_at(address):
    """A finite half-precision float."""
    bits = np.uint32(u16_at(address)[0])
    value = bits_to_f32((bits & np.uint32(0x7FFF)) << np.uint32(13)) * float32(2.0**112)
    return -value if bits >= np.uint32(0x8000) else value


@inlined()
def _code(tile, bits, row, column):
    """The code of one weight of a tile."""
    quad, within = column >> 2, 4 * row + (column & 3)
    found, shift, at = int64(0), int64(0), tile
    for width in (8, 4, 2, 1):
        if bits & width:
            per = 8 // width
            byte = int64(u8_at(at)[64 * (quad // per) + within])
            found |= ((byte >> (width * (quad % per))) & ((1 << width) - 1)) << shift
            shift += width
            at += 64 * width
    return found


@kernel()
def embed_rows(args, worker, counter):
    """Rows IDS (int64 [COUNT]) of one matrix times FACTOR (a float's bits) -> float32 at its OUT. Blocks are rows."""
    a = i64_at(args)
    ids, depth, m = i64_at(a[IDS]), a[DEPTH], MATRIX
    factor = bits_to_f32(np.uint32(a[FACTOR]))
    bits, scheme, tiles = a[m + KIND] >> SCHEME_SHIFT, a[m + KIND] & SCHEME_MASK, a[m + TILES]
    while True:
        index = fetch_add(counter, 1)
        if index >= a[COUNT]:
            return
        block, row = ids[index] // ROWS, ids[index] % ROWS
        out = f32_at(a[m + OUT] + 4 * index * a[m + OUT_STRIDE])
        row_scale = bits_to_f32(np.uint32(u16_at(a[m + ROW_SCALES])[ids[index]]) << np.uint32(16))
        for k in range(depth):
            tile, column = k // TILE, k % TILE
            code = _code(a[m + WEIGHT] + (block * tiles + tile) * 64 * bits, bits, row, column)
            if scheme == CODEBOOK:
                nibbles = int64(u8_at(a[m + SCALES])[(block * tiles + tile) * ROWS + row])
                step = u8_at(a[m + TABLES] + LEVELS_NBYTES)[(nibbles >> (4 * (column >> 4))) & 15]
                value = float32(int32(step) * int32(i8_at(a[m + TABLES])[code]))
            elif scheme == MXFP:
                exponent = np.uint32(u8_at(a[m + SCALES])[(block * tiles + tile) * ROWS + row])
                value = bits_to_f32(exponent << np.uint32(23)) * float32(i8_at(a[m + TABLES])[code])
            elif scheme == SUPER:
                record = a[m + SCALES] + (block * (tiles >> 3) + (tile >> 3)) * SUPER_NBYTES
                own = record + SUPER_HEAD + (tile & 7) * SUPER_TILE
                low, high = int64(u8_at(own)[row]), int64(u8_at(own + ROWS)[row % (ROWS // 2)]) >> (4 * (row // (ROWS // 2))) & 15
                factor_of, least = half_at(record + 2 * row) * float32(low & 63), half_at(record + 2 * (ROWS + row))
                value = factor_of * float32(code) - least * float32(low >> 6 | high << 2)
            elif scheme == SIGNED:
                record = a[m + SCALES] + (block * (tiles >> 3) + (tile >> 3)) * SIGNED_NBYTES
                own = record + SIGNED_HEAD + (tile & 7) * SIGNED_TILE + (column >> 4) * ROWS
                value = half_at(record + 2 * row) * float32(int64(i8_at(own)[row]) * (code - 32))
            else:
                shift = a[m + SHIFT]
                group = (block * (tiles >> shift) + (tile >> shift) if shift >= 0 else 2 * block * tiles + k // 16) * ROWS + row
                zero = int64(1)
                if scheme == AFFINE or scheme == OFFSET:
                    zero = int64(u8_at(a[m + ZEROS])[group])
                elif scheme != TERNARY:
                    zero = int64(1) << (bits - 1)
                scale = half_at(a[m + SCALES] + 2 * group) if scheme == BLOCK or scheme == OFFSET else float32(u8_at(a[m + SCALES])[group])
                value = scale * float32(code - zero)
            out[k] = row_scale * value
        if a[m + SPARSE] != 0:
            starts = u32_at(a[m + SPARSE])
            at = a[m + SPARSE] + 4 * ((a[m + ROW_COUNT] + ROWS - 1) // ROWS + 1)
            place, correction = u32_at(at), u16_at(at + 4 * a[m + SPARSE_COUNT])
            for i in range(int64(starts[block]), int64(starts[block + 1])):
                if int64(place[i] >> np.uint32(28)) == row:
                    out[int64(place[i] & np.uint32(0x0FFFFFFF))] += bits_to_f32(np.uint32(correction[i]) << np.uint32(16))
        for k in range(depth):
            out[k] *= factor
