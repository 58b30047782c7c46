"""Int8 products for attention over packed pages: queries are multiplied by K's scales, and softmax weights by V's.

Codes of few bits are not scaled: each is expanded from its bit plane to a byte in a register and multiplied right away. A K scale belongs
to one channel for 32 tokens, so queries are multiplied by it and rounded to 8 bits (7 and a sign) once per 32 tokens. A V scale belongs to
one token for 16 channels, so softmax weights are multiplied by it. Both are 16-bit multiplications of whole vectors. The queries of a KV
head are stored in tiles of R rows as [quad, R, 4], so that the same vector serves scaling and the sums that correct for K's zero points.

Sums of bytes are exact and the same on every instruction set. Rounded weights are dithered: rounding errors must not accumulate on pages
with one large weight and many small ones.
"""

from __future__ import annotations

from llvmlite import ir

from ...kv_layout import PLANES, WIDTHS
from ...layout import PAGE
from ...lazy_numba import llvm_intrinsic, types
from ...target import target
from ..int8_ir import (
    BYTES,
    FLOATS,
    HALVES,
    I8,
    INSTRUCTION_SET,
    LANES,
    NEXT_PAGE,
    OFFSET_WHEN_WIDE,
    PIECES,
    WIDTH,
    WORDS,
    constant,
    fma,
    load,
    offset,
    opaque_address,
    prefetch_lines,
    shift_left,
    splat,
    store,
)
from ..int8_products import dot, dots, rounded_high
from ..intrinsics import F32, I16, I32, I64
from .unpack_loops import MIN_MAXIMUM, field_at, largest, loop, pick, shorts

UNIT_TOKENS = 16  # tokens whose codes of a quad of channels fill 64 bytes
MAX_K_BITS, MAX_V_BITS = 6, 5  # bits of codes that may be multiplied as bytes
LINES = 5  # cache lines prefetched per group of K, or per 32 tokens of a group of V
MAX_SCALED_QUERY = 32512  # 127 * 256: limit of a scaled query before it is rounded to a byte
KEY_STEP = 256 * 32768 / (MAX_SCALED_QUERY * 32767)  # unit of scores of a query of 1 in bytes
UNITS_AT_ONCE = 2 if WIDTH == 64 else 1  # in products with K
VECTORS = UNITS_AT_ONCE * PIECES
# Broadcasting a value for two vectors costs an instruction; reading it as an operand of each costs none. Zen 5 multiplies as often as it
# loads, so there the loads are the bottleneck.
READ_ONCE = WIDTH == 64 and target()[0] == "znver5"
# Quads whose products are summed in 16 bits; codes of four quads do not fit into the registers.
PAIRED = 2 if INSTRUCTION_SET == "avx2" else 1


def zero_factors(bits: int) -> tuple[int, int]:
    """What `zero_terms` multiplies a group's two sums by, in 1/64 of a code: zero * 2^bits - 32 (2^bits - 1) for every channel."""
    width = 1 << bits
    return width, 32 * (width - 1) + (0 if OFFSET_WHEN_WIDE else 128 * width)


def value_multiple(bits: int) -> int:
    """How many bits V's codes are shifted up, so that zero points and the middle of the code range are integers."""
    return max(1, 5 - bits)


def value_zero(bits: int) -> tuple[int, int]:
    """How many bits a zero + 8 of V is shifted up, and what is then subtracted, to match codes of `value_multiple`."""
    up = max(0, bits - 4)
    return up, (8 << up) + (((1 << bits) - 1) << value_multiple(bits)) // 2


