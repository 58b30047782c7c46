"""Products of bytes and of 16-bit numbers as LLVM instructions: the four-way dot product, or its emulation.

Integer results are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable

from llvmlite import ir

from ..tiles import LEVEL_SHIFT, TABLE_LEVEL_SHIFT
from .int8_ir import (
    BYTES,
    HALVES,
    I1,
    INSTRUCTION_SET,
    LANES,
    NEON,
    OFFSET_WHEN_WIDE,
    WIDTH,
    WORDS,
    arm,
    constant,
    fma,
    function,
    to_floats,
)
from .intrinsics import I16, I32

SIGNED_SHIFT = 32  # offset of the codes of signed super-blocks
TABLE_SHIFT = 0 if OFFSET_WHEN_WIDE else TABLE_LEVEL_SHIFT  # offset of a table's levels
# Yields a value at the end; pauses where instructions of another such generator may be interleaved.
Emitting = Generator[None, None, ir.Value]


def dot(builder: ir.IRBuilder, sums: ir.Value, weights: ir.Value, x: ir.Value, wide: bool) -> ir.Value:
    """sums[i32 per row] + the four products of each row: unsigned bytes times signed bytes.

    `wide`: weights above 127 occur; where `OFFSET_WHEN_WIDE` applies, weights are then taken 128 lower.
    """
    if INSTRUCTION_SET in ("avx512", "avx2vnni"):
        dp = function(builder, WORDS, [WORDS] * 3, f"llvm.x86.avx512.vpdpbusd.{8 * WIDTH}")
        return builder.call(dp, [sums, builder.bitcast(weights, WORDS), builder.bitcast(x, WORDS)])
    if wide and INSTRUCTION_SET == "avx2":  # sums of two products would overflow 16 bits: signed weights, as magnitude and sign of x
        weights = builder.xor(weights, constant(BYTES, 128))
        x = builder.call(function(builder, BYTES, [BYTES] * 2, "llvm.x86.avx2.psign.b"), [x, weights])
        weights = builder.call(function(builder, BYTES, [BYTES, I1], f"llvm.abs.v{WIDTH}i8"), [weights, I1(0)])
    if INSTRUCTION_SET == "avx2":
        pairs = builder.call(function(builder, HALVES, [BYTES] * 2, "llvm.x86.avx2.pmadd.ub.sw"), [weights, x])
        fours = builder.call(function(builder, WORDS, [HALVES] * 2, "llvm.x86.avx2.pmadd.wd"), [pairs, constant(HALVES, 1)])
        return builder.add(sums, fours)
    if NEON:
        return _signed_dot(builder, sums, builder.xor(weights, constant(BYTES, 128)) if wide else weights, x)
    halves, words = ir.VectorType(I16, WIDTH), ir.VectorType(I32, WIDTH)
    products = builder.sext(builder.mul(builder.zext(weights, halves), builder.sext(x, halves)), words)
    for i in range(4):
        lanes = ir.Constant(ir.VectorType(I32, LANES), list(range(i, WIDTH, 4)))
        sums = builder.add(sums, builder.shuffle_vector(products, products, lanes))
    return sums


def _signed_dot(builder: ir.IRBuilder, sums: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """sums + the four products of signed bytes of each row, on ARM. Two products fit 16 bits: one side is never -128."""
    if INSTRUCTION_SET == "neondot":
        return arm(builder, "sdot.v4i32.v16i8", WORDS, sums, a, b)
    pairs = _pair_sums(builder, a, b)
    return builder.add(sums, arm(builder, "saddlp.v4i32.v8i16", WORDS, pairs))


def _pair_sums(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Products of adjacent pairs of signed bytes, or of 16-bit numbers, summed into a number of twice the width, on ARM."""
    count, element = a.type.count, ir.IntType(2 * a.type.element.width)
    half, products = ir.VectorType(element, count // 2), []
    for part in (0, 1):
        indices = ir.Constant(ir.VectorType(I32, count // 2), [count // 2 * part + i for i in range(count // 2)])
        products.append(builder.mul(*(builder.sext(builder.shuffle_vector(vector, vector, indices), half) for vector in (a, b))))
    return arm(builder, f"addp.v{count // 2}i{element.width}", half, *products)


def pair_products(builder: ir.IRBuilder, sums: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """sums[i32 per row] + the two products of each row: signed 16-bit numbers."""
    if INSTRUCTION_SET in ("avx512", "avx2vnni"):
        two = function(builder, WORDS, [WORDS] * 3, f"llvm.x86.avx512.vpdpwssd.{8 * WIDTH}")
        return builder.call(two, [sums, builder.bitcast(a, WORDS), builder.bitcast(b, WORDS)])
    a, b = builder.bitcast(a, HALVES), builder.bitcast(b, HALVES)
    if INSTRUCTION_SET == "avx2":
        return builder.add(sums, builder.call(function(builder, WORDS, [HALVES] * 2, "llvm.x86.avx2.pmadd.wd"), [a, b]))
    if NEON:
        return builder.add(sums, _pair_sums(builder, a, b))
    half = constant(WORDS, 16)
    for part in (lambda factor: builder.ashr(builder.shl(factor, half), half), lambda factor: builder.ashr(factor, half)):
        sums = builder.add(sums, builder.mul(*(part(builder.bitcast(factor, WORDS)) for factor in (a, b))))
    return sums


def rounded_high(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """(a * b + 2**14) >> 15 of HALVES, which are not both -2**15."""
    if NEON:
        return arm(builder, "sqrdmulh.v8i16", HALVES, a, b)
    if WIDTH > 16:
        name = "llvm.x86.avx512.pmul.hr.sw.512" if WIDTH == 64 else "llvm.x86.avx2.pmul.hr.sw"
        return builder.call(function(builder, HALVES, [HALVES] * 2, name), [a, b])
    wide = ir.VectorType(I32, WIDTH // 2)
    product = builder.add(builder.mul(builder.sext(a, wide), builder.sext(b, wide)), constant(wide, 1 << 14))
    return builder.trunc(builder.ashr(product, constant(wide, 15)), HALVES)


def dots(builder: ir.IRBuilder, sums: ir.Value, weights: list[ir.Value], x: list[ir.Value], largest: int,
         above: bool = False) -> ir.Value:
    """`dot` of several quads in sequence, whose single products are at most `largest` (at most half of 2**15). `above`: weights above 127
    occur, and are to be multiplied as such."""
    if INSTRUCTION_SET == "avx2":
        return builder.add(sums, pairs_of(builder, weights, x, largest, constant(HALVES, 1)))
    for quad, inputs in zip(weights, x, strict=True):
        sums = dot(builder, sums, quad, inputs, above)
        if above and OFFSET_WHEN_WIDE:  # an offset of 128 times the activations, common to all rows
            alone = dot(builder, constant(WORDS, 0), constant(BYTES, 1), inputs, False)
            sums = builder.add(sums, builder.shl(alone, constant(WORDS, 7)))
    return sums


def pairs_of(builder: ir.IRBuilder, quads: list[ir.Value], x: list[ir.Value], largest: int, steps: ir.Value) -> ir.Value:
    """The two AVX2 instructions per quad, where the second also multiplies by `steps`: one of those for as many quads as have pair sums
    fitting 16 bits, given the largest product `largest`."""
    pair_up = function(builder, HALVES, [BYTES] * 2, "llvm.x86.avx2.pmadd.ub.sw")
    scale_up = function(builder, WORDS, [HALVES] * 2, "llvm.x86.avx2.pmadd.wd")
    per, total = 32767 // (2 * largest), None
    for start in range(0, len(quads), per):
        pairs = None
        for quad, inputs in zip(quads[start : start + per], x[start : start + per]):
            products = builder.call(pair_up, [quad, inputs])
            pairs = products if pairs is None else builder.add(pairs, products)
        part = builder.call(scale_up, [pairs, steps])
        total = part if total is None else builder.add(total, part)
    return total


def _signed_pairs(builder: ir.IRBuilder, quads: list[ir.Value], x: list[ir.Value], steps: ir.Value) -> ir.Value:
    """`pairs_of` quads of signed bytes on AVX2, as their magnitudes and the signs of x."""
    sign = function(builder, BYTES, [BYTES] * 2, "llvm.x86.avx2.psign.b")
    size = function(builder, BYTES, [BYTES, I1], f"llvm.abs.v{WIDTH}i8")
    signed = [builder.call(sign, [inputs, quad]) for inputs, quad in zip(x, quads, strict=True)]
    return pairs_of(builder, [builder.call(size, [quad, I1(0)]) for quad in quads], signed, 127 * 127, steps)


def side_by_side(emitting: Iterable[Emitting]) -> list[ir.Value]:
    """Interleaves the instructions of several emitters. A chain of dot products has a latency of five cycles per link, and the processor
    looks only some hundred instructions ahead: consecutive chains run at four fifths of the rate of interleaved ones. Sixteen registers
    have no room for that; there they are emitted one after the other."""
    batches = [list(emitting)] if INSTRUCTION_SET == "avx512" else [[generator] for generator in emitting]
    results = []
    for batch in batches:
        waiting, done = dict(enumerate(batch)), {}
        while waiting:
            for index, generator in list(waiting.items()):
                try:
                    next(generator)
                except StopIteration as end:
                    done[index] = end.value
                    del waiting[index]
        results += [done[index] for index in range(len(batch))]
    return results


def sum_quads(builder: ir.IRBuilder, quads: list[ir.Value], x: list[ir.Value], max_weight: int, steps: ir.Value | None = None) -> Emitting:
    """The products of several quads, summed per row, as floats; codes are up to `max_weight` (above 127: see `dot`). Multiplied by `steps`,
    in their form, if given; still an integer below 2**24.

    Without a four-way dot product, pair sums are accumulated in 16 bits for as many quads as fit, and one instruction widens all of them to
    32 bits while multiplying by the step.
    """
    if INSTRUCTION_SET == "avx2" and max_weight <= 127:
        return to_floats(builder, pairs_of(builder, quads, x, 127 * max_weight, constant(HALVES, 1) if steps is None else steps))
    # two chains: a dot product has a latency of several cycles
    parts = [constant(WORDS, 0)] * 2
    for j, (quad, inputs) in enumerate(zip(quads, x)):
        which = 2 * j // len(quads) if len(quads) > 4 else 0
        parts[which] = dot(builder, parts[which], quad, inputs, max_weight > 127)
        yield
    total = to_floats(builder, builder.add(*parts))
    return total if steps is None else builder.fmul(total, steps)


def codebook_sum(builder: ir.IRBuilder, quads: list[ir.Value], x: list[ir.Value], seeds: list[ir.Value],
                 steps: tuple[ir.Value, ir.Value], above: int = LEVEL_SHIFT) -> Emitting:
    """The sum over a tile's two groups of step * (levels . x), as floats, exact except for one rounding; `quads` hold levels offset by
    `above`: 64, or 32 for numbers up to 63, or TABLE_SHIFT for 8-bit levels, none where signed bytes are multiplied.

    A group's product with its step is below 2**24, so it is exact in float, and a fused multiply-add rounds the sum of two once, as
    converting from 32 bits would: three instructions instead of two 32-bit multiplications (two micro-operations each) and three more.
    Without a four-way dot product, the instruction that sums pairs multiplies by the step at no cost. `seeds`, from `seed_of`, undo the
    offset.
    """
    if INSTRUCTION_SET != "avx2":
        if above == 0:
            seeds = [constant(WORDS, 0)] * 2
        elif above != LEVEL_SHIFT:
            moved = builder.ashr if above == SIGNED_SHIFT else builder.shl
            seeds = [moved(seed, constant(WORDS, 1)) for seed in seeds]
        parts = list(seeds)
        for j in range(4):
            yield
            parts = [dot(builder, part, quads[4 * group + j], x[4 * group + j], False) for group, part in enumerate(parts)]
        yield
        parts = [to_floats(builder, part) for part in parts]
        yield
        first = builder.fmul(parts[0], steps[0])
        yield
        return fma(builder, parts[1], steps[1], first)
    if above == 0:
        sums = builder.add(*(_signed_pairs(builder, quads[group : group + 4], x[group : group + 4], steps[group // 4]) for group in (0, 4)))
        return to_floats(builder, sums)
    halved = above == SIGNED_SHIFT
    scale_up = function(builder, WORDS, [HALVES] * 2, "llvm.x86.avx2.pmadd.wd")
    sums = builder.add(*(builder.call(scale_up, [steps[group], builder.bitcast(seeds[group], HALVES)]) for group in (0, 1)))
    sums = sums if halved else builder.shl(sums, constant(WORDS, 1))
    for group in (0, 4):
        pairs = pairs_of(builder, quads[group : group + 4], x[group : group + 4], 127 * (63 if halved else 127), steps[group // 4])
        sums = builder.add(sums, pairs)
    return to_floats(builder, sums)
