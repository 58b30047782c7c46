"""Intel AMX tile registers as LLVM instructions: eight tiles of 16 rows of 64 bytes.

One instruction multiplies 16 tokens by 16 weight rows over 64 inputs: 16,384 multiply-adds in 16 cycles, where a vector dot product does
64. Activations are stored in a tile as [token][64 bytes], weights as [quad][16 rows][4 bytes], which is the quad order of `tiles.py`. A
process has to request permission from the OS first (`kernels/target.py`). A thread configures the tile shapes before use (`configure`) and
releases them after (`release`), so that context switches need not save them.
"""

from __future__ import annotations

from llvmlite import ir

from ..compile import cpu_features
from ..lazy_numba import llvm_intrinsic
from ..reference_low_bit import INT16_GROUP
from .int8_ir import FLOATS, I8, INSTRUCTION_SET, WORDS, constant, fma, function, load, offset, splat, store
from .intrinsics import F32, I64
from .ir_loop import Loop

AMX = INSTRUCTION_SET == "avx512" and {"amx-tile", "amx-int8"} <= cpu_features()
AMX_ROWS, INPUTS = 16, 64  # tokens or weight rows of a tile; inputs (bytes) of a tile's row, taken by one instruction
TILE_NBYTES = AMX_ROWS * INPUTS
STEP_NBYTES = 2 * TILE_NBYTES  # of a panel, per 64 inputs: those of 32 tokens in one byte each, or of 16 tokens in two
QUAD_NBYTES = 2 * INPUTS  # of a pair of row blocks, which are multiplied together
PAIR_SPAN = INT16_GROUP  # inputs for which the weights of 32 rows and a panel fit into the L1 cache
BLOCK = 128  # inputs of a token that share a scale, with one byte each
CONFIG_NBYTES = 64
SUMS, LEFT, RIGHT = (0, 1, 2, 3), (4, 5), (6, 7)  # tile registers of sums, activations and weights
STAGE_NBYTES = len(SUMS) * TILE_NBYTES


def call(builder: ir.IRBuilder, name: str, *values: ir.Value) -> None:
    builder.call(function(builder, ir.VoidType(), [value.type for value in values], f"llvm.x86.{name}"), values)


def _pointer(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, I8.as_pointer())


def load_tile(builder: ir.IRBuilder, tile: int, address: ir.Value, stride: int = INPUTS) -> None:
    call(builder, "tileloadd64", I8(tile), _pointer(builder, address), I64(stride))


def _multiply(builder: ir.IRBuilder, tile: int, left: int, right: int) -> None:
    call(builder, "tdpbssd", I8(tile), I8(left), I8(right))


def zero_tiles(builder: ir.IRBuilder) -> None:
    for tile in SUMS:
        call(builder, "tilezero", I8(tile))


def store_tiles(builder: ir.IRBuilder, stage: ir.Value) -> None:
    for tile in SUMS:
        call(builder, "tilestored64", I8(tile), _pointer(builder, offset(builder, stage, TILE_NBYTES * tile)), I64(INPUTS))


@llvm_intrinsic
def configure(builder, scratch):
    """Configure all tiles as 16 rows of 64 bytes. scratch: CONFIG_NBYTES bytes."""
    shape = [1, *[0] * 15, *[INPUTS, 0] * 8, *[0] * 16, *[AMX_ROWS] * 8, *[0] * 8]
    store(builder, ir.Constant(ir.VectorType(I8, CONFIG_NBYTES), shape), scratch)
    call(builder, "ldtilecfg", _pointer(builder, scratch))


@llvm_intrinsic
def release(builder):
    call(builder, "tilerelease")


def _step_of_bytes(builder: ir.IRBuilder, weights: ir.Value, panel: ir.Value) -> None:
    """64 inputs of 32 tokens times 32 rows."""
    for i in (0, 1):
        load_tile(builder, LEFT[i], offset(builder, panel, TILE_NBYTES * i))
    for row in (0, 1):
        load_tile(builder, RIGHT[row], offset(builder, weights, INPUTS * row), QUAD_NBYTES)
        for token in (0, 1):
            _multiply(builder, SUMS[2 * token + row], LEFT[token], RIGHT[row])


def _merge_tokens(builder: ir.IRBuilder, stage: ir.Value, scales: ir.Value, out: ir.Value, pitch: ir.Value, half: int) -> None:
    """out[token][32 rows] += scale * sum for the first or second 16 of 32 tokens."""
    for token in range(AMX_ROWS):
        scale = splat(builder, load(builder, offset(builder, scales, 4 * (AMX_ROWS * half + token)), F32, 4), FLOATS)
        at = builder.add(out, builder.mul(pitch, I64(AMX_ROWS * half + token)))
        for row in (0, 1):
            words = load(builder, offset(builder, stage, TILE_NBYTES * (2 * half + row) + INPUTS * token), WORDS, 4)
            address = offset(builder, at, INPUTS * row)
            store(builder, fma(builder, builder.sitofp(words, FLOATS), scale, load(builder, address, FLOATS, 4)), address, 4)


