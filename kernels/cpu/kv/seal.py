"""Sealing KV pages: encodes exact keys and values as `kv_layout.RecordLayout` records, as defined by `quant/kv_codec.encode`.

A block of work is one record, i.e. a layer and KV head. Keys have their mean subtracted and are rotated by the layer's matrix; then
exponents, zero points and codes are found for 16 channels at a time. Values likewise, 16 tokens at a time. Pages that fall due together, in
all layers, are one job. Per-layer preparation happens once in `quant/kv_seal.py`, which also writes the headers: their checksum covers this
kernel's output.
"""

from __future__ import annotations

from numpy import float32, int64, uint8, uint32

from ...compile import kernel
from ...kv_layout import GROUP_CHANNELS, GROUP_K, PLANES, QUAD, TAIL_OFFSET
from ...layout import HEADER_NBYTES, PAGE
from ...lazy_numba import inlined
from ..arithmetic import expand
from ..inner_loops import DECODE_TILE_ROWS, TILE_COLUMNS, low_tile_product
from ..intrinsics import f32_at, f64_at, fetch_add, i32_at, i64_at, u8_at, u32_at
from .seal_loops import (
    ABOVE,
    CODES_NBYTES,
    EXPONENT_AT,
    FIRST_AT,
    FOUND_NBYTES,
    LANES,
    LEVELS,
    SPAN_NBYTES,
    TABLE_SLOTS,
    ZERO_AT,
    search,
    span,
)

# Slots of the argument block. NOTES int64 [COUNT, NOTE_SLOTS], STATUS int64 [COUNT, HEADS]: 0, `KEYS_ODD`, `VALUES_ODD` or both.
NOTES, COUNT, HEADS, STATUS, SCRATCH, SCRATCH_STRIDE, SLOTS = range(7)
KEYS_ODD, VALUES_ODD = 1, 2  # a value is not finite, or too large for a page
# A note: addresses of the exact layer-page, the sealed layer-page, the layer's block, and cos and sin float32 [PAGE, D / 2] (0: no mean).
EXACT, OUT, LAYER, COS, SIN, NOTE_SLOTS = range(6)
# A layer's block. RECIPROCALS float32 [H, D] of K's scales; K_MATRIX [H, D, PADDED_DIM], transposed and zero-padded; V_MATRIX [H, D, D];
# K_MEAN [H, D] or 0; WIDTHS uint8 [H, 3, D / 16]: of rotated K, of unrotated K, of V; TAILS uint8 [H, 2, bytes of a tail]: of unrotated and
# rotated K, without the largest scale; TABLES [2, MAX_BITS + 1, TABLE_SLOTS]: of K and V by bits (`seal_loops`); RECORDS int64 [H,
# RECORD_SLOTS]; DOMINANT_PAIR_RATIO float64: ratio to the mean power above which a channel pair is dominant.
# ROWS: tokens in a part of an exact layer-page; PART_STRIDE: bytes between parts.
(DIM, DTYPE, HEAD_STRIDE, SIDE, ROWS, PART_STRIDE, RECIPROCALS, K_MATRIX, PADDED_DIM, V_MATRIX, K_MEAN, WIDTHS, TAILS, TABLES, RECORDS,
 DOMINANT_PAIR_RATIO,
 LAYER_SLOTS) = range(17)
# A head's record: its offset in the layer-page, the offsets of its five parts and their end, its size.
START, K_CODES, K_EXPONENTS, K_ZEROS, V_CODES, V_SCALES, END, NBYTES, RECORD_SLOTS = range(9)
BLOCKS = PAGE // LANES  # of V, in tokens
MAX_STEPS = 15  # of a V scale below the page's largest
ZERO = float32(0.0)
MAX_BITS = max(PLANES)
_FIRST_PLANE = tuple(PLANES.get(bits, (0,))[0] for bits in range(9))
_SECOND_PLANE = tuple((*PLANES.get(bits, (0,)), 0)[1] for bits in range(9))


