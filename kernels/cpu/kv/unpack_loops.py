"""Unpacking of packed pages, as LLVM instructions: codes to bytes, bytes to 16-bit numbers, and dot products of those.

Used by prefill, and by everything for K stored unrotated. Codes become bytes with the code in the high bits, then signed 16-bit numbers
`code * a + b`, which include the scale and zero point of the code's channel (of K, for 32 tokens) or token (of V, for 16 channels), as
integers of a common step, at most `MAX_UNPACKED`. Queries are rounded to 16 bits as well, so that sums of products stay below 2^31: exact,
and the same on every instruction set.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from ...kv_layout import GROUP_CHANNELS
from ...layout import PAGE
from ...lazy_numba import llvm_intrinsic, types
from ..int8_ir import (
    BYTES,
    FLOATS,
    I8,
    LANES,
    NEXT_PAGE,
    PIECES,
    WIDTH,
    WORDS,
    constant,
    function,
    load,
    offset,
    prefetch_lines,
    shift_left,
    shift_right,
    splat,
    store,
)
from ..int8_products import pair_products, rounded_high
from ..intrinsics import F32, I16, I32, I64
from ..ir_loop import Loop

SPAN = 32  # tokens that share a scale of K
MAX_UNPACKED = 8191  # limit of an unpacked K or V
MAX_QUERY_SUM = 250_000.0  # limit of the absolute sum of a query row: times MAX_UNPACKED below 2^31
LARGEST = 32767.0
MIN_MAXIMUM = 2.0**-100  # smaller maxima count as zero: their inverse could be infinite
CHAINS = 8  # independent accumulators of a dot product


def loop(builder: ir.IRBuilder, count: ir.Value, step: int, carried: Sequence[ir.Value]):
    """Head of a loop from 0 to `count` (> 0) by `step`: (counter, carried values, finish). `finish(values)` ends the body and returns the
    final values."""
    inner = Loop(builder, count, carried, "loop", step=step)
    return inner.index, inner.values, inner.end


def _spread(width: int, up: int, merge: bool):
    """A plane of `width` bits: its fields, moved up by `up`, into one byte each; `merge` keeps what the bytes hold already."""

    @llvm_intrinsic
    def spread(builder, source, target, run):
        """`run` bytes (a multiple of 64) at source -> 8 / width runs of bytes at target."""
        at, _, finish = loop(builder, run, 64, [])
        raw = [load(builder, offset(builder, builder.add(source, at), WIDTH * piece), BYTES) for piece in range(PIECES)]
        for field in range(8 // width):
            begin = builder.add(builder.add(target, at), builder.mul(run, I64(field)))
            for piece in range(PIECES):
                value = field_at(builder, raw[piece], width * field, width, up)
                where = offset(builder, begin, WIDTH * piece)
                store(builder, builder.or_(value, load(builder, where, BYTES)) if merge else value, where)
        finish([])

    return spread


def field_at(builder: ir.IRBuilder, raw: ir.Value, at: int, width: int, up: int) -> ir.Value:
    """Bits at ... at + width of every byte, shifted to up ... up + width."""
    if up <= at:
        return builder.and_(shift_right(builder, raw, at - up, 8), constant(BYTES, ((1 << width) - 1) << up))
    return shift_left(builder, builder.and_(raw, constant(BYTES, ((1 << width) - 1) << at)), up - at)


# First planes of 4 (or more), 3 and 2, and 1 bits; second planes of 8, 6, 5 and 3.
first_4, first_2, first_1 = _spread(4, 4, False), _spread(2, 6, False), _spread(1, 7, False)
second_8, second_6, second_5, second_3 = _spread(4, 0, True), _spread(2, 2, True), _spread(1, 3, True), _spread(1, 5, True)


SHORTS = ir.VectorType(I16, LANES)
EIGHT = ir.VectorType(I16, WIDTH // 2)  # a vector of 16-bit numbers


def _four(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """Four 16-bit numbers, repeated to fill a vector."""
    single = load(builder, address, I64, 2)
    return builder.bitcast(splat(builder, single, ir.VectorType(I64, WIDTH // 8)), EIGHT)


def _widen(shift_bits: int):
    half = WIDTH // 2

    def part(builder: ir.IRBuilder, address: ir.Value, piece: int) -> ir.Value:
        raw = load(builder, offset(builder, address, half * piece), ir.VectorType(I8, half))
        return builder.shl(builder.zext(raw, EIGHT), constant(EIGHT, 7))

    @llvm_intrinsic
    def widen(builder, codes, a, b, out, nbytes):
        """Bytes at `codes`, in fours that share factors, -> 16-bit numbers at `out`: code * a + b, rounded, the code taken as a fraction of
        256. `a` (of 1/128) and `b` are four 16-bit numbers; `nbytes` is a multiple of 64."""
        factor, shift = _four(builder, a), _four(builder, b)
        at, _, finish = loop(builder, nbytes, 64, [])
        for piece in range(64 // half):
            value = part(builder, builder.add(codes, at), piece)
            if shift_bits:
                low = part(builder, offset(builder, builder.add(codes, at), shift_bits), piece)
                value = builder.or_(value, builder.lshr(low, constant(EIGHT, 8)))
            where = offset(builder, builder.add(out, builder.shl(at, I64(1))), WIDTH * piece)
            store(builder, builder.add(rounded_high(builder, value, factor), shift), where)
        finish([])

    return widen


GROUP_NBYTES = GROUP_CHANNELS * PAGE  # of a group's codes as bytes
# Codes of up to 8 bits, and codes whose further bits are in bytes GROUP_NBYTES later.
widen, widen_both = _widen(0), _widen(GROUP_NBYTES)


@llvm_intrinsic
def dot_keys(builder, opened, x, factor: types.float32, out, quads):
    """SPAN float32 at out: factor * sum over `quads` of opened [SPAN, 4] (of pages of tokens) times x [4]; both 16-bit. `quads` is a
    multiple of four."""
    vectors, stride = SPAN * 4 * 2 // WIDTH, PAGE * 4 * 2
    unrolled = max(1, CHAINS // vectors)
    at, running, finish = loop(builder, quads, unrolled, [constant(WORDS, 0)] * (vectors * unrolled))
    base, x_at = builder.add(opened, builder.mul(at, I64(stride))), builder.add(x, builder.shl(at, I64(3)))
    updated = []
    for step in range(unrolled):
        other = _four(builder, offset(builder, x_at, 8 * step))
        for i in range(vectors):
            vector = load(builder, offset(builder, base, stride * step + WIDTH * i), EIGHT)
            updated.append(pair_products(builder, running[vectors * step + i], vector, other))
    updated = finish(updated)
    sums = updated[:vectors]
    for step in range(1, unrolled):
        sums = [builder.add(one, more) for one, more in zip(sums, updated[vectors * step : vectors * (step + 1)], strict=True)]
    scale = splat(builder, factor, FLOATS)
    for i in range(0, vectors, 2):
        index_vectors = [ir.Constant(ir.VectorType(I32, LANES), list(range(first, 2 * LANES, 2))) for first in (0, 1)]
        both = builder.add(*(builder.shuffle_vector(sums[i], sums[i + 1], indices) for indices in index_vectors))
        store(builder, builder.fmul(builder.sitofp(both, FLOATS), scale), offset(builder, out, 4 * LANES * (i // 2)), 4)


@llvm_intrinsic
def round_row(builder, x, factor: types.float32, out, count):
    """float32 x [count] times a factor as 16-bit numbers. `count` is a multiple of 16."""
    scale = splat(builder, factor, FLOATS)
    at, _, finish = loop(builder, count, LANES, [])
    value = builder.fmul(load(builder, builder.add(x, builder.shl(at, I64(2))), FLOATS, 4), scale)
    store(builder, shorts(builder, value), builder.add(out, builder.shl(at, I64(1))), 2)
    finish([])


def shorts(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Round to the nearest integers below 2^15, as 16-bit numbers."""
    moved = builder.fadd(value, constant(FLOATS, 1.5 * 2**23))
    return builder.trunc(builder.bitcast(moved, WORDS), SHORTS)


