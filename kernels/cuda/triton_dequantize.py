"""Dequantization in registers for `triton_matmul.py`: loads words of stored codes and converts them to values.

A thread holds rows of a tile; a word contains four inputs of a row. Codes are converted by byte permutation: looking up a codebook table,
and then building the float whose last byte is the code (2^23 plus the code), take one GPU instruction each. Where programs are interpreted,
ordinary operations replace the inline assembly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import tiles

CODEBOOK, _AFFINE, _TERNARY = tl.constexpr(tiles.CODEBOOK), tl.constexpr(tiles.AFFINE), tl.constexpr(tiles.TERNARY)
_BLOCK, MXFP, _OFFSET = tl.constexpr(tiles.BLOCK), tl.constexpr(tiles.MXFP), tl.constexpr(tiles.OFFSET)
_FLOATS, NVFP, MINIMUM = tl.constexpr(tiles.FLOAT), tl.constexpr(tiles.NVFP), tl.constexpr(tiles.MINIMUM)
SUPER, _SIGNED, _TABLE = tl.constexpr(tiles.SUPER), tl.constexpr(tiles.SIGNED), tl.constexpr(tiles.TABLE)
NIBBLE, _NIBBLE_NBYTES = tl.constexpr(tiles.NIBBLE), tl.constexpr(tiles.NIBBLE_NBYTES)
ROWS, TILE, _SUPER_BLOCK = tl.constexpr(tiles.ROWS), tl.constexpr(tiles.TILE), tl.constexpr(tiles.SUPER_BLOCK)
LEVELS = tl.constexpr(tiles.LEVELS_NBYTES)
_SUPER_HEAD, _SUPER_TILE = tl.constexpr(tiles.SUPER_HEADER_NBYTES), tl.constexpr(tiles.SUPER_TILE_NBYTES)
_SUPER_NBYTES = tl.constexpr(tiles.SUPER_NBYTES)
_SIGNED_HEAD, _SIGNED_NBYTES = tl.constexpr(tiles.SIGNED_HEADER_NBYTES), tl.constexpr(tiles.SIGNED_NBYTES)
_EVERY_BYTE = tl.constexpr(0x01010101)  # one in every byte
SIGNS = tl.constexpr(-0x7F7F7F80)  # the highest bit of every byte
_FLOAT, _NOTHING = tl.constexpr(0x4B000000), tl.constexpr(8388608.0)  # a float whose lowest byte counts ones, and its value at zero


@triton.jit
def _byte(at):
    return tl.load(at).to(tl.int32)


@triton.jit
def _half(at):
    """The bits of the half-precision float at an address."""
    return tl.load(at.to(tl.pointer_type(tl.int16)))


@triton.jit
def _float_of_half(bits):
    return bits.to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def word_at(at):
    """The 32 bits at an aligned address."""
    return tl.load(at.to(tl.pointer_type(tl.int32)))


@triton.jit
def row_scales_of(scales, row, SCHEME: tl.constexpr):
    """Row scales as float32, from bfloat16 or float32."""
    if SCHEME == _FLOATS or SCHEME == NVFP:
        scales_f32 = tl.load(scales.to(tl.pointer_type(tl.float32)) + row)
    else:
        scales_f32 = (tl.load(scales.to(tl.pointer_type(tl.int16)) + row).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return scales_f32


@triton.jit
def block_rows(positive):
    """Rows of a block, [8, 1, 2]. That they are consecutive is hidden behind a zero: otherwise Triton has each thread load the scales of
    two and moves everything else through shared memory."""
    return (tl.arange(0, 8) ^ positive >> 31)[:, None, None] + (tl.arange(0, 2) * 8)[None, None, :]


@triton.jit
def read_tiles(blob, block, depth, tile, row, scales, zeros, BITS: tl.constexpr, GROUP: tl.constexpr, SCHEME: tl.constexpr):
    """Loads from rows [8, 1, 2] of tiles [1, V, 1]: one word from each vector of codes (missing ones repeat the first), and up to four
    numbers that define the scaling; int32 or int16 [8, V, 2] each."""
    at = block * (depth // TILE) + tile
    codes = blob + at * (ROWS * TILE // 8 * BITS) + row * 4
    a = word_at(codes)
    b = word_at(codes + 64) if BITS > 1 else a
    c = word_at(codes + 128) if BITS > 2 else a
    d = word_at(codes + 192) if BITS > 3 else a
    e = word_at(codes + 256) if BITS > 4 else a
    f = word_at(codes + 320) if BITS > 5 else a
    g = word_at(codes + 384) if BITS > 6 else a
    h = word_at(codes + 448) if BITS > 7 else a
    if SCHEME == SUPER:
        record = blob + scales + (block * (depth // _SUPER_BLOCK) + tile // 8) * _SUPER_NBYTES
        tile_record = record + _SUPER_HEAD + tile % 8 * _SUPER_TILE
        p, q = _byte(tile_record + row), _byte(tile_record + ROWS + row % 8)
        r, s = _half(record + 2 * row), _half(record + 2 * ROWS + 2 * row)
    elif SCHEME == NIBBLE:
        record = blob + scales + (block * (depth // _SUPER_BLOCK) + tile // 8) * _NIBBLE_NBYTES
        tile_record = record + _SUPER_HEAD + tile % 8 * (2 * ROWS) + row
        p, q, r, s = _byte(tile_record), _byte(tile_record + ROWS), _half(record + 2 * row), _half(record + 2 * ROWS + 2 * row)
    elif SCHEME == _SIGNED or SCHEME == _TABLE:
        record = blob + scales + (block * (depth // _SUPER_BLOCK) + tile // 8) * _SIGNED_NBYTES
        tile_record = record + _SIGNED_HEAD + tile % 8 * (2 * ROWS) + row
        p, q, r = _byte(tile_record), _byte(tile_record + ROWS), _half(record + 2 * row)
        s = r
    elif SCHEME == CODEBOOK:
        p = _byte(blob + scales + at * ROWS + row)
        q, r, s = p, p, p
    elif SCHEME == MINIMUM:
        pair = blob + scales + (block * (depth // GROUP) + tile * TILE // GROUP) * (4 * ROWS) + 2 * row
        p, q = _half(pair), _half(pair + 2 * ROWS)
        r, s = p, p
    elif SCHEME == _FLOATS:  # one scale for all rows of a block
        p = word_at(blob + scales + 4 * (block * (depth // GROUP) + tile * TILE // GROUP) + 0 * row)
        q, r, s = p, p, p
    else:
        group = (block * (depth // GROUP) + tile * TILE // GROUP) * ROWS + row
        p = _half(blob + scales + 2 * group) if SCHEME == _BLOCK or SCHEME == _OFFSET else _byte(blob + scales + group)
        q = _byte(blob + zeros + group) if SCHEME == _AFFINE or SCHEME == _OFFSET else p
        q = _byte(blob + scales + group + ROWS) if GROUP == 16 else q
        r, s = p, p
    return a, b, c, d, e, f, g, h, p, q, r, s


@triton.jit
def _looked_up(pairs, table, at, ASM: tl.constexpr):
    """Table lookup of the low and of the high nibble of every byte of `pairs`. The sixteen table bytes are `at`, and given as words in
    `table`."""
    if ASM:
        low, high = tl.inline_asm_elementwise("""{
            .reg .b32 a, b, c, d, m, n, s, t;
            and.b32 s, $2, 0x77777777;
            shr.u32 t, s, 16;
            and.b32 m, $2, 0x88888888;
            shr.u32 m, m, 1;
            or.b32 m, m, 0x32103210;
            shr.u32 n, m, 16;
            prmt.b32 a, $3, $4, s;
            prmt.b32 b, $5, $6, s;
            prmt.b32 c, $3, $4, t;
            prmt.b32 d, $5, $6, t;
            prmt.b32 a, a, b, m;
            prmt.b32 c, c, d, n;
            prmt.b32 $0, a, c, 0x6420;
            prmt.b32 $1, a, c, 0x7531;
        }""", "=r,=r,r,r,r,r,r", [pairs, table[0], table[1], table[2], table[3]], dtype=(tl.int32, tl.int32), is_pure=True, pack=1)
    else:
        low, high = tl.zeros_like(pairs), tl.zeros_like(pairs)
        for byte in tl.static_range(4):
            low |= _byte(at + (pairs >> 8 * byte & 15)) << 8 * byte
            high |= _byte(at + (pairs >> 8 * byte + 4 & 15)) << 8 * byte
    return low, high


@triton.jit
def table_words(at, SCHEME: tl.constexpr, ASM: tl.constexpr):
    """The words of a format's tables `at`, for `_looked_up`: four of levels, offset by 128, and four of steps."""
    a, b, c, d, e, f, g, h = 0, 0, 0, 0, 0, 0, 0, 0
    if ASM and (SCHEME == CODEBOOK or SCHEME == MXFP or SCHEME == _TABLE or SCHEME == NVFP):
        a, b, c, d = word_at(at) ^ SIGNS, word_at(at + 4) ^ SIGNS, word_at(at + 8) ^ SIGNS, word_at(at + 12) ^ SIGNS
    if ASM and SCHEME == CODEBOOK:
        steps = at + LEVELS
        e, f, g, h = word_at(steps), word_at(steps + 4), word_at(steps + 8), word_at(steps + 12)
    return a, b, c, d, e, f, g, h


