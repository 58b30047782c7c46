"""Register tiles of the int8 product for weights with separate groups: every 16 or 32 inputs the integer sums end, are converted to float32
and multiplied by the group's own factor."""

from __future__ import annotations

from llvmlite import ir

from ..lazy_numba import llvm_intrinsic
from .gemm_expand import CODE_OFFSET
from .gemm_tiles import (
    FULL_FORM,
    HEADER,
    NARROW_FORM,
    STRIPE,
    TOKENS_AT_ONCE,
    VECTORS,
    Form,
    add_sums,
    first_sums,
    panel_by_turns,
    steps_of_tile,
)
from .int8_ir import FLOATS, HALVES, LANES, WORDS, constant, load, offset
from .intrinsics import I32, I64
from .ir_loop import Loop


def _group_product(halves: bool, with_minima: bool = False, form: Form = FULL_FORM, alike: bool = False, lowered: int = 0):
    """`halves`: groups of 16 inputs, two per block; else at most one. `with_minima`: instead of shifts (there are none), float32 minima of
    every group are added. `alike`: all rows share one shift. `lowered`: how far the stripe's bytes are below the codes, with minima."""

    @llvm_intrinsic
    def run(builder, weights, factors, shifts, stride, panel, out, inputs):
        """out[token][STRIPE] (float32) += scale * (factor * sum), group by group; blocks of TILE inputs, `inputs` of them in all.

        factors: float32 [group or half block][STRIPE]. shifts: int32 [STRIPE], the offset of the stripe's unsigned bytes from the weights;
        `stride` bytes apart per block (0: always the same).
        """
        def product(panel: ir.Value, out: ir.Value, running: list[ir.Value], asks: bool) -> list[ir.Value]:
            loop = Loop(builder, builder.lshr(inputs, I64(5)), [weights, factors, shifts, panel, *running], "groups")
            at, weights_at, shift, header, *running = loop.values
            one_shift = minima = above = None
            if with_minima:
                minima, one_shift = vectors(shift, FLOATS), I32(-lowered) if lowered else None
            elif form.byte_weights and alike:
                one_shift = load(builder, shift, I32, 4)
            elif form.byte_weights:
                above = [builder.sitofp(builder.neg(vector), FLOATS) for vector in vectors(shift, WORDS)]
            steps = builder.add(header, I64(HEADER))
            for part in ("first half", "second half") if halves else ("whole",):
                if with_minima and part == "second half":
                    minima = vectors(offset(builder, shift, 4 * STRIPE), FLOATS)
                if one_shift is None:
                    first = [constant(HALVES if form.halves else WORDS, 0)] * (VECTORS * TOKENS_AT_ONCE)
                else:
                    first = first_sums(builder, header, TOKENS_AT_ONCE, one_shift, part)
                at, steps, sums = steps_of_tile(builder, at, steps, I64(16 if halves else 32), first, TOKENS_AT_ONCE, form=form)
                running = add_sums(builder, out, running, header, sums, vectors(weights_at, FLOATS), minima, above, part)
                weights_at = builder.add(weights_at, I64(4 * STRIPE))
            return loop.end([at, weights_at, builder.add(shift, stride), steps, *running])[4:]

        def vectors(address: ir.Value, kind: ir.Type) -> list[ir.Value]:
            """Of the stripe's rows."""
            return [load(builder, offset(builder, address, 4 * LANES * v), kind, 4) for v in range(VECTORS)]

        panel_by_turns(builder, panel, out, product)

    return run


# groups of 16 inputs have no zero points
half_group_product, group_product = _group_product(True, alike=True), _group_product(False, alike=True)
shifted_group_product = _group_product(False)
minimum_product, half_minimum_product = _group_product(False, with_minima=True), _group_product(True, with_minima=True)
# For 8-bit codes, which `sdot` takes as signed bytes.
lowered_minimum_product = _group_product(False, with_minima=True, lowered=CODE_OFFSET) if CODE_OFFSET else minimum_product
# For codes of up to four bits; the same function if both forms are the same.
narrow_half_product, narrow_product, narrow_minimum_product = (
    (_group_product(True, form=NARROW_FORM), _group_product(False, form=NARROW_FORM), _group_product(False, True, NARROW_FORM))
    if NARROW_FORM.halves else (half_group_product, shifted_group_product, minimum_product))
