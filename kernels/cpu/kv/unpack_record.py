"""Dequantizing a packed KV record inside a kernel: K and V as 16-bit numbers of a common step, or as floats, in a worker's scratch memory.

The record layout is defined in `kernels/kv_layout.py`. A record is dequantized once for all queries of its KV head.
"""

from __future__ import annotations

import numpy as np
from numpy import float32

from ...kv_layout import GROUP_CHANNELS, GROUP_K, MANTISSA_BITS, ROTATED_K, TAIL_GROUPS, TAIL_OFFSET, WIDTHS_IN_TAIL
from ...layout import PAGE
from ...lazy_numba import inlined
from ..intrinsics import f32_at, i16_at, u8_at
from .unpack_loops import (
    GROUP_NBYTES,
    first_1,
    first_2,
    first_4,
    key_factors,
    second_3,
    second_5,
    second_6,
    second_8,
    value_factors,
    widen,
    widen_both,
)

SPANS = PAGE // GROUP_K
EIGHTHS = np.array(MANTISSA_BITS, np.uint32).view(np.float32)  # kernels compute scales from it


@inlined()
def bytes_at(depth):
    """Scratch of a dequantized record: first D * PAGE 16-bit numbers of K or V, K as [D / 4, PAGE, 4], V as [D / 16, PAGE / 4, 16, 4]; then
    a group's codes as bytes, and their bits beyond 8; then the arguments of `widen`, 16-bit [2, max(D, PAGE)]; then float32 [4, D] of
    channels and as much scratch."""
    return 2 * depth * PAGE


@inlined()
def factors_at(depth):
    return bytes_at(depth) + 2 * GROUP_NBYTES


@inlined()
def channels_at(depth):
    return factors_at(depth) + 4 * max(depth, PAGE) * SPANS


@inlined()
def products_at(depth):
    return channels_at(depth) + 16 * depth


@inlined()
def opened_end(depth):
    return products_at(depth) + 8 * max(depth, PAGE)


def unpacked_nbytes(depth: int) -> int:
    """Bytes of all of that."""
    return 2 * depth * PAGE + 2 * GROUP_NBYTES + 4 * max(depth, PAGE) * SPANS + 16 * depth + 8 * max(depth, PAGE)


@inlined()
def _width(record, side, group):
    """Bits of a group; `side`: 0 for K, 1 for V."""
    packed = u8_at(record + TAIL_OFFSET + WIDTHS_IN_TAIL + (group & -TAIL_GROUPS))
    bit = 3 * (TAIL_GROUPS * side + (group & TAIL_GROUPS - 1))
    index = ((packed[bit >> 3] | packed[(bit >> 3) + 1] << 8) >> (bit & 7)) & 7
    return index + 1 if index < 6 else 2 * index - 4


@inlined()
def _unpack(source, target, bits, is_whole):
    """A group's planes -> a byte for each code, in its high bits, and its bits beyond 8 GROUP_NBYTES further on; `is_whole`: 1 for V, whose
    unit is 64 bytes, 0 for K, whose unit is a quad of channels."""
    _unpack_bytes(source, target, min(bits, 8), is_whole)
    if bits > 8:
        _unpack_bytes(source + GROUP_NBYTES, target + GROUP_NBYTES, bits - 8, is_whole)


