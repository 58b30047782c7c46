"""Repacks rows of GGUF blocks into the tile layout of `tiles.py`: codes and scales are moved, nothing is computed.

    Q8_0   half d, 32 int8                                  Q4_K  halves d and e, 12 bytes of scales, 4 runs of 32 bytes
    Q4_0   half d, 16 bytes                                 Q5_K  as Q4_K, but 32 bytes of fifth bits before the runs
    Q5_0   half d, 32 fifth bits, 16 bytes                  Q6_K  2 runs of 64 bytes, 2 of 32 bytes of upper bits, 16 int8, half d
    IQ4_NL as Q4_0, of levels of eight bits
    Q4_1, Q5_1  as Q4_0 and Q5_0, a half m behind d         NVFP4 4 bytes of scales, 4 runs of 8 bytes
    MXFP4  exponent, 16 bytes                               Q2_K  16 bytes of scales and minima, 2 runs of 32 bytes, halves d and e

Bytes hold the first half of their codes in the low nibbles and the second half in the high ones, per block or run. A row becomes words of
four codes whose bits change places, so eight bytes are processed at once; tile by tile with sixteen rows side by side, so that writes stay
in the L1 cache. Single-threaded: the thread that reads an expert repacks it.
"""

from __future__ import annotations

from ..compile import jit
from ..lazy_numba import inlined
from ..tiles import NIBBLE_NBYTES, ROWS, SIGNED_HEADER_NBYTES, SIGNED_NBYTES, SUPER_HEADER_NBYTES, SUPER_NBYTES, SUPER_TILE_NBYTES
from .unaligned import load8, load16, load32, load64, store8, store16, store32

KINDS = {"Q8_0": 0, "Q4_0": 1, "Q5_0": 2, "MXFP4": 3, "Q4_K": 4, "Q5_K": 5, "Q6_K": 6, "Q2_K": 7, "IQ4_NL": 8, "Q4_1": 9, "Q5_1": 10}
Q8_0, Q4_0, Q5_0, MXFP4, Q4_K, Q5_K, Q6_K, Q2_K, IQ4_NL, Q4_1, Q5_1 = KINDS.values()
LOW = 0x0F0F0F0F0F0F0F0F
MIDDLE = -0x7F7F7F7F7F7F7F80  # 0x80 in each byte: offset from int8 to codes
NON_LINEAR = (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241)  # IQ4_NL's levels plus 128
EXPONENT = 0x7C00  # of a half: all ones for infinity and NaN


@inlined()
def clear(begin, nbytes):
    """Zeros for missing rows of a row block; `nbytes` is a multiple of 16."""
    for at in range(begin, begin + nbytes, 4):
        store32(at, 0)


@inlined()
def put_nibbles(quads, out):
    """The codes of two quads, a byte each, as a row's word in a 4-bit vector."""
    store32(out, quads | quads >> 28)


@inlined()
def put_halves(source, out):
    """16 bytes -> a row's 4-bit tile."""
    first, second = load64(source), load64(source + 8)
    put_nibbles(first & LOW, out)
    put_nibbles(second & LOW, out + 64)
    put_nibbles(first >> 4 & LOW, out + 128)
    put_nibbles(second >> 4 & LOW, out + 192)


@inlined()
def put_levels(source, out):
    """16 bytes of IQ4_NL -> a row's 8-bit tile."""
    for quad in range(8):
        word, shift = 0, 4 * (quad >> 2)
        for i in range(4):
            word |= NON_LINEAR[load8(source + 4 * (quad & 3) + i) >> shift & 15] << 8 * i
        store32(out + 64 * quad, word)


@inlined()
def put_fifth_bits(bits, out):
    """Bit k of 32 belongs to code k -> a row's word of the bit plane."""
    word = 0
    for quad in range(8):
        word |= ((bits >> 4 * quad & 15) * 0x00204081 & 0x01010101) << quad  # moves each bit of a nibble to the lowest bit of its byte
    store32(out, word)


@inlined()
def _codes_at(kind):
    """Offset of the codes in a block: after its scale, its minimum, its fifth bits."""
    if kind == MXFP4:
        return 1
    if kind == Q5_1:
        return 8
    if kind == Q5_0:
        return 6
    return 4 if kind == Q4_1 else 2


