"""Products of bf16 pairs by AVX-512's `vdpbf16ps`: rounding activations to pairs, transposing them into panels, and a register tile.

A 32-bit lane holds two neighbouring inputs. The instruction adds both products to the lane's float32 sum, and takes subnormals for zeros:
twice the products of a fused multiply-add. Weights need no conversion: two neighbouring bf16 of a row are such a pair as they lie. A cache
line of `pair_tile`'s rows compiles to 384 `vdpbf16ps` on registers for 192 broadcasts and some 50 loads; a Zen 4 runs 3e9 of them a
second and core.
"""

from __future__ import annotations

from llvmlite import ir

from ..compile import cpu_features
from ..lazy_numba import llvm_intrinsic
from .amx import AMX
from .amx_int16 import transposed
from .inner_loops import TILE_ROWS, VECTOR
from .int8_ir import FLOATS, INSTRUCTION_SET, WORDS, function, load, offset, prefetch_lines, splat, store
from .intrinsics import I32, I64
from .ir_loop import Loop

# The matrix unit multiplies all three parts of an activation, which is not rounded then, in a fifth of the cycles that pairs take.
HAS_PAIRS = INSTRUCTION_SET == "avx512" and "avx512bf16" in cpu_features() and not (AMX and "amx-bf16" in cpu_features())
PAIRS_STEP = 16  # pairs of inputs, and tokens, of a transposition
GROUP_ROWS = 6  # rows whose lines are in use at once: fewer than a set of the L1 cache has ways
PREFETCH_NBYTES = 1024  # prefetch distance within a row


class _BFloat(ir.types._BaseFloatType):
    """LLVM's bfloat, which llvmlite lacks."""

    null, intrinsic_name = "0.0", "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()
PAIRS = ir.VectorType(_BFloat(), 32)


def multiply_pairs(builder: ir.IRBuilder, total: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
    """total + a * b, float32 [16], for vectors of words that are bf16 pairs."""
    product = function(builder, FLOATS, [FLOATS, PAIRS, PAIRS], "llvm.x86.avx512bf16.dpbf16ps.512")
    return builder.call(product, [total, builder.bitcast(a, PAIRS), builder.bitcast(b, PAIRS)])


def rounds_activations(scheme: str, exact: bool, by_neuron: bool) -> bool:
    """Whether prompts round the activations of weights of this type to bf16; flags as in `candidates.default_registry`."""
    return HAS_PAIRS and scheme == "bf16" and not (exact or by_neuron)


@llvm_intrinsic
def round_row(builder, x, steps, out):
    """`steps` >= 1 times 32 float32 rounded to bf16, ties to even, at `out`. Infinities stay, subnormals become zeros."""
    loop = Loop(builder, steps, [x, out], "steps")
    x, out = loop.values
    narrow = function(builder, PAIRS, [FLOATS, FLOATS], "llvm.x86.avx512bf16.cvtne2ps2bf16.512")
    low, high = (load(builder, offset(builder, x, nbytes), FLOATS, 4) for nbytes in (0, 64))
    store(builder, builder.bitcast(builder.call(narrow, [high, low]), WORDS), out, 4)
    loop.end([offset(builder, x, 128), offset(builder, out, 64)])


@llvm_intrinsic
def transpose_pairs(builder, rows, pitch, steps, out, out_pitch):
    """Words [16 tokens][16 `steps`], rows `pitch` bytes apart, as [16 `steps`][16 tokens], rows `out_pitch` bytes apart; `steps` >= 1."""
    loop = Loop(builder, steps, [rows, out], "steps")
    first, out = loop.values
    words = [load(builder, builder.add(first, builder.mul(pitch, I64(row))), WORDS, 4) for row in range(PAIRS_STEP)]
    for pair, column in enumerate(transposed(builder, words)):
        store(builder, column, builder.add(out, builder.mul(out_pitch, I64(pair))), 4)
    loop.end([offset(builder, first, 4 * PAIRS_STEP), builder.add(out, builder.mul(out_pitch, I64(PAIRS_STEP)))])


def _pair_tile(rows: int, vectors: int):
    @llvm_intrinsic
    def pair_tile(builder, a, a_stride, b, c, c_stride, steps, accumulate, jump):
        """C[R, N] (+)= A[R, K] @ B[K / 2, N]: A bf16, B words of bf16 pairs, sums float32; K = 32 * `steps`, N = 16 * `vectors`.

        Addresses and strides in bytes; `accumulate` 0 starts from zero, 1 from what C holds. Each element is one chain of products in the
        order of inputs, so cutting the inputs or the columns differently gives the same bits. A cache line of a row is multiplied at once,
        GROUP_ROWS rows at a time: lines of rows whose stride is a power of two replace each other. Lines PREFETCH_NBYTES ahead are
        prefetched, behind the last input `jump` bytes further.
        """
        rows_c = [builder.add(c, builder.mul(I64(r), c_stride)) for r in range(rows)]
        warm = builder.icmp_signed("!=", accumulate, I64(0))
        start = builder.basic_block
        with builder.if_then(warm):
            loaded = [load(builder, offset(builder, row, 64 * part), FLOATS, 4) for row in rows_c for part in range(vectors)]
            loading = builder.basic_block
        first = []
        for value in loaded:
            phi = builder.phi(FLOATS)
            phi.add_incoming(ir.Constant(FLOATS, [0.0] * VECTOR), start)
            phi.add_incoming(value, loading)
            first.append(phi)
        loop = Loop(builder, steps, [a, b, *first], "steps")
        a, b, *totals = loop.values
        left = builder.sub(builder.sub(steps, loop.index), I64(PREFETCH_NBYTES // 64))
        ahead = builder.select(builder.icmp_signed(">", left, I64(0)), I64(PREFETCH_NBYTES), builder.add(jump, I64(PREFETCH_NBYTES)))
        for group in range(0, rows, GROUP_ROWS):
            lines = [builder.add(a, builder.mul(I64(r), a_stride)) for r in range(group, group + GROUP_ROWS)]
            for line in lines:
                prefetch_lines(builder, builder.add(line, ahead), 64, 2)
            for pair in range(PAIRS_STEP):
                parts = [load(builder, offset(builder, b, 64 * (vectors * pair + part)), WORDS, 4) for part in range(vectors)]
                for r, line in enumerate(lines, group):
                    weights = splat(builder, load(builder, offset(builder, line, 4 * pair), I32, 2), WORDS)
                    for part in range(vectors):
                        i = vectors * r + part
                        totals[i] = multiply_pairs(builder, totals[i], weights, parts[part])
        _, _, *totals = loop.end([offset(builder, a, 64), offset(builder, b, 64 * vectors * PAIRS_STEP), *totals])
        for index, value in enumerate(totals):
            row, part = divmod(index, vectors)
            store(builder, value, offset(builder, rows_c[row], 64 * part), 4)

    return pair_tile


pair_tile, half_pair_tile = (_pair_tile(TILE_ROWS, vectors) for vectors in (2, 1))
