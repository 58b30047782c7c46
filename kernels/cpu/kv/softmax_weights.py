"""Softmax weights of packed pages with V's scales multiplied in, as bytes (for `int8_products.py`).

Scores are in units of log 2, so a weight is 2^x. A token's largest V scale (the lowest step among its groups) is added to the exponent. So
the largest product of weight and scale in a row is 1, and a token with a large weight but near-zero values does not cost the others
precision. The scale of each group, relative to that largest one, is a 16-bit fraction.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from llvmlite import ir

from ...layout import PAGE
from ...lazy_numba import llvm_intrinsic
from ..int8_ir import (
    BYTES,
    FLOATS,
    HALVES,
    INSTRUCTION_SET,
    LANES,
    WIDTH,
    WORDS,
    constant,
    fma,
    function,
    load,
    look_up,
    offset,
    splat,
    store,
)
from ..int8_products import pair_products
from ..intrinsics import F32, I32, I64
from ..reductions import maximum, reduce_lanes, reduce_vectors
from .int8_products import upper_bytes
from .unpack_loops import loop
from .unpack_record import EIGHTHS

MAGIC = 1.5 * 2**23  # adding it rounds a float32 to an integer, which is then in the low bits
# A weight 2^x is stored as 65535 * 2^-(u / 256) with u = 2 - 256 x, so that the largest plus dither is below 2^16. Weights below 2^-16 are
# 0.
MIN_EXPONENT, MAX_EXPONENT = 2.0, 4095.0
FULL_WEIGHT = 65535 * 2 ** (-MIN_EXPONENT / 256)
SLOPE, BEND = 44068, 11373  # 2^-x = 1 - x (SLOPE - BEND x) / 2^16 for x from 0 to 1, with an error of at most 0.0023
LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
EXP2 = (1.0, 0.69312419, 0.24024099, 0.05590643, 0.00958285)  # 2^x for x from -1/2 to 1/2, off by at most 3e-6
UP = 600 * LANES // 16  # a scale of 1 among those that weights are multiplied by: a lane's sum stays below 2^31
STEPS_DOWN = tuple(round(65535 * 2 ** (-step / 4)) for step in range(16))
STEPS_UP = tuple(round(UP * 2 ** (step / 4)) for step in range(16))


def tables() -> np.ndarray:
    """Lookup tables of these kernels, passed by address, float32: the eight powers 2^(i / 8), then 16 bits per token with the dither, in
    1/256, added to a page's weights before they are truncated to bytes: neighbors differ widely."""
    dither = [2 * int(f"{token:07b}"[::-1], 2) + 1 for token in range(PAGE)]
    return np.concatenate([EIGHTHS, np.array(dither, np.uint16).view(np.float32)])


def _words(builder: ir.IRBuilder, indices: ir.Value, table: tuple[int, ...]) -> list[ir.Value]:
    """16-bit table[place] for every byte, two vectors of them."""
    low, high = (look_up(builder, _levels([entry >> part & 255 for entry in table]), indices, 4) for part in (0, 8))
    halves = [[i // 2 + WIDTH // 2 * part + WIDTH * (i % 2) for i in range(WIDTH)] for part in (0, 1)]
    return [builder.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, WIDTH), half)) for half in halves]


def _put_words(builder: ir.IRBuilder, words: list[ir.Value], address: ir.Value) -> None:
    for part in (0, 1):
        store(builder, words[part], offset(builder, address, WIDTH * part))


def _levels(levels: list[int]) -> list[ir.Value]:
    """16 bytes in the form `look_up` takes."""
    if INSTRUCTION_SET == "portable":
        return [constant(BYTES, level) for level in levels]
    return [ir.Constant(BYTES, [levels[i % 16] for i in range(WIDTH)])]