@llvm_intrinsic
def key_scales(builder, exponents, tops, eighths, room, out, count) -> types.float32:
    """Scales of K of `count` channels times the channels' largest queries, as 16-bit fractions of the largest such product, which is
    returned. `room`: scratch, float32 [count]."""
    at, (top,), finish = loop(builder, count, LANES, [constant(FLOATS, 0.0)])
    scale_offset = builder.shl(at, I64(2))
    e = builder.sext(load(builder, builder.add(exponents, at), ir.VectorType(I8, LANES)), WORDS)
    mantissa = builder.bitcast(pick(builder, eighths, builder.and_(e, constant(WORDS, 7))), WORDS)
    power = builder.and_(builder.shl(e, constant(WORDS, 20)), constant(WORDS, -(1 << 23)))
    scale = builder.bitcast(builder.add(mantissa, power), FLOATS)
    product = builder.fmul(scale, load(builder, builder.add(tops, scale_offset), FLOATS, 4))
    store(builder, product, builder.add(room, scale_offset), 4)
    (top,) = finish([builder.select(builder.fcmp_ordered(">", product, top), product, top)])
    maximum = largest(builder, top)
    some = builder.fcmp_ordered(">=", maximum, F32(MIN_MAXIMUM))
    inverse = splat(builder, builder.select(some, builder.fdiv(F32(32767.0), maximum), F32(0.0)), FLOATS)
    at, _, finish = loop(builder, count, LANES, [])
    product = load(builder, builder.add(room, builder.shl(at, I64(2))), FLOATS, 4)
    store(builder, shorts(builder, builder.fmul(product, inverse)), builder.add(out, builder.shl(at, I64(1))), 2)
    finish([])
    return builder.select(some, maximum, F32(0.0))