def broad_of(head_dim: int) -> int:
    """Columns of a rotated page of K: a multiple of the register tile."""
    return -(-head_dim // TILE_COLUMNS) * TILE_COLUMNS


def seal_scratch(head_dim: int) -> int:
    """Floats of scratch per worker: two pages, spans, search results, codes, and two rows of statistics."""
    spans = head_dim // GROUP_CHANNELS * BLOCKS * SPAN_NBYTES // 4
    return 2 * PAGE * broad_of(head_dim) + spans + FOUND_NBYTES // 4 + 2 * CODES_NBYTES // 4 + 2 * head_dim


@inlined()
def _transpose(source, rows, columns, target):
    """float32 [rows, columns] -> [columns, rows], both addresses; 16 lines of the target at a time stay in the L1 cache."""
    x, y = f32_at(source), f32_at(target)
    for begin in range(0, columns, 16):
        for row in range(rows):
            for column in range(begin, begin + 16):
                y[column * rows + row] = x[row * columns + column]


@inlined()
def _subtract_mean(keys, mean, cos, sin, depth):
    """Keys [PAGE, depth] minus the pre-RoPE mean, rotated to each position."""
    half = depth // 2
    m = f32_at(mean)
    for t in range(PAGE):
        row, c, s = f32_at(keys + 4 * t * depth), f32_at(cos + 4 * t * half), f32_at(sin + 4 * t * half)
        for i in range(half):
            row[i] -= m[i] * c[i] - m[i + half] * s[i]
            row[i + half] -= m[i + half] * c[i] + m[i] * s[i]


@inlined()
def _has_dominant_pair(keys, reciprocals, depth, limit, statistics):
    """Does some RoPE pair of keys [PAGE, depth], times their reciprocals, have `limit` times the mean power of the pairs?"""
    mean, power, factor = f32_at(statistics), f32_at(statistics + 4 * depth), f32_at(reciprocals)
    for i in range(depth):
        mean[i] = power[i] = ZERO
    for t in range(PAGE):
        row = f32_at(keys + 4 * t * depth)
        for i in range(depth):
            mean[i] += row[i] * factor[i]
    for i in range(depth):
        mean[i] /= float32(PAGE)
    for t in range(PAGE):
        row = f32_at(keys + 4 * t * depth)
        for i in range(depth):
            away = row[i] * factor[i] - mean[i]
            power[i] += away * away
    total, top, half = ZERO, ZERO, depth // 2
    for i in range(half):
        pair = power[i] + power[i + half]
        total += pair
        top = max(top, pair)
    return top > limit * (total / float32(half))


@inlined()
def _plane_of_keys(codes, shift, width, out):
    """`width` bits from `shift` on of codes [PAGE, 16] -> a plane of K: [4 quads, tokens, 4 channels]."""
    source, target = u32_at(codes), u32_at(out)
    mask = uint32(((1 << width) - 1) * 0x01010101)
    fields = 8 // width
    tokens = PAGE // fields
    for quad in range(QUAD):
        for i in range(tokens):
            word = uint32(0)
            for f in range(fields):
                word |= ((source[(f * tokens + i) * QUAD + quad] >> uint32(shift)) & mask) << uint32(width * f)
            target[quad * tokens + i] = word


@inlined()
def _plane_of_values(codes, shift, width, out):
    """`width` bits from `shift` on of codes [16, PAGE] -> a plane of V: [token quads, 16 channels, 4 tokens]."""
    source, target = u32_at(codes), u32_at(out)
    mask = uint32(((1 << width) - 1) * 0x01010101)
    fields = 8 // width
    for unit in range(PAGE // (QUAD * fields)):
        for channel in range(GROUP_CHANNELS):
            word, at = uint32(0), channel * (PAGE // QUAD) + unit * fields
            for f in range(fields):
                word |= ((source[at + f] >> uint32(shift)) & mask) << uint32(width * f)
            target[unit * GROUP_CHANNELS + channel] = word


@inlined()
def _pack(codes, bits, of_keys, out):
    """Codes of a group of channels, plane by plane, high bits first."""
    _pack_bytes(codes, min(bits, 8), of_keys, out)
    if bits > 8:
        _pack_bytes(codes + CODES_NBYTES, bits - 8, of_keys, out + PAGE * GROUP_CHANNELS)


@inlined()
def _pack_bytes(codes, bits, of_keys, out):
    first, second = _FIRST_PLANE[bits], _SECOND_PLANE[bits]
    if of_keys:
        _plane_of_keys(codes, second, first, out)
        if second > 0:
            _plane_of_keys(codes, 0, second, out + PAGE * GROUP_CHANNELS // 8 * first)
    else:
        _plane_of_values(codes, second, first, out)
        if second > 0:
            _plane_of_values(codes, 0, second, out + PAGE * GROUP_CHANNELS // 8 * first)


@inlined()
def _seal_keys(layer, record, widths, keys, out, spans, result_at, codes):
    """Rotated keys [PAGE, PADDED_DIM] -> exponents, zeros and codes in the record. True if a value is out of range."""
    depth, stride = layer[DIM], 4 * layer[PADDED_DIM]
    at, odd = out + record[K_CODES], ZERO
    exponents, zeros = i32_at(result_at + EXPONENT_AT), i32_at(result_at + ZERO_AT)
    for group in range(depth // GROUP_CHANNELS):
        bits = int64(u8_at(widths)[group])
        table = layer[TABLES] + 4 * TABLE_SLOTS * bits
        for part in range(PAGE // GROUP_K):
            x = keys + stride * GROUP_K * part + 4 * GROUP_CHANNELS * group
            odd += span(x, stride, GROUP_K, f32_at(table)[LEVELS], spans)
            search(x, stride, GROUP_K, spans, table, -128, 127, codes + GROUP_CHANNELS * GROUP_K * part, GROUP_CHANNELS, result_at)
            channel_offset = depth * part + GROUP_CHANNELS * group
            kept_exponents, kept_zeros = u8_at(out + record[K_EXPONENTS] + channel_offset), u8_at(out + record[K_ZEROS] + channel_offset)
            for lane in range(LANES):
                kept_exponents[lane], kept_zeros[lane] = uint8(exponents[lane] & 255), uint8(zeros[lane] & 255)
        _pack(codes, bits, True, at)
        at += PAGE * GROUP_CHANNELS // 8 * bits
    return odd != ZERO


@inlined()
def _span_values(layer, widths, values, spans):
    """Spans of rotated values [D, PAGE], and the page's largest scale: (is a value out of range, largest scale)."""
    odd, top = ZERO, -(1 << 15)
    for group in range(layer[DIM] // GROUP_CHANNELS):
        table = layer[TABLES] + 4 * TABLE_SLOTS * (MAX_BITS + 1 + int64(u8_at(widths)[group]))
        above = int64(i32_at(table)[ABOVE])
        for block in range(BLOCKS):
            span_at = spans + SPAN_NBYTES * (BLOCKS * group + block)
            x = values + 4 * (PAGE * GROUP_CHANNELS * group + LANES * block)
            odd += span(x, 4 * PAGE, GROUP_CHANNELS, f32_at(table)[LEVELS], span_at)
            firsts = i32_at(span_at + FIRST_AT)
            for lane in range(LANES):
                top = max(top, ((int64(firsts[lane]) + 1) >> 1) + above)
    return odd != ZERO, top


@inlined()
def _seal_values(layer, record, widths, values, top, out, spans, result_at, codes):
    """Rotated values [D, PAGE] -> scales, zeros and codes in the record."""
    at = out + record[V_CODES]
    exponents, zeros = i32_at(result_at + EXPONENT_AT), i32_at(result_at + ZERO_AT)
    for group in range(layer[DIM] // GROUP_CHANNELS):
        bits = int64(u8_at(widths)[group])
        table = layer[TABLES] + 4 * TABLE_SLOTS * (MAX_BITS + 1 + bits)
        for block in range(BLOCKS):
            x = values + 4 * (PAGE * GROUP_CHANNELS * group + LANES * block)
            span_at = spans + SPAN_NBYTES * (BLOCKS * group + block)
            search(x, 4 * PAGE, GROUP_CHANNELS, span_at, table, top - MAX_STEPS, top, codes + LANES * block, PAGE, result_at)
            stored = u8_at(out + record[V_SCALES] + PAGE * group + LANES * block)
            for lane in range(LANES):
                stored[lane] = uint8((top - exponents[lane]) | (zeros[lane] + 8) << 4)
        _pack(codes, bits, False, at)
        at += PAGE * GROUP_CHANNELS // 8 * bits


@inlined()
def _load_keys(layer, note, head, source, scratch_at, keys):
    """A page of exact keys as float32 [PAGE, D] minus their mean; `scratch_at`: scratch for them in stored form."""
    depth = layer[DIM]
    for begin in range(0, PAGE, layer[ROWS]):
        part = source + begin // layer[ROWS] * layer[PART_STRIDE]
        expand(part, layer[DTYPE], scratch_at + 4 * begin * depth, layer[ROWS] * depth)
        _transpose(scratch_at + 4 * begin * depth, depth, layer[ROWS], keys + 4 * begin * depth)
    if layer[K_MEAN] != 0:
        _subtract_mean(keys, layer[K_MEAN] + 4 * depth * head, note[COS], note[SIN], depth)


@inlined()
def _turn_keys(layer, head, keys, skips_rotation, rotated):
    """Keys [PAGE, D] in the basis of the record, [PAGE, PADDED_DIM]; with `skips_rotation` pairs are scaled only, not mixed."""
    depth, padded_depth = layer[DIM], layer[PADDED_DIM]
    if skips_rotation:
        factor = f32_at(layer[RECIPROCALS] + 4 * depth * head)
        for t in range(PAGE):
            row, target = f32_at(keys + 4 * t * depth), f32_at(rotated + 4 * t * padded_depth)
            for i in range(depth):
                target[i] = row[i] * factor[i]
        return
    matrix = layer[K_MATRIX] + 4 * depth * padded_depth * head
    for t in range(0, PAGE, DECODE_TILE_ROWS):
        for i in range(0, padded_depth, TILE_COLUMNS):
            low_tile_product(keys + 4 * t * depth, 4 * depth, matrix + 4 * i, 4 * padded_depth, rotated + 4 * (t * padded_depth + i),
                             4 * padded_depth, depth, 0)


@inlined()
def _load_values(layer, head, source, scratch_at, rotated):
    """A page of values in the basis of the record, float32 [D, PAGE]; `scratch_at`: scratch for them as floats."""
    depth = layer[DIM]
    for begin in range(0, PAGE, layer[ROWS]):
        part = source + layer[SIDE] + begin // layer[ROWS] * layer[PART_STRIDE]
        expand(part, layer[DTYPE], rotated + 4 * begin * depth, layer[ROWS] * depth)
    _transpose(rotated, PAGE, depth, scratch_at)
    matrix = layer[V_MATRIX] + 4 * depth * depth * head
    for i in range(0, depth, DECODE_TILE_ROWS):
        for t in range(0, PAGE, TILE_COLUMNS):
            low_tile_product(matrix + 4 * i * depth, 4 * depth, scratch_at + 4 * t, 4 * PAGE, rotated + 4 * (i * PAGE + t), 4 * PAGE,
                             depth, 0)


@inlined()
def _finish_record(layer, record, head, skips_rotation, top, out):
    """The tail of a record's header, with V's largest scale `top`, and zero padding after its parts."""
    length = record[K_CODES] - TAIL_OFFSET
    tail, target = u8_at(layer[TAILS] + length * (2 * head + (0 if skips_rotation else 1))), u8_at(out + TAIL_OFFSET)
    for i in range(length):
        target[i] = tail[i]
    target[0], target[1] = uint8(top & 255), uint8(top >> 8 & 255)
    for i in range(record[END], record[NBYTES]):
        u8_at(out)[i] = uint8(0)


@kernel()
def seal_records(args, worker, counter):
    """Seal every listed page, head by head: the whole record except the first 48 bytes of its header."""
    a = i64_at(args)
    heads = a[HEADS]
    plain = a[SCRATCH] + worker * a[SCRATCH_STRIDE]
    while True:
        job = fetch_add(counter, 1)
        if job >= a[COUNT] * heads:
            return
        note, head = i64_at(a[NOTES] + 8 * NOTE_SLOTS * (job // heads)), job % heads
        layer = i64_at(note[LAYER])
        depth, padded_depth = layer[DIM], layer[PADDED_DIM]
        rotated = plain + 4 * PAGE * padded_depth
        statistics = rotated + 4 * PAGE * padded_depth
        result_at = statistics + 8 * depth
        codes = result_at + FOUND_NBYTES
        spans = codes + 2 * CODES_NBYTES
        source = note[EXACT] + head * layer[HEAD_STRIDE] + HEADER_NBYTES
        record = i64_at(layer[RECORDS] + 8 * RECORD_SLOTS * head)
        out = note[OUT] + record[START]
        groups = depth // GROUP_CHANNELS
        widths = layer[WIDTHS] + 3 * groups * head
        _load_keys(layer, note, head, source, rotated, plain)
        skips_rotation = _has_dominant_pair(plain, layer[RECIPROCALS] + 4 * depth * head, depth,
                                            float32(f64_at(note[LAYER])[DOMINANT_PAIR_RATIO]), statistics)
        _turn_keys(layer, head, plain, skips_rotation, rotated)
        status = KEYS_ODD if _seal_keys(layer, record, widths + groups if skips_rotation else widths, rotated, out, spans, result_at,
                                        codes) else 0
        _load_values(layer, head, source, plain, rotated)
        odd, top = _span_values(layer, widths + 2 * groups, rotated, spans)
        if odd:
            status |= VALUES_ODD
        i64_at(a[STATUS])[job] = status
        if status == 0:
            _seal_values(layer, record, widths + 2 * groups, rotated, top, out, spans, result_at, codes)
            _finish_record(layer, record, head, skips_rotation, top, out)