@triton.jit
def _codes(read, pair: tl.constexpr, BITS: tl.constexpr, FIRST: tl.constexpr):
    """Codes of two quads, four inputs per word."""
    low, high = read[0], read[0]
    if FIRST == 8:
        low, high = read[2 * pair], read[2 * pair + 1]
    else:
        IN_VECTOR: tl.constexpr = 8 // FIRST
        word, shift = read[2 * pair // IN_VECTOR], 2 * pair % IN_VECTOR * FIRST
        low, high = word >> shift & _EVERY_BYTE * ((1 << FIRST) - 1), word >> shift + FIRST & _EVERY_BYTE * ((1 << FIRST) - 1)
    if BITS > FIRST:
        SECOND: tl.constexpr = BITS - FIRST
        IN_SECOND: tl.constexpr = 8 // SECOND
        word, shift = read[FIRST + 2 * pair // IN_SECOND], 2 * pair % IN_SECOND * SECOND
        low |= (word >> shift & _EVERY_BYTE * ((1 << SECOND) - 1)) << FIRST
        high |= (word >> shift + SECOND & _EVERY_BYTE * ((1 << SECOND) - 1)) << FIRST
    return low, high


@triton.jit
def values(read, levels, at, pair: tl.constexpr, BITS: tl.constexpr, FIRST: tl.constexpr, SCHEME: tl.constexpr, ASM: tl.constexpr):
    """Multiplicands of two quads: codes, or levels offset by 128."""
    if SCHEME == CODEBOOK or SCHEME == MXFP or SCHEME == _TABLE or SCHEME == NVFP:
        if BITS == 4:
            pairs = read[pair]
        else:
            low, high = _codes(read, pair, BITS, FIRST)
            pairs = low | high << 4
        low, high = _looked_up(pairs, levels, at, ASM)
        if not ASM:
            low, high = low ^ SIGNS, high ^ SIGNS
    else:
        low, high = _codes(read, pair, BITS, FIRST)
    return low, high


@triton.jit
def factors(read, steps, at, row, half: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SCHEME: tl.constexpr, ASM: tl.constexpr):
    """For the inputs of half a tile: the factor of the values, the zero point subtracted before (a float offset by `_FLOAT`), and the
    minimum subtracted after; float32 [8, V, 2]."""
    less = 0.0
    base = _NOTHING + (1 << BITS - 1)
    if SCHEME == SUPER:
        base = _NOTHING
        step = _float_of_half(read[10]) * (read[8] & 63).to(tl.float32)
        less = _float_of_half(read[11]) * (read[8] >> 6 | (read[9] >> row // 8 * 4 & 15) << 2).to(tl.float32)
    elif SCHEME == NIBBLE:
        base = _NOTHING
        both = read[9] if half else read[8]
        step = _float_of_half(read[10]) * (both & 15).to(tl.float32)
        less = _float_of_half(read[11]) * (both >> 4 & 15).to(tl.float32)
    elif SCHEME == _SIGNED or SCHEME == _TABLE:
        base = _NOTHING + 128 if SCHEME == _TABLE else base
        step = _float_of_half(read[10]) * (read[9] if half else read[8]).to(tl.int8).to(tl.float32)
    elif SCHEME == CODEBOOK:
        base = _NOTHING + 128
        low, high = _looked_up(read[8], steps, at, ASM)
        step = ((high if half else low) & 255).to(tl.float32)
    elif SCHEME == MXFP:
        base = _NOTHING + 128
        step = (read[8] << 23).to(tl.float32, bitcast=True)
    elif SCHEME == NVFP:
        base = _NOTHING + 128
        step = _small_float(read[9] if half else read[8], 0)
    elif SCHEME == MINIMUM:
        base = _NOTHING
        step, less = _float_of_half(read[8]), -_float_of_half(read[9])
    elif SCHEME == _FLOATS:
        step = read[8].to(tl.float32, bitcast=True)
    elif SCHEME == _BLOCK:
        step = _float_of_half(read[8])
    elif SCHEME == _OFFSET:
        step, base = _float_of_half(read[8]), (read[9] + _FLOAT).to(tl.float32, bitcast=True)
    elif SCHEME == _AFFINE:
        step, base = read[8].to(tl.float32), (read[9] + _FLOAT).to(tl.float32, bitcast=True)
    else:
        step = (read[9] if GROUP == 16 and half else read[8]).to(tl.float32)
        if SCHEME == _TERNARY:
            base = _NOTHING + 1
    return step, base, less


@triton.jit
def _number(word, byte: tl.constexpr, base, ASM: tl.constexpr):
    """One byte of every word as a float, minus `base`."""
    if not ASM:
        value = (word >> 8 * byte & 255 | _FLOAT).to(tl.float32, bitcast=True)
    elif byte == 0:
        value = tl.inline_asm_elementwise("prmt.b32 $0, $1, 0x4B000000, 0x7440;", "=f,r", [word], dtype=tl.float32, is_pure=True, pack=1)
    elif byte == 1:
        value = tl.inline_asm_elementwise("prmt.b32 $0, $1, 0x4B000000, 0x7441;", "=f,r", [word], dtype=tl.float32, is_pure=True, pack=1)
    elif byte == 2:
        value = tl.inline_asm_elementwise("prmt.b32 $0, $1, 0x4B000000, 0x7442;", "=f,r", [word], dtype=tl.float32, is_pure=True, pack=1)
    else:
        value = tl.inline_asm_elementwise("prmt.b32 $0, $1, 0x4B000000, 0x7443;", "=f,r", [word], dtype=tl.float32, is_pure=True, pack=1)
    return value - base


@triton.jit
def _small_float(word, byte: tl.constexpr):
    """One byte of every word as an E4M3 number: shifted by one bit it is a half, 2**-8 times as large."""
    code = word >> 8 * byte
    return _float_of_half(((code & 127) << 7 | (code & 128) << 8).to(tl.int16)) * 256.0


@triton.jit
def weights_of(word, step, base, less, SCHEME: tl.constexpr, ASM: tl.constexpr):
    """Four inputs' weights before the row scale, [8, V, 2] each; with a step of 1.0 if that is applied later. Nothing is rounded except
    when minima are subtracted: products have at most 24 bits."""
    if SCHEME == _FLOATS:
        a, b, c, d = _small_float(word, 0), _small_float(word, 1), _small_float(word, 2), _small_float(word, 3)
    else:
        a, b, c, d = _number(word, 0, base, ASM), _number(word, 1, base, ASM), _number(word, 2, base, ASM), _number(word, 3, base, ASM)
    if SCHEME == SUPER or SCHEME == NIBBLE or SCHEME == MINIMUM:
        a, b, c, d = a * step - less, b * step - less, c * step - less, d * step - less
    return a, b, c, d


ASM = isinstance(_byte, triton.JITFunction)  # not in the interpreter
