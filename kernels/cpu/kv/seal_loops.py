"""Inner loops of KV page sealing: the joint search for scale and zero point of 16 groups side by side, as LLVM vectors.

Each lane is a group: 16 channels of K over 32 tokens, or 16 tokens of V over 16 channels, so nothing is summed across lanes. Every
operation is one float32 operation in the order of `quant/kv_grid.py`, none contracted, so codes are the same on every instruction set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from ...kv_layout import MANTISSA_BITS
from ...layout import PAGE
from ...lazy_numba import llvm_intrinsic, types
from ..int8_ir import I8, constant, load, offset, splat, store
from ..intrinsics import F32, I32, I64
from ..ir_loop import Loop
from ..reductions import maximum

LANES = 16
WIDE, WORDS, SMALL = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES), ir.VectorType(I8, LANES)
MAGIC = 1.5 * 2**23  # adding and subtracting it rounds a small float32 to an integer
TINY, FAR, NEARLY = 2.0**-24, 2.0**20, 1 - 2.0**-12
OVERFLOW_FACTOR, BIAS, MANTISSA = 2.0**68, 127, 0x7FFFFF  # 2^60 · OVERFLOW_FACTOR is infinite
# Results of `span`, 16 values each: float32 minimum and maximum of the groups, int32 exponent of the scale that covers them, in eighths.
LOW_AT, HIGH_AT, FIRST_AT, SPAN_NBYTES = 0, 64, 128, 192
# Results of `search`: int32 exponents and zero points. Its table for a bit width: int32 ABOVE, TRIES (number of exponents), ASIDE (zero
# points tried on either side), COARSE (log2 of eighths per exponent step); float32 HALF, MOST, UNIT, PER_UNIT, LEAST_ZERO, MOST_ZERO,
# LEVELS; int32 BEHIND: bits of a code beyond 8.
EXPONENT_AT, ZERO_AT, FOUND_NBYTES = 0, 64, 128
ABOVE, TRIES, ASIDE, COARSE, HALF, MOST, UNIT, PER_UNIT, LEAST_ZERO, MOST_ZERO, LEVELS, BEHIND = range(12)
TABLE_SLOTS = 12
CODES_NBYTES = PAGE * LANES  # of a group; as many bytes after them hold the bits beyond 8


def _loop(builder: ir.IRBuilder, name: str, count: ir.Value, start: Sequence[ir.Value],
          body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]]) -> list[ir.Value]:
    """A loop of `count` >= 1 iterations of `body(index, values)`, which returns the next values; returns the last ones."""
    loop = Loop(builder, count, start, name)
    return loop.end(body(loop.index, loop.values))


def _smaller(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered("<", a, b), a, b)


def _clamped(builder: ir.IRBuilder, value: ir.Value, low: ir.Value, high: ir.Value) -> ir.Value:
    return _smaller(builder, maximum(builder, value, low), high)


def _whole(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    magic = constant(WIDE, MAGIC)
    return builder.fsub(builder.fadd(value, magic), magic)


def _power(builder: ir.IRBuilder, eighths: ir.Value) -> ir.Value:
    """2^(eighths / 8)."""
    fraction, bits = builder.and_(eighths, constant(WORDS, 7)), constant(WORDS, MANTISSA_BITS[0])
    for i, mantissa in enumerate(MANTISSA_BITS[1:], 1):
        bits = builder.select(builder.icmp_signed("==", fraction, constant(WORDS, i)), constant(WORDS, mantissa), bits)
    exponent = builder.shl(builder.ashr(eighths, constant(WORDS, 3)), constant(WORDS, 23))
    return builder.bitcast(builder.add(bits, exponent), WIDE)


@llvm_intrinsic
def span(builder, x, stride, count, levels: types.float32, out) -> types.float32:
    """The ends of 16 groups of `count` float32, `stride` bytes apart, and the smallest scale exponents that cover them with `levels` steps
    -> `SPAN_NBYTES` at `out`. Returns 0, or NaN if a value is not finite or not below 2^60."""
    first = load(builder, x, WIDE, 4)

    def step(index, carried):
        low, high, odd = carried
        value = load(builder, builder.add(x, builder.mul(index, stride)), WIDE, 4)
        nothing = builder.fmul(builder.fmul(value, constant(WIDE, OVERFLOW_FACTOR)), constant(WIDE, 0.0))
        return [_smaller(builder, value, low), maximum(builder, value, high), builder.fadd(odd, nothing)]

    low, high, odd = _loop(builder, "span", count, [first, first, constant(WIDE, 0.0)], step)
    need = builder.fdiv(builder.fsub(high, low), splat(builder, levels, WIDE))
    bits = builder.bitcast(maximum(builder, need, constant(WIDE, TINY)), WORDS)
    exponent = builder.sub(builder.lshr(bits, constant(WORDS, 23)), constant(WORDS, BIAS))
    mantissa = builder.or_(builder.and_(bits, constant(WORDS, MANTISSA)), constant(WORDS, BIAS << 23))
    eighths = builder.shl(exponent, constant(WORDS, 3))
    for bits_of_eighth in MANTISSA_BITS:
        eighths = builder.sub(eighths, builder.sext(builder.icmp_signed(">", mantissa, constant(WORDS, bits_of_eighth)), WORDS))
    for at, value in ((LOW_AT, low), (HIGH_AT, high), (FIRST_AT, eighths)):
        store(builder, value, offset(builder, out, at), 4)
    total = builder.extract_element(odd, I32(0))
    for lane in range(1, LANES):
        total = builder.fadd(total, builder.extract_element(odd, I32(lane)))
    return total


@llvm_intrinsic
def search(builder, x, stride, count, spans, table, minimum, maximum, codes, codes_stride, out):
    """The best exponent, from `minimum` to `maximum`, and zero point of 16 groups of `count` float32, `stride` bytes apart, whose `span` is
    at `spans`, by the table of their bits: the upper 8 bits of codes to `codes`, bytes in rows of 16, `codes_stride` apart, the bits below
    them CODES_NBYTES behind, `FOUND_NBYTES` to `out`."""
    load_constant = lambda index_in_table: load(builder, offset(builder, table, 4 * index_in_table), I32, 4)  # noqa: E731
    real = lambda index_in_table: splat(builder, load(builder, offset(builder, table, 4 * index_in_table), F32, 4), WIDE)  # noqa: E731
    low, high = (load(builder, offset(builder, spans, at), WIDE, 4) for at in (LOW_AT, HIGH_AT))
    middle = builder.fmul(builder.fadd(high, low), constant(WIDE, 0.5))
    minimum, maximum = (splat(builder, builder.trunc(end, I32), WORDS) for end in (minimum, maximum))
    coarse, aside = splat(builder, load_constant(COARSE), WORDS), builder.sext(load_constant(ASIDE), I64)
    half, top, unit, per_unit, least_zero, most_zero = map(real, (HALF, MOST, UNIT, PER_UNIT, LEAST_ZERO, MOST_ZERO))
    nothing = constant(WIDE, 0.0)
    shift_bits = splat(builder, load_constant(BEHIND), WORDS)
    mask = builder.sub(builder.shl(constant(WORDS, 1), shift_bits), constant(WORDS, 1))
    # eighths to exponent steps, rounded up
    last = builder.sub(builder.shl(constant(WORDS, 1), coarse), constant(WORDS, 1))
    first = builder.ashr(builder.add(load(builder, offset(builder, spans, FIRST_AT), WORDS, 4), last), coarse)
    first = builder.add(first, splat(builder, load_constant(ABOVE), WORDS))

    def scales(exponent):
        eighths = builder.shl(exponent, coarse)
        return _power(builder, eighths), _power(builder, builder.sub(constant(WORDS, 0), eighths))

    def away(index, inverse, shift):
        value = load(builder, builder.add(x, builder.mul(index, stride)), WIDE, 4)
        return builder.fsub(builder.fmul(value, inverse), shift)

    def one_exponent(below, carried):
        below = splat(builder, builder.trunc(below, I32), WORDS)
        exponent = builder.sub(first, below)
        exponent = builder.select(builder.icmp_signed("<", exponent, minimum), minimum, exponent)
        exponent = builder.select(builder.icmp_signed(">", exponent, maximum), maximum, exponent)
        scale, inverse = scales(exponent)
        square = builder.fmul(scale, scale)
        centre = builder.fmul(builder.fmul(middle, inverse), per_unit)
        centre = _whole(builder, _clamped(builder, centre, constant(WIDE, -FAR), constant(WIDE, FAR)))

        def one_zero(index_in_table, carried):
            best, best_exponent, best_zero = carried
            moved = builder.sitofp(builder.trunc(builder.sub(index_in_table, aside), I32), F32)
            zero = _clamped(builder, builder.fadd(centre, splat(builder, moved, WIDE)), least_zero, most_zero)
            shift = builder.fsub(builder.fmul(zero, unit), half)

            def one_value(index, carried):
                target_value = away(index, inverse, shift)
                off = builder.fsub(_whole(builder, _clamped(builder, target_value, nothing, top)), target_value)
                return [builder.fadd(carried[0], builder.fmul(off, off))]

            (error,) = _loop(builder, "values", count, [nothing], one_value)
            error = builder.fmul(error, square)
            better = builder.fcmp_ordered("<", error, builder.fmul(best, constant(WIDE, NEARLY)))
            return [builder.select(better, new, old) for new, old in ((error, best), (exponent, best_exponent), (zero, best_zero))]

        return _loop(builder, "zeros", builder.add(builder.shl(aside, I64(1)), I64(1)), carried, one_zero)

    start = [constant(WIDE, float("inf")), first, nothing]
    _, exponent, zero = _loop(builder, "exponents", builder.sext(load_constant(TRIES), I64), start, one_exponent)
    _, inverse = scales(exponent)
    shift = builder.fsub(builder.fmul(zero, unit), half)

    def keep(index, carried):
        code = builder.fptosi(_whole(builder, _clamped(builder, away(index, inverse, shift), nothing, top)), WORDS)
        index_in_table = builder.add(codes, builder.mul(index, codes_stride))
        store(builder, builder.trunc(builder.lshr(code, shift_bits), SMALL), index_in_table)
        store(builder, builder.trunc(builder.and_(code, mask), SMALL), offset(builder, index_in_table, CODES_NBYTES))
        return []

    _loop(builder, "codes", count, [], keep)
    store(builder, exponent, offset(builder, out, EXPONENT_AT), 4)
    store(builder, builder.fptosi(zero, WORDS), offset(builder, out, ZERO_AT), 4)
