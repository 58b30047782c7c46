"""Repacks rows of GGUF blocks with codebook (grid) codes into the tile layout of `tiles.py`; the NumPy version in
`quant/imports/gguf_codebooks.py` describes what the types have in common.

A tile is built as four words of eight codes, a byte each, from the eight or twice four that a grid entry holds, with signs alongside; then
their bits are distributed to planes. Bytes of a block of 256:

    Q3_K     32 third bits, 64 of lowest two, 12 of scales, half d      IQ2_XXS  half d, 8 x (4 indices, 4 x 7 signs and a scale)
    IQ4_XS   half d, 8 x 2 upper bits and 4 of scales, 128              IQ1_S    half d, 32 indices, 8 x 16 bits: 4 x 3 more, scale, delta
    IQ3_S    half d, 64 indices, 8 ninth bits, 32 signs, 4 of scales    IQ1_M    32 indices, 16 of 3 more and delta, 4 x 16 bits: 4 x 3 of
    IQ3_XXS  half d, 64 indices, 8 x (4 x 7 signs and a scale)                   scales and a quarter of d
    IQ2_S    half d, 32 indices, 32 signs, 8 of 2 more, 8 of scales     TQ1_0    48 of five thirds, 4 of four, half d
    IQ2_XS   half d, 32 x (9 bits of index and 7 signs), 8 of scales    TQ2_0    64 bytes, half d
"""

from __future__ import annotations

from ..compile import jit
from ..lazy_numba import inlined
from ..tiles import ROWS, SIGNED_HEADER_NBYTES, SIGNED_NBYTES
from .repack_gguf import EXPONENT, LOW, clear, put_nibbles
from .unaligned import load8, load16, load32, load64, store8, store16, store32

KINDS = {"Q3_K": 0, "IQ4_XS": 1, "IQ3_S": 2, "IQ3_XXS": 3, "IQ2_S": 4, "IQ2_XS": 5, "IQ2_XXS": 6, "IQ1_S": 7, "IQ1_M": 8, "TQ1_0": 9,
         "TQ2_0": 10}  # fmt: skip
Q3_K, IQ4_XS, IQ3_S, IQ3_XXS, IQ2_S, IQ2_XS, IQ2_XXS, IQ1_S, IQ1_M, TQ1_0, TQ2_0 = KINDS.values()
ONES, TWOS, FOURS = 0x0101010101010101, 0x0303030303030303, 0x0404040404040404
SPREAD = 0x40810204081  # moves each of seven bits to the lowest bit of its own byte


@inlined()
def signs_of(byte):
    """Eight bits, each to the lowest bit of its byte."""
    return (byte & 127) * SPREAD & ONES | (byte >> 7) << 56


@inlined()
def even_signs_of(seven):
    """The same from seven bits; the eighth makes the parity even."""
    odd = seven ^ seven >> 4
    odd ^= odd >> 2
    odd ^= odd >> 1
    return (seven * SPREAD & ONES) | (odd & 1) << 56


@inlined()
def two_of(grid, first, second):
    """Eight codes from two entries of a grid of four."""
    return load32(grid + 4 * first) | load32(grid + 4 * second) << 32


@inlined()
def thirds_of(at, power):
    """Eight base-3 digits of packed numbers: multiplying by the `power`th power of three moves the digits to the top."""
    word = 0
    for i in range(8):
        word |= ((load8(at + i) * power & 255) * 3 >> 8) << 8 * i
    return word


@inlined()
def codes_of(kind, at, grid, tile, i):
    """Codes 8i to 8i + 8 of a tile of the block at `at`."""
    group = 4 * tile + i  # of 8 inputs in the block
    if kind == IQ4_XS:
        return load64(at + 8 + 16 * tile + 8 * (i & 1)) >> 4 * (i >> 1) & LOW
    if kind == Q3_K:
        low = load64(at + 32 + 32 * (tile >> 2) + 8 * i) >> 2 * (tile & 3) & TWOS
        return low | (load64(at + 8 * i) >> tile & ONES) << 2
    if kind == IQ3_S:
        high = load8(at + 66 + tile) >> 2 * i
        word = two_of(grid, load8(at + 2 + 2 * group) | (high & 1) << 8, load8(at + 3 + 2 * group) | (high & 2) << 7)
        return word | signs_of(load8(at + 74 + group)) << 3
    if kind == IQ3_XXS:
        word = two_of(grid, load8(at + 2 + 2 * group), load8(at + 3 + 2 * group))
        return word | even_signs_of(load32(at + 66 + 4 * tile) >> 7 * i & 127) << 3
    if kind == IQ2_S:
        index = load8(at + 2 + group) | (load8(at + 66 + tile) >> 2 * i & 3) << 8
        return load64(grid + 8 * index) | signs_of(load8(at + 34 + group)) << 2
    if kind == IQ2_XS:
        word = load16(at + 2 + 2 * group)
        return load64(grid + 8 * (word & 511)) | even_signs_of(word >> 9) << 2
    if kind == IQ2_XXS:
        index = load8(at + 2 + 8 * tile + i)
        return load64(grid + 8 * index) | even_signs_of(load32(at + 6 + 8 * tile) >> 7 * i & 127) << 2
    if kind == IQ1_S:
        word = load16(at + 34 + 2 * tile)
        return load64(grid + 8 * (load8(at + 2 + group) | (word >> 3 * i & 7) << 8)) | (word >> 15) * FOURS
    if kind == IQ1_M:
        high = load8(at + 32 + (group >> 1)) >> 4 * (group & 1)
        return load64(grid + 8 * (load8(at + group) | (high & 7) << 8)) | (high >> 3 & 1) * FOURS
    if kind == TQ2_0:
        return load64(at + 32 * (tile >> 2) + 8 * i) >> 2 * (tile & 3) & TWOS
    power = 1
    if group < 20:  # 32 bytes of five digits, the first digits of all of them first
        for _ in range(tile):
            power *= 3
        return thirds_of(at + 8 * i, power)
    if group < 30:  # 16 of them
        for _ in range((group - 20) >> 1):
            power *= 3
        return thirds_of(at + 32 + 8 * (group & 1), power)
    word = 0
    for half in range(2):  # 4 of four
        power = 9 if group == 31 else 1
        for k in range(4):
            word |= ((load8(at + 48 + k) * power * (3 if half else 1) & 255) * 3 >> 8) << 8 * (4 * half + k)
    return word