@inlined()
def _put_codes(kind, at, step, count, out):
    """The codes of a tile of `count` rows, from address `at` on and `step` apart, as words of four at `out`."""
    if kind == Q8_0:
        for row in range(count):
            for pair in range(4):
                word = load64(at + row * step + 8 * pair) ^ MIDDLE
                store32(out + 4 * row + 128 * pair, word)
                store32(out + 4 * row + 128 * pair + 64, word >> 32)
    elif kind == IQ4_NL:
        for row in range(count):
            put_levels(at + row * step, out + 4 * row)
    elif kind == Q5_0 or kind == Q5_1:
        for row in range(count):
            put_halves(at + row * step, out + 4 * row)
            put_fifth_bits(load32(at + row * step - 4), out + 4 * row + 256)
    else:
        for row in range(count):
            put_halves(at + row * step, out + 4 * row)


@inlined()
def _put_scales(kind, at, step, count, out):
    """Their scales, from address `at` on, followed by the minima if a `kind` has them; returns 1 if one is NaN or infinite, else 0."""
    bad = 0
    if kind == MXFP4:
        for row in range(count):
            scale = load8(at + row * step)
            bad |= scale == 255
            store8(out + row, scale)
        return bad
    for row in range(count):
        scale = load16(at + row * step)
        bad |= scale & EXPONENT == EXPONENT
        store16(out + 2 * row, scale)
    if kind == Q4_1 or kind == Q5_1:
        for row in range(count):
            minimum = load16(at + row * step + 2)
            bad |= minimum & EXPONENT == EXPONENT
            store16(out + 2 * (ROWS + row), minimum)
    return bad


@jit("int64(int64, int64, int64, int64, int64, int64)")
def repack_blocks_of_32(kind, source, rows, tiles, codes, scales):
    """`rows` rows of `tiles` blocks each at address `source` -> row blocks at `codes` and `scales`, the last one zero-padded. Returns 1 if
    a scale is NaN or infinite, else 0."""
    bits = 8 if kind == Q8_0 or kind == IQ4_NL else 5 if kind == Q5_0 or kind == Q5_1 else 4
    codes_at = _codes_at(kind)
    block_nbytes = codes_at + (32 if kind == Q8_0 else 16)
    scale_nbytes = 1 if kind == MXFP4 else 4 if kind == Q4_1 or kind == Q5_1 else 2
    bad = 0
    for first in range(0, rows, ROWS):
        count = min(ROWS, rows - first)
        if count < ROWS:
            clear(codes, tiles * 64 * bits)
            clear(scales, tiles * ROWS * scale_nbytes)
        for tile in range(tiles):
            at, step = source + tile * block_nbytes, tiles * block_nbytes
            _put_codes(kind, at + codes_at, step, count, codes)
            bad |= _put_scales(kind, at, step, count, scales)
            codes += 64 * bits
            scales += ROWS * scale_nbytes
        source += ROWS * tiles * block_nbytes
    return bad


@jit("void(int64, int64, int64, int64, int64)")
def repack_nvfp4_blocks(source, rows, blocks, codes, scales):
    """`rows` rows of `blocks` NVFP4 blocks each at address `source`, two tiles per block -> as `repack_blocks_of_32`. A scale's eighth bit
    is ignored, and NaN becomes zero."""
    for first in range(0, rows, ROWS):
        count = min(ROWS, rows - first)
        if count < ROWS:
            clear(codes, blocks * 512)
            clear(scales, blocks * 4 * ROWS)
        for block in range(blocks):
            for row in range(count):
                at, out = source + ((first + row) * blocks + block) * 36, codes + 4 * row
                for group in range(4):
                    word, scale = load64(at + 4 + 8 * group), load8(at + group) & 127
                    put_nibbles(word & LOW, out + 128 * group)
                    put_nibbles(word >> 4 & LOW, out + 128 * group + 64)
                    store8(scales + ROWS * group + row, 0 if scale == 127 else scale)
            codes += 512
            scales += 4 * ROWS


@inlined()
def put_runs(source, step, out):
    """4 runs of 32 bytes, each the low nibbles of a tile and the high ones of the next -> a row of eight tiles, `step` bytes apart."""
    for run in range(4):
        for pair in range(4):
            both, at = load64(source + 32 * run + 8 * pair), out + 2 * step * run + 64 * pair
            put_nibbles(both & LOW, at)
            put_nibbles(both >> 4 & LOW, at + step)


@inlined()
def put_upper_bit(source, out):
    """Bit t of 32 bytes is that of tile t -> a row of eight planes of one bit, 320 bytes apart."""
    a, b, c, d = load64(source), load64(source + 8), load64(source + 16), load64(source + 24)
    for tile in range(8):
        even = a >> tile & 0x0101010101010101
        even |= (b >> tile & 0x0101010101010101) << 2
        even |= (c >> tile & 0x0101010101010101) << 4
        even |= (d >> tile & 0x0101010101010101) << 6
        store32(out + 320 * tile, even | even >> 31)