def pick(builder: ir.IRBuilder, table: ir.Value, positions: ir.Value) -> ir.Value:
    """table[place] for every lane, from eight floats at an address."""
    if LANES == 4:
        result = constant(FLOATS, 0.0)
        for lane in range(LANES):
            position = builder.zext(builder.extract_element(positions, I32(lane)), I64)
            address = builder.add(table, builder.mul(position, I64(4)))
            result = builder.insert_element(result, load(builder, address, F32, 4), I32(lane))
        return result
    eight = load(builder, table, ir.VectorType(F32, 8), 4)
    if LANES == 8:
        return builder.call(function(builder, FLOATS, [FLOATS, WORDS], "llvm.x86.avx2.permps"), [eight, positions])
    both = builder.shuffle_vector(eight, eight, ir.Constant(ir.VectorType(I32, 16), list(range(16))))
    return builder.call(function(builder, FLOATS, [FLOATS, WORDS], "llvm.x86.avx512.permvar.sf.512"), [both, positions])


def power(builder: ir.IRBuilder, exponent: ir.Value) -> ir.Value:
    """2 ** exponent, for -126 to 127; below, 0."""
    biased = builder.add(exponent, constant(WORDS, 127))
    biased = builder.select(builder.icmp_signed(">", biased, constant(WORDS, 0)), biased, constant(WORDS, 0))
    return builder.bitcast(builder.shl(biased, constant(WORDS, 23)), FLOATS)


