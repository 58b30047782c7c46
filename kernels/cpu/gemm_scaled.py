"""Low-bit weights as int8 of their row's own range, for the stripes of the int8 product, as LLVM vectors.

    v8 = ((v << up) * p + 2**14) >> 15,    p = rint(f * limit)

with f the group's factor and `limit` the row's 127 * 2**(15 - up) / max |f * v|. This equals rint(127 * f * v / max |f * v|) except for
rare ties, takes one 16-bit multiplication (`vpmulhrsw`), and gives the same integers on every instruction set.

With AVX-512, v << up is looked up (`vpermw`) by the low five bits of each 16-bit element: of two codes first the lower, then the upper one.
So codes need no mask and levels no widening, which leaves 10 instructions per 64 weights. Elsewhere bytes are looked up and widened, in 12
or more.
"""

from __future__ import annotations

from llvmlite import ir

from ..lazy_numba import llvm_intrinsic
from ..tiles import ROWS, TILE
from .amx import PAIR_SPAN, QUAD_NBYTES
from .gemm_expand import (
    BLOCKS,
    LINEAR,
    each_of,
    four_times,
    interleave,
    less,
    put,
    row_factors,
    step_factors,
    steps_table,
    twice,
    widened,
)
from .gemm_tiles import HALVES, INPUTS, ROUND, SIGNED_BYTES, STEP, STRIPE
from .int8_ir import (
    FLOATS,
    I8,
    INSTRUCTION_SET,
    LANES,
    PIECES,
    WIDTH,
    WORDS,
    constant,
    function,
    levels_of_tile,
    load,
    load_table,
    loose_quads,
    offset,
    prefetch_lines,
    splat,
    store,
    unpack_tile,
    widen_bytes,
)
from .int8_products import rounded_high
from .intrinsics import I16, I32
from .ir_loop import Loop

SCALED_SHIFT = 0 if SIGNED_BYTES else 128  # offset of stripe values if bytes are multiplied as unsigned
LOOKS_UP_WORDS = INSTRUCTION_SET == "avx512"
# Inputs expanded at a time, a multiple of 128. A stripe of many rows should fit into the L1 cache; narrow ones gain nothing.
SPAN = 256 if STRIPE >= 64 else 2048
UNPACKED = 8  # bits of a code in a tile that is already unpacked


