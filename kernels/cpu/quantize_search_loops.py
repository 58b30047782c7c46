"""Inner loops of the quantization search: the error of a group of weights under a scale, as LLVM vectors.

The search must choose the same codes on every instruction set. For a codebook, weights become integers in units of 1 / FINE of a level, by
one float32 product and one rounding; all that follows is exact. For a grid everything is float32 in LANES lanes, with every operation in a
fixed order and none contracted.
"""

from __future__ import annotations

from llvmlite import ir

from ..lazy_numba import llvm_intrinsic, types
from .int8_ir import I8, constant, function, load, offset, splat, store
from .intrinsics import F32, I16, I32, I64
from .ir_loop import Loop

LANES = 16  # on every instruction set: the order of a sum must not depend on it
WIDE, WORDS = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
SHORTS, SMALL = ir.VectorType(I16, LANES), ir.VectorType(I8, LANES)
MAGIC, MAGIC_BITS = 1.5 * 2**23, 0x4B400000  # adding it to a small float32 leaves the nearest integer in the low bits
FINE, MOST_FINE = 16, 4095
MAX_LEVELS, TABLE_NBYTES = 16, 32 * 31  # borders [15], then levels [16], as int16 times FINE, each repeated LANES times


def _clamped(builder: ir.IRBuilder, value: ir.Value, low: ir.Value, high: ir.Value) -> ir.Value:
    value = builder.select(builder.fcmp_ordered("<", value, low), low, value)
    return builder.select(builder.fcmp_ordered(">", value, high), high, value)


