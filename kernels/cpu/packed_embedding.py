"""Single rows of a low-bit weight as float32, for embedding lookup. A row is spread over its block, so it is read code by code, a tile at a
time."""

from __future__ import annotations

import numpy as np
from numpy import float32, int32, int64

from ..compile import kernel
from ..lazy_numba import inlined
from ..tiles import (
    AFFINE,
    BLOCK,
    CODEBOOK,
    FLOAT,
    LEVELS_NBYTES,
    MINIMUM,
    MXFP,
    NIBBLE,
    NIBBLE_NBYTES,
    NIBBLE_TILE_NBYTES,
    NVFP,
    OFFSET,
    ROWS,
    SCHEME_MASK,
    SCHEME_SHIFT,
    SIGNED,
    SIGNED_HEADER_NBYTES,
    SIGNED_NBYTES,
    SIGNED_TILE_NBYTES,
    SUPER,
    SUPER_HEADER_NBYTES,
    SUPER_NBYTES,
    SUPER_TILE_NBYTES,
    TABLE,
    TERNARY,
    TILE,
)
from .fp8_to_half import e4m3
from .intrinsics import bits_to_f32, f32_at, fetch_add, i8_at, i32_at, i64_at, u8_at, u16_at, u32_at
from .packed_matrix import (
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
def _codes(tile, bits, row, columns, out):
    """The codes of a row's first `columns` weights in a tile -> int32. A plane of 1, 2, 4 or 8 bits at a time, the lowest first after the
    widest: four inputs of sixteen rows share 64 bytes, and 8 / width such quads one byte each."""
    code = i32_at(out)
    for k in range(columns):
        code[k] = int32(0)
    shift, at = int64(0), tile
    for log in range(3, -1, -1):
        width = int64(1) << log
        if bits & width:
            byte, mask, plane_shift = u8_at(at + 4 * row), (int64(1) << width) - 1, 3 - log
            for k in range(columns):
                quad = k >> 2
                low_code = int64(byte[((quad >> plane_shift) << 6) + (k & 3)]) >> ((quad & ((1 << plane_shift) - 1)) << log)
                code[k] |= int32((low_code & mask) << shift)
            shift += width
            at += 64 * width


@inlined()
def _values(a, m, block, tile, row, columns, out):
    """Codes at `out` -> float32 there, but for the row's scale."""
    code, value = i32_at(out), f32_at(out)
    bits, scheme, tiles = a[m + KIND] >> SCHEME_SHIFT, a[m + KIND] & SCHEME_MASK, a[m + TILES]
    if scheme == CODEBOOK:
        nibbles = int64(u8_at(a[m + SCALES])[(block * tiles + tile) * ROWS + row])
        steps, levels = u8_at(a[m + TABLES] + LEVELS_NBYTES), i8_at(a[m + TABLES])
        for k in range(columns):
            value[k] = float32(int32(steps[(nibbles >> (4 * (k >> 4))) & 15]) * int32(levels[code[k]]))
    elif scheme == MXFP:
        exponent = np.uint32(u8_at(a[m + SCALES])[(block * tiles + tile) * ROWS + row])
        scale, levels = bits_to_f32(exponent << np.uint32(23)), i8_at(a[m + TABLES])
        for k in range(columns):
            value[k] = scale * float32(levels[code[k]])
    elif scheme == NVFP:
        both, levels = u8_at(a[m + SCALES] + 2 * (block * tiles + tile) * ROWS + row), i8_at(a[m + TABLES])
        for k in range(columns):
            value[k] = e4m3(np.uint32(both[(k >> 4) * ROWS])) * float32(levels[code[k]])
    elif scheme == MINIMUM:
        shift = a[m + SHIFT]
        pair = a[m + SCALES] + (block * (tiles >> shift) + (tile >> shift)) * 4 * ROWS + 2 * row
        scale, minimum = half_at(pair), half_at(pair + 2 * ROWS)
        for k in range(columns):
            value[k] = scale * float32(code[k]) + minimum
    elif scheme == FLOAT:
        scale = f32_at(a[m + SCALES])[(block * tiles + tile) >> a[m + SHIFT]]
        for k in range(columns):
            value[k] = scale * e4m3(np.uint32(code[k]))
    elif scheme == SUPER:
        record = a[m + SCALES] + (block * (tiles >> 3) + (tile >> 3)) * SUPER_NBYTES
        tile_record = record + SUPER_HEADER_NBYTES + (tile & 7) * SUPER_TILE_NBYTES
        low, high = int64(u8_at(tile_record)[row]), int64(u8_at(tile_record + ROWS)[row % (ROWS // 2)]) >> (4 * (row // (ROWS // 2))) & 15
        scale = half_at(record + 2 * row) * float32(low & 63)
        minimum = half_at(record + 2 * (ROWS + row)) * float32(low >> 6 | high << 2)
        for k in range(columns):
            value[k] = scale * float32(code[k]) - minimum
    elif scheme == NIBBLE:
        record = a[m + SCALES] + (block * (tiles >> 3) + (tile >> 3)) * NIBBLE_NBYTES
        d, e = half_at(record + 2 * row), half_at(record + 2 * (ROWS + row))
        both = u8_at(record + SUPER_HEADER_NBYTES + (tile & 7) * NIBBLE_TILE_NBYTES + row)
        for k in range(columns):
            tile_record = int64(both[(k >> 4) * ROWS])
            value[k] = d * float32(tile_record & 15) * float32(code[k]) - e * float32(tile_record >> 4)
    elif scheme == SIGNED or scheme == TABLE:
        record = a[m + SCALES] + (block * (tiles >> 3) + (tile >> 3)) * SIGNED_NBYTES
        steps, scale = i8_at(record + SIGNED_HEADER_NBYTES + (tile & 7) * SIGNED_TILE_NBYTES + row), half_at(record + 2 * row)
        levels = i8_at(a[m + TABLES])
        for k in range(columns):
            level = int64(levels[code[k]]) if scheme == TABLE else int64(code[k]) - 32
            value[k] = scale * float32(int64(steps[(k >> 4) * ROWS]) * level)
    else:
        shift = a[m + SHIFT]
        for half in range(2):
            group = block * (tiles >> shift) + (tile >> shift) if shift >= 0 else 2 * (block * tiles + tile) + half
            group = group * ROWS + row
            zero = int64(1)
            if scheme == AFFINE or scheme == OFFSET:
                zero = int64(u8_at(a[m + ZEROS])[group])
            elif scheme != TERNARY:
                zero = int64(1) << (bits - 1)
            scale = half_at(a[m + SCALES] + 2 * group) if scheme == BLOCK or scheme == OFFSET else float32(u8_at(a[m + SCALES])[group])
            for k in range(16 * half, min(columns, 16 * half + 16)):
                value[k] = scale * float32(code[k] - zero)


@kernel()
def embed_rows(args, worker, counter):
    """Rows IDS (int64 [COUNT]) of one matrix times FACTOR (a float's bits) -> float32 at its OUT. Blocks are rows."""
    a = i64_at(args)
    ids, depth, m = i64_at(a[IDS]), a[DEPTH], MATRIX
    factor = bits_to_f32(np.uint32(a[FACTOR]))
    bits, tiles = a[m + KIND] >> SCHEME_SHIFT, a[m + TILES]
    while True:
        index = fetch_add(counter, 1)
        if index >= a[COUNT]:
            return
        block, row = ids[index] // ROWS, ids[index] % ROWS
        start = a[m + OUT] + 4 * index * a[m + OUT_STRIDE]
        out = f32_at(start)
        if a[m + KIND] & SCHEME_MASK == FLOAT or a[m + KIND] & SCHEME_MASK == NVFP:
            row_scale = f32_at(a[m + ROW_SCALES])[ids[index]]
        else:
            row_scale = bits_to_f32(np.uint32(u16_at(a[m + ROW_SCALES])[ids[index]]) << np.uint32(16))
        for tile in range((depth + TILE - 1) // TILE):
            tile_at, columns = start + 4 * TILE * tile, min(TILE, depth - TILE * tile)
            _codes(a[m + WEIGHT] + (block * tiles + tile) * 64 * bits, bits, row, columns, tile_at)
            _values(a, m, block, tile, row, columns, tile_at)
        for k in range(depth):
            out[k] *= row_scale
        if a[m + SPARSE] != 0:
            starts = u32_at(a[m + SPARSE])
            at = a[m + SPARSE] + 4 * ((a[m + ROW_COUNT] + ROWS - 1) // ROWS + 1)
            position, correction = u32_at(at), u16_at(at + 4 * a[m + SPARSE_COUNT])
            for i in range(int64(starts[block]), int64(starts[block + 1])):
                if int64(position[i] >> np.uint32(28)) == row:
                    out[int64(position[i] & np.uint32(0x0FFFFFFF))] += bits_to_f32(np.uint32(correction[i]) << np.uint32(16))
        for k in range(depth):
            out[k] *= factor