def _bytes(builder: ir.IRBuilder, address: ir.Value, signed: bool) -> ir.Value:
    raw = load(builder, address, ir.VectorType(I8, LANES))
    return builder.sext(raw, WORDS) if signed else builder.zext(raw, WORDS)


@llvm_intrinsic
def key_factors(builder, exponents, zeros, eighths, of_channel, products, a, b, count) -> types.float32:
    """Dequantization factors for the codes of `count` channels: `a` and `b` for `widen`; returns the step. e and z are signed bytes,
    `eighths` the eight powers 2^(i / 8), `of_channel` float32 [4, count]: gain, 2^bits, unit of a zero, half; `products` is scratch for
    float32 [2, count].

    With scale = 2^(e / 8) * gain a code means scale * (code + z * unit - half).
    """
    row = builder.shl(count, I64(2))
    at, (top,), finish = loop(builder, count, LANES, [constant(FLOATS, 0.0)])
    factor_offset = builder.shl(at, I64(2))
    gain, _, unit, half = _columns(builder, builder.add(of_channel, factor_offset), row, 4)
    e = _bytes(builder, builder.add(exponents, at), True)
    octave = power(builder, builder.ashr(e, constant(WORDS, 3)))
    scale = builder.fmul(builder.fmul(pick(builder, eighths, builder.and_(e, constant(WORDS, 7))), octave), gain)
    zero = builder.fmul(builder.sitofp(_bytes(builder, builder.add(zeros, at), True), FLOATS), unit)
    store(builder, scale, builder.add(products, factor_offset), 4)
    store(builder, zero, builder.add(builder.add(products, row), factor_offset), 4)
    (top,) = finish([_bound(builder, scale, zero, half, top)])
    step, inverse = _steps(builder, largest(builder, top))
    at, _, finish = loop(builder, count, LANES, [])
    factor_offset = builder.shl(at, I64(2))
    _, count_of, _, half = _columns(builder, builder.add(of_channel, factor_offset), row, 4)
    scale = builder.fmul(load(builder, builder.add(products, factor_offset), FLOATS, 4), inverse)
    shift = builder.fsub(load(builder, builder.add(builder.add(products, row), factor_offset), FLOATS, 4), half)
    _put_factors(builder, scale, shift, count_of, a, b, builder.shl(at, I64(1)))
    finish([])
    return step


@llvm_intrinsic
def value_factors(builder, packed, eighths, top, bits, products, a, b) -> types.float32:
    """`key_factors` for a page of tokens of V: scale = 2^((top - step) / 4), bytes hold step and z + 8; `products`: float32 [2, PAGE]."""
    count = splat(builder, builder.sitofp(builder.shl(I64(1), bits), F32), FLOATS)
    unit = builder.fmul(count, constant(FLOATS, 1 / 32))
    half = builder.fmul(builder.fsub(count, constant(FLOATS, 1.0)), constant(FLOATS, 0.5))
    top = splat(builder, builder.trunc(top, I32), WORDS)
    at, (maximum,), finish = loop(builder, I64(PAGE), LANES, [constant(FLOATS, 0.0)])
    factor_at = builder.add(products, builder.shl(at, I64(2)))
    raw = _bytes(builder, builder.add(packed, at), False)
    quarters = builder.sub(top, builder.and_(raw, constant(WORDS, 15)))
    eighth = builder.shl(builder.and_(quarters, constant(WORDS, 3)), constant(WORDS, 1))
    scale = builder.fmul(pick(builder, eighths, eighth), power(builder, builder.ashr(quarters, constant(WORDS, 2))))
    zero = builder.sitofp(builder.sub(builder.lshr(raw, constant(WORDS, 4)), constant(WORDS, 8)), FLOATS)
    zero = builder.fmul(zero, unit)
    store(builder, scale, factor_at, 4)
    store(builder, zero, offset(builder, factor_at, 4 * PAGE), 4)
    (maximum,) = finish([_bound(builder, scale, zero, half, maximum)])
    step, inverse = _steps(builder, largest(builder, maximum))
    at, _, finish = loop(builder, I64(PAGE), LANES, [])
    factor_at = builder.add(products, builder.shl(at, I64(2)))
    scale = builder.fmul(load(builder, factor_at, FLOATS, 4), inverse)
    shift = builder.fsub(load(builder, offset(builder, factor_at, 4 * PAGE), FLOATS, 4), half)
    _put_factors(builder, scale, shift, count, a, b, builder.shl(at, I64(1)))
    finish([])
    return step


