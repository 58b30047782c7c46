"""bf16 products with the matrix unit (AMX): activations split into three bf16 parts, weights packed as pairs of inputs."""

from __future__ import annotations

from llvmlite import ir

from ..lazy_numba import llvm_intrinsic
from .amx import AMX_ROWS, INPUTS, LEFT, RIGHT, SUMS, TILE_NBYTES, call, load_tile, store_tiles, zero_tiles
from .amx_int16 import transposed
from .int8_ir import FLOATS, I8, LANES, WORDS, constant, load, offset, store
from .intrinsics import I16, I64
from .ir_loop import Loop

PARTS = 3  # bf16 parts of an activation, which together hold the bits of a float32
STEP = 32  # inputs of one instruction
STEP_NBYTES = PARTS * 2 * TILE_NBYTES  # of a panel of 32 tokens, [part][32 tokens][32 inputs]
PAIRS_PITCH = 2 * INPUTS  # bytes between pairs of inputs of 32 rows


@llvm_intrinsic
def split_token(builder, x, steps, out):
    """Splits `steps` >= 1 times 32 float32 of a token into a panel's steps, starting at its own row of `out`: each value rounded to bf16,
    then the remainder, twice. NaN and infinity become NaN."""
    narrow = ir.VectorType(I16, LANES)
    loop = Loop(builder, steps, [x, out], "steps")
    x, out = loop.values
    for piece in range(STEP // LANES):
        remainder = load(builder, offset(builder, x, 4 * LANES * piece), FLOATS, 4)
        for part in range(PARTS):
            bits = builder.bitcast(remainder, WORDS)
            odd = builder.and_(builder.lshr(bits, constant(WORDS, 16)), constant(WORDS, 1))
            rounded = builder.lshr(builder.add(builder.add(bits, constant(WORDS, 0x7FFF)), odd), constant(WORDS, 16))
            store(builder, builder.trunc(rounded, narrow), offset(builder, out, 2 * TILE_NBYTES * part + 2 * LANES * piece), 2)
            remainder = builder.fsub(remainder, builder.bitcast(builder.shl(rounded, constant(WORDS, 16)), FLOATS))
    loop.end([offset(builder, x, 4 * STEP), offset(builder, out, STEP_NBYTES)])


@llvm_intrinsic
def pair_rows(builder, rows, pitch, valid_rows, count, out):
    """`count` bf16 of 16 rows, `pitch` bytes apart, of which the first `valid_rows` exist, as pairs of inputs [pair][16 rows], PAIRS_PITCH
    bytes apart. Missing rows, and inputs up to a multiple of STEP, are zeros."""
    lanes = ir.VectorType(I16, STEP)
    steps = builder.lshr(builder.add(count, I64(STEP - 1)), I64(STEP.bit_length() - 1))
    loop = Loop(builder, steps, [rows, out], "steps")
    first, out = loop.values
    left = builder.sub(count, builder.mul(loop.index, I64(STEP)))
    numbers = ir.Constant(lanes, list(range(STEP)))
    bound = builder.select(builder.icmp_signed("<", left, I64(STEP)), left, I64(STEP))
    splatted = builder.shuffle_vector(builder.insert_element(ir.Constant(lanes, ir.Undefined), builder.trunc(bound, I16), I64(0)),
                                      ir.Constant(lanes, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), STEP), [0] * STEP))
    inside = builder.icmp_signed("<", numbers, splatted)
    name = f"llvm.masked.load.v{STEP}i16.p0"
    masks = ir.VectorType(ir.IntType(1), STEP)
    fetch = builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(lanes, [lanes.as_pointer(), ir.IntType(32), masks, lanes]), name)
    pairs = []
    for row in range(AMX_ROWS):
        there = builder.icmp_signed("<", I64(row), valid_rows)
        mask = builder.select(there, ir.Constant(masks, [1] * STEP), ir.Constant(masks, [0] * STEP))
        at = builder.inttoptr(builder.add(first, builder.mul(pitch, I64(row))), lanes.as_pointer())
        values = builder.call(fetch, [at, ir.IntType(32)(2), builder.and_(inside, mask), ir.Constant(lanes, [0] * STEP)])
        pairs.append(builder.bitcast(values, WORDS))
    for pair, words in enumerate(transposed(builder, pairs)):
        store(builder, words, offset(builder, out, PAIRS_PITCH * pair), 4)
    loop.end([offset(builder, first, 2 * STEP), offset(builder, out, PAIRS_PITCH * AMX_ROWS)])


@llvm_intrinsic
def float_product(builder, panel, pairs, steps, sums, adds):
    """Sums [2][2][16 tokens][16 rows] (float32) of a panel times 32 rows over `steps` >= 1 times 32 inputs; with `adds` 1 accumulates."""
    zero_tiles(builder)
    with builder.if_then(builder.icmp_signed("!=", adds, I64(0))):
        for tile in SUMS:
            load_tile(builder, tile, offset(builder, sums, TILE_NBYTES * tile))
    loop = Loop(builder, steps, [panel, pairs], "steps")
    panel, pairs = loop.values
    for i in (0, 1):
        load_tile(builder, RIGHT[i], offset(builder, pairs, INPUTS * i), PAIRS_PITCH)
    for part in range(PARTS - 1, -1, -1):  # smallest parts first, which is more exact
        for i in (0, 1):
            load_tile(builder, LEFT[i], offset(builder, panel, TILE_NBYTES * (2 * part + i)))
        for token in (0, 1):
            for row in (0, 1):
                call(builder, "tdpbf16ps", I8(SUMS[2 * token + row]), I8(LEFT[token]), I8(RIGHT[row]))
    loop.end([offset(builder, panel, STEP_NBYTES), offset(builder, pairs, PAIRS_PITCH * AMX_ROWS)])
    store_tiles(builder, sums)
