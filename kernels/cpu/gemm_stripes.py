"""Rows of a low-bit weight as stripes of the int8 product, or as float32: which bytes of the blob make a tile, and where it goes.

`gemm_expand.py` turns one tile into another form; here are the loops over tiles and the formats.
"""

from __future__ import annotations

from numpy import float32, int32, int64, uint32

from ..deferred import inlined
from ..tiles import (
    CODEBOOK,
    FLOAT,
    LEVEL_SHIFT,
    MINIMUM,
    MXFP,
    NIBBLE,
    NVFP,
    SIGNED,
    SUPER,
    TABLE,
    TERNARY,
    TILE,
)
from ..tiles import ROWS as TILE_ROWS
from .floats import tile_of_floats
from .gemm_expand import (
    LOWERED,
    block_factors,
    codebook_factors,
    exponent_factors,
    largest_block,
    largest_linear,
    largest_step,
    levels_of,
    linear_factors,
    lowered_plain,
    narrow_plain,
    plain_codebook,
    plain_linear,
    scaled_blocks,
    scaled_codebook,
    scaled_linear,
    small_factors,
    wide_levels_of,
)
from .gemm_factors import (
    floats_of,
    floats_under_wide_rows,
    floats_with_minima,
    minima_factors,
    nibble_factors,
    signed_factors,
    super_factors,
)
from .gemm_formats import (
    BITS,
    CODES,
    GROUP,
    ROW_SCALES,
    ROWS,
    SCALES,
    SCHEME,
    SPARSE,
    TABLES,
    ZEROS,
    constant_zero,
    fill,
    halves_of,
    record_of,
    stored_rows,
    stores_zeros,
    unpack,
)
from .gemm_steps import STEPPED_TILE, stepped_codebook
from .gemm_tiles import AS_BYTES, INPUTS, ITEM, NARROW_INPUTS, PAIRS, STEP, STRIPE
from .intrinsics import bits_to_f32, f32_at, i8_at, i32_at, u8_at, u16_at, u32_at

SCALED, GROUPED = 0, 1
NARROW_CODES = 2 if AS_BYTES else GROUPED  # the groups apart as well, codes of up to four bits as bytes
STEPPED = 3 if AS_BYTES else SCALED  # levels of up to four bits as bytes, multiplied by their steps (`gemm_steps.py`)
# A whole number of stripes, also when one half is another matrix's. All of them see a panel while it lies in the second-level cache.
BLOCK_ROWS = max(2 * STRIPE, 64)
# Inputs expanded at a time, a multiple of 128. A stripe of many rows is to lie in the first-level cache; narrow ones gain nothing by it.
SPAN = 256 if STRIPE >= 64 else 2048
MOST = float32(127.0)

