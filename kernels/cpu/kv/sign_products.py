"""Products of queries with sign vectors by table lookup: per token, the sum of a query's elements, subtracted where the sign bit is 0.

A query is quantized so that any four elements sum to no more than LARGEST. Four sign bits select one of 16 such sums: one table per four
elements, biased to be unsigned, looked up by byte shuffle for as many tokens as a vector has bytes (as in FAISS's fast scan,
arXiv:1704.07355). The two sums for eight sign bits still fit a byte; these are accumulated in 16 bits, even and odd tokens separately. So
sums are exact and the same on every instruction set.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numpy import float32, int8

from ...layout import PAGE
from ...lazy_numba import inlined, llvm_intrinsic
from ..arithmetic import ZERO
from ..int8_ir import (
    BYTES,
    FLOATS,
    HALVES,
    I8,
    INSTRUCTION_SET,
    LANES,
    WIDTH,
    WORDS,
    constant,
    fma,
    load,
    look_up,
    offset,
    shift_right,
    splat,
    store,
)
from ..intrinsics import F32, I16, I32, I64, f32_at, u8_at
from .unpack_loops import loop

PAIR = 8  # query values, and bits of a token, covered by two tables
TABLE = 32  # size of both tables
LARGEST = 63
ROUNDED = np.float32(LARGEST - 2)  # limit before rounding, which moves each of four numbers by at most half
MAGIC = np.float32(1.5 * 2**23)  # adding and subtracting it rounds a float32 to an integer
FLAT, INFINITE = np.float32(2.0**-100), np.float32(np.inf)
TABLE_LANE = ir.VectorType(I8, 16)


@inlined()
def _four(row, first, depth):
    """The sum of the magnitudes of four elements of a row."""
    total = ZERO
    for i in range(first, min(first + 4, depth)):
        total += abs(row[i])
    return total


@inlined()
def make_tables(query, tables, depth):
    """Lookup tables of a query, float32 [D], as uint8 [pairs, 2, 16]; returns the scale of the sums, NaN if the query is not finite."""
    row, table = f32_at(query), u8_at(tables)
    top, total = ZERO, ZERO
    for first in range(0, depth, 4):
        four = _four(row, first, depth)
        top, total = max(top, four), total + four
    finite = total < INFINITE
    inverse = ROUNDED / top if finite and top > FLAT else ZERO
    for first in range(0, (depth + PAIR - 1) // PAIR * PAIR, 4):
        lowest = LARGEST
        for k in range(4):
            i = first + k
            number = int8((row[i] * inverse + MAGIC) - MAGIC) if finite and i < depth else int8(0)
            if k == 0:
                table[4 * first] = 0
            for code in range(1 << k):
                table[4 * first + (1 << k) + code] = table[4 * first + code] + 2 * number
            lowest -= number
        for code in range(16):
            table[4 * first + code] += lowest
    if not finite:
        return float32(np.nan)
    return top / ROUNDED if top > FLAT else ZERO


def _looked_up(builder: ir.IRBuilder, address: ir.Value, nibbles: list[ir.Value]) -> ir.Value:
    """A table's sum for every token. `nibbles`: the codes or, without a shuffle instruction, a mask for each of their bits."""
    table = load(builder, address, TABLE_LANE)
    if INSTRUCTION_SET != "portable":
        wide = builder.shuffle_vector(table, table, ir.Constant(ir.VectorType(I32, WIDTH), [i % 16 for i in range(WIDTH)]))
        return look_up(builder, [wide], nibbles[0], 4)
    lowest = builder.extract_element(table, I32(0))
    result = splat(builder, lowest, BYTES)
    for bit, mask in enumerate(nibbles):
        more = builder.sub(builder.extract_element(table, I32(1 << bit)), lowest)
        result = builder.add(result, builder.and_(splat(builder, more, BYTES), mask))
    return result


def _nibbles(builder: ir.IRBuilder, raw: ir.Value, half: int) -> list[ir.Value]:
    """The low or high four bits of every byte, in the form `_looked_up` takes."""
    if INSTRUCTION_SET != "portable":
        return [shift_right(builder, raw, 4 * half, 4)]
    bits = [builder.and_(raw, constant(BYTES, 1 << (4 * half + bit))) for bit in range(4)]
    return [builder.sext(builder.icmp_unsigned("!=", bit_vector, constant(BYTES, 0)), BYTES) for bit_vector in bits]


def _sign_scores(rows: int):
    @llvm_intrinsic
    def sign_scores(builder, sides, far, tables, steps, more, out, pairs):
        """Scores of R rows, float32 [R, PAGE] at `out`: steps * far * the sums of signs + more. `sides` uint8 [pairs, PAGE], `far` uint8
        [PAGE], `tables` uint8 [R, pairs, TABLE], `steps` and `more` float32 [R]."""
        table_rows = [builder.add(tables, builder.mul(pairs, I64(TABLE * row))) for row in range(rows)]
        factors, terms = ([splat(builder, load(builder, offset(builder, vector, 4 * row), F32, 4), FLOATS) for row in range(rows)]
                          for vector in (steps, more))
        bias = splat(builder, builder.trunc(builder.mul(pairs, I64(2 * LARGEST)), I16), HALVES)
        for begin in range(0, PAGE, WIDTH):
            at, sums, finish = loop(builder, pairs, 1, [constant(HALVES, 0)] * (2 * rows))
            raw = load(builder, offset(builder, builder.add(sides, builder.mul(at, I64(PAGE))), begin), BYTES)
            low, high, updated = _nibbles(builder, raw, 0), _nibbles(builder, raw, 1), []
            for row in range(rows):
                table = builder.add(table_rows[row], builder.mul(at, I64(TABLE)))
                products = builder.add(_looked_up(builder, table, low), _looked_up(builder, offset(builder, table, 16), high))
                products = builder.bitcast(products, HALVES)
                updated.append(builder.add(sums[2 * row], products))
                updated.append(builder.add(sums[2 * row + 1], builder.lshr(products, constant(HALVES, 8))))
            sums = finish(updated)
            for row in range(rows):
                odd = sums[2 * row + 1]
                even = builder.sub(sums[2 * row], builder.shl(odd, constant(HALVES, 8)))
                even, odd = builder.sub(even, bias), builder.sub(odd, bias)
                for piece in range(WIDTH // LANES):
                    first = LANES // 2 * piece
                    lanes = [first + i // 2 + i % 2 * (WIDTH // 2) for i in range(LANES)]
                    words = builder.shuffle_vector(even, odd, ir.Constant(ir.VectorType(I32, LANES), lanes))
                    first_lane = begin + LANES * piece
                    distance = load(builder, offset(builder, far, first_lane), ir.VectorType(I8, LANES))
                    value = builder.sitofp(builder.mul(builder.sext(words, WORDS), builder.zext(distance, WORDS)), FLOATS)
                    store(builder, fma(builder, value, factors[row], terms[row]), offset(builder, out, 4 * (PAGE * row + first_lane)), 4)

    return sign_scores


sign_scores_4, sign_scores_1 = _sign_scores(4), _sign_scores(1)
