"""Softmax of a page's scores summed over chunks of tokens: all an estimate needs, so the weights themselves are not stored."""

from __future__ import annotations

from functools import partial

from llvmlite import ir

from ...layout import PAGE
from ...lazy_numba import intrinsic, types
from ..inner_loops import FLOATS, VECTOR
from ..int8_ir import constant, load, offset, splat, store
from ..intrinsics import F32, I32
from ..reductions import maximum, reduce_lanes, reduce_vectors
from ..softmax import LOG2E, power_of_two

CHUNK = 32  # tokens represented by one mean value
CHUNKS = PAGE // CHUNK
# 2^x for x from -1/2 to 1/2, with an error of at most 3e-6, far below that of the scores
POWER = (0.9999992614441341, 0.6931218147397951, 0.24024744833108325, 0.055917860302730535, 0.009570101698785041)


@intrinsic
def weigh_chunks(typingctx, scores, steps, out):
    """float32 scores [PAGE] -> at `out` the sums of exp(s - m) of each chunk times `steps`, both float32 [CHUNKS]. Returns (m, total sum);
    the sum is NaN if a score is."""

    def codegen(context, builder, signature, args):
        scores, steps, out = args
        rows = [load(builder, offset(builder, scores, 4 * VECTOR * piece), FLOATS, 4) for piece in range(PAGE // VECTOR)]
        larger = partial(maximum, builder)
        top = builder.extract_element(reduce_lanes(builder, [reduce_vectors(rows, larger)], larger), I32(0))
        highest, weights = splat(builder, top, FLOATS), []
        for row in rows:
            weights.append(power_of_two(builder, builder.fmul(builder.fsub(row, highest), constant(FLOATS, LOG2E)), POWER))
        per = CHUNK // VECTOR
        chunks = [reduce_vectors(weights[begin : begin + per], builder.fadd) for begin in range(0, len(weights), per)]
        sums = reduce_lanes(builder, chunks, builder.fadd)
        store(builder, builder.fmul(sums, load(builder, steps, ir.VectorType(F32, CHUNKS), 4)), out, 4)
        total = builder.extract_element(reduce_lanes(builder, [sums], builder.fadd), I32(0))
        return context.make_tuple(builder, signature.return_type, (top, total))

    return types.UniTuple(types.float32, 2)(*[types.int64] * 3), codegen
