"""Integer products with 16-bit factors for attention over packed pages: the counterpart of `int8_products.py` for codes of many bits.

Scales are multiplied into queries and softmax weights as there, but the products keep 16 bits: rounding them to 8 would be noticeable next
to the codec's own error. With a four-way dot product, a factor is split into two digits (256 high + low for queries, 128 high + low for
weights), each multiplied as a byte; without one, codes are widened to 16 bits in a register. Sums are integers below 2^31 and identical
either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from llvmlite import ir

from ...layout import PAGE
from ...lazy_numba import llvm_intrinsic, types
from ..int8_ir import (
    BYTES,
    FLOATS,
    HALVES,
    I8,
    INSTRUCTION_SET,
    LANES,
    PIECES,
    WIDTH,
    WORDS,
    constant,
    fma,
    load,
    offset,
    splat,
    store,
)
from ..int8_products import dot, pair_products, rounded_high
from ..intrinsics import F32, I32, I64
from ..reductions import maximum, reduce_lanes, reduce_vectors
from .int8_products import by_width, codes_of_keys, codes_of_values, prefetch_part, scaled_queries, upper_bytes
from .softmax_weights import LN2, MAGIC, exp2
from .unpack_loops import loop, pick, power, shorts

DIGITS = INSTRUCTION_SET in ("avx512", "avx2vnni")
# Cache lines prefetched per group of K and unit of tokens, or per group of V and 32 tokens: their share of half a record, at most 281 and
# 545 bytes with 8 bits; with 10 bits a few lines are left out. More would also prefetch the next share's lines.
KEY_LINES, VALUE_LINES = 5, 9
REMAINDER_BITS = 2  # bits of 10-bit groups beyond 8: they contribute so little that the high digit of a factor is precise enough for them
ITEM = 1 if DIGITS else 2  # bytes of a factor as read by products
WEIGHT = 32767  # the largest softmax weight, before scaling
TOTAL = 2.0**18  # share of a weight of 1 in a row's sum; a scale's largest share of it is 2^(15/4)
VALUE_FULL = WEIGHT * 32767.5 / 32768  # a weight of 1 times a scale of 1
MAGIC_BITS = 0x4B400000  # the bits of MAGIC as float32


def value_zero(bits: int) -> tuple[int, int]:
    """By how many bits a zero + 8 of V is moved up, and what is then taken off: in 2^-`value_multiple`, what a value is above its code when
    that is counted from the middle."""
    up = max(0, bits - 4)
    return up, (8 << up) - (1 << max(0, 4 - bits))


def _lower_bytes(builder: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    """The low byte of every 16-bit number of two vectors."""
    indices = ir.Constant(ir.VectorType(I32, WIDTH), list(range(0, 2 * WIDTH, 2)))
    return builder.shuffle_vector(builder.bitcast(low, BYTES), builder.bitcast(high, BYTES), indices)


def _wide(builder: ir.IRBuilder, value: ir.Value, signed: bool) -> list[ir.Value]:
    """Bytes as 16-bit numbers, two vectors of them."""
    parts = [ir.Constant(ir.VectorType(I32, WIDTH // 2), list(range(begin, begin + WIDTH // 2))) for begin in (0, WIDTH // 2)]
    parts = [builder.shuffle_vector(value, value, part) for part in parts]
    return [builder.sext(part, HALVES) if signed else builder.zext(part, HALVES) for part in parts]


def _products(builder: ir.IRBuilder, sums: list[ir.Value], codes: ir.Value, factors: Sequence[ir.Value], signed: bool,
              mask: int = -1) -> list[ir.Value]:
    """A row's two sums and the products of a quad of codes, `signed` or not, with its factors: their digits' addresses (of the high one
    alone, if there is but one), or that of 16-bit numbers, of which those bits count that are in `mask`."""
    if DIGITS:
        digits = [builder.bitcast(splat(builder, load(builder, factor, I32), WORDS), BYTES) for factor in factors]
        products = [dot(builder, accumulator, *((digit, codes) if signed else (codes, digit)), False) for accumulator,
                    digit in zip(sums, digits, strict=False)]
        return [*products, *sums[len(products) :]]
    four = builder.bitcast(splat(builder, load(builder, factors[0], I64, 2), ir.VectorType(I64, WIDTH // 8)), HALVES)
    if mask != -1:
        four = builder.and_(four, constant(HALVES, mask))
    return [pair_products(builder, accumulator, part, four) for accumulator, part in zip(sums, _wide(builder, codes, signed), strict=True)]


def _total(builder: ir.IRBuilder, sums: list[ir.Value], shift: int) -> ir.Value:
    """A row's two sums as one."""
    if DIGITS:
        return builder.add(builder.shl(sums[0], constant(WORDS, shift)), sums[1])
    index_vectors = [ir.Constant(ir.VectorType(I32, LANES), list(range(first, 2 * LANES, 2))) for first in (0, 1)]
    return builder.add(*(builder.shuffle_vector(*sums, indices) for indices in index_vectors))


