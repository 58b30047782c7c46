"""The register tiles of the int8 GEMM, as LLVM vectors.

A stripe of STRIPE rows consists of steps: a step is VECTORS vectors, each of LANES rows times INPUTS inputs. A panel of TOKENS tokens
consists of steps too: one 32-bit word per token. With VNNI a step is four inputs, and weights are offset to unsigned bytes for `vpdpbusd`;
the offset is undone in the sums' initial values. Without VNNI `vpmaddubsw` would saturate (a pair of products needs 17 bits), so a step is
two inputs of 16 bits each, multiplied by `vpmaddwd`: the same products per cycle, since bytes need two instructions. ARM's `sdot`
multiplies signed bytes, so weights need no offset, except for levels and 8-bit codes. On AVX2 codes of up to four bits are multiplied as
bytes after all (NARROW_FORM): sixteen of their products fit 16 bits, so `vpmaddwd` is needed only once per group.

A panel is cut into blocks along the inputs. A block begins with its header, one word per token each: the scale (float32), the sum of the
int8 activations (for `block_product` the sums' initial value: minus the offset times that), the sum of the first half of them (int32); then
its steps.

Compiled steps, nothing spilled: AVX-512 24 `vpdpbusd` on zmm for 4 loads and 6 broadcasts (2 and 12 took 8 to 20% longer: a load costs
about half as much as a multiplication), or with KEEP_IN_REGISTERS 12 for 4 and 3; AVX-VNNI 12 on ymm for 2 loads and 6 broadcasts; AVX2 12
`vpmaddwd` and 12 `vpaddd` for the same. The multipliers are the bottleneck, on AVX2 together with the adders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from llvmlite import ir

from ..lazy_numba import llvm_intrinsic
from ..target import target
from .int8_ir import (
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
    offset,
    opaque_address,
    prefetch_lines,
    splat,
    store,
    words_at,
)
from .int8_products import dot, pair_products
from .intrinsics import F32, I16, I32, I64
from .ir_loop import Loop

PAIRS = INSTRUCTION_SET in ("avx2", "neon", "portable")
SIGNED_BYTES = INSTRUCTION_SET == "neondot"
INPUTS = 2 if PAIRS else 4  # of a step
ITEM = 4 // INPUTS  # bytes of an input in a step, weights and activations alike
# The register tile: 24 sums of 32 registers with AVX-512 and on ARM (16 if products need more registers), 12 of 16 with AVX2, 8 if x has to
# be split as well.
VECTORS, TOKENS = {"avx512": (4, 6), "avx2vnni": (2, 6), "avx2": (2, 6), "neondot": (4, 6), "neon": (4, 4),
                   "portable": (4, 2)}[INSTRUCTION_SET]
STRIPE = VECTORS * LANES  # rows
STEP = VECTORS * WIDTH  # bytes of weights
HEADER = 12 * TOKENS  # bytes
# On processors with two products per cycle, running sums stay in registers from block to block, for half of a panel's tokens at a time: 7
# loads for 12 products instead of 10 for 24, but no loads and stores of sums between blocks or groups.
KEEP_IN_REGISTERS = INSTRUCTION_SET == "avx512" and target()[0] == "znver5"
TOKENS_AT_ONCE = TOKENS // 2 if KEEP_IN_REGISTERS else TOKENS


class Form(NamedTuple):
    """Operand layout of a step. `inputs`: per step; `unroll`: steps per iteration of the innermost loop (with more, the compiler hoists
    loads until it runs out of registers); `halves`: products are summed in 16 bits, up to sixteen of them; `raised`: activations are offset
    by 128 to unsigned, and weights are signed."""

    inputs: int
    unroll: int
    halves: bool = False
    raised: bool = False

    @property
    def item(self) -> int:
        """Bytes per activation."""
        return 4 // self.inputs

    @property
    def byte_weights(self) -> bool:
        """Are weights bytes, offset to unsigned like their codes, so that sums must undo an offset?"""
        return self.inputs == 4


FULL_FORM = Form(INPUTS, 2 if PAIRS else 4)
# The form for codes of up to four bits; the same if there is no better one.
NARROW_FORM = Form(4, 2, True) if INSTRUCTION_SET == "avx2" else FULL_FORM
AS_BYTES, NARROW_INPUTS, NARROW_ITEM = NARROW_FORM.halves, NARROW_FORM.inputs, NARROW_FORM.item
STEPPED = Form(4, 2, raised=True)  # of `gemm_avx2_codebook.py`, AVX2 only
# Adding it to a float32 below 2**22 leaves the nearest integer (ties to even) in the low bits.
ROUND, ROUND_BITS = 12582912.0, 0x4B400000


def multiply_add(builder: ir.IRBuilder, sums: ir.Value, weights: ir.Value, x: ir.Value, form: Form = FULL_FORM) -> ir.Value:
    """sums + the products of a step, per row; all WORDS, bytes or 16-bit numbers within. With `halves` the sums are HALVES, two a row."""
    if form.halves:
        pairs = function(builder, HALVES, [BYTES] * 2, "llvm.x86.avx2.pmadd.ub.sw")
        sums = builder.add(sums, builder.call(pairs, [builder.bitcast(weights, BYTES), builder.bitcast(x, BYTES)]))
        # Otherwise the compiler adds products to one another first and runs out of registers.
        return builder.asm(ir.FunctionType(HALVES, [HALVES]), "", "=x,0", [sums], side_effect=False)
    if not PAIRS:
        return dot(builder, sums, builder.bitcast(weights, BYTES), builder.bitcast(x, BYTES), False)
    return pair_products(builder, sums, weights, x)


def steps_of_tile(builder: ir.IRBuilder, weights: ir.Value, x: ir.Value, inputs: ir.Value, sums: list[ir.Value],
           tokens: int, ahead: ir.Value | None = None, form: Form = FULL_FORM) -> tuple[ir.Value, ir.Value, list[ir.Value]]:
    """The innermost loop over `inputs`, a multiple of 16. Returns the addresses after them and the sums, [token][vector].

    Prefetches `ahead` bytes beyond x.
    """
    loop = Loop(builder, builder.lshr(inputs, I64((form.inputs * form.unroll).bit_length() - 1)), [weights, x, *sums], "steps")
    weights, x, *sums = loop.values
    weights, x = opaque_address(builder, weights), opaque_address(builder, x)
    if ahead is not None:
        prefetch_lines(builder, builder.add(x, ahead), 4 * TOKENS * form.unroll)
    for step in range(form.unroll):
        rows = [load(builder, offset(builder, weights, STEP * step + WIDTH * v), WORDS, 4) for v in range(VECTORS)]
        for t, word in enumerate(words_at(builder, offset(builder, x, 4 * TOKENS * step), tokens)):
            for v in range(VECTORS):
                sums[VECTORS * t + v] = multiply_add(builder, sums[VECTORS * t + v], rows[v], word, form)
    weights, x, *sums = loop.end([builder.add(weights, I64(STEP * form.unroll)), builder.add(x, I64(4 * TOKENS * form.unroll)), *sums])
    return weights, x, sums


def header_word(builder: ir.IRBuilder, header: ir.Value, row: int, token: int, kind: ir.Type) -> ir.Value:
    return load(builder, offset(builder, header, 4 * (TOKENS * row + token)), kind, 4)


def input_total(builder: ir.IRBuilder, header: ir.Value, token: int, part: str) -> ir.Value:
    """The sum of a token's inputs in a part of a block."""
    total = header_word(builder, header, 2 if part == "first half" else 1, token, I32)
    return builder.sub(total, header_word(builder, header, 2, token, I32)) if part == "second half" else total


