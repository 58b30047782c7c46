"""Attention over one packed record for the queries of its KV head: scores from K, output from V.

Scales are multiplied into the other factor, which is then in bytes for codes of few bits (`int8_products.py`, `softmax_weights.py`) and in
16 bits for all others (`int16_products.py`). K with outlier channels, stored unrotated, is dequantized (`unpack_record.py`). The choice
depends on the record alone.
"""

from __future__ import annotations

from collections.abc import Callable

from numpy import float32, int16, uint32

from ...kv_layout import GROUP_CHANNELS, MAX_GROUPS, TAIL_OFFSET
from ...layout import BITS_OFFSET, PAGE
from ...lazy_numba import inlined
from ..arithmetic import ONE, ZERO
from ..attention import _load_queries
from ..intrinsics import bits_to_f32, f32_at, i16_at, i32_at, u8_at
from . import int16_products
from .arguments import K_ROTATION, _padded_depth, _rotate_rows
from .int8_products import (
    KEY_STEP,
    MAX_SCALED_QUERY,
    UNIT_TOKENS,
    UNITS_AT_ONCE,
    dot_units_4,
    dot_units_8,
    dot_values_4,
    dot_values_8,
    key_scales,
    scale_4,
    scale_8,
    value_multiple,
    value_zero,
    zero_factors,
    zeros_4,
    zeros_8,
)
from .int16_products import (
    DIGITS,
    ITEM,
    VALUE_FULL,
    dot_rests_4,
    dot_rests_8,
    dot_unit_digits_4,
    dot_unit_digits_8,
    dot_value_digits_4,
    dot_value_digits_8,
    rises,
    scale_coarse_4,
    scale_coarse_8,
    scale_digits_4,
    scale_digits_8,
    weigh_digits_4,
    weigh_digits_8,
)
from .scratch_layout import SUMMED_GROUPS, key_places, query_places, row_places, tile_rows, value_places
from .softmax_weights import FULL_WEIGHT, fold_sums, lowest_steps, value_scales, weigh_4, weigh_8
from .unpack_loops import GROUP_NBYTES, SPAN, dot_keys, round_row, row_factor
from .unpack_record import SPANS, _width, open_keys

LOG2E, LN2 = float32(1.4426950408889634), float32(0.6931471805599453)
_ZERO_FACTORS = tuple(zero_factors(bits) for bits in range(9))
_VALUE_ZEROS = tuple(value_zero(bits) for bits in range(9))
_MULTIPLES = tuple(value_multiple(bits) for bits in range(9))
_VALUE_STEPS = tuple(float32(2.0**-value_multiple(bits) * 256 / FULL_WEIGHT) for bits in range(9))
_DIGIT_ZEROS = tuple(int16_products.value_zero(bits) for bits in range(9))
_DIGIT_STEPS = tuple(float32(2.0**-value_multiple(bits) / VALUE_FULL) for bits in range(9))
_REST_STEP = float32(0.5 / VALUE_FULL)  # of halves
_KEY_STEP, _TOP, _FLAT = float32(KEY_STEP), float32(MAX_SCALED_QUERY), float32(2.0**-100)


