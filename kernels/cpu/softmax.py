"""Softmax of a page's scores, a row of PAGE in registers: for the equivalent loop the compiler emits vectors of half the width."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from llvmlite import ir

from ..layout import PAGE
from ..lazy_numba import intrinsic, types
from .inner_loops import FLOATS, VECTOR
from .int8_ir import constant, fma, load, offset, splat, store
from .intrinsics import I32
from .reductions import maximum, reduce_lanes, reduce_vectors

LOG2E = 1.4426950408889634
LOWEST = -126.0  # powers of two below it are flushed to 0
MAGIC = 1.5 * 2**23  # adding it rounds a float32 to an integer, which is then in the low bits
POWER = (1.0, 0.6931471824645996, 0.24022647738456726, 0.055503323674201965, 0.009618435986340046, 0.0013398895971477032,
         0.0001535367628093809)  # 2^x for x from -1/2 to 1/2, off by at most 8e-8
WORDS = ir.VectorType(I32, VECTOR)


def power_of_two(builder: ir.IRBuilder, x: ir.Value, power: Sequence[float] = POWER) -> ir.Value:
    """2**x for x <= 0, by a polynomial from -1/2 to 1/2; 0 below LOWEST, NaN for NaN."""
    low = builder.fcmp_ordered("<", x, constant(FLOATS, LOWEST))
    bounded = builder.select(low, constant(FLOATS, LOWEST), x)
    moved = builder.fadd(bounded, constant(FLOATS, MAGIC))
    fraction, value = builder.fsub(bounded, builder.fsub(moved, constant(FLOATS, MAGIC))), constant(FLOATS, power[-1])
    for factor in power[-2::-1]:
        value = fma(builder, value, fraction, constant(FLOATS, factor))
    scaled = builder.add(builder.bitcast(value, WORDS), builder.shl(builder.bitcast(moved, WORDS), constant(WORDS, 23)))
    return builder.select(low, constant(FLOATS, 0.0), builder.bitcast(scaled, FLOATS))


@intrinsic
def softmax_row(typingctx, address, begin, end, scale):
    """float32 [PAGE], which times `scale` are the scores s -> exp(s - m) in place, 0 outside [begin, end), which is not empty. Returns (m,
    sum); the sum is NaN if a score is."""

    def codegen(context, builder, signature, args):
        address, begin, end, scale = args
        factor = splat(builder, scale, FLOATS)
        first, last = (splat(builder, builder.trunc(bound, I32), WORDS) for bound in (begin, end))
        vectors = []
        for piece in range(PAGE // VECTOR):
            vector_at = offset(builder, address, 4 * VECTOR * piece)
            lanes = ir.Constant(WORDS, list(range(VECTOR * piece, VECTOR * (piece + 1))))
            visible = builder.and_(builder.icmp_signed(">=", lanes, first), builder.icmp_signed("<", lanes, last))
            score = builder.fmul(load(builder, vector_at, FLOATS, 4), factor)
            value = builder.select(visible, score, constant(FLOATS, float("-inf")))
            vectors.append(value)
        larger = partial(maximum, builder)
        top = builder.extract_element(reduce_lanes(builder, [reduce_vectors(vectors, larger)], larger), I32(0))
        highest, weights = splat(builder, top, FLOATS), []
        for piece, value in enumerate(vectors):
            weights.append(power_of_two(builder, builder.fmul(builder.fsub(value, highest), constant(FLOATS, LOG2E))))
            store(builder, weights[-1], offset(builder, address, 4 * VECTOR * piece), 4)
        total = builder.extract_element(reduce_lanes(builder, [reduce_vectors(weights, builder.fadd)], builder.fadd), I32(0))
        return context.make_tuple(builder, signature.return_type, (top, total))

    return types.UniTuple(types.float32, 2)(*[types.int64] * 3, types.float32), codegen