def _wide_table(builder: ir.IRBuilder, levels: ir.Value, bits: int, up: ir.Value) -> ir.Value:
    """16 levels, shifted up by `up`, as HALVES repeating those of `bits`: bits above a code do not matter."""
    indices = ir.Constant(ir.VectorType(I32, WIDTH // 2), [i % min(16, 1 << bits) for i in range(WIDTH // 2)])
    wide = builder.sext(levels, ir.VectorType(I16, 16))
    return builder.shl(builder.shuffle_vector(wide, wide, indices), splat(builder, builder.trunc(up, I16), HALVES))


def _by_words(builder: ir.IRBuilder, table: ir.Value, zeros: ir.Value | None, codes: ir.Value, multiplier: ir.Value,
              shift: int) -> ir.Value:
    """A quad from `loose_quads` as scaled bytes, offset by `shift`, with AVX-512."""
    permute = function(builder, HALVES, [HALVES] * 2, "llvm.x86.avx512.permvar.hi.512")
    codes, scaled = builder.bitcast(codes, HALVES), []
    for half in (codes, builder.lshr(codes, constant(HALVES, 8))):
        values = builder.call(permute, [table, half])
        scaled.append(rounded_high(builder, values if zeros is None else builder.sub(values, zeros), multiplier))
    lower, upper = scaled[0], builder.shl(scaled[1], constant(HALVES, 8))
    if shift:  # then the lower one is positive and borrows nothing
        return builder.add(builder.add(lower, constant(HALVES, 0x101 * shift)), upper)
    return builder.or_(builder.and_(lower, constant(HALVES, 0xFF)), upper)


def _multiplier(builder: ir.IRBuilder, factors: ir.Value, limit: ir.Value) -> ir.Value:
    """p of a piece's rows, twice per word."""
    rounded = builder.fadd(builder.fmul(factors, limit), constant(FLOATS, ROUND))
    return twice(builder, builder.and_(builder.bitcast(rounded, WORDS), constant(WORDS, 0xFFFF)))


def _limit(builder: ir.IRBuilder, limits: ir.Value, piece: int) -> ir.Value:
    return load(builder, offset(builder, limits, 4 * LANES * piece), FLOATS, 4)


def _scaled(way: str, bits: int, shift: int = SCALED_SHIFT, step: int = STEP):
    by_words = LOOKS_UP_WORDS and bits != UNPACKED

    @llvm_intrinsic
    def run(builder, source, scales, second, zeros, limits, up, out):
        """A tile as int8 of each row's own range, into this row block's place in a stripe at `out`.

        source: its codes. scales: those of the tile's first half; `second` those of the other. zeros: a byte per row. limits: float32 [16].
        up: see the module.
        """
        distance = splat(builder, builder.trunc(up, I16), HALVES)
        table = _wide_table(builder, ir.Constant(ir.VectorType(I8, 16), list(range(16))), bits, up) if by_words else None
        factors = row_factors(builder, way, scales), row_factors(builder, way, second)
        for piece in range(PIECES):
            limit, below = _limit(builder, limits, piece), widen_bytes(builder, offset(builder, zeros, LANES * piece))
            multipliers = [_multiplier(builder, half[piece], limit) for half in factors]
            if by_words:
                below = builder.shl(builder.bitcast(twice(builder, below), HALVES), distance)
                multipliers = [builder.bitcast(multiplier, HALVES) for multiplier in multipliers]
                for quad, codes in enumerate(loose_quads(builder, source, bits, piece)):
                    scaled = _by_words(builder, table, below, codes, multipliers[quad // 4], shift)
                    store(builder, scaled, offset(builder, out, step * quad))
                continue
            below, multipliers = four_times(builder, below), [interleave(builder, multiplier, multiplier) for multiplier in multipliers]
            for quad, codes in enumerate(unpack_tile(builder, source, bits, piece)):
                values = each_of(lambda multiplier: builder.shl(multiplier, distance), less(builder, codes, below))
                scaled = each_of(lambda a, b: rounded_high(builder, a, b), values, multipliers[quad // 4])
                put(builder, out, quad, piece, scaled, shift, step)

    return run


def _scaled_codebook(bits: int, ahead: int, shift: int = SCALED_SHIFT, step: int = STEP):
    nbytes = ROWS * TILE * bits // 8

    @llvm_intrinsic
    def run(builder, source, scales, tables, limits, up, count, out):
        """`_scaled` of `count` tiles of a codebook. What lies `ahead` tiles further is asked for."""
        steps, piece_limits = steps_table(builder, tables), [_limit(builder, limits, piece) for piece in range(PIECES)]
        if LOOKS_UP_WORDS:
            levels = _wide_table(builder, load(builder, tables, ir.VectorType(I8, 16)), bits, up)
        else:  # a level is in the upper byte
            levels = load_table(builder, tables, bits, 0)
            down = builder.sub(constant(HALVES, 8), splat(builder, builder.trunc(up, I16), HALVES))
        loop = Loop(builder, count, [source, scales, out], "tiles")
        source, scales, out = loop.values
        prefetch_lines(builder, offset(builder, source, ahead * nbytes), nbytes, 2)
        prefetch_lines(builder, offset(builder, scales, ahead * ROWS), ROWS, 2)
        factors = step_factors(builder, steps, scales)
        for piece, limit in enumerate(piece_limits):
            multipliers = [_multiplier(builder, half[piece], limit) for half in factors]
            if LOOKS_UP_WORDS:
                multipliers = [builder.bitcast(multiplier, HALVES) for multiplier in multipliers]
                for quad, codes in enumerate(loose_quads(builder, source, bits, piece)):
                    scaled = _by_words(builder, levels, None, codes, multipliers[quad // 4], shift)
                    store(builder, scaled, offset(builder, out, step * quad))
                continue
            multipliers = [interleave(builder, multiplier, multiplier) for multiplier in multipliers]
            for quad, quad_levels in enumerate(levels_of_tile(builder, levels, source, bits, piece)):
                scaled = each_of(lambda a, b: rounded_high(builder, a, b), widened(builder, quad_levels, down), multipliers[quad // 4])
                put(builder, out, quad, piece, scaled, shift, step)
        loop.end([offset(builder, source, nbytes), offset(builder, scales, ROWS), offset(builder, out, TILE // INPUTS * step)])

    return run


scaled_linear_2, scaled_linear_3, scaled_linear_4, scaled_linear_8 = (_scaled(LINEAR, bits) for bits in (2, 3, 4, UNPACKED))
scaled_blocks_2, scaled_blocks_3, scaled_blocks_4, scaled_blocks_8 = (_scaled(BLOCKS, bits) for bits in (2, 3, 4, UNPACKED))
scaled_codebook_2, scaled_codebook_3, scaled_codebook_4 = (_scaled_codebook(bits, SPAN // TILE) for bits in (2, 3, 4))
# As signed bytes for AMX.
signed_linear, signed_blocks = (_scaled(kind, UNPACKED, 0, QUAD_NBYTES) for kind in (LINEAR, BLOCKS))
signed_codebook_2, signed_codebook_3, signed_codebook_4 = (_scaled_codebook(bits, PAIR_SPAN // TILE, 0, QUAD_NBYTES) for bits in (2, 3, 4))