def _scale_digits(rows: int, coarse: bool = False):
    @llvm_intrinsic
    def scale_digits(builder, queries, scales, high, low, words, quads):
        """Queries, 16-bit [quads, R, 4], times `scales`, 16-bit [quads, 4]: as digits, bytes of the same shape, and where products read
        them as 16-bit `words`. A low digit of -128, which has no opposite, becomes -127; `coarse` ones are 0."""
        at, _, finish = loop(builder, builder.mul(quads, I64(4 * rows)), WIDTH, [])
        parts = []
        for part in (0, 1):
            offset_bytes, product = scaled_queries(builder, queries, scales, rows, at, part)
            if coarse:
                parts.append(builder.and_(builder.add(product, constant(HALVES, 128)), constant(HALVES, -256)))
            else:
                lowest = builder.icmp_unsigned("==", builder.and_(product, constant(HALVES, 255)), constant(HALVES, 128))
                parts.append(builder.sub(product, builder.sext(lowest, HALVES)))
            if not DIGITS:
                store(builder, parts[part], builder.add(words, offset_bytes))
        store(builder, upper_bytes(builder, *(builder.add(part, constant(HALVES, 128)) for part in parts)), builder.add(high, at))
        store(builder, _lower_bytes(builder, *parts), builder.add(low, at))
        finish([])

    return scale_digits


def _dot_units(rows: int):
    @llvm_intrinsic
    def dot_units(builder, codes, widths, starts, high, low, terms, low_terms, unit, out, groups, rests, ahead, share):
        """Scores of R rows, float32 PAGE apart at `out`, with the codes of K of the tokens of a unit. `widths`: bits of the groups, bytes;
        `starts`: where their codes begin, int32; `high`, `low`: digits of queries, bytes [quads, R, 4], or the same 16-bit numbers; terms
        of both digits as `zero_terms` leaves them. Behind the groups are `rests` of them, REMAINDER_BITS bits each, for the high digits
        alone. KEY_LINES cache lines from `ahead` on, `share` bytes further for every group, are asked for meanwhile."""
        def part_of(at: ir.Value, count: int) -> tuple[ir.Value, list[ir.Value]]:
            start = load(builder, builder.add(starts, builder.shl(at, I64(2))), I32, 4)
            factors_at = [builder.add(address, builder.mul(at, I64(16 * rows * ITEM))) for address in (high, low)[:count]]
            return builder.add(codes, builder.zext(start, I64)), factors_at

        def add(running: list[ir.Value], quad: int, row: int, vector: ir.Value, factors_at: list[ir.Value]) -> None:
            factors = [offset(builder, address, 4 * (quad * rows + row) * ITEM) for address in factors_at]
            running[2 * row : 2 * row + 2] = _products(builder, running[2 * row : 2 * row + 2], vector, factors, False)

        for piece in range(PIECES):
            at, running, finish = loop(builder, groups, 1, [constant(WORDS, 0)] * (2 * rows))
            running, bits = list(running), load(builder, builder.add(widths, at), I8)
            source, factors_at = part_of(at, 2)
            quads = by_width(builder, bits, 8, [constant(BYTES, 0)] * 4, lambda width, source=source, piece=piece: [
                codes_of_keys(builder, source, width, quad, unit, piece) for quad in range(4)])
            for quad in range(4):
                if piece == 0:
                    prefetch_part(builder, builder.add(ahead, builder.mul(at, share)), quad, 4, KEY_LINES, 2)
                for row in range(rows):
                    add(running, quad, row, quads[quad], factors_at)
            running = finish(running)
            before, done = builder.basic_block, builder.append_basic_block("rests.done")
            following = builder.append_basic_block("rests")
            builder.cbranch(builder.icmp_signed(">", rests, I64(0)), following, done)
            builder.position_at_end(following)
            at, finer, finish = loop(builder, rests, 1, running)
            finer, (source, factors_at) = list(finer), part_of(builder.add(at, groups), 1)
            for quad in range(4):
                vector = codes_of_keys(builder, source, REMAINDER_BITS, quad, unit, piece)
                for row in range(rows):
                    add(finer, quad, row, vector, factors_at)
            finer, last_block = finish(finer), builder.basic_block
            builder.branch(done)
            builder.position_at_end(done)
            for index, pair in enumerate(zip(running, finer, strict=True)):
                running[index] = builder.phi(WORDS)
                for value, block in zip(pair, (before, last_block), strict=True):
                    running[index].add_incoming(value, block)
            for row in range(rows):
                word = lambda at, index: splat(builder, load(builder, offset(builder, at, 4 * index), F32, 4), FLOATS)  # noqa: E731
                step = builder.fmul(word(terms, row), constant(FLOATS, 1 / 256))
                more = fma(builder, word(low_terms, rows + row), constant(FLOATS, 1 / 256), word(terms, rows + row))
                total = builder.sitofp(_total(builder, running[2 * row : 2 * row + 2], 8), FLOATS)
                target = offset(builder, builder.add(out, builder.shl(unit, I64(6))), 4 * (PAGE * row + LANES * piece))
                store(builder, fma(builder, total, step, more), target, 4)

    return dot_units