@inlined()
def put_scales(packed, row, out):
    """12 bytes: eight scales and eight minima of six bits -> a row of eight tiles of a record."""
    low, mid, high = load32(packed), load32(packed + 4), load32(packed + 8)
    scales = low & 0x3F3F3F3F | (high & 0x0F0F0F0F | low >> 2 & 0x30303030) << 32
    minima = mid & 0x3F3F3F3F | (high >> 4 & 0x0F0F0F0F | mid >> 2 & 0x30303030) << 32
    for tile in range(8):
        scale, minimum, at = scales >> 8 * tile & 63, minima >> 8 * tile & 63, out + SUPER_TILE_NBYTES * tile
        store8(at + row, scale | minimum << 6)
        if row < ROWS // 2:
            store8(at + ROWS + row, minimum >> 2)
        else:
            store8(at + ROWS // 2 + row, load8(at + ROWS // 2 + row) | minimum >> 2 << 4)


@inlined()
def put_six_bits(source, out):
    """A row of eight tiles of six bits: of each half 64 bytes of low nibbles and 32 of upper bits."""
    for half in range(2):
        for tile in range(4):
            quads, at = source + 64 * half + 32 * (tile & 1), out + 384 * (4 * half + tile)
            for pair in range(4):
                put_nibbles(load64(quads + 8 * pair) >> 4 * (tile >> 1) & LOW, at + 64 * pair)
            upper = source + 128 + 32 * half
            for vector in range(2):
                even = load64(upper + 16 * vector) >> 2 * tile & 0x0303030303030303
                even |= (load64(upper + 16 * vector + 8) >> 2 * tile & 0x0303030303030303) << 4
                store32(at + 256 + 64 * vector, even | even >> 30)


@inlined()
def put_two_bits(source, out):
    """2 runs of 32 bytes, each the lowest two bits of a tile, then those of the next -> a row of eight tiles of two bits."""
    for tile in range(8):
        for vector in range(2):
            quads = source + 32 * (tile >> 2) + 16 * vector
            even = load64(quads) >> 2 * (tile & 3) & 0x0303030303030303
            even |= (load64(quads + 8) >> 2 * (tile & 3) & 0x0303030303030303) << 4
            store32(out + 128 * tile + 64 * vector, even | even >> 30)


@jit("int64(int64, int64, int64, int64, int64, int64)")
def repack_super_blocks(kind, source, rows, supers, codes, scales):
    """As `repack_blocks_of_32`, rows of `supers` super-blocks each -> row blocks at `codes` and records at `scales`."""
    block_nbytes = 210 if kind == Q6_K else 176 if kind == Q5_K else 84 if kind == Q2_K else 144
    tile_nbytes = 384 if kind == Q6_K else 320 if kind == Q5_K else 128 if kind == Q2_K else 256
    record_nbytes = SIGNED_NBYTES if kind == Q6_K else NIBBLE_NBYTES if kind == Q2_K else SUPER_NBYTES
    bad = 0
    for first in range(0, rows, ROWS):
        count = min(ROWS, rows - first)
        if count < ROWS:
            clear(codes, supers * 8 * tile_nbytes)
            clear(scales, supers * record_nbytes)
        for block in range(supers):
            for row in range(count):
                at, out = source + (row * supers + block) * block_nbytes, codes + 4 * row
                if kind == Q6_K:
                    put_six_bits(at, out)
                    for group in range(16):
                        store8(scales + SIGNED_HEADER_NBYTES + ROWS * group + row, load8(at + 192 + group))
                    at += 208
                else:
                    if kind == Q2_K:
                        put_two_bits(at + 16, out)
                        for group in range(16):
                            store8(scales + SUPER_HEADER_NBYTES + ROWS * group + row, load8(at + group))
                        at += 80
                    elif kind == Q5_K:
                        put_runs(at + 48, 320, out)
                        put_upper_bit(at + 16, out + 256)
                        put_scales(at + 4, row, scales + SUPER_HEADER_NBYTES)
                    else:
                        put_runs(at + 16, 256, out)
                        put_scales(at + 4, row, scales + SUPER_HEADER_NBYTES)
                    half = load16(at + 2)
                    bad |= half & EXPONENT == EXPONENT
                    store16(scales + 2 * ROWS + 2 * row, half)
                half = load16(at)
                bad |= half & EXPONENT == EXPONENT
                store16(scales + 2 * row, half)
            codes += 8 * tile_nbytes
            scales += record_nbytes
        source += ROWS * supers * block_nbytes
    return bad