@llvm_intrinsic
def product_of_bytes(builder, weights, scales, panel, blocks, stage, out, pitch):
    """out[32 tokens][32 rows] (float32, tokens `pitch` bytes apart) += scale * (panel . rows), block by block; `blocks` >= 1.

    weights: quads of 32 rows. scales: float32 [blocks][32]. panel: a block's 128 inputs are two steps. stage: STAGE_NBYTES bytes. The sums
    of a block are merged while the next one is multiplied.
    """
    further = lambda address: offset(builder, address, STEP_NBYTES)  # noqa: E731  as long for weights as for activations
    zero_tiles(builder)
    _step_of_bytes(builder, weights, panel)
    _step_of_bytes(builder, further(weights), further(panel))
    store_tiles(builder, stage)
    with builder.if_then(builder.icmp_signed(">", blocks, I64(1))):
        loop = Loop(builder, builder.sub(blocks, I64(1)), [further(further(weights)), scales, further(further(panel))], "blocks")
        weights_at, before, x = loop.values
        zero_tiles(builder)
        for half in (0, 1):
            _step_of_bytes(builder, weights_at, x)
            _merge_tokens(builder, stage, before, out, pitch, half)
            weights_at, x = further(weights_at), further(x)
        store_tiles(builder, stage)
        loop.end([weights_at, offset(builder, before, 8 * AMX_ROWS), x])
    last = builder.add(scales, builder.mul(builder.sub(blocks, I64(1)), I64(8 * AMX_ROWS)))
    for half in (0, 1):
        _merge_tokens(builder, stage, last, out, pitch, half)


@llvm_intrinsic
def product_of_halves(builder, weights, second, panel, steps, stage):
    """Products of a panel's 16 tokens with 32 rows, both two-byte integers, over `steps` >= 1 times 64 inputs, int32 [2][2][16][16] at
    `stage`: per row block high by high bytes, and the mixed products, which weigh 256 times less. Low by low is omitted.

    weights: quads of 32 rows, their low bytes `second` bytes further. panel: a step is 16 tokens' high bytes, then the low ones.
    """
    zero_tiles(builder)
    loop = Loop(builder, steps, [weights, panel], "steps")
    weights, panel = loop.values
    upper, lower = LEFT
    load_tile(builder, upper, panel)
    load_tile(builder, lower, offset(builder, panel, TILE_NBYTES))
    for row in (0, 1):
        main, fine = SUMS[2 * row], SUMS[2 * row + 1]
        row_at = offset(builder, weights, INPUTS * row)
        load_tile(builder, RIGHT[0], row_at, QUAD_NBYTES)
        _multiply(builder, main, upper, RIGHT[0])
        _multiply(builder, fine, lower, RIGHT[0])
        load_tile(builder, RIGHT[1], builder.add(row_at, second), QUAD_NBYTES)
        _multiply(builder, fine, upper, RIGHT[1])
    loop.end([offset(builder, weights, QUAD_NBYTES * AMX_ROWS), offset(builder, panel, STEP_NBYTES)])
    store_tiles(builder, stage)


@llvm_intrinsic
def add_halves(builder, stage, scales, factors, out, pitch):
    """out[16][32] (float32, tokens `pitch` bytes apart) += (256 * first + second) * row factor * token scale, from the output of
    `product_of_halves`. scales: float32 [16]; factors: float32 [32]."""
    rows = [load(builder, offset(builder, factors, INPUTS * v), FLOATS, 4) for v in (0, 1)]
    loop = Loop(builder, I64(AMX_ROWS), [stage, out], "tokens")
    stage, out = loop.values
    scale = splat(builder, load(builder, builder.add(scales, builder.mul(loop.index, I64(4))), F32, 4), FLOATS)
    for v in (0, 1):
        main, fine = (builder.sitofp(load(builder, offset(builder, stage, TILE_NBYTES * (2 * v + i)), WORDS, 4), FLOATS)
                      for i in (0, 1))
        value = builder.fmul(fma(builder, main, constant(FLOATS, 256.0), fine), rows[v])
        at = offset(builder, out, INPUTS * v)
        store(builder, fma(builder, value, scale, load(builder, at, FLOATS, 4)), at, 4)
    loop.end([offset(builder, stage, INPUTS), builder.add(out, pitch)])