def repeated(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, lanes: int, rows: int) -> ir.Value:
    """A vector of `lanes` numbers: each number at an address, `rows` times."""
    if lanes <= rows:
        return splat(builder, load(builder, address, kind), ir.VectorType(kind, lanes))
    values = load(builder, address, ir.VectorType(kind, lanes // rows))
    return builder.shuffle_vector(values, values, ir.Constant(ir.VectorType(I32, lanes), [i // rows for i in range(lanes)]))


def upper_bytes(builder: ir.IRBuilder, low: ir.Value, high: ir.Value) -> ir.Value:
    """The high byte of every 16-bit number of two vectors."""
    indices = ir.Constant(ir.VectorType(I32, WIDTH), list(range(1, 2 * WIDTH, 2)))
    return builder.shuffle_vector(builder.bitcast(low, BYTES), builder.bitcast(high, BYTES), indices)


def scaled_queries(builder: ir.IRBuilder, queries: ir.Value, scales: ir.Value, rows: int, at: ir.Value,
                   part: int) -> tuple[ir.Value, ir.Value]:
    """Of 16-bit queries [quads, R, 4] the half `part` of the 2 * WIDTH bytes that begin at twice `at`: how far from the first query it
    lies, and its products with `scales`, 16-bit [quads, 4]."""
    query_offset = offset(builder, builder.shl(at, I64(1)), WIDTH * part)
    query = load(builder, builder.add(queries, query_offset), HALVES)
    four = builder.shl(builder.udiv(query_offset, I64(8 * rows)), I64(3))  # size of a quad of queries
    factor = builder.bitcast(repeated(builder, builder.add(scales, four), I64, WIDTH // 8, rows), HALVES)
    return query_offset, rounded_high(builder, query, factor)


def _scale_rows(rows: int):
    @llvm_intrinsic
    def scale_rows(builder, queries, scales, out, quads):
        """Queries, 16-bit [quads, R, 4], times `scales`, 16-bit [quads, 4]: as bytes of the same shape."""
        at, _, finish = loop(builder, builder.mul(quads, I64(4 * rows)), WIDTH, [])
        parts = []
        for part in (0, 1):
            _, product = scaled_queries(builder, queries, scales, rows, at, part)
            parts.append(builder.add(product, constant(HALVES, 128)))
        store(builder, upper_bytes(builder, *parts), builder.add(out, at))
        finish([])

    return scale_rows


def _zero_terms(rows: int):
    @llvm_intrinsic
    def zero_terms(builder, queries, zeros, factors, row_steps, bound: types.float32, out, groups):
        """What a score is beside the products with codes: at `out` float32 [2, R], the step of the products and what is added.
        `queries`: bytes [quads, R, 4]; `zeros` of the channels; `factors`: int32 [groups, 2] of `zero_factors`; `row_steps`: float32 [R],
        times `bound` the step."""
        at, (total,), finish = loop(builder, groups, 1, [constant(WORDS, 0)])
        queries_at = builder.add(queries, builder.mul(at, I64(16 * rows)))
        zero_at, factor_at = builder.add(zeros, builder.shl(at, I64(4))), builder.add(factors, builder.shl(at, I64(3)))
        times_zero, alone = constant(WORDS, 0), constant(WORDS, 0)
        for vector in range(4 * rows // LANES):
            x = load(builder, offset(builder, queries_at, WIDTH * vector), BYTES)
            z = repeated(builder, offset(builder, zero_at, 4 * (vector * LANES // rows)), I32, LANES, rows)
            z = builder.bitcast(builder.xor(z, constant(WORDS, 0x80808080 - (1 << 32))), BYTES)
            times_zero = dot(builder, times_zero, z, x, True)
            alone = dot(builder, alone, constant(BYTES, 1), x, False)
        first = splat(builder, load(builder, factor_at, I32, 4), WORDS)
        second = splat(builder, load(builder, offset(builder, factor_at, 4), I32, 4), WORDS)
        part = builder.sub(builder.mul(times_zero, first), builder.mul(alone, second))
        (total,) = finish([builder.add(total, part)])
        while total.type.count > rows:
            half = total.type.count // 2
            ends = [ir.Constant(ir.VectorType(I32, half), list(range(begin, begin + half))) for begin in (0, half)]
            total = builder.add(*(builder.shuffle_vector(total, total, indices) for indices in ends))
        kind = ir.VectorType(F32, total.type.count)
        for piece in range(rows // total.type.count):
            term_offset = 4 * total.type.count * piece
            step = builder.fmul(load(builder, offset(builder, row_steps, term_offset), kind, 4), splat(builder, bound, kind))
            store(builder, step, offset(builder, out, term_offset), 4)
            added = builder.fmul(builder.fmul(builder.sitofp(total, kind), constant(kind, 1 / 64)), step)
            store(builder, added, offset(builder, out, 4 * rows + term_offset), 4)

    return zero_terms


def _plane(builder: ir.IRBuilder, base: ir.Value, width: int, quad: int, unit: ir.Value, piece: int) -> ir.Value:
    """One vector of fields of K: a plane's bits of a quad of channels, for the tokens of a unit."""
    field, within = builder.udiv(unit, I64(width)), builder.urem(unit, I64(width))
    at = offset(builder, builder.add(base, builder.shl(within, I64(6))), 64 * width * quad + WIDTH * piece)
    raw = builder.bitcast(load(builder, at, BYTES), HALVES)
    bits = splat(builder, builder.trunc(builder.mul(field, I64(width)), I16), HALVES)
    return builder.and_(builder.bitcast(builder.lshr(raw, bits), BYTES), constant(BYTES, (1 << width) - 1))


def by_width(builder: ir.IRBuilder, bits: ir.Value, max_width: int, carried: list[ir.Value], body) -> list[ir.Value]:
    """Dispatch on a group's bit width: the result of body(width) for whichever width it has. Other widths leave `carried` unchanged."""
    done, before = builder.append_basic_block("width.done"), builder.basic_block
    choice = builder.switch(bits, done)
    ends = []
    for width in [width for width in WIDTHS if width <= max_width]:
        block = builder.append_basic_block(f"width.{width}")
        choice.add_case(I8(width), block)
        builder.position_at_end(block)
        function = body(width)
        ends.append((builder.basic_block, function))
        builder.branch(done)
    builder.position_at_end(done)
    merged = []
    for index, value in enumerate(carried):
        phi = builder.phi(value.type)
        phi.add_incoming(value, before)
        for block, function in ends:
            phi.add_incoming(function[index], block)
        merged.append(phi)
    return merged


def prefetch_part(builder: ir.IRBuilder, address: ir.Value, part: int, parts: int, lines: int = LINES, nearness: int = NEXT_PAGE) -> None:
    """Prefetch one of `parts` shares of some cache lines: all at once would delay the loads needed now."""
    first, last = (lines * index // parts for index in (part, part + 1))
    prefetch_lines(builder, offset(builder, address, 64 * first), 64 * (last - first), nearness)


def _dot_units(rows: int):
    order = [(v, row) for v in range(VECTORS) for row in range(rows)]
    if READ_ONCE:  # both vectors of a row one after the other
        order.sort(key=lambda each: each[1])

    @llvm_intrinsic
    def dot_units(builder, codes, widths, queries, terms, unit, out, groups, ahead, share):
        """Scores of R rows, float32 PAGE apart at `out`, with the codes of K of UNITS_AT_ONCE units of tokens from `unit` on. `widths`:
        bits of the groups, bytes; `queries`: bytes [quads, R, 4]; `terms` as `zero_terms` leaves them.
        LINES cache lines from `ahead` on, `share` bytes further for every group, are asked for meanwhile."""
        at, carried, finish = loop(builder, groups, 1, [codes, *[constant(WORDS, 0)] * (rows * VECTORS)])
        source, running = carried[0], carried[1:]
        bits = load(builder, builder.add(widths, at), I8)
        queries_at = builder.add(queries, builder.mul(at, I64(16 * rows)))
        prefetch_at = builder.add(ahead, builder.mul(at, share))

        def products(width: int) -> list[ir.Value]:
            sums = list(running)
            for first in range(0, 4, PAIRED):
                quads, vectors = range(first, first + PAIRED), []
                for quad in quads:
                    prefetch_part(builder, prefetch_at, quad, 4)
                    vectors.append([codes_of_keys(builder, source, width, quad, offset(builder, unit, v // PIECES), v % PIECES)
                                    for v in range(VECTORS)])
                addresses = [opaque_address(builder, queries_at) if WIDTH == 64 and not READ_ONCE else queries_at for _ in range(VECTORS)]
                for v, row in order:
                    x = [load(builder, offset(builder, addresses[v], 4 * (quad * rows + row)), I32, 4) for quad in quads]
                    x = [builder.bitcast(splat(builder, each, WORDS), BYTES) for each in x]
                    index, largest = VECTORS * row + v, 127 * ((1 << width) - 1)
                    sums[index] = dots(builder, sums[index], [each[v] for each in vectors], x, largest)
            return sums

        running = by_width(builder, bits, MAX_K_BITS, running, products)
        following = builder.add(source, builder.shl(builder.zext(bits, I64), I64(8)))
        _, *running = finish([following, *running])
        target = builder.add(out, builder.shl(unit, I64(6)))
        for row in range(rows):
            step = splat(builder, load(builder, offset(builder, terms, 4 * row), F32, 4), FLOATS)
            more = splat(builder, load(builder, offset(builder, terms, 4 * (rows + row)), F32, 4), FLOATS)
            for v in range(VECTORS):
                score = fma(builder, builder.sitofp(running[VECTORS * row + v], FLOATS), step, more)
                store(builder, score, offset(builder, target, 4 * (PAGE * row + LANES * v)), 4)

    return dot_units


def codes_of_keys(builder: ir.IRBuilder, source: ir.Value, width: int, quad: int, unit: ir.Value, piece: int) -> ir.Value:
    """Codes of K of one quad and unit, a byte each."""
    code, base = None, source
    for plane in PLANES[width]:
        part = _plane(builder, base, plane, quad, unit, piece)
        code = part if code is None else builder.or_(shift_left(builder, code, plane), part)
        base = offset(builder, base, 256 * plane)
    return code


def _dot_values(rows: int):
    # sums of a row in parallel: a product has a latency of several cycles, the addition of a pair one
    chains = 2 if rows < 8 and PAIRED == 1 else 1

    @llvm_intrinsic
    def dot_values(builder, codes, bits, zeros, weights, step: types.float32, out, stride, keep, take, ahead, share):
        """float32 [R, 16] at `out`, rows `stride` bytes apart, times `keep`, plus `take`, both float32 [R], times step times the sum over
        tokens of weights, bytes [R, PAGE], and a group of values: codes of `bits` moved up by `value_multiple`, and `zeros`, a byte for
        every token. LINES cache lines from `ahead` on, `share` bytes further for every 32 tokens, are asked for meanwhile."""
        count = rows * PIECES

        def products(width: int) -> list[ir.Value]:
            at, running, finish = loop(builder, I64(PAGE // 32), 1, [constant(WORDS, 0)] * (count * chains))
            prefetch_at = builder.add(ahead, builder.mul(at, share))
            source, zero_at = builder.mul(at, I64(64)), builder.add(zeros, builder.shl(at, I64(5)))
            weight_at, accumulators = builder.add(weights, builder.shl(at, I64(5))), list(running)
            for first_quad in range(0, 8, PAIRED):
                quads, values = range(first_quad, first_quad + PAIRED), []
                for quad in quads:
                    prefetch_part(builder, prefetch_at, quad, 8)
                    zero = load(builder, offset(builder, zero_at, 4 * quad), I32)
                    zero = builder.bitcast(splat(builder, zero, WORDS), BYTES)
                    values.append([builder.add(codes_of_values(builder, codes, source, width, quad, piece, value_multiple(width)), zero)
                                   for piece in range(PIECES)])
                for row in range(rows):
                    x = [load(builder, offset(builder, weight_at, PAGE * row + 4 * quad), I32) for quad in quads]
                    x = [builder.bitcast(splat(builder, vector, WORDS), BYTES) for vector in x]
                    for piece in range(PIECES):
                        target = (first_quad % chains) * count + PIECES * row + piece
                        accumulators[target] = dots(builder, accumulators[target], x, [vector[piece] for vector in values],
                                                    255 * value_zero(width)[1],
                                                    above=True)
            accumulators = finish(accumulators)
            return [builder.add(*(accumulators[chain * count + i] for chain in range(chains))) if chains > 1 else accumulators[i]
                    for i in range(count)]

        sums = by_width(builder, builder.trunc(bits, I8), MAX_V_BITS, [constant(WORDS, 0)] * count, products)
        factor = splat(builder, step, FLOATS)
        for row in range(rows):
            target = builder.add(out, builder.mul(stride, I64(row)))
            old, new = (splat(builder, load(builder, offset(builder, vector, 4 * row), F32, 4), FLOATS) for vector in (keep, take))
            for piece in range(PIECES):
                where = offset(builder, target, WIDTH * piece)
                value = builder.fmul(builder.sitofp(sums[PIECES * row + piece], FLOATS), factor)
                value = builder.fadd(builder.fmul(load(builder, where, FLOATS, 4), old), builder.fmul(value, new))
                store(builder, value, where, 4)

    return dot_values


def codes_of_values(builder: ir.IRBuilder, codes: ir.Value, chunk: ir.Value, width: int, quad: int, piece: int, up: int) -> ir.Value:
    """Codes of V of one quad of a chunk of eight, moved up by so many bits."""
    planes, base, left, code = PLANES[width], codes, width, None
    for plane in planes:
        left -= plane
        unit, field = divmod(quad, 8 // plane)
        at = offset(builder, builder.add(base, builder.mul(chunk, I64(plane))), 64 * unit + WIDTH * piece)
        part = field_at(builder, load(builder, at, BYTES), plane * field, plane, left + up)
        code = part if code is None else builder.or_(code, part)
        base = offset(builder, base, 256 * plane)
    return code


# For KV heads with many query heads, and for all others; vectors of less than 64 bytes have no eight-row tiles.
scale_4, zeros_4, dot_units_4, dot_values_4 = _scale_rows(4), _zero_terms(4), _dot_units(4), _dot_values(4)
scale_8, zeros_8, dot_units_8, dot_values_8 = _scale_rows(8), _zero_terms(8), _dot_units(8), _dot_values(8)
