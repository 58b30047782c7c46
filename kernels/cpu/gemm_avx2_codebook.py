"""GEMM with codebook weights on AVX2 without VNNI: levels stay bytes, and the instruction that sums pairs of products also multiplies by
the groups' steps.

`vpmaddubsw` multiplies unsigned activations (offset by 128) by signed levels: a pair is at most 2 * 255 * 64, which fits 16 bits. Two quads
are added before `vpmaddwd` multiplies them by the step. That sum may overflow, but the intended value, four products of at most 127 * 64,
does not: adding a seed of -128 times the levels, prepared during expansion, wraps it back. Six instructions per 64 products, where 16-bit
weights (`gemm_tiles.py`) take eight and more cache space, and nothing is rounded to the row's int8.

A stripe is a row block. A group of 16 inputs is a record of 448 bytes, a vector for each piece of 8 rows:

    0 quad 0 · 64 quad 1 · 128 seeds of both · 192 quad 2 · 256 quad 3 · 320 seeds of both · 384 the step, twice

seeds and steps as 16-bit numbers. A panel is as in `gemm_tiles.py`, in bytes, with a scale per 128 inputs.
"""

from __future__ import annotations

from llvmlite import ir

from ..lazy_numba import llvm_intrinsic
from ..tiles import ROWS
from .gemm_expand import QUADS, steps_of, steps_table, table_of
from .gemm_tiles import AS_BYTES, HEADER, STRIPE, TOKENS, VECTORS
from .int8_ir import (
    BYTES,
    FLOATS,
    HALVES,
    LANES,
    PIECES,
    WIDTH,
    WORDS,
    constant,
    fma,
    function,
    load,
    look_up,
    offset,
    opaque_address,
    prefetch_lines,
    splat,
    store,
)
from .intrinsics import F32, I32, I64
from .ir_loop import Loop

PAIR_NBYTES = 3 * PIECES * WIDTH  # two quads and their seeds
RECORD = 2 * PAIR_NBYTES + PIECES * WIDTH
STEPPED_TILE = 2 * RECORD  # bytes of 32 inputs
CODE_OFFSET = 128
assert not AS_BYTES or (STRIPE == ROWS and VECTORS == PIECES)


def _pairs(builder: ir.IRBuilder, x: ir.Value, levels: ir.Value) -> ir.Value:
    """Sums of two products of bytes, unsigned by signed, as HALVES."""
    return builder.call(function(builder, HALVES, [BYTES] * 2, "llvm.x86.avx2.pmadd.ub.sw"), [x, levels])


@llvm_intrinsic
def stepped_codebook(builder, codes, scales, tables, out):
    """A tile as two records at `out`. codes: from `codes_of`; scales: the tile's 16 bytes of step codes. Emits nothing but for AVX2."""
    if not AS_BYTES:
        return
    levels = table_of(builder, tables)
    for group, steps in enumerate(steps_of(builder, steps_table(builder, tables), scales)):
        record = offset(builder, out, RECORD * group)
        for piece, step in enumerate(steps):
            twice = builder.or_(step, builder.shl(step, constant(WORDS, 16)))
            store(builder, twice, offset(builder, record, 2 * PAIR_NBYTES + WIDTH * piece))
            for pair in (0, 1):
                at, raised = offset(builder, record, PAIR_NBYTES * pair + WIDTH * piece), []
                for i in (0, 1):
                    quad = QUADS // 2 * group + 2 * pair + i
                    raw = load(builder, offset(builder, codes, 64 * quad + WIDTH * piece), BYTES)
                    values = look_up(builder, levels, raw, 4)
                    store(builder, values, offset(builder, at, PIECES * WIDTH * i))
                    raised.append(_pairs(builder, constant(BYTES, CODE_OFFSET), values))
                store(builder, builder.neg(builder.add(*raised)), offset(builder, at, 2 * PIECES * WIDTH))


@llvm_intrinsic
def stepped_product(builder, weights, panel, out, inputs, block, ahead):
    """out[token][STRIPE] (float32) += scale * (panel . stripe), block by block of `block` inputs, a multiple of 16; `inputs` a multiple of
    TILE in all. Prefetches a panel `ahead` bytes further. Emits code for AVX2 only."""
    if not AS_BYTES:
        return
    blocks = builder.sdiv(builder.add(inputs, builder.sub(block, I64(1))), block)
    outer = Loop(builder, blocks, [weights, panel, inputs], "blocks")
    weights, panel, left = outer.values
    num_tiles = builder.select(builder.icmp_signed("<", left, block), left, block)
    zeros = [constant(WORDS, 0)] * (TOKENS * PIECES)
    loop = Loop(builder, builder.lshr(num_tiles, I64(4)), [weights, builder.add(panel, I64(HEADER)), *zeros], "groups")
    at, x, *sums = loop.values
    at, x = opaque_address(builder, at), opaque_address(builder, x)
    prefetch_lines(builder, builder.add(x, ahead), 16 * TOKENS)
    for pair in (0, 1):
        _add_pair(builder, offset(builder, at, PAIR_NBYTES * pair), offset(builder, at, 2 * PAIR_NBYTES),
                  offset(builder, x, 8 * TOKENS * pair), sums)
    at, x, *sums = loop.end([builder.add(at, I64(RECORD)), builder.add(x, I64(16 * TOKENS)), *sums])
    _add_up(builder, panel, out, sums)
    outer.end([at, x, builder.sub(left, block)])


def _add_pair(builder: ir.IRBuilder, quads: ir.Value, steps: ir.Value, x: ir.Value, sums: list[ir.Value]) -> None:
    """sums[token][piece] += the products of two quads times their step."""
    fours = function(builder, WORDS, [HALVES] * 2, "llvm.x86.avx2.pmadd.wd")
    for token in range(TOKENS):
        words = (load(builder, offset(builder, x, 4 * (TOKENS * i + token)), I32, 4) for i in (0, 1))
        first, second = (builder.bitcast(splat(builder, word, WORDS), BYTES) for word in words)
        for piece in range(PIECES):
            one, other, seed = (load(builder, offset(builder, quads, WIDTH * (PIECES * i + piece)), kind)
                                for i, kind in enumerate((BYTES, BYTES, HALVES)))
            total = builder.add(_pairs(builder, second, other), builder.add(_pairs(builder, first, one), seed))
            step = load(builder, offset(builder, steps, WIDTH * piece), HALVES)
            sums[PIECES * token + piece] = builder.add(sums[PIECES * token + piece], builder.call(fours, [total, step]))


def _add_up(builder: ir.IRBuilder, panel: ir.Value, out: ir.Value, sums: list[ir.Value]) -> None:
    """out += a token's scale times its sums."""
    # Without this the compiler keeps stored values in registers, more than there are.
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)
    out = opaque_address(builder, out)
    for token in range(TOKENS):
        scale = splat(builder, load(builder, offset(builder, panel, 4 * token), F32, 4), FLOATS)
        for piece in range(PIECES):
            at = offset(builder, out, 4 * LANES * (PIECES * token + piece))
            value = builder.sitofp(sums[PIECES * token + piece], FLOATS)
            store(builder, fma(builder, value, scale, load(builder, at, FLOATS, 4)), at, 4)