@inlined()
def scale_of(kind, at, group):
    """The scale code of a group of 16, besides d, in the low eight bits."""
    tile = group >> 1
    if kind == IQ4_XS:
        return (load8(at + 4 + (tile >> 1)) >> 4 * (tile & 1) & 15 | (load16(at + 2) >> 2 * tile & 3) << 4) - 32
    if kind == Q3_K:
        low = load8(at + 96 + (group & 7)) >> 4 * (group >> 3) & 15
        return (low | (load8(at + 104 + (group & 3)) >> 2 * (group >> 2) & 3) << 4) - 32
    if kind == IQ3_S:
        code = load8(at + 106 + (tile >> 1)) >> 4 * (tile & 1) & 15
    elif kind == IQ3_XXS:
        code = load32(at + 66 + 4 * tile) >> 28
    elif kind == IQ2_S:
        code = load8(at + 74 + tile) >> 4 * (group & 1) & 15
    elif kind == IQ2_XS:
        code = load8(at + 66 + tile) >> 4 * (group & 1) & 15
    elif kind == IQ2_XXS:
        code = load32(at + 6 + 8 * tile) >> 28
    elif kind == IQ1_S:
        code = load16(at + 34 + 2 * tile) >> 12 & 7
    elif kind == IQ1_M:
        code = load16(at + 48 + 2 * (group >> 2)) >> 3 * (group & 3) & 7
    else:
        code = 0
    return 2 * code + 1


@inlined()
def half_of(kind, at):
    """The bits of d."""
    if kind == IQ1_M:
        return load16(at + 48) >> 12 | load16(at + 50) >> 8 & 0xF0 | load16(at + 52) >> 4 & 0xF00 | load16(at + 54) & 0xF000
    return load16(at + (108 if kind == Q3_K else 52 if kind == TQ1_0 else 64 if kind == TQ2_0 else 0))


@inlined()
def put_codes(bits, a, b, c, d, out):
    """32 codes in four words -> a row's tile of four or three bits."""
    if bits == 4:
        put_nibbles(a, out)
        put_nibbles(b, out + 64)
        put_nibbles(c, out + 128)
        put_nibbles(d, out + 192)
        return
    first, second = a & TWOS | (b & TWOS) << 4, c & TWOS | (d & TWOS) << 4
    store32(out, first | first >> 30)
    store32(out + 64, second | second >> 30)
    third = a >> 2 & ONES | (b >> 2 & ONES) << 2 | (c >> 2 & ONES) << 4 | (d >> 2 & ONES) << 6
    store32(out + 128, third | third >> 31)


@jit("int64(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def repack_codebook_blocks(kind, bits, block_nbytes, grid, source, rows, supers, codes, scales):
    """As `repack_gguf.repack_super_blocks`; `grid`: address of the grid entries, words of eight or four codes."""
    bad, tile_nbytes = 0, 64 * bits
    for first in range(0, rows, ROWS):
        count = min(ROWS, rows - first)
        if count < ROWS:
            clear(codes, supers * 8 * tile_nbytes)
            clear(scales, supers * SIGNED_NBYTES)
        for block in range(supers):
            for row in range(count):
                at, out = source + (row * supers + block) * block_nbytes, codes + 4 * row
                for tile in range(8):
                    put_codes(bits, codes_of(kind, at, grid, tile, 0), codes_of(kind, at, grid, tile, 1), codes_of(kind, at, grid, tile, 2),
                              codes_of(kind, at, grid, tile, 3), out + tile_nbytes * tile)
                for group in range(16):
                    store8(scales + SIGNED_HEADER_NBYTES + ROWS * group + row, scale_of(kind, at, group))
                half = half_of(kind, at)
                bad |= half & EXPONENT == EXPONENT
                store16(scales + 2 * row, half)
            codes += 8 * tile_nbytes
            scales += SIGNED_NBYTES
        source += ROWS * supers * block_nbytes
    return bad