@llvm_intrinsic
def lowest_steps(builder, packed, groups, lowest, low, up):
    """From V's scales, bytes [groups, PAGE] with the step in the low four bits: each token's lowest step, as bytes; what it subtracts from
    an exponent of two, float32 [PAGE]; and what it multiplies a weight by, 16-bit [PAGE] in 1 / UP."""
    token, _, finish_tokens = loop(builder, I64(PAGE), WIDTH, [])
    group, (lowest_bytes,), finish = loop(builder, groups, 1, [constant(BYTES, 15)])
    at = builder.add(builder.add(packed, token), builder.mul(group, I64(PAGE)))
    steps = builder.and_(load(builder, at, BYTES), constant(BYTES, 15))
    (lowest_bytes,) = finish([builder.select(builder.icmp_unsigned("<", steps, lowest_bytes), steps, lowest_bytes)])
    store(builder, lowest_bytes, builder.add(lowest, token))
    for piece in range(WIDTH // LANES):
        indices = ir.Constant(ir.VectorType(I32, LANES), list(range(LANES * piece, LANES * (piece + 1))))
        words = builder.zext(builder.shuffle_vector(lowest_bytes, lowest_bytes, indices), WORDS)
        where = builder.shl(builder.add(token, I64(LANES * piece)), I64(2))
        store(builder, builder.fmul(builder.sitofp(words, FLOATS), constant(FLOATS, -0.25)), builder.add(low, where), 4)
    _put_words(builder, _words(builder, lowest_bytes, STEPS_UP), builder.add(up, builder.shl(token, I64(1))))
    finish_tokens([])


@llvm_intrinsic
def value_scales(builder, packed, lowest, up, less, fractions, zeros):
    """One group of V's scales and zeros, bytes [PAGE]: scales as 16-bit fractions of the token's largest (`lowest`: its step); zeros,
    moved up by `up` bits and less `less`, as bytes."""
    up, less = (splat(builder, builder.trunc(value, kind.element), kind) for value, kind in ((up, HALVES), (less, BYTES)))
    at, _, finish = loop(builder, I64(PAGE), WIDTH, [])
    raw = load(builder, builder.add(packed, at), BYTES)
    high = builder.and_(builder.bitcast(builder.lshr(builder.bitcast(raw, HALVES), constant(HALVES, 4)), BYTES), constant(BYTES, 15))
    high = builder.bitcast(builder.shl(builder.bitcast(high, HALVES), up), BYTES)
    store(builder, builder.sub(high, less), builder.add(zeros, at))
    below = builder.sub(builder.and_(raw, constant(BYTES, 15)), load(builder, builder.add(lowest, at), BYTES))
    _put_words(builder, _words(builder, below, STEPS_DOWN), builder.add(fractions, builder.shl(at, I64(1))))
    finish([])


def _upper(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """a * b / 2^16 of unsigned 16-bit numbers."""
    if WIDTH > 16:
        name = "llvm.x86.avx512.pmulhu.w.512" if WIDTH == 64 else "llvm.x86.avx2.pmulhu.w"
        return builder.call(function(builder, HALVES, [HALVES] * 2, name), [a, b])
    wide = ir.VectorType(I32, WIDTH // 2)
    return builder.trunc(builder.lshr(builder.mul(builder.zext(a, wide), builder.zext(b, wide)), constant(wide, 16)), HALVES)


def _weights(builder: ir.IRBuilder, below: list[ir.Value]) -> ir.Value:
    """65535 * 2^-(u / 256) as 16-bit numbers, u whole from 2 to 4095 in the low bits of two vectors of floats."""
    even = ir.Constant(ir.VectorType(I32, WIDTH // 2), list(range(0, WIDTH, 2)))
    u = builder.shuffle_vector(*(builder.bitcast(half, HALVES) for half in below), even)
    x = builder.shl(u, constant(HALVES, 8))
    fall = _upper(builder, x, builder.sub(constant(HALVES, SLOPE), _upper(builder, x, constant(HALVES, BEND))))
    return builder.lshr(builder.sub(constant(HALVES, 65535), fall), builder.lshr(u, constant(HALVES, 8)))


def _weigh(rows: int):
    @llvm_intrinsic
    def weigh(builder, scores, low, up, fractions, tables, out, stride, groups, tops, totals):
        """R rows of PAGE scores, in units of log 2, -infinity where masked (not everywhere): their weights times V's scales as bytes [R,
        PAGE], `groups` of them `stride` bytes apart at `out`; float32 [R] each, what was taken from the exponents, in natural units, and
        the weights' sum. `low` and `up` as of `lowest_steps`, `fractions`: 16-bit [groups, PAGE] of `value_scales`. A row of
        scores that are no numbers has no sum either; a lone one weighs nothing, since looking for it makes all of this 4% slower."""
        count = PAGE // LANES
        kind = ir.VectorType(F32, rows)
        lows = [load(builder, offset(builder, low, 4 * LANES * i), FLOATS, 4) for i in range(count)]

        def raised(row: int) -> list[ir.Value]:
            at = offset(builder, scores, 4 * PAGE * row)
            return [builder.fadd(load(builder, offset(builder, at, 4 * LANES * i), FLOATS, 4), lows[i]) for i in range(count)]

        higher = partial(maximum, builder)
        highest = reduce_lanes(builder, [reduce_vectors(raised(row), higher) for row in range(rows)], higher)
        store(builder, builder.fmul(highest, constant(kind, LN2)), tops, 4)
        sums = []
        for row in range(rows):
            top = splat(builder, builder.extract_element(highest, I32(row)), FLOATS)
            below = []
            for value in raised(row):
                u = fma(builder, builder.fsub(top, value), constant(FLOATS, 256.0), constant(FLOATS, MAGIC + MIN_EXPONENT))
                max_weight = constant(FLOATS, MAGIC + MAX_EXPONENT)
                below.append(builder.select(builder.fcmp_ordered("<", u, max_weight), u, max_weight))
            weights = [_weights(builder, pair) for pair in zip(below[::2], below[1::2], strict=True)]
            total = constant(WORDS, 0)
            for i, value in enumerate(weights):
                half = builder.lshr(value, constant(HALVES, 1))
                total = pair_products(builder, total, half, load(builder, offset(builder, up, WIDTH * i), HALVES))
            sums.append(total)
            at, carried, finish = loop(builder, groups, 1, [fractions, offset(builder, out, PAGE * row)])
            _scaled(builder, weights, tables, *carried)
            finish([offset(builder, carried[0], 2 * PAGE), builder.add(carried[1], stride)])
        total = builder.uitofp(reduce_lanes(builder, sums, builder.add), kind)
        nothing = builder.fsub(highest, highest)  # NaN stays visible
        store(builder, builder.fadd(builder.fmul(total, constant(kind, 2 / (UP * FULL_WEIGHT))), nothing), totals, 4)

    return weigh


def _scaled(builder: ir.IRBuilder, weights: list[ir.Value], tables: ir.Value, fraction: ir.Value, target: ir.Value) -> None:
    """A row's weights times a group's scales, dithered and truncated to bytes."""
    for i in range(0, len(weights), 2):
        scaled = []
        for j in (i, i + 1):
            product = _upper(builder, weights[j], load(builder, offset(builder, fraction, WIDTH * j), HALVES))
            scaled.append(builder.add(product, load(builder, offset(builder, tables, 32 + WIDTH * j), HALVES)))
        store(builder, upper_bytes(builder, *scaled), offset(builder, target, WIDTH * i // 2))


weigh_4, weigh_8 = _weigh(4), _weigh(8)


def exp2(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2^x for floats not above 0; 2^-126 below that."""
    kind, words = x.type, ir.VectorType(I32, x.type.count)
    minimum, magic = constant(kind, -126.0), constant(kind, MAGIC)
    x = builder.select(builder.fcmp_ordered("<", x, minimum), minimum, x)
    moved = builder.fadd(x, magic)
    fraction, value = builder.fsub(x, builder.fsub(moved, magic)), constant(kind, EXP2[-1])
    for factor in EXP2[-2::-1]:
        value = builder.fadd(builder.fmul(value, fraction), constant(kind, factor))
    exponent = builder.shl(builder.bitcast(moved, words), constant(words, 23))
    return builder.bitcast(builder.add(builder.bitcast(value, words), exponent), kind)


@llvm_intrinsic
def fold_sums(builder, m, l, tops, totals, factors, rows):
    """Merge (m, l) into the running ones, float32 [rows] each; at `factors` [2, rows], the factors of the running output and of the new
    one. `rows` is a multiple of four."""
    four = ir.VectorType(F32, 4)
    row, _, finish = loop(builder, builder.shl(rows, I64(2)), 16, [])
    addresses = [builder.add(address, row) for address in (m, l, tops, totals, factors, builder.add(factors, builder.shl(rows, I64(2))))]
    old, total, new, more = (load(builder, address, four, 4) for address in addresses[:4])
    top = maximum(builder, new, old)
    scaled = []
    for address in (old, new):
        scaled.append(exp2(builder, builder.fmul(builder.fsub(address, top), constant(four, LOG2E))))
    store(builder, top, addresses[0], 4)
    store(builder, builder.fadd(builder.fmul(total, scaled[0]), builder.fmul(more, scaled[1])), addresses[1], 4)
    for address, target in zip(scaled, addresses[4:], strict=True):
        store(builder, address, target, 4)
    finish([])