def _columns(builder: ir.IRBuilder, address: ir.Value, row: ir.Value, count: int) -> list[ir.Value]:
    """A vector of each of `count` rows, `row` bytes apart."""
    columns = []
    for _ in range(count):
        columns.append(load(builder, address, FLOATS, 4))
        address = builder.add(address, row)
    return columns


def _bound(builder: ir.IRBuilder, scale: ir.Value, zero: ir.Value, half: ir.Value, top: ir.Value) -> ir.Value:
    """The larger of `top` and the largest magnitude a code with this scale and zero can have."""
    size = builder.call(function(builder, FLOATS, [FLOATS], f"llvm.fabs.v{LANES}f32"), [zero])
    size = builder.fmul(scale, builder.fadd(size, half))
    return builder.select(builder.fcmp_ordered(">", size, top), size, top)


def largest(builder: ir.IRBuilder, sizes: ir.Value) -> ir.Value:
    """The largest lane. Nonnegative floats are ordered like integers, and integers need no NaN handling."""
    maximum_bits = builder.call(function(builder, I32, [WORDS], f"llvm.vector.reduce.umax.v{LANES}i32"), [builder.bitcast(sizes, WORDS)])
    return builder.bitcast(maximum_bits, F32)


def _steps(builder: ir.IRBuilder, maximum: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The step for numbers up to `maximum`, and its inverse in every lane; both 0 if `maximum` is 0."""
    some = builder.fcmp_ordered(">=", maximum, F32(MIN_MAXIMUM))
    step = builder.select(some, builder.fdiv(maximum, F32(MAX_UNPACKED)), F32(0.0))
    return step, splat(builder, builder.select(some, builder.fdiv(F32(MAX_UNPACKED), maximum), F32(0.0)), FLOATS)


def _put_factors(builder: ir.IRBuilder, scale: ir.Value, shift: ir.Value, count: ir.Value, a: ir.Value, b: ir.Value, at: ir.Value) -> None:
    store(builder, shorts(builder, builder.fmul(scale, count)), builder.add(a, at), 2)
    store(builder, shorts(builder, builder.fmul(scale, shift)), builder.add(b, at), 2)


@llvm_intrinsic
def row_factor(builder, x, count) -> types.float32:
    """The factor for float32 x [count] in `round_row`; 0 for zeros, NaN if x holds NaN or infinity."""
    at, (top, total), finish = loop(builder, count, LANES, [constant(FLOATS, 0.0)] * 2)
    value = load(builder, builder.add(x, builder.shl(at, I64(2))), FLOATS, 4)
    size = builder.call(function(builder, FLOATS, [FLOATS], f"llvm.fabs.v{LANES}f32"), [value])
    top, total = finish([builder.select(builder.fcmp_ordered(">", size, top), size, top), builder.fadd(total, size)])
    sum_of_row = builder.call(function(builder, F32, [F32, FLOATS], f"llvm.vector.reduce.fadd.v{LANES}f32"), [F32(0.0), total],
                              fastmath=("reassoc",))
    by_sum, by_top = builder.fdiv(F32(MAX_QUERY_SUM), sum_of_row), builder.fdiv(F32(LARGEST), largest(builder, top))
    smaller = builder.select(builder.fcmp_ordered(">", by_sum, by_top), by_top, by_sum)
    finite = builder.fcmp_ordered("<", sum_of_row, F32(float("inf")))
    return builder.select(finite, builder.select(builder.fcmp_ordered("<", sum_of_row, F32(MIN_MAXIMUM)), F32(0.0), smaller),
                          F32(float("nan")))


@llvm_intrinsic
def prefetch(builder, address, nbytes):
    """Prefetch `nbytes` (> 0) at an address."""
    at, _, finish = loop(builder, nbytes, 64, [])
    prefetch_lines(builder, builder.add(address, at), 64, NEXT_PAGE)
    finish([])