@inlined()
def _unpack_bytes(source, target, bits, is_whole):
    high = 4 if bits >= 4 else 2 if bits >= 2 else 1
    run = 64 if is_whole else 64 * high
    for r in range(4 * high if is_whole else 4):
        begin, end = source + r * run, target + r * run * (8 // high)
        if high == 4:
            first_4(begin, end, run)
        elif high == 2:
            first_2(begin, end, run)
        else:
            first_1(begin, end, run)
    low = bits - high
    if low == 0:
        return
    run = 64 if is_whole else 64 * low
    for r in range(4 * low if is_whole else 4):
        begin, end = source + 256 * high + r * run, target + r * run * (8 // low)
        if low == 4:
            second_8(begin, end, run)
        elif low == 2:
            second_6(begin, end, run)
        elif bits == 5:
            second_5(begin, end, run)
        else:
            second_3(begin, end, run)


@inlined()
def open_keys(record, at, depth, opened, eighths, factor, channel_scale, steps):
    """Dequantize K of a record, with the step of every 32 tokens at `steps`. `at`: offsets of codes, exponents, zeros. Scales are
    multiplied by `factor`, and by the channels' own if the record is unrotated; returns whether it was rotated."""
    rotated = u8_at(record + TAIL_OFFSET + 2)[0] & ROTATED_K
    gains, counts = f32_at(opened + channels_at(depth)), f32_at(opened + channels_at(depth) + 4 * depth)
    units, halves = f32_at(opened + channels_at(depth) + 8 * depth), f32_at(opened + channels_at(depth) + 12 * depth)
    channel_scales = f32_at(channel_scale)
    for c in range(depth):
        gains[c] = factor if rotated else factor * channel_scales[c]
    groups = depth // GROUP_CHANNELS
    for group in range(groups):
        count = float32(1 << _width(record, 0, group))
        for c in range(GROUP_CHANNELS * group, GROUP_CHANNELS * (group + 1)):
            counts[c], units[c], halves[c] = count, count * float32(1.0 / 64), (count - float32(1.0)) * float32(0.5)
    a, b, target = opened + factors_at(depth), opened + factors_at(depth) + 2 * depth * SPANS, f32_at(steps)
    for span in range(SPANS):
        target[span] = key_factors(record + at[1] + span * depth, record + at[2] + span * depth, eighths, opened + channels_at(depth),
                                   opened + products_at(depth), a + 2 * depth * span, b + 2 * depth * span, depth)
    source, codes = record + at[0], opened + bytes_at(depth)
    for group in range(groups):
        bits = _width(record, 0, group)
        _unpack(source, codes, bits, 0)
        source += 2 * PAGE * bits
        for quad in range(GROUP_CHANNELS // 4):
            begin, out = codes + 4 * PAGE * quad, opened + 8 * PAGE * (GROUP_CHANNELS // 4 * group + quad)
            for span in range(SPANS):
                factors, at_codes = 2 * (depth * span + GROUP_CHANNELS * group + 4 * quad), begin + 4 * GROUP_K * span
                if bits > 8:
                    widen_both(at_codes, a + factors, b + factors, out + 8 * GROUP_K * span, 4 * GROUP_K)
                else:
                    widen(at_codes, a + factors, b + factors, out + 8 * GROUP_K * span, 4 * GROUP_K)
    return rotated


@inlined()
def open_values(record, at, depth, opened, eighths, steps):
    """Dequantize V of a record, with the step of every group of channels at `steps`. `at`: offsets of the five parts of a record."""
    top, source, codes = i16_at(record + TAIL_OFFSET)[0], record + at[3], opened + bytes_at(depth)
    a, target = opened + factors_at(depth), f32_at(steps)
    for group in range(depth // GROUP_CHANNELS):
        bits = _width(record, 1, group)
        target[group] = value_factors(record + at[4] + PAGE * group, eighths, top, bits, opened + products_at(depth), a, a + 2 * PAGE)
        _unpack(source, codes, bits, 1)
        source += 2 * PAGE * bits
        for quad in range(PAGE // 4):
            out = opened + 2 * GROUP_NBYTES * group + 128 * quad
            if bits > 8:
                widen_both(codes + 64 * quad, a + 8 * quad, a + 2 * PAGE + 8 * quad, out, 64)
            else:
                widen(codes + 64 * quad, a + 8 * quad, a + 2 * PAGE + 8 * quad, out, 64)


@inlined()
def float_keys(opened, depth, steps, keys):
    """Dequantized K as float32 [D, PAGE], for many queries."""
    step = f32_at(steps)
    for quad in range(depth // 4):
        numbers = i16_at(opened + 8 * PAGE * quad)
        for j in range(4):
            target = f32_at(keys + 4 * PAGE * (4 * quad + j))
            for span in range(SPANS):
                for t in range(GROUP_K * span, GROUP_K * (span + 1)):
                    target[t] = step[span] * float32(numbers[4 * t + j])


@inlined()
def float_values(opened, depth, steps, values, padded_depth):
    """Dequantized V as float32 [PAGE, `padded_depth`], for many queries; columns beyond D are zero."""
    step = f32_at(steps)
    for group in range(depth // GROUP_CHANNELS):
        numbers = i16_at(opened + 2 * GROUP_NBYTES * group)
        for t in range(PAGE):
            target = f32_at(values + 4 * (t * padded_depth + GROUP_CHANNELS * group))
            for c in range(GROUP_CHANNELS):
                target[c] = step[group] * float32(numbers[64 * (t >> 2) + 4 * c + (t & 3)])
    for t in range(PAGE):
        padding = f32_at(values + 4 * t * padded_depth)
        for c in range(depth, padded_depth):
            padding[c] = float32(0.0)