@llvm_intrinsic
def rises(builder, lowest, eighths, out):
    """What tokens' lowest steps, bytes [PAGE], subtracted from their weights' exponents: float32 2^(step / 4)."""
    at, _, finish = loop(builder, I64(PAGE), LANES, [])
    step = builder.zext(load(builder, builder.add(lowest, at), ir.VectorType(I8, LANES)), WORDS)
    eighth = builder.shl(builder.and_(step, constant(WORDS, 3)), constant(WORDS, 1))
    value = builder.fmul(pick(builder, eighths, eighth), power(builder, builder.lshr(step, constant(WORDS, 2))))
    store(builder, value, builder.add(out, builder.shl(at, I64(2))), 4)
    finish([])


def _highest(builder: ir.IRBuilder, rows: Iterable[list[ir.Value]]) -> ir.Value:
    """The largest score of each row, one lane per row; infinity if one is NaN, which `maximum` would skip. Subtracting it yields NaN again,
    as the sum of weights must: integer weights cannot represent it."""
    maxima, higher = [], partial(maximum, builder)
    for scores in rows:
        unknown = [builder.fcmp_unordered("uno", *pair) for pair in zip(scores[::2], scores[1::2], strict=True)]
        maxima.append(builder.select(reduce_vectors(unknown, builder.or_), constant(FLOATS, float("inf")), reduce_vectors(scores, higher)))
    return reduce_lanes(builder, maxima, higher)


