"""Repacks codes stored separately from their scales (GPTQ, AWQ, compressed-tensors, gpt-oss) into the tile layout of `tiles.py`.

    PAIRS     rows of codes of four bits, neighbours in a byte, the first in its low half
    BYTES     rows of codes of eight bits               SIGNED_BYTES  of int8, whose middle becomes 128
    NIBBLES_DOWN, BYTES_DOWN   words of eight or four inputs of one output, the lowest bits first; outputs lie side by side
    GROUPED   words of eight outputs at one input, in the order of `AWQ_ORDER`

Output is written tile by tile, sixteen rows side by side. Single-threaded: the thread that reads an expert repacks it.
"""

from __future__ import annotations

from ..compile import jit
from ..lazy_numba import inlined
from ..tiles import ROWS
from .repack_gguf import LOW, MIDDLE, clear
from .unaligned import load8, load32, load64, store8, store32, store64

PAIRS, BYTES, SIGNED_BYTES, NIBBLES_DOWN, BYTES_DOWN, GROUPED = range(6)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output whose code each nibble of a word holds, from the lowest
NOT_A_NUMBER = 255  # NaN as an exponent byte


@inlined()
def deinterleave_nibbles(word):
    """Eight adjacent nibbles in each half of a 64-bit word -> the first four in the low nibbles, the last four in the high ones."""
    swap = (word ^ word >> 8) & 0x0000FF000000FF00
    word ^= swap ^ swap << 8
    swap = (word ^ word >> 4) & 0x00F000F000F000F0
    return word ^ swap ^ swap << 4


@inlined()
def exchange_bits(first, second, bits, keep):
    """Swap the upper `bits` of each field of `first` with the lower ones of `second`."""
    swap = (first >> bits ^ second) & keep
    return first ^ swap << bits, second ^ swap


@inlined()
def put_grouped(source, stride, wide, out):
    """Eight inputs of eight outputs, or of sixteen if `wide` -> their words of a vector: a nibble transpose."""
    if wide:
        a, b, c, d = load64(source), load64(source + 4 * stride), load64(source + stride), load64(source + 5 * stride)
        e, f, g, h = load64(source + 2 * stride), load64(source + 6 * stride), load64(source + 3 * stride), load64(source + 7 * stride)
    else:
        a, b, c, d = load32(source), load32(source + 4 * stride), load32(source + stride), load32(source + 5 * stride)
        e, f, g, h = load32(source + 2 * stride), load32(source + 6 * stride), load32(source + 3 * stride), load32(source + 7 * stride)
    a, e = exchange_bits(a, e, 16, 0x0000FFFF0000FFFF)
    b, f = exchange_bits(b, f, 16, 0x0000FFFF0000FFFF)
    c, g = exchange_bits(c, g, 16, 0x0000FFFF0000FFFF)
    d, h = exchange_bits(d, h, 16, 0x0000FFFF0000FFFF)
    a, c = exchange_bits(a, c, 8, 0x00FF00FF00FF00FF)
    b, d = exchange_bits(b, d, 8, 0x00FF00FF00FF00FF)
    e, g = exchange_bits(e, g, 8, 0x00FF00FF00FF00FF)
    f, h = exchange_bits(f, h, 8, 0x00FF00FF00FF00FF)
    a, b = exchange_bits(a, b, 4, LOW)
    c, d = exchange_bits(c, d, 4, LOW)
    e, f = exchange_bits(e, f, 4, LOW)
    g, h = exchange_bits(g, h, 4, LOW)
    for index, word in zip(AWQ_ORDER, (a, b, c, d, e, f, g, h)):
        store32(out + 4 * index, word)
        if wide:
            store32(out + 4 * (ROWS // 2 + index), word >> 32)


@jit("void(int64, int64, int64, int64, int64, int64)")
def repack_codes(kind, source, stride, rows, tiles, codes):
    """Codes of `rows` outputs and 32 * `tiles` inputs at address `source` -> row blocks at `codes`, the last one zero-padded. `stride`:
    bytes from one row to the next; for the last three kinds from words to those of the next inputs, and for NIBBLES_DOWN and GROUPED `rows`
    is a multiple of 8."""
    bits = 4 if kind == PAIRS or kind == NIBBLES_DOWN or kind == GROUPED else 8
    for first in range(0, rows, ROWS):
        count = min(ROWS, rows - first)
        if count < ROWS:
            clear(codes, tiles * 64 * bits)
        for tile in range(tiles):
            if kind == PAIRS:
                for row in range(count):
                    at, out = source + (first + row) * stride + 16 * tile, codes + 4 * row
                    for pair in range(2):
                        word = deinterleave_nibbles(load64(at + 8 * pair))
                        store32(out + 128 * pair, word)
                        store32(out + 128 * pair + 64, word >> 32)
            elif kind == BYTES or kind == SIGNED_BYTES:
                sign_flip = MIDDLE if kind == SIGNED_BYTES else 0
                for row in range(count):
                    at, out = source + (first + row) * stride + 32 * tile, codes + 4 * row
                    for pair in range(4):
                        word = load64(at + 8 * pair) ^ sign_flip
                        store32(out + 128 * pair, word)
                        store32(out + 128 * pair + 64, word >> 32)
            elif kind == NIBBLES_DOWN:
                for vector in range(4):
                    at, out = source + (4 * tile + vector) * stride + 4 * first, codes + 64 * vector
                    for pair in range(count // 2):
                        store64(out + 8 * pair, deinterleave_nibbles(load64(at + 8 * pair)))
            elif kind == BYTES_DOWN:
                for quad in range(8):
                    at, out = source + (8 * tile + quad) * stride + 4 * first, codes + 64 * quad
                    for row in range(count):
                        store32(out + 4 * row, load32(at + 4 * row))
            else:
                for vector in range(4):
                    at = source + (32 * tile + 8 * vector) * stride + first // 2
                    put_grouped(at, stride, count == ROWS, codes + 64 * vector)
            codes += 64 * bits


@jit("int64(int64, int64, int64, int64, int64)")
def repack_exponents(source, stride, rows, groups, scales):
    """Exponents of `rows` rows of `groups` each, rows `stride` bytes apart -> row blocks at `scales`, the last one zero-padded. Returns 1
    if one is NaN, else 0."""
    bad = 0
    for first in range(0, rows, ROWS):
        count = min(ROWS, rows - first)
        if count < ROWS:
            clear(scales, groups * ROWS)
        for group in range(groups):
            for row in range(count):
                scale = load8(source + (first + row) * stride + group)
                bad |= scale == NOT_A_NUMBER
                store8(scales + row, scale)
            scales += ROWS
    return bad
