"""Vector loops for neurons stored one by one: adding a scaled column to sums, and reducing a sum kept in lanes.

Both repeat what `inner_loops.dot_rows` does for one output, operation for operation, so that skipping zeros changes no bit.
"""

from __future__ import annotations

from ..layout import BF16, F16
from ..lazy_numba import inlined, llvm_intrinsic, types
from .arithmetic import widen
from .inner_loops import FLOATS, VECTOR, plain_f32, widen_bf16, widen_f16
from .int8_ir import fma, function, load, splat, store
from .intrinsics import F32, HAS_HALF, I64, f32_at
from .ir_loop import Loop


def _add_scaled(convert, item: int):
    """A loop for a stored type of `item` bytes."""

    @llvm_intrinsic
    def add_scaled(builder, weights, factor: types.float32, sums, vectors):
        """sums[i] = fma(weights[i], factor, sums[i]) for `vectors` >= 1 times VECTOR values; addresses, and a float32."""
        scale = splat(builder, factor, FLOATS)
        loop = Loop(builder, vectors, [], "scaled")
        place = builder.add(sums, builder.mul(loop.index, I64(4 * VECTOR)))
        value = convert(builder, builder.add(weights, builder.mul(loop.index, I64(item * VECTOR))))
        store(builder, fma(builder, value, scale, load(builder, place, FLOATS, 4)), place, 4)
        loop.end([])

    return add_scaled


_add_bf16, _add_f16, _add_f32 = _add_scaled(widen_bf16, 2), _add_scaled(widen_f16, 2), _add_scaled(plain_f32, 4)

if HAS_HALF:

    @inlined()
    def _add_half(weights, factor, sums, vectors):
        _add_f16(weights, factor, sums, vectors)
else:

    @inlined()
    def _add_half(weights, factor, sums, vectors):
        """Halves by shifts, not fused: the product of whole rows is not bit for bit this one where the processor converts no halves."""
        for i in range(vectors * VECTOR):
            f32_at(sums)[i] += widen(weights, F16, i) * factor


@inlined()
def add_scaled(weights, dtype, factor, sums, vectors):
    """`vectors` * VECTOR stored values times `factor`, added to as many float32 sums."""
    if dtype == BF16:
        _add_bf16(weights, factor, sums, vectors)
    elif dtype == F16:
        _add_half(weights, factor, sums, vectors)
    else:
        _add_f32(weights, factor, sums, vectors)


def _lane_sum(parts: int):
    @llvm_intrinsic
    def lane_sum(builder, lanes) -> types.float32:
        """The sum of `parts` * VECTOR float32 at an address, as `dot_rows` adds up its lanes."""
        vectors = [load(builder, builder.add(lanes, I64(4 * VECTOR * part)), FLOATS, 4) for part in range(parts)]
        total = vectors[0]
        for vector in vectors[1:]:
            total = builder.fadd(total, vector)
        reduce = function(builder, F32, [F32, FLOATS], f"llvm.vector.reduce.fadd.v{VECTOR}f32")
        return builder.call(reduce, [F32(0.0), total], fastmath=("reassoc",))

    return lane_sum


sum_of_two, sum_of_four = _lane_sum(2), _lane_sum(4)