def _weigh(rows: int):
    @llvm_intrinsic
    def weigh(builder, scores, low, rise, fractions, out, lower, stride, groups, tops, totals):
        """`softmax_weights.weigh` in 15 bits and from a finer exponential: weights times V's scales [R, PAGE] for every group, `stride`
        bytes apart, as digits at `out` and `lower` or as 16-bit numbers at `out`. `rise` as of `rises`; totals are sums of whole
        numbers."""
        count, kind = PAGE // LANES, ir.VectorType(F32, rows)
        column = lambda base, i: load(builder, offset(builder, base, 4 * LANES * i), FLOATS, 4)  # noqa: E731

        def raised(row: int) -> list[ir.Value]:
            return [builder.fadd(column(offset(builder, scores, 4 * PAGE * row), i), column(low, i)) for i in range(count)]

        maxima, sums = _highest(builder, (raised(row) for row in range(rows))), []
        store(builder, builder.fmul(maxima, constant(kind, LN2)), tops, 4)
        for row in range(rows):
            top = splat(builder, builder.extract_element(maxima, I32(row)), FLOATS)
            total, parts = constant(WORDS, 0), []
            for i, value in enumerate(raised(row)):
                weight = exp2(builder, builder.fsub(value, top))
                parts.append(shorts(builder, builder.fmul(weight, constant(FLOATS, WEIGHT))))
                part = fma(builder, builder.fmul(weight, column(rise, i)), constant(FLOATS, TOTAL), constant(FLOATS, MAGIC))
                total = builder.add(total, builder.sub(builder.bitcast(part, WORDS), constant(WORDS, MAGIC_BITS)))
            sums.append(total)
            both = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(2 * LANES)))
            weights = [builder.shuffle_vector(*pair, both) for pair in zip(parts[::2], parts[1::2], strict=True)]
            first = offset(builder, out, PAGE * ITEM * row)
            _, carried, finish = loop(builder, groups, 1, [fractions, first, offset(builder, lower, PAGE * row)])
            _scaled(builder, weights, *carried)
            finish([offset(builder, carried[0], 2 * PAGE), *(builder.add(value, stride) for value in carried[1:])])
        total = builder.sitofp(reduce_lanes(builder, sums, builder.add), kind)
        nothing = builder.fsub(maxima, maxima)  # NaN if a score is NaN, so that it stays visible
        store(builder, builder.fadd(builder.fmul(total, constant(kind, 1 / TOTAL)), nothing), totals, 4)

    return weigh