def _sum(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Lanes added pairwise: halves, quarters, and so on."""
    for half in (8, 4, 2, 1):
        other = builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, LANES), [(i + half) % LANES for i in range(LANES)]))
        value = builder.fadd(value, other)
    return builder.extract_element(value, I32(0))


def _product_sum(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """Sum of int16 products, int64."""
    products = builder.mul(builder.sext(a, WORDS), builder.sext(b, WORDS))
    return builder.sext(builder.call(function(builder, I32, [WORDS], f"llvm.vector.reduce.add.v{LANES}i32"), [products]), I64)


def _fine(builder: ir.IRBuilder, x: ir.Value, inverse: ir.Value) -> ir.Value:
    """16 float32 at `x` times `inverse`, rounded to int16."""
    scaled = builder.fmul(load(builder, x, WIDE, 4), splat(builder, inverse, WIDE))
    scaled = _clamped(builder, scaled, constant(WIDE, -MOST_FINE), constant(WIDE, MOST_FINE))
    return builder.trunc(builder.bitcast(builder.fadd(scaled, constant(WIDE, MAGIC)), WORDS), SHORTS)


def _entry(builder: ir.IRBuilder, tables: ir.Value, index: int) -> ir.Value:
    return load(builder, offset(builder, tables, 32 * index), SHORTS, 16)


def book_error(count: int):
    """The error of 16 weights under a codebook of `count` levels and one scale."""

    @llvm_intrinsic
    def run(builder, x, inverse: types.float32, tables) -> types.int64:
        """Sum of squares, int64 in units of 1 / FINE**2, of 16 float32 at `x` times `inverse` / FINE less the nearest levels."""
        fine = _fine(builder, x, inverse)
        level = _entry(builder, tables, MAX_LEVELS - 1)
        for i in range(count - 1):
            above = builder.icmp_signed(">", fine, _entry(builder, tables, i))
            level = builder.select(above, _entry(builder, tables, MAX_LEVELS + i), level)
        off = builder.sub(fine, level)
        return _product_sum(builder, off, off)

    return run


def book_codes(count: int):
    """The codes of 16 weights under a codebook of `count` levels and one scale."""

    @llvm_intrinsic
    def run(builder, x, inverse: types.float32, tables, codes, sums):
        """Codes uint8 [16] to `codes`; sums of level * weight and level * level, in units of 1 / FINE**2, to int64 [2] at `sums`."""
        fine = _fine(builder, x, inverse)
        level, index = _entry(builder, tables, MAX_LEVELS - 1), constant(SHORTS, 0)
        for i in range(count - 1):
            above = builder.icmp_signed(">", fine, _entry(builder, tables, i))
            level = builder.select(above, _entry(builder, tables, MAX_LEVELS + i), level)
            index = builder.sub(index, builder.sext(above, SHORTS))
        store(builder, builder.trunc(index, SMALL), codes)
        store(builder, _product_sum(builder, fine, level), sums, 8)
        store(builder, _product_sum(builder, level, level), offset(builder, sums, 8), 8)

    return run


def _grid(keep: bool):
    """The error of weights under a grid of integers and one scale; `keep`: store the codes too."""

    @llvm_intrinsic
    def run(builder, x, vectors, inverse: types.float32, low: types.float32, high: types.float32, zero, codes, sums) -> types.float32:
        """Sum of squares of `vectors` * 16 float32 at `x` times `inverse` less the nearest whole numbers q in [low, high].

        Kept: codes q + zero, uint8, at `codes`, sum(q * x * inverse) and sum(q * q) in float32 [2] at `sums`.
        """
        inverse, low, high = (splat(builder, value, WIDE) for value in (inverse, low, high))
        zeros = splat(builder, builder.trunc(zero, I32), WORDS)
        loop = Loop(builder, vectors, [constant(WIDE, 0.0)] * (3 if keep else 1), "fit")
        scaled = builder.fmul(load(builder, builder.add(x, builder.mul(loop.index, I64(4 * LANES))), WIDE, 4), inverse)
        moved = builder.fadd(_clamped(builder, scaled, low, high), constant(WIDE, MAGIC))
        q = builder.fsub(moved, constant(WIDE, MAGIC))
        off = builder.fsub(scaled, q)
        terms = [builder.fmul(off, off), builder.fmul(q, scaled), builder.fmul(q, q)][: len(loop.values)]
        totals = [builder.fadd(total, term) for total, term in zip(loop.values, terms)]
        if keep:
            index = builder.add(builder.sub(builder.bitcast(moved, WORDS), constant(WORDS, MAGIC_BITS)), zeros)
            store(builder, builder.trunc(index, SMALL), builder.add(codes, builder.mul(loop.index, I64(LANES))))
        loop.end(totals)
        for i, total in enumerate(totals[1:]):
            store(builder, _sum(builder, total), offset(builder, sums, 4 * i), 4)
        return _sum(builder, totals[0])

    return run


grid_error, grid_codes = _grid(False), _grid(True)


@llvm_intrinsic
def extent(builder, x, vectors, out):
    """Smallest and largest of `vectors` * 16 float32 at `x`, and the sum of 0 * x (NaN where one is not finite) -> float32 [3] at `out`."""
    first = load(builder, x, WIDE, 4)
    loop = Loop(builder, vectors, [first, first, constant(WIDE, 0.0)], "extent")
    low, high, odd = loop.values
    value = load(builder, builder.add(x, builder.mul(loop.index, I64(4 * LANES))), WIDE, 4)
    updated = [builder.select(builder.fcmp_ordered("<", value, low), value, low),
               builder.select(builder.fcmp_ordered(">", value, high), value, high),
               builder.fadd(odd, builder.fmul(value, constant(WIDE, 0.0)))]
    loop.end(updated)
    for i, (name, candidate) in enumerate(zip("<>", updated)):
        for half in (8, 4, 2, 1):
            rotated_lanes = ir.Constant(ir.VectorType(I32, LANES), [(lane + half) % LANES for lane in range(LANES)])
            other = builder.shuffle_vector(candidate, candidate, rotated_lanes)
            candidate = builder.select(builder.fcmp_ordered(name, other, candidate), other, candidate)
        store(builder, builder.extract_element(candidate, I32(0)), offset(builder, out, 4 * i), 4)
    store(builder, _sum(builder, updated[2]), offset(builder, out, 8), 4)
