"""Activations for `packed.py`: each token as int8 with a scale per 32 inputs, and the records in which the loops read them."""

from __future__ import annotations

from numpy import float32, int64

from ..lazy_numba import inlined
from ..tiles import SUPER_BLOCK, TILE
from .arithmetic import least_of
from .int8_ir import seed_of
from .intrinsics import f32_at, i8_at, i32_at
from .packed_avx2 import RECORD as RECORD_IN_TURN
from .packed_avx2 import USES_AVX2, make_column
from .packed_avx512 import RECORD as RECORD_IN_PAIRS
from .packed_avx512 import SCALE_AT, SEEDS_AT, USES_AVX512
from .packed_loops import COLUMNS_AT_ONCE
from .packed_loops import RECORD as RECORD_ABREAST
from .packed_matrix import CODEBOOK_TILE, HALF_TILE, HALF_TILE_SINGLE
from .packed_vectors import quantize_tiles

COLUMNS_IN_SEQUENCE = USES_AVX2 or USES_AVX512  # the columns of a tile are processed one after the other, not COLUMNS_AT_ONCE
RECORD = RECORD_IN_TURN if USES_AVX2 else RECORD_IN_PAIRS if USES_AVX512 else RECORD_ABREAST
PAD = SUPER_BLOCK  # inputs of a column are zero-padded to whole groups of the longest kind


def column_nbytes(depth: int) -> int:
    """Bytes of one quantized column: int8 values, float32 scales per 32, int32 sums and seeds per 16, the normed float32 values."""
    padded = -(-depth // PAD) * PAD
    return padded + padded // 32 * 4 + padded // 16 * 8 + 4 * padded


@inlined()
def column_parts(depth):
    """Offsets of the parts of a quantized column after its int8 values: scales, seeds, totals, the normed values; then its size in bytes.
    """
    padded = (depth + PAD - 1) // PAD * PAD
    scales = padded
    seeds = scales + padded // 32 * 4
    totals = seeds + padded // 16 * 4
    normed = totals + padded // 16 * 4
    return scales, seeds, totals, normed, normed + 4 * padded


@inlined()
def quantize_column(x, depth, codes, scales, totals, norm=0):
    """float32 [depth], padded to whole PADs -> int8 [padded], float32 per 32 and int32 totals per 16. `norm`: as for `least_of`."""
    padded = (depth + PAD - 1) // PAD * PAD
    values = f32_at(x)
    for i in range(depth, padded):
        values[i] = float32(0.0)
    quantize_tiles(x, padded // TILE, codes, scales, totals, least_of(x, padded, norm))


@inlined()
def quantize_rest(x, depth, codes, scales, totals, distance):
    """A second column, `distance` bytes after the first in all parts: the rounding error of `quantize_column`, quantized in turn."""
    value, code, scale, remainder = f32_at(x), i8_at(codes), f32_at(scales), f32_at(x + distance)
    for i in range(depth):
        remainder[i] = value[i] - scale[i // TILE] * float32(code[i])
    quantize_column(x + distance, depth, codes + distance, scales + distance, totals + distance)


@inlined()
def make_seeds(way, totals, seeds, tiles):
    """Initial sums for the codebook loops; for the other formats the totals, of a tile or its halves."""
    total, seed = i32_at(totals), i32_at(seeds)
    for tile in range(tiles):
        if way == CODEBOOK_TILE:
            seed[2 * tile], seed[2 * tile + 1] = seed_of(total[2 * tile]), seed_of(total[2 * tile + 1])
        elif way == HALF_TILE or way == HALF_TILE_SINGLE:
            seed[2 * tile], seed[2 * tile + 1] = total[2 * tile], total[2 * tile + 1]
        else:
            seed[2 * tile] = total[2 * tile] + total[2 * tile + 1]


@inlined()
def columns_at_once(left):
    """How many of the `left` columns are multiplied together: all, or COLUMNS_AT_ONCE (with one of them possibly a duplicate), or one."""
    if COLUMNS_IN_SEQUENCE:
        return int64(left)
    return int64(COLUMNS_AT_ONCE) if left + 1 >= COLUMNS_AT_ONCE else int64(1)


@inlined()
def num_column_groups(tokens):
    """How often `abreast` applies for this many columns."""
    if COLUMNS_IN_SEQUENCE:
        return int64(1)
    left = tokens % COLUMNS_AT_ONCE
    return tokens // COLUMNS_AT_ONCE + (1 if left + 1 >= COLUMNS_AT_ONCE else left)


@inlined()
def _pair_records(tokens, tiles, codes, scales, seeds, x_nbytes, records):
    """`make_records` for pairs of row blocks."""
    for t in range(tokens):
        at = t * x_nbytes
        code, scale, seed = i32_at(codes + at), i32_at(scales + at), i32_at(seeds + at)
        for tile in range(tiles):
            record_words = i32_at(records + (tile * tokens + t) * RECORD)
            for i in range(8):
                record_words[i] = code[8 * tile + i]
            record_words[SCALE_AT // 4] = scale[tile]
            record_words[SEEDS_AT // 4], record_words[SEEDS_AT // 4 + 1] = seed[2 * tile], seed[2 * tile + 1]


@inlined()
def make_records(tokens, tiles, codes, scales, seeds, x_nbytes, records):
    """Columns, `x_nbytes` apart in all three parts, as read by `columns`. Missing columns up to COLUMNS_AT_ONCE repeat the last. Columns
    multiplied in sequence have their own seeds, for every format."""
    if USES_AVX2:
        for t in range(tokens):
            make_column(codes + t * x_nbytes, scales + t * x_nbytes, tiles, tokens * RECORD, records + t * RECORD)
        return
    if USES_AVX512:
        _pair_records(tokens, tiles, codes, scales, seeds, x_nbytes, records)
        return
    t = int64(0)
    while t < tokens:
        count = columns_at_once(tokens - t)
        for c in range(count):
            at = min(t + c, tokens - 1) * x_nbytes
            code, scale, seed = i32_at(codes + at), i32_at(scales + at), i32_at(seeds + at)  # records are aligned to words
            for tile in range(tiles):
                record = records + (t * tiles + tile * count) * RECORD
                record_words, seeded = i32_at(record + 32 * c), i32_at(record + 36 * count + 8 * c)
                for i in range(8):
                    record_words[i] = code[8 * tile + i]
                i32_at(record + 32 * count + 4 * c)[0] = scale[tile]
                seeded[0], seeded[1] = seed[2 * tile], seed[2 * tile + 1]
        t += count