def first_sums(builder: ir.IRBuilder, header: ir.Value, tokens: int, shift: ir.Value | None, part: str = "whole") -> list[ir.Value]:
    """Initial sums that undo the weights' offset: minus the offset, one number for all rows, times the sum of a token's inputs; with None
    the header's value."""
    if PAIRS:
        return [constant(WORDS, 0)] * (VECTORS * tokens)
    first = []
    for t in range(tokens):
        if shift is None:
            total = header_word(builder, header, 1, t, I32)
        else:
            total = builder.mul(builder.neg(input_total(builder, header, t, part)), shift)
        first += [splat(builder, total, WORDS)] * VECTORS
    return first


def panel_by_turns(builder: ir.IRBuilder, panel: ir.Value, out: ir.Value,
                   product: Callable[[ir.Value, ir.Value, list[ir.Value], bool], list[ir.Value]]) -> None:
    """Apply `product` to a panel and stripe, TOKENS_AT_ONCE tokens at a time, given the panel and out[token][row] from the first of them
    on. With KEEP_IN_REGISTERS it is also given the old values, [token][vector], and returns the new ones; otherwise it accumulates in
    memory. The last argument: is it the first iteration?"""
    for first in range(0, TOKENS, TOKENS_AT_ONCE):
        at = [offset(builder, out, 4 * LANES * (VECTORS * first + i)) for i in range(VECTORS * TOKENS_AT_ONCE)]
        running = [load(builder, address, FLOATS, 4) for address in at] if KEEP_IN_REGISTERS else []
        running = product(offset(builder, panel, 4 * first), at[0], running, first == 0)
        for value, address in zip(running, at if KEEP_IN_REGISTERS else [], strict=True):
            store(builder, value, address, 4)