# Scratch of a worker, byte offsets.
WIDE_AT = 0  # a stripe
assert SPAN // TILE * STEPPED_TILE <= STRIPE * SPAN * ITEM or not AS_BYTES
FACTORS_AT = WIDE_AT + STRIPE * SPAN * ITEM  # float32 [group][STRIPE]
SHIFTS_AT = FACTORS_AT + STRIPE * (SPAN // 16) * 4  # int32 [tile][STRIPE], or float32 minima of tiles or groups
LIMITS_AT = SHIFTS_AT + STRIPE * (SPAN // 16) * 4  # float32 per row of a block, as is the next
ROWS_AT = LIMITS_AT + 4 * BLOCK_ROWS
TILE_AT = ROWS_AT + 4 * BLOCK_ROWS  # codes of a tile, 16 constant zeros, factors and minima of a tile
ZEROS_AT = TILE_AT + TILE_ROWS * TILE
TILE_FACTORS_AT = ZEROS_AT + 64
STRIPES_NBYTES = TILE_FACTORS_AT + 256
TILE_SCRATCH_NBYTES = STRIPES_NBYTES - TILE_AT

@inlined()
def _largest_level(tables):
    largest = 1
    for i in range(16):
        largest = max(largest, abs(int64(i8_at(tables)[i])))
    return largest


@inlined()
def up_of(a, matrix):
    """How far weights are shifted up before they are scaled: as far as the multiplier, at most 127 * 256, allows."""
    if a[matrix + SCHEME] == CODEBOOK:
        up, largest = 7, _largest_level(a[matrix + TABLES])
        while largest > 1:
            largest >>= 1
            up -= 1
        return up
    return 7 if a[matrix + SCHEME] == TERNARY else 8 - a[matrix + BITS]


@inlined()
def _largest(a, matrix, depth, row, scratch, out):
    """The largest |f * v| that the scale codes of the 16 rows from `row` on allow, float32 at `out`."""
    scheme, group = a[matrix + SCHEME], a[matrix + GROUP]
    block = row // TILE_ROWS
    if scheme == CODEBOOK:
        tiles, level = depth // TILE, float32(_largest_level(a[matrix + TABLES]))
        largest_step(a[matrix + SCALES] + block * tiles * TILE_ROWS, a[matrix + TABLES], 0, 0, tiles, out)
        for i in range(TILE_ROWS):
            f32_at(out)[i] *= level
        return
    groups = depth // group
    zeros, stride = scratch + ZEROS_AT, 0
    if stores_zeros(scheme):
        zeros, stride = a[matrix + ZEROS] + block * groups * TILE_ROWS, TILE_ROWS
    else:
        fill(zeros, constant_zero(a, matrix))
    most = 2 if scheme == TERNARY else (1 << a[matrix + BITS]) - 1
    if halves_of(scheme):
        largest_block(a[matrix + SCALES] + block * groups * 2 * TILE_ROWS, zeros, stride, most, groups, out)
    else:
        largest_linear(a[matrix + SCALES] + block * groups * TILE_ROWS, zeros, stride, most, groups, out)


@inlined()
def prepare_rows(a, matrix, depth, way, row, scratch, number):
    """The scales of the rows of stripe `number` of a block, which begins at row `row` of the weight; with SCALED their limits as well."""
    limits, scales = scratch + LIMITS_AT + 4 * number * STRIPE, scratch + ROWS_AT + 4 * number * STRIPE
    top = float32(127 << (15 - up_of(a, matrix)))
    for first in range(0, min(STRIPE, stored_rows(a, matrix) - row), TILE_ROWS):
        stored, own = u16_at(a[matrix + ROW_SCALES] + 2 * (row + first)), f32_at(scales + 4 * first)
        if a[matrix + SCHEME] == NVFP:
            for i in range(TILE_ROWS):
                own[i] = f32_at(a[matrix + ROW_SCALES])[row + first + i]
            continue
        for i in range(TILE_ROWS):
            own[i] = bits_to_f32(uint32(stored[i]) << uint32(16))
        if way == SCALED:
            limit = f32_at(limits + 4 * first)
            _largest(a, matrix, depth, row + first, scratch, limits + 4 * first)
            for i in range(TILE_ROWS):
                own[i] = own[i] * limit[i] / MOST
                limit[i] = top / limit[i] if limit[i] > float32(0.0) else limit[i]  # a row of zeros


@inlined()
def expand_stripe(a, matrix, depth, way, row, start, span, scratch, number):
    """Inputs `start` to `start + span` of the rows from `row` on, stripe `number` of a block; with GROUPED their factors and shifts too."""
    scheme, group = a[matrix + SCHEME], a[matrix + GROUP]
    wide = scratch + WIDE_AT
    codes, tables, zeros, up = scratch + TILE_AT, a[matrix + TABLES], scratch + ZEROS_AT, up_of(a, matrix)
    tiles, groups = depth // TILE, depth // group
    parts = 2 if group == 16 else 1  # groups of a tile
    narrow, stepped = way == NARROW_CODES and AS_BYTES, way == STEPPED and AS_BYTES
    lower = LOWERED if a[matrix + BITS] == 8 or scheme == TABLE else 0
    if not stores_zeros(scheme):
        shift = LEVEL_SHIFT if scheme == CODEBOOK or scheme == MXFP or scheme == NVFP else constant_zero(a, matrix)
        fill(zeros, shift)
        shifts = i32_at(scratch + SHIFTS_AT)
        for i in range(STRIPE):
            shifts[i] = int32(shift - lower)
    for first in range(0, min(STRIPE, stored_rows(a, matrix) - row), TILE_ROWS):
        block = (row + first) // TILE_ROWS
        limits = scratch + LIMITS_AT + 4 * (number * STRIPE + first)
        factors = scratch + FACTORS_AT + 4 * first
        shifts_at = scratch + SHIFTS_AT + 4 * first
        out = wide + 4 * first  # a step holds 4 bytes of every row
        last, scales, second, left = int64(-1), int64(0), int64(0), int64(0)
        for tile in range(start // TILE, (start + span) // TILE):
            unpack(a, matrix, tiles, block, tile, codes)
            if scheme == CODEBOOK:
                scales = a[matrix + SCALES] + (block * tiles + tile) * TILE_ROWS
                if stepped:
                    stepped_codebook(codes, scales, tables, out)
                elif way == SCALED:
                    scaled_codebook(codes, scales, scales, tables, limits, up, out)
                else:
                    plain_codebook(codes, tables, out)
                    codebook_factors(scales, tables, factors, factors + 4 * STRIPE)
            elif scheme == MXFP:  # never scaled: powers of two span more than a row's int8 would hold
                plain_codebook(codes, tables, out)
                exponent_factors(a[matrix + SCALES] + (block * tiles + tile) * TILE_ROWS, 0, factors, 0)
            elif scheme == NVFP:
                own = a[matrix + SCALES] + 2 * (block * tiles + tile) * TILE_ROWS
                plain_codebook(codes, tables, out)
                small_factors(own, 0, factors, 0)
                small_factors(own + TILE_ROWS, 0, factors + 4 * STRIPE, 0)
            elif scheme == MINIMUM:
                if narrow:
                    narrow_plain(codes, zeros, out)
                else:
                    plain_linear(codes, zeros, out)
                minima_factors(a[matrix + SCALES] + (block * tiles + tile) * 4 * TILE_ROWS, factors, shifts_at)
            elif scheme == SUPER:
                record, own = record_of(a, matrix, tiles, block, tile)
                if narrow:
                    narrow_plain(codes, zeros, out)
                else:
                    plain_linear(codes, zeros, out)
                super_factors(record, own, factors, shifts_at)
            elif scheme == NIBBLE:
                record, own = record_of(a, matrix, tiles, block, tile)
                plain_linear(codes, zeros, out)
                nibble_factors(record, own, factors, shifts_at, 4 * STRIPE)
                shifts_at += 4 * STRIPE
            elif scheme == TABLE:  # as codes of eight bits
                record, own = record_of(a, matrix, tiles, block, tile)
                wide_levels_of(codes, tables)
                lowered_plain(codes, zeros, out)
                signed_factors(record, own, factors, factors + 4 * STRIPE)
            elif scheme == SIGNED:
                record, own = record_of(a, matrix, tiles, block, tile)
                plain_linear(codes, zeros, out)
                signed_factors(record, own, factors, factors + 4 * STRIPE)
            else:
                if left == 0:
                    last = tile * TILE // group
                    left = max(1, group // TILE)
                    scales = a[matrix + SCALES] + (block * groups + last) * TILE_ROWS * (2 if halves_of(scheme) else 1)
                    second = scales + (TILE_ROWS if parts == 2 else 0)
                    if stores_zeros(scheme):
                        zeros = a[matrix + ZEROS] + (block * groups + last) * TILE_ROWS
                left -= 1
                if way == SCALED:
                    if halves_of(scheme):
                        scaled_blocks(codes, scales, second, zeros, limits, up, out)
                    else:
                        scaled_linear(codes, scales, second, zeros, limits, up, out)
                else:
                    if narrow:
                        narrow_plain(codes, zeros, out)
                    elif lower != 0:
                        lowered_plain(codes, zeros, out)
                    else:
                        plain_linear(codes, zeros, out)
                    if halves_of(scheme):
                        block_factors(scales, 0, factors, 0)
                    else:
                        linear_factors(scales, 0, factors, 0)
                    if parts == 2:
                        linear_factors(second, 0, factors + 4 * STRIPE, 0)
                    if stores_zeros(scheme) and (narrow or not PAIRS):
                        for i in range(TILE_ROWS):
                            i32_at(shifts_at)[i] = int32(u8_at(zeros)[i]) - int32(lower)
            factors += 4 * parts * STRIPE
            shifts_at += 4 * STRIPE
            out += STEPPED_TILE if stepped else TILE // (NARROW_INPUTS if narrow else INPUTS) * STEP


@inlined()
def expand_f32(a, matrix, depth, row, start, span, scratch, out, stride):
    """16 rows from `row` on (a multiple of 16), inputs `start` to `start + span` (multiples of TILE) -> float32 rows `stride` bytes apart.

    Exactly what the weight means: row scale * (factor * v), each rounded to float32, plus outliers. `depth`: inputs as stored; scratch:
    TILE_SCRATCH_NBYTES bytes.
    """
    scheme, group = a[matrix + SCHEME], a[matrix + GROUP]
    codes, zeros, factors = scratch, scratch + (ZEROS_AT - TILE_AT), scratch + (TILE_FACTORS_AT - TILE_AT)
    minima = factors + 128
    tiles, groups, block = depth // TILE, depth // group, row // TILE_ROWS
    fill(zeros, LEVEL_SHIFT if scheme == CODEBOOK or scheme == MXFP or scheme == NVFP else constant_zero(a, matrix))
    for tile in range(start // TILE, (start + span) // TILE):
        at = block * tiles + tile
        if scheme == FLOAT:
            scale = a[matrix + SCALES] + 4 * (block * groups + tile * TILE // group)
            tile_of_floats(a[matrix + CODES] + at * TILE_ROWS * TILE, scale, a[matrix + ROW_SCALES] + 4 * row,
                           out + 4 * (tile * TILE - start), stride)
            continue
        unpack(a, matrix, tiles, block, tile, codes)
        if scheme == CODEBOOK:
            levels_of(codes, a[matrix + TABLES])
            codebook_factors(a[matrix + SCALES] + at * TILE_ROWS, a[matrix + TABLES], factors, factors + 64)
        elif scheme == MXFP:
            levels_of(codes, a[matrix + TABLES])
            exponent_factors(a[matrix + SCALES] + at * TILE_ROWS, 0, factors, 0)
            exponent_factors(a[matrix + SCALES] + at * TILE_ROWS, 0, factors + 64, 0)
        elif scheme == NVFP:
            levels_of(codes, a[matrix + TABLES])
            small_factors(a[matrix + SCALES] + 2 * at * TILE_ROWS, 0, factors, 0)
            small_factors(a[matrix + SCALES] + (2 * at + 1) * TILE_ROWS, 0, factors + 64, 0)
            floats_under_wide_rows(codes, zeros, factors, a[matrix + ROW_SCALES] + 4 * row, out + 4 * (tile * TILE - start), stride)
            continue
        elif scheme == MINIMUM:
            own = a[matrix + SCALES] + at * 4 * TILE_ROWS
            minima_factors(own, factors, minima)
            minima_factors(own, factors + 64, minima + 64)
            floats_with_minima(codes, minima, factors, a[matrix + ROW_SCALES] + 2 * row, out + 4 * (tile * TILE - start), stride)
            continue
        elif scheme == SUPER:
            record, own = record_of(a, matrix, tiles, block, tile)
            super_factors(record, own, factors, minima)
            super_factors(record, own, factors + 64, minima + 64)
            floats_with_minima(codes, minima, factors, a[matrix + ROW_SCALES] + 2 * row, out + 4 * (tile * TILE - start), stride)
            continue
        elif scheme == NIBBLE:
            record, own = record_of(a, matrix, tiles, block, tile)
            nibble_factors(record, own, factors, minima, 64)
            floats_with_minima(codes, minima, factors, a[matrix + ROW_SCALES] + 2 * row, out + 4 * (tile * TILE - start), stride)
            continue
        elif scheme == SIGNED or scheme == TABLE:
            if scheme == TABLE:
                wide_levels_of(codes, a[matrix + TABLES])
            record, own = record_of(a, matrix, tiles, block, tile)
            signed_factors(record, own, factors, factors + 64)
        else:
            first = block * groups + tile * TILE // group
            if halves_of(scheme):
                block_factors(a[matrix + SCALES] + first * 2 * TILE_ROWS, 0, factors, 0)
                block_factors(a[matrix + SCALES] + first * 2 * TILE_ROWS, 0, factors + 64, 0)
            else:
                linear_factors(a[matrix + SCALES] + first * TILE_ROWS, 0, factors, 0)
                linear_factors(a[matrix + SCALES] + (first + (1 if group == 16 else 0)) * TILE_ROWS, 0, factors + 64, 0)
            if stores_zeros(scheme):
                zeros = a[matrix + ZEROS] + first * TILE_ROWS
        floats_of(codes, zeros, factors, a[matrix + ROW_SCALES] + 2 * row, out + 4 * (tile * TILE - start), stride)
    if a[matrix + SPARSE] != 0:
        first, last, places, weights = outliers_of(a, matrix, block)
        for i in range(first, last):
            place = int64(u32_at(places)[i])
            column = (place & 0x0FFFFFFF) - start
            if 0 <= column < span:
                f32_at(out + (place >> 28) * stride)[column] += bits_to_f32(uint32(u16_at(weights)[i]) << uint32(16))


@inlined()
def outliers_of(a, matrix, block):
    """Where the outliers of 16 rows lie: from which to before which, addresses of all places and of all values."""
    blocks = (a[matrix + ROWS] + TILE_ROWS - 1) // TILE_ROWS
    starts, places = u32_at(a[matrix + SPARSE]), a[matrix + SPARSE] + 4 * (blocks + 1)
    return int64(starts[block]), int64(starts[block + 1]), places, places + 4 * int64(starts[blocks])