def _scaled(builder: ir.IRBuilder, weights: list[ir.Value], fractions: ir.Value, target: ir.Value, lower: ir.Value) -> None:
    """A row's weights times a group's scales, in their places."""
    scaled = []
    for i, weight in enumerate(weights):
        fraction = builder.lshr(load(builder, offset(builder, fractions, WIDTH * i), HALVES), constant(HALVES, 1))
        scaled.append(rounded_high(builder, weight, fraction))
    if not DIGITS:
        for i, value in enumerate(scaled):
            store(builder, value, offset(builder, target, WIDTH * i))
        return
    for i in range(0, len(scaled), 2):
        high = upper_bytes(builder, *(builder.shl(value, constant(HALVES, 1)) for value in scaled[i : i + 2]))
        store(builder, high, offset(builder, target, WIDTH * i // 2))
        low = builder.and_(_lower_bytes(builder, *scaled[i : i + 2]), constant(BYTES, 127))
        store(builder, low, offset(builder, lower, WIDTH * i // 2))


def _zero_sums(builder: ir.IRBuilder, zeros: ir.Value, weights: tuple[ir.Value, ir.Value], rows: int) -> ir.Value:
    """A lane for each row: the sum over tokens of weights times zeros."""
    sums = []
    for row in range(rows):
        accumulators = [constant(WORDS, 0)] * 2
        for at in range(0, PAGE, WIDTH):
            zero = load(builder, offset(builder, zeros, at), BYTES)
            if DIGITS:
                digits = [load(builder, offset(builder, address, PAGE * row + at), BYTES) for address in weights]
                accumulators = [dot(builder, address, digit, zero, False) for address, digit in zip(accumulators, digits, strict=True)]
            else:
                words = [load(builder, offset(builder, weights[0], 2 * (PAGE * row + at) + WIDTH * i), HALVES) for i in (0, 1)]
                accumulators = [pair_products(builder, *address)
                                for address in zip(accumulators, _wide(builder, zero, True), words, strict=True)]
        sums.append(builder.add(builder.shl(accumulators[0], constant(WORDS, 7)) if DIGITS else accumulators[0], accumulators[1]))
    return reduce_lanes(builder, sums, builder.add)


def _dot_values(rows: int):
    @llvm_intrinsic
    def dot_values(builder, codes, bits, multiple, zeros, weights, lower, step: types.float32, out, stride, keep, take, ahead, share):
        """`int8_products.dot_values`, weights [R, PAGE] as digits, or 16-bit numbers at `weights`; `multiple` is the `value_multiple` of
        `bits`, zeros are of `value_zero` here, step what a weight of 1 / VALUE_FULL and a value of 2^-multiple count in."""
        bits, factor = builder.trunc(bits, I8), splat(builder, step, FLOATS)
        up = splat(builder, builder.trunc(multiple, I32), WORDS)
        extra = _zero_sums(builder, zeros, (weights, lower), rows)
        for piece in range(PIECES):
            at, running, finish = loop(builder, I64(PAGE // 32), 1, [constant(WORDS, 0)] * (2 * rows))
            source, running = builder.mul(at, I64(64)), list(running)
            weights_at = [builder.add(address, builder.mul(at, I64(32 * ITEM))) for address in (weights, lower)]
            for first in (0, 4):
                quads = by_width(builder, bits, 8, [constant(BYTES, 0)] * 4, lambda width, source=source, piece=piece, first=first: [
                    builder.sub(codes_of_values(builder, codes, source, width, quad, piece, 0), constant(BYTES, 1 << width - 1))
                    for quad in range(first, first + 4)])
                for i, quad in enumerate(quads):
                    if piece == 0:
                        prefetch_part(builder, builder.add(ahead, builder.mul(at, share)), first + i, 8, VALUE_LINES, 2)
                    for row in range(rows):
                        weight_offset = (PAGE * row + 4 * (first + i)) * ITEM
                        factors = [offset(builder, address, weight_offset) for address in weights_at]
                        running[2 * row : 2 * row + 2] = _products(builder, running[2 * row : 2 * row + 2], quad, factors, True)
            running = finish(running)
            for row in range(rows):
                total = builder.shl(_total(builder, running[2 * row : 2 * row + 2], 7), up)
                total = builder.add(total, splat(builder, builder.extract_element(extra, I32(row)), WORDS))
                where = offset(builder, builder.add(out, builder.mul(stride, I64(row))), WIDTH * piece)
                old, new = (splat(builder, load(builder, offset(builder, address, 4 * row), F32, 4), FLOATS) for address in (keep, take))
                value = builder.fmul(builder.fmul(builder.sitofp(total, FLOATS), factor), new)
                store(builder, builder.fadd(builder.fmul(load(builder, where, FLOATS, 4), old), value), where, 4)

    return dot_values


def _dot_rests(rows: int):
    @llvm_intrinsic
    def dot_rests(builder, codes, weights, step: types.float32, out, stride, take):
        """What a group of V has beyond 8 bits: added to float32 [R, 16] at `out`, rows `stride` bytes apart, `take`, float32 [R], times
        step times the sum over tokens of weights, as of `dot_values` but for their low digits, and codes of REMAINDER_BITS bits from their
        middle, in halves."""
        factor = splat(builder, step, FLOATS)
        for piece in range(PIECES):
            at, running, finish = loop(builder, I64(PAGE // 32), 1, [constant(WORDS, 0)] * (2 * rows))
            source, running = builder.mul(at, I64(64)), list(running)
            weights_at = builder.add(weights, builder.mul(at, I64(32 * ITEM)))
            for quad in range(8):
                vector = codes_of_values(builder, codes, source, REMAINDER_BITS, quad, piece, 1)
                vector = builder.sub(vector, constant(BYTES, (1 << REMAINDER_BITS) - 1))
                for row in range(rows):
                    weight_at = [offset(builder, weights_at, (PAGE * row + 4 * quad) * ITEM)]
                    running[2 * row : 2 * row + 2] = _products(builder, running[2 * row : 2 * row + 2], vector, weight_at, True, -128)
            running = finish(running)
            for row in range(rows):
                total = builder.sitofp(_total(builder, running[2 * row : 2 * row + 2], 7), FLOATS)
                where = offset(builder, builder.add(out, builder.mul(stride, I64(row))), WIDTH * piece)
                new = splat(builder, load(builder, offset(builder, take, 4 * row), F32, 4), FLOATS)
                value = builder.fmul(builder.fmul(total, factor), new)
                store(builder, builder.fadd(load(builder, where, FLOATS, 4), value), where, 4)

    return dot_rests


# As in `int8_products.py`.
scale_digits_4, dot_unit_digits_4, weigh_digits_4, dot_value_digits_4 = _scale_digits(4), _dot_units(4), _weigh(4), _dot_values(4)
scale_digits_8, dot_unit_digits_8, weigh_digits_8, dot_value_digits_8 = _scale_digits(8), _dot_units(8), _weigh(8), _dot_values(8)
scale_coarse_4, dot_rests_4, scale_coarse_8, dot_rests_8 = _scale_digits(4, True), _dot_rests(4), _scale_digits(8, True), _dot_rests(8)