def add_sums(builder: ir.IRBuilder, out: ir.Value, running: list[ir.Value], header: ir.Value, sums: list[ir.Value],
             factors: list[ir.Value] | None, minima: list[ir.Value] | None = None, shifts: list[ir.Value] | None = None,
             part: str = "whole") -> list[ir.Value]:
    """`with_sums` applied to `running`, which is returned; without KEEP_IN_REGISTERS applied to out[token][row], in place."""
    if KEEP_IN_REGISTERS:
        return list(with_sums(builder, running, header, sums, factors, minima, shifts, part))
    # Without this the compiler keeps stored values in registers, more than there are.
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)
    out = opaque_address(builder, out)
    at = lambda i: offset(builder, out, 4 * LANES * i)  # noqa: E731
    old = (load(builder, at(i), FLOATS, 4) for i in range(len(sums)))
    for i, value in enumerate(with_sums(builder, old, header, sums, factors, minima, shifts, part)):
        store(builder, value, at(i), 4)
    return []


def with_sums(builder: ir.IRBuilder, old: Iterable[ir.Value], header: ir.Value, sums: list[ir.Value], factors: list[ir.Value] | None,
              minima: list[ir.Value] | None = None, shifts: list[ir.Value] | None = None, part: str = "whole") -> Iterator[ir.Value]:
    """Old values [token][vector], each + token scale * (row factor * sum), as one fused multiply-add. Minima, times the sum of the token's
    inputs, are added to the product by another; so are `shifts`, to the sum: both are integers below 2**24, exact in float32. Sums of 16
    bits, two per row, are merged."""
    scale = total = None
    for i, (before, value) in enumerate(zip(old, sums, strict=True)):
        t, v = divmod(i, VECTORS)
        if v == 0:
            scale = splat(builder, header_word(builder, header, 0, t, F32), FLOATS)
            if minima or shifts:
                total = builder.sitofp(splat(builder, input_total(builder, header, t, part), WORDS), FLOATS)
        if value.type == HALVES:
            both = function(builder, WORDS, [HALVES] * 2, "llvm.x86.avx2.pmadd.wd")
            value = builder.call(both, [value, constant(HALVES, 1)])
        value = builder.sitofp(value, FLOATS)
        if shifts:
            value = fma(builder, shifts[v], total, value)
        if factors:
            value = builder.fmul(value, factors[v])
        if minima:
            value = fma(builder, minima[v], total, value)
        yield fma(builder, value, scale, before)


@llvm_intrinsic
def block_product(builder, weights, panel, out, inputs, block, ahead):
    """out[token][STRIPE] (float32) += scale * (panel . stripe), block by block of `block` inputs; `inputs` a multiple of TILE in all.

    The panel's sums are those of `pack_panel` with a factor of minus the stripe's offset. Prefetches a panel `ahead` bytes further.
    """
    blocks = builder.sdiv(builder.add(inputs, builder.sub(block, I64(1))), block)

    def product(panel: ir.Value, out: ir.Value, running: list[ir.Value], asks: bool) -> list[ir.Value]:
        loop = Loop(builder, blocks, [weights, panel, inputs, *running], "blocks")
        weights_at, panel, left, *running = loop.values
        block_inputs = builder.select(builder.icmp_signed("<", left, block), left, block)
        first = first_sums(builder, panel, TOKENS_AT_ONCE, None)
        steps = builder.add(panel, I64(HEADER))
        weights_at, following, sums = steps_of_tile(builder, weights_at, steps, block_inputs, first, TOKENS_AT_ONCE,
                                                    ahead if asks else None)
        running = add_sums(builder, out, running, panel, sums, None)
        return loop.end([weights_at, following, builder.sub(left, block), *running])[3:]

    panel_by_turns(builder, panel, out, product)