@inlined()
def load_kv(a, kv, token, scratch, rows, padded, depth, scale):
    """A token's queries of a KV head: unrotated as 16-bit numbers, and rotated, to be scaled."""
    padded_depth, tile = _padded_depth(depth), tile_rows(rows)
    at_turned, at_queries, at_steps, at_tops, at_numbers, at_counts, _ = query_places(padded, depth)
    _load_queries(a, scratch, kv, token, rows, padded)
    _rotate_rows(padded, scratch, a[K_ROTATION] + 4 * kv * depth * padded_depth, scratch + at_turned, depth, padded_depth)
    counts, steps, tops = f32_at(scratch + at_counts), f32_at(scratch + at_steps), f32_at(scratch + at_tops)
    for c in range(depth):
        tops[c] = ZERO
    for r in range(padded):
        rotated = scratch + at_turned + 4 * r * padded_depth
        factor = row_factor(scratch + 4 * r * depth, depth)
        counts[r] = ZERO if factor == ZERO else ONE / factor
        round_row(scratch + 4 * r * depth, factor, scratch + at_numbers + 2 * r * depth, depth)
        row, top, factor = f32_at(rotated), ZERO, row_factor(rotated, depth)
        for c in range(depth):
            top = max(top, abs(row[c]))
        fine = factor == factor
        inverse = ONE / top if fine and top > _FLAT else ZERO
        steps[r] = top * scale * LOG2E * _KEY_STEP if fine else factor  # NaN stays in its row's scores
        for c in range(depth):
            row[c] = row[c] * inverse if fine else ZERO
            tops[c] = max(tops[c], abs(row[c]))
    for r in range(padded):
        row, target = f32_at(scratch + at_turned + 4 * r * padded_depth), i16_at(scratch + at_queries + 2 * (r - r % tile) * depth)
        for c in range(depth):
            value = row[c] * _TOP / tops[c] if tops[c] > _FLAT else ZERO
            target[(c // 4 * tile + r % tile) * 4 + c % 4] = round(value)


@inlined()
def header_bits(record, side):
    """Bits of a side according to the record's header: the mean over its groups."""
    return u8_at(record + BITS_OFFSET)[side]


@inlined()
def read_widths(record, widths, groups):
    """Bits of the groups of K and V to bytes [2, MAX_GROUPS]; returns the maximum of each side."""
    bits, most_k, most_v = u8_at(widths), 0, 0
    for group in range(groups):
        k, v = _width(record, 0, group), _width(record, 1, group)
        bits[group], bits[MAX_GROUPS + group] = k, v
        most_k, most_v = max(most_k, k), max(most_v, v)
    return most_k, most_v


@inlined()
def key_parts(widths, groups, bits, starts, factors):
    """The layout of K's groups for the products: bits (bytes), code offsets (int32) and `zero_factors` (int32 [2]) of each, then of the
    groups' bits beyond 8."""
    parts, start = groups, 0
    for group in range(groups):
        width = min(widths[group], 8)
        bits[group], starts[group] = width, start
        factors[2 * group], factors[2 * group + 1] = _ZERO_FACTORS[width]
        if widths[group] > 8:
            bits[parts], starts[parts] = widths[group] - 8, start + GROUP_NBYTES
            factors[2 * parts], factors[2 * parts + 1] = 0, 32 * ((1 << (widths[group] - 8)) - 1)
            parts += 1
        start += 2 * PAGE * widths[group]


@inlined()
def finer_tops(widths, groups, tops, out):
    """The largest queries per channel, as `key_scales` takes them, times the weight of a code's upper 8 bits."""
    source, target = f32_at(tops), f32_at(out)
    for group in range(groups):
        factor = float32(1 << (max(widths[group], 8) - 8))
        for c in range(GROUP_CHANNELS * group, GROUP_CHANNELS * (group + 1)):
            target[c] = source[c] * factor


@inlined()
def finer_scales(widths, groups, scales):
    """Appends to the 16-bit scales of K's channels those for group bits beyond 8."""
    numbers, position = i16_at(scales), GROUP_CHANNELS * groups
    for group in range(groups):
        if widths[group] > 8:
            for c in range(GROUP_CHANNELS):
                numbers[position + c] = numbers[GROUP_CHANNELS * group + c] >> (widths[group] - 8)
            position += GROUP_CHANNELS


@inlined()
def coarser_scales(scales, bound, depth):
    """Shrinks the 16-bit scales of a wide head's K until sums over all its channels stay as small as those of SUMMED_GROUPS; returns their
    unit."""
    numbers, factor = i16_at(scales), float32(GROUP_CHANNELS * SUMMED_GROUPS) / float32(depth)
    for c in range(depth):
        numbers[c] = int16(float32(numbers[c]) * factor)
    return bound / factor


@inlined()
def quarter_power(exponent, tables):
    """2^(exponent / 4); 0 below 2^-126."""
    octave = max(-127, exponent >> 2) + 127
    return f32_at(tables)[2 * (exponent & 3)] * bits_to_f32(uint32(octave << 23))


def record_products(tile: int) -> tuple[Callable, Callable]:
    """`scores_of` and `output_of` for tiles of 4 or 8 rows."""
    scale, zeros_of, dot_units, weigh, dot_values = {
        4: (scale_4, zeros_4, dot_units_4, weigh_4, dot_values_4), 8: (scale_8, zeros_8, dot_units_8, weigh_8, dot_values_8)}[tile]
    scale_digits, scale_coarse, dot_unit_digits, weigh_digits, dot_value_digits, dot_rests = {
        4: (scale_digits_4, scale_coarse_4, dot_unit_digits_4, weigh_digits_4, dot_value_digits_4, dot_rests_4),
        8: (scale_digits_8, scale_coarse_8, dot_unit_digits_8, weigh_digits_8, dot_value_digits_8, dot_rests_8)}[tile]

    @inlined()
    def scale_rests(widths, groups, queries, scales, scaled, low, words):
        """Appends to a tile's scaled queries the factors for group bits beyond 8."""
        part = groups
        for group in range(groups):
            if widths[group] > 8:
                base, scale, at, target = queries + 32 * tile * group, scales + 32 * part, 16 * tile * part, words + 32 * tile * part
                scale_coarse(base, scale, scaled + at, low + at, target, 4)
                part += 1

    @inlined()
    def further_zeros(high, low, zeros, factors, steps, bound, terms, scratch_at, groups, parts):
        """What the groups of a wide head behind the first SUMMED_GROUPS add to the terms of both digits: of more than these the sums would
        not stay below 2^31. `scratch_at`: float32 [2, 8]."""
        added = f32_at(scratch_at + 4 * tile)
        for digit in range(2):
            queries, count, total = low if digit else high, groups if digit else parts, f32_at(terms + 64 * digit + 4 * tile)
            for first in range(SUMMED_GROUPS, count, SUMMED_GROUPS):
                base, at_zeros, at_factors = queries + 16 * tile * first, zeros + GROUP_CHANNELS * first, factors + 8 * first
                zeros_of(base, at_zeros, at_factors, steps, bound, scratch_at, min(SUMMED_GROUPS, count - first))
                for r in range(tile):
                    total[r] += added[r]

    @inlined()
    def scores_of(record, at, depth, rows, padded, scratch, scores, widths, more, eighths, fits_int8, ahead, nbytes):
        """Scores in units of log 2; `fits_int8`: with bytes. `nbytes` from `ahead` on are prefetched meanwhile."""
        _, at_queries, at_steps, at_tops, _, _, _ = query_places(padded, depth)
        groups, quads, base = depth // GROUP_CHANNELS, depth // 4, u8_at(widths)
        parts, tops = groups, scratch + at_tops
        for group in range(groups):
            parts += 1 if base[group] > 8 else 0
        wide = GROUP_CHANNELS * parts
        at_scales, at_bounds, at_scaled, at_low, at_words, at_terms, at_room, at_factors, at_bits, at_starts = key_places(wide)
        bits, starts, bounds = more + at_bits, more + at_starts, f32_at(more + at_bounds)
        key_parts(base, groups, u8_at(bits), i32_at(starts), i32_at(more + at_factors))
        if parts > groups:
            tops = more + at_room + 4 * wide
            finer_tops(base, groups, scratch + at_tops, tops)
        at_once = UNITS_AT_ONCE if fits_int8 else 1
        rests, share = parts - groups, nbytes // (SPANS * (SPAN // UNIT_TOKENS // at_once) * groups) + 1
        is_wide, summed, summed_parts = not fits_int8 and groups > SUMMED_GROUPS, groups, parts
        if is_wide:
            summed = summed_parts = SUMMED_GROUPS
        # One step for all spans before the next: steps depend on each other, spans do not.
        for span in range(SPANS):
            scales = more + at_scales + 2 * wide * span
            bounds[span] = key_scales(record + at[1] + span * depth, tops, eighths, more + at_room, scales, depth)
            if is_wide:
                bounds[span] = coarser_scales(scales, bounds[span], depth)
            if parts > groups:
                finer_scales(base, groups, scales)
        for r in range(0, rows, tile):
            queries, steps, out = scratch + at_queries + 2 * r * depth, scratch + at_steps + 4 * r, scores + 4 * PAGE * r
            for span in range(SPANS):
                scales, scaled, terms = more + at_scales + 2 * wide * span, more + at_scaled + 8 * wide * span, more + at_terms + 128 * span
                low, words, zeros = more + at_low + 8 * wide * span, more + at_words + 16 * wide * span, record + at[2] + span * depth
                if parts > groups:
                    scale_rests(base, groups, queries, scales, scaled, low, words)
                if fits_int8:
                    scale(queries, scales, scaled, quads)
                else:
                    scale_digits(queries, scales, scaled, low, words, quads)
                    zeros_of(low, zeros, more + at_factors, steps, bounds[span], terms + 64, summed)
                zeros_of(scaled, zeros, more + at_factors, steps, bounds[span], terms, summed_parts)
                if is_wide:
                    further_zeros(scaled, low, zeros, more + at_factors, steps, bounds[span], terms, more + at_room, groups, parts)
            for unit in range(0, SPANS * (SPAN // UNIT_TOKENS), at_once):
                span, target = unit // (SPAN // UNIT_TOKENS), ahead + share * groups * (unit // at_once)
                scaled, terms = more + at_scaled + 8 * wide * span, more + at_terms + 128 * span
                high, low = scaled if DIGITS else more + at_words + 16 * wide * span, more + at_low + 8 * wide * span
                if fits_int8:
                    dot_units(record + at[0], widths, scaled, terms, unit, out, groups, target, share)
                else:
                    dot_unit_digits(record + at[0], bits, starts, high, low, terms, terms + 64, unit, out, groups, rests, target, share)

    @inlined()
    def output_of(record, at, depth, rows, padded, scores, begin_of, output, m, more, tables, fits_int8, ahead, nbytes):
        """Merge a page into the running `output` [padded, D] with its (m, l) [2, padded] at `m`, from scores in units of log 2;
        `fits_int8`: with bytes. `nbytes` from `ahead` on are prefetched meanwhile."""
        at_lowest, at_low, at_up, at_rise, at_fractions, at_zeros, at_weights = value_places(depth)
        at_sums, _, _, at_factors, _, at_widths, _ = row_places(padded, depth)
        sums, factors = begin_of + at_sums, begin_of + at_factors
        groups, bits = depth // GROUP_CHANNELS, u8_at(begin_of + at_widths + MAX_GROUPS)
        lowest_steps(record + at[4], groups, more + at_lowest, more + at_low, more + at_up)
        for group in range(groups):
            up, less = _VALUE_ZEROS[bits[group]] if fits_int8 else _DIGIT_ZEROS[min(bits[group], 8)]
            value_scales(record + at[4] + PAGE * group, more + at_lowest, up, less, more + at_fractions + 2 * PAGE * group,
                         more + at_zeros + PAGE * group)
        # low digits after all high ones
        item, lower = 1 if fits_int8 else ITEM, PAGE * padded * groups
        if not fits_int8:
            rises(more + at_lowest, tables, more + at_rise)
        for r in range(0, rows, tile):
            weights, tops = more + at_weights + PAGE * item * r, sums + 4 * r
            base, stride, totals, low = scores + 4 * PAGE * r, PAGE * item * padded, tops + 4 * padded, weights + lower
            if fits_int8:
                weigh(base, more + at_low, more + at_up, more + at_fractions, tables, weights, stride, groups, tops, totals)
            else:
                weigh_digits(base, more + at_low, more + at_rise, more + at_fractions, weights, low, stride, groups, tops, totals)
        fold_sums(m, m + 4 * padded, sums, sums + 4 * padded, factors, padded)
        share = nbytes // (SPANS * groups) + 1
        source, largest = record + at[3], quarter_power(i16_at(record + TAIL_OFFSET)[0], tables)
        for group in range(groups):
            width, zeros = bits[group], more + at_zeros + PAGE * group
            for r in range(0, rows, tile):
                weights, out = more + at_weights + PAGE * item * (group * padded + r), output + 4 * (r * depth + GROUP_CHANNELS * group)
                keep, take = factors + 4 * r, factors + 4 * (padded + r)
                if fits_int8:
                    dot_values(source, width, zeros, weights, largest * _VALUE_STEPS[width], out, 4 * depth, keep, take, ahead, share)
                else:
                    first, low = min(width, 8), weights + lower
                    step, multiple = largest * _DIGIT_STEPS[first] * float32(1 << (width - first)), _MULTIPLES[first]
                    dot_value_digits(source, first, multiple, zeros, weights, low, step, out, 4 * depth, keep, take, ahead, share)
                    if width > 8:
                        dot_rests(source + GROUP_NBYTES, weights, largest * _REST_STEP, out, 4 * depth, take)
            source, ahead = source + 2 * PAGE * width, ahead + SPANS * share

    return scores_of, output_of


@inlined()
def scores_by_numbers(record, at, depth, rows, padded, scratch, scores, steps, opened, tables, scale, channel_scale):
    """Scores for unrotated keys: dequantized to 16-bit numbers, times unrotated queries."""
    _, _, _, _, at_numbers, at_counts, _ = query_places(padded, depth)
    open_keys(record, at, depth, opened, tables, scale * LOG2E, channel_scale, steps)
    step, counts = f32_at(steps), f32_at(scratch + at_counts)
    for r in range(rows):
        for span in range(SPANS):
            dot_keys(opened + 8 * SPAN * span, scratch + at_numbers + 2 * r * depth, step[span] * counts[r],
                     scores + 4 * (r * PAGE + SPAN * span), depth // 4)
