"""Expands rows of a low-bit weight to stripes of the int8 product: locates each tile in the blob and in the stripe.

`gemm_expand.py` converts one tile; the loops over tiles and formats are here, those for float32 in `gemm_dequantize.py`.
"""

from __future__ import annotations

from numpy import float32, int32, int64, uint32

from ..lazy_numba import inlined
from ..tiles import (
    CODEBOOK,
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
from .gemm_avx2_codebook import STEPPED_TILE, stepped_codebook
from .gemm_dequantize import CONSTANTS_AT, TILE_SCRATCH_NBYTES
from .gemm_expand import (
    CODE_OFFSET,
    block_factors,
    codebook_factors,
    exponent_factors,
    largest_block,
    largest_linear,
    largest_step,
    linear_factors,
    lowered_plain,
    narrow_plain,
    plain_codebook,
    plain_linear,
    small_factors,
    wide_levels_of,
)
from .gemm_formats import (
    BITS,
    CODES,
    GROUP,
    LOOKED_UP,
    ROW_SCALES,
    SCALES,
    SCHEME,
    TABLES,
    ZEROS,
    constant_zero,
    fill,
    group_of,
    halves_of,
    pairs_at,
    record_of,
    shift_of,
    stored_rows,
    stores_zeros,
    unpack,
)
from .gemm_scaled import (
    SPAN,
    UNPACKED,
    scaled_blocks_2,
    scaled_blocks_3,
    scaled_blocks_4,
    scaled_blocks_8,
    scaled_codebook_2,
    scaled_codebook_3,
    scaled_codebook_4,
    scaled_linear_2,
    scaled_linear_3,
    scaled_linear_4,
    scaled_linear_8,
)
from .gemm_super_blocks import (
    minima_factors,
    nibble_factors,
    signed_factors,
    super_factors,
)
from .gemm_tiles import AS_BYTES, INPUTS, ITEM, NARROW_INPUTS, PAIRS, STEP, STRIPE
from .intrinsics import bits_to_f32, f32_at, i8_at, i32_at, u8_at, u16_at

SCALED, GROUPED = 0, 1
NARROW_CODES = 2 if AS_BYTES else GROUPED  # like GROUPED, for codes of up to four bits as bytes
STEPPED = 3 if AS_BYTES else SCALED  # 4-bit levels as bytes, multiplied by their steps (`gemm_avx2_codebook.py`)
# A whole number of stripes, also if half of them belong to another matrix. All of them read a panel while it is in the L2 cache.
BLOCK_ROWS = max(2 * STRIPE, 64)
INT8_MAX = float32(127.0)

# Scratch of a worker, byte offsets.
WIDE_AT = 0  # a stripe
assert SPAN // TILE * STEPPED_TILE <= STRIPE * SPAN * ITEM or not AS_BYTES
FACTORS_AT = WIDE_AT + STRIPE * SPAN * ITEM  # float32 [group][STRIPE]
SHIFTS_AT = FACTORS_AT + STRIPE * (SPAN // 16) * 4  # int32 [tile][STRIPE], or float32 minima of tiles or groups
LIMITS_AT = SHIFTS_AT + STRIPE * (SPAN // 16) * 4  # float32 per row of a block, as is ROWS_AT
ROWS_AT = LIMITS_AT + 4 * BLOCK_ROWS
TILE_AT = ROWS_AT + 4 * BLOCK_ROWS  # codes of a tile and 16 constant zeros after them, the layout of `gemm_dequantize.py`
ZEROS_AT = TILE_AT + CONSTANTS_AT
STRIPES_NBYTES = TILE_AT + TILE_SCRATCH_NBYTES


@inlined()
def _largest_level(tables):
    largest = 1
    for i in range(16):
        largest = max(largest, abs(int64(i8_at(tables)[i])))
    return largest


@inlined()
def up_of(a, matrix):
    """How far weights are shifted up before scaling: as far as the multiplier, at most 127 * 256, allows."""
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
    max_code = 2 if scheme == TERNARY else (1 << a[matrix + BITS]) - 1
    if halves_of(scheme):
        largest_block(a[matrix + SCALES] + block * groups * 2 * TILE_ROWS, zeros, stride, max_code, groups, out)
    else:
        largest_linear(a[matrix + SCALES] + block * groups * TILE_ROWS, zeros, stride, max_code, groups, out)


@inlined()
def prepare_rows(a, matrix, depth, way, row, scratch, number):
    """The row scales of stripe `number` of a block, which begins at row `row` of the weight; with SCALED their limits as well."""
    limits, scales = scratch + LIMITS_AT + 4 * number * STRIPE, scratch + ROWS_AT + 4 * number * STRIPE
    top = float32(127 << (15 - up_of(a, matrix)))
    for first in range(0, min(STRIPE, stored_rows(a, matrix) - row), TILE_ROWS):
        stored, row_scales = u16_at(a[matrix + ROW_SCALES] + 2 * (row + first)), f32_at(scales + 4 * first)
        if a[matrix + SCHEME] == NVFP:
            for i in range(TILE_ROWS):
                row_scales[i] = f32_at(a[matrix + ROW_SCALES])[row + first + i]
            continue
        for i in range(TILE_ROWS):
            row_scales[i] = bits_to_f32(uint32(stored[i]) << uint32(16))
        if way == SCALED:
            limit = f32_at(limits + 4 * first)
            _largest(a, matrix, depth, row + first, scratch, limits + 4 * first)
            for i in range(TILE_ROWS):
                row_scales[i] = row_scales[i] * limit[i] / INT8_MAX
                limit[i] = top / limit[i] if limit[i] > float32(0.0) else limit[i]  # a row of zeros


@inlined()
def _lower_of(a, matrix):
    """The offset subtracted from a stripe's codes so that eight bits fit an int8."""
    return CODE_OFFSET if a[matrix + BITS] == 8 or a[matrix + SCHEME] == TABLE else 0


@inlined()
def _fill_shifts(a, matrix, scratch):
    """Store the constant shift of a format without zero points where those of tiles and rows would be."""
    shift, lower = shift_of(a, matrix), _lower_of(a, matrix)
    fill(scratch + ZEROS_AT, shift)
    shifts = i32_at(scratch + SHIFTS_AT)
    for i in range(STRIPE):
        shifts[i] = int32(shift - lower)


@inlined()
def _has_groups(scheme):
    """Are scales stored per group of inputs, of any length? The other formats store them per tile."""
    return not (scheme == CODEBOOK or scheme == MXFP or scheme == NVFP or scheme == MINIMUM or scheme == SUPER or scheme == NIBBLE
                or scheme == TABLE or scheme == SIGNED)


@inlined()
def _plain(codes, zeros, narrow, out):
    """Store a tile's codes unscaled into a stripe."""
    if narrow:
        narrow_plain(codes, zeros, out)
    else:
        plain_linear(codes, zeros, out)


@inlined()
def _expand_scaled_codebook(a, matrix, at, count, limits, up, out):
    """Expand `count` tiles of a codebook's row block, after skipping `at`, to the row's int8 in a stripe at `out`."""
    bits, scales, tables = a[matrix + BITS], a[matrix + SCALES] + at * TILE_ROWS, a[matrix + TABLES]
    source = a[matrix + CODES] + at * bits * (TILE_ROWS * TILE // 8)
    if bits == 4:
        scaled_codebook_4(source, scales, tables, limits, up, count, out)
    elif bits == 3:
        scaled_codebook_3(source, scales, tables, limits, up, count, out)
    else:
        scaled_codebook_2(source, scales, tables, limits, up, count, out)


@inlined()
def _expand_tile(a, matrix, tiles, way, block, tile, scratch, factors, shifts, out):
    """Expand a tile whose scales are stored with it, codes unpacked at TILE_AT, unscaled into a stripe at `out`; with GROUPED also its
    factors and minima."""
    scheme, tables, narrow = a[matrix + SCHEME], a[matrix + TABLES], way == NARROW_CODES and AS_BYTES
    codes, zeros = scratch + TILE_AT, scratch + ZEROS_AT
    if scheme == CODEBOOK:
        scales = a[matrix + SCALES] + (block * tiles + tile) * TILE_ROWS
        if way == STEPPED and AS_BYTES:
            stepped_codebook(codes, scales, tables, out)
        else:
            plain_codebook(codes, tables, out)
            codebook_factors(scales, tables, factors, factors + 4 * STRIPE)
    elif scheme == MXFP:  # not scaled: powers of two span a wider range than int8 holds
        plain_codebook(codes, tables, out)
        exponent_factors(a[matrix + SCALES] + (block * tiles + tile) * TILE_ROWS, 0, factors, 0)
    elif scheme == NVFP:
        tile_scales = a[matrix + SCALES] + 2 * (block * tiles + tile) * TILE_ROWS
        plain_codebook(codes, tables, out)
        small_factors(tile_scales, 0, factors, 0)
        small_factors(tile_scales + TILE_ROWS, 0, factors + 4 * STRIPE, 0)
    elif scheme == MINIMUM:
        if _lower_of(a, matrix) != 0:
            lowered_plain(codes, zeros, out)
        else:
            _plain(codes, zeros, narrow, out)
        minima_factors(pairs_at(a, matrix, tiles * TILE, block, tile), factors, shifts)
    else:
        record, tile_scales = record_of(a, matrix, tiles, block, tile)
        if scheme == SUPER:
            _plain(codes, zeros, narrow, out)
            super_factors(record, tile_scales, factors, shifts)
        elif scheme == NIBBLE:
            plain_linear(codes, zeros, out)
            nibble_factors(record, tile_scales, factors, shifts, 4 * STRIPE)
        else:
            if scheme == TABLE:  # as 8-bit codes
                wide_levels_of(codes, tables)
                lowered_plain(codes, zeros, out)
            else:
                plain_linear(codes, zeros, out)
            signed_factors(record, tile_scales, factors, factors + 4 * STRIPE)


@inlined()
def _is_unpacked(a, matrix, way):
    """Are codes unpacked first? Those of few bits are scaled straight from their stored form."""
    return way != SCALED or a[matrix + LOOKED_UP] != 0 or a[matrix + BITS] > 4


@inlined()
def _expand_scaled(a, matrix, at, codes, scales, second, zeros, limits, up, out):
    """Expand tile number `at` to the row's int8, with scales and zeros of its group, or of two groups of half a tile."""
    bits, halves = a[matrix + BITS], halves_of(a[matrix + SCHEME])
    source = a[matrix + CODES] + at * bits * (TILE_ROWS * TILE // 8)
    if _is_unpacked(a, matrix, SCALED):
        source, bits = codes, int64(UNPACKED)
    if halves and bits == 4:
        scaled_blocks_4(source, scales, second, zeros, limits, up, out)
    elif halves and bits == 3:
        scaled_blocks_3(source, scales, second, zeros, limits, up, out)
    elif halves and bits == 2:
        scaled_blocks_2(source, scales, second, zeros, limits, up, out)
    elif halves:
        scaled_blocks_8(source, scales, second, zeros, limits, up, out)
    elif bits == 4:
        scaled_linear_4(source, scales, second, zeros, limits, up, out)
    elif bits == 3:
        scaled_linear_3(source, scales, second, zeros, limits, up, out)
    elif bits == 2:
        scaled_linear_2(source, scales, second, zeros, limits, up, out)
    else:
        scaled_linear_8(source, scales, second, zeros, limits, up, out)


@inlined()
def _expand_in_group(a, matrix, way, scratch, scales, second, zeros, factors, shifts, out):
    """`_expand_tile` for a tile with scales and zeros of its group, or of two groups of half a tile."""
    scheme, codes, lower = a[matrix + SCHEME], scratch + TILE_AT, _lower_of(a, matrix)
    narrow = way == NARROW_CODES and AS_BYTES
    if lower != 0 and not narrow:
        lowered_plain(codes, zeros, out)
    else:
        _plain(codes, zeros, narrow, out)
    if halves_of(scheme):
        block_factors(scales, 0, factors, 0)
    else:
        linear_factors(scales, 0, factors, 0)
    if second != scales:
        linear_factors(second, 0, factors + 4 * STRIPE, 0)
    if stores_zeros(scheme) and (narrow or not PAIRS):
        for i in range(TILE_ROWS):
            i32_at(shifts)[i] = int32(u8_at(zeros)[i]) - int32(lower)


@inlined()
def expand_stripe(a, matrix, depth, way, row, start, span, scratch, number):
    """Expand inputs `start` to `start + span` of the rows from `row` on, as stripe `number` of a block; with GROUPED also their factors and
    shifts."""
    scheme, group, tiles, up = a[matrix + SCHEME], a[matrix + GROUP], depth // TILE, up_of(a, matrix)
    in_groups, narrow, stepped = _has_groups(scheme), way == NARROW_CODES and AS_BYTES, way == STEPPED and AS_BYTES
    tile_nbytes = STEPPED_TILE if stepped else TILE // (NARROW_INPUTS if narrow else INPUTS) * STEP
    factors_nbytes, shifts_nbytes = 4 * STRIPE * (2 if group == 16 else 1), 4 * STRIPE * (2 if scheme == NIBBLE else 1)
    if not stores_zeros(scheme):
        _fill_shifts(a, matrix, scratch)
    for first in range(0, min(STRIPE, stored_rows(a, matrix) - row), TILE_ROWS):
        block = (row + first) // TILE_ROWS
        limits = scratch + LIMITS_AT + 4 * (number * STRIPE + first)
        factors, shifts = scratch + FACTORS_AT + 4 * first, scratch + SHIFTS_AT + 4 * first
        out = scratch + WIDE_AT + 4 * first  # a step holds 4 bytes of every row
        if scheme == CODEBOOK and way == SCALED:
            _expand_scaled_codebook(a, matrix, block * tiles + start // TILE, span // TILE, limits, up, out)
            continue
        scales, second, zeros, left = int64(0), int64(0), int64(0), int64(0)
        for tile in range(start // TILE, (start + span) // TILE):
            if in_groups:
                if left == 0:
                    scales, second, zeros = group_of(a, matrix, depth, block, tile, scratch + ZEROS_AT)
                    left = max(1, group // TILE)
                left -= 1
                if _is_unpacked(a, matrix, way):
                    unpack(a, matrix, tiles, block, tile, scratch + TILE_AT)
                if way == SCALED:
                    _expand_scaled(a, matrix, block * tiles + tile, scratch + TILE_AT, scales, second, zeros, limits, up, out)
                else:
                    _expand_in_group(a, matrix, way, scratch, scales, second, zeros, factors, shifts, out)
            else:
                unpack(a, matrix, tiles, block, tile, scratch + TILE_AT)
                _expand_tile(a, matrix, tiles, way, block, tile, scratch, factors, shifts, out)
            factors += factors_nbytes
            shifts += shifts_nbytes
            out += tile_nbytes