def _correction(form: Form):
    """Outliers of a row, with the tokens of a panel in one vector."""
    lanes = 4 if TOKENS <= 4 else 8 if TOKENS <= 8 else 16
    words, floats = ir.VectorType(I32, lanes), ir.VectorType(F32, lanes)
    item_bits, step_bits = 8 * form.item, (form.inputs - 1).bit_length()

    @llvm_intrinsic
    def run(builder, positions, values, count, panel, block, block_nbytes, out):
        """out[token] (float32, room for 16) = sum over `count` >= 1 outliers of value * (scale * x), in their order.

        places: uint32, the column in the low 28 bits. values: bfloat16. `block`: inputs of a panel's block, a power of two. May read 64
        bytes past the panel.
        """
        loop = Loop(builder, count, [constant(floats, 0.0)], "outliers")
        column = load(builder, builder.add(positions, builder.mul(loop.index, I64(4))), I32, 4)
        column = builder.zext(builder.and_(column, I32((1 << 28) - 1)), I64)
        bits = load(builder, builder.add(values, builder.mul(loop.index, I64(2))), I16, 2)
        value = splat(builder, builder.bitcast(builder.shl(builder.zext(bits, I32), I32(16)), F32), floats)
        header = builder.add(panel, builder.mul(builder.sdiv(column, block), block_nbytes))
        within = builder.and_(column, builder.sub(block, I64(1)))
        step = builder.mul(builder.lshr(within, I64(step_bits)), I64(4 * TOKENS))
        word = load(builder, builder.add(header, builder.add(step, I64(HEADER))), words, 4)
        word = builder.xor(word, constant(words, 0x80808080)) if form.raised else word
        lane = builder.trunc(builder.and_(within, I64(form.inputs - 1)), I32)
        up = builder.sub(I32(32 - item_bits), builder.mul(lane, I32(item_bits)))
        x = builder.ashr(builder.shl(word, splat(builder, up, words)), constant(words, 32 - item_bits))
        x = builder.fmul(builder.sitofp(x, floats), load(builder, header, floats, 4))
        total, = loop.end([fma(builder, x, value, loop.values[0])])
        store(builder, total, out, 4)

    return run


def _finish(add: bool):
    @llvm_intrinsic
    def run(builder, sums, scales, bias, out, stride, tokens):
        """out[token] (STRIPE rows, tokens `stride` bytes apart) = sums[token][STRIPE] * scales + bias, or += with `add`.

        scales, bias: float32 [STRIPE]. May work in place.
        """
        vectors = range(0, STRIPE, LANES)
        rows = [(load(builder, offset(builder, scales, 4 * i), FLOATS, 4), load(builder, offset(builder, bias, 4 * i), FLOATS, 4))
                for i in vectors]
        loop = Loop(builder, tokens, [sums, out], "tokens")
        sums, out = loop.values
        for i, (scale, extra) in zip(vectors, rows):
            value = builder.fadd(builder.fmul(load(builder, offset(builder, sums, 4 * i), FLOATS, 4), scale), extra)
            if add:
                value = builder.fadd(load(builder, offset(builder, out, 4 * i), FLOATS, 4), value)
            store(builder, value, offset(builder, out, 4 * i), 4)
        loop.end([builder.add(sums, I64(4 * STRIPE)), builder.add(out, stride)])

    return run


outlier_sums, stepped_outlier_sums = _correction(FULL_FORM), _correction(STEPPED)
finish, finish_adding = _finish(False), _finish(True)
# For codes of up to four bits; the same function if both forms are the same.
narrow_outlier_sums = _correction(NARROW_FORM) if NARROW_FORM.halves else outlier_sums
