"""One column times a codebook on AVX2 without VNNI, i.e. without a four-way dot product: bound by instruction count.

Two quads share the multiplication that widens to 32 bits and applies the group's step, as in `packed_avx2.py`. A column's records are
broadcast in advance, each word to a whole vector, so that the multiplies and adds take them from memory and need no registers. `vpshufb`
looks at the lowest four bits and the highest one of a byte: two masks serve four quads of two bits, and a third bit from another plane can
act as the third bit of an index or the fourth, with a table for either, so one mask serves it in two quads.

Compiled, in instructions per 64 weights (before: `packed_loops.single`):

    codebook   4 bits 15.3 (19.9)   3 bits 19.4 (26.3)   2 bits 15.0 (19.6)    a tile and row block: 16 `vpmaddubsw`, 8 `vpmaddwd`
"""

from __future__ import annotations

from llvmlite import ir

from ..lazy_numba import llvm_intrinsic
from ..tiles import LEVEL_SHIFT, LEVELS_NBYTES, ROWS, tile_nbytes
from .int8_ir import BYTES, FLOATS, HALVES, LANES, PIECES, WIDTH, WORDS, constant, fma, function, load, offset, splat, store, to_floats
from .intrinsics import F32, I32, I64
from .ir_loop import Loop
from .packed_avx2 import EIGHTS_AT, RECORD, SCALE_AT, pair_up, scale_up
from .packed_loops import STREAMS, end_tiles, tile_at

SPREAD_WORDS = 12  # of a record: codes, and seeds of 8 inputs each
SPREAD = SPREAD_WORDS * WIDTH + 64  # bytes of an expanded record: its words, then the scale
ENTRIES = 16  # entries of a table, which is repeated every 16 bytes of a vector
NIBBLES, EVERY_OTHER_TWO, THIRDS = 0x0F, 0x33, 0x0C
ZERO_INDEX = 0x80  # index of a zero in a byte shuffle


@llvm_intrinsic
def spread_records(builder, records, tiles, out):
    """A column's records -> the same broadcast to whole vectors, SPREAD bytes per tile. `tiles` >= 1."""
    loop = Loop(builder, tiles, [], "spread")
    tile = loop.index
    record = builder.add(records, builder.mul(tile, I64(RECORD)))
    to = builder.add(out, builder.mul(tile, I64(SPREAD)))
    for i in range(SPREAD_WORDS):
        store(builder, splat(builder, load(builder, offset(builder, record, 4 * i), I32, 4), WORDS), offset(builder, to, WIDTH * i), 4)
    store(builder, load(builder, offset(builder, record, SCALE_AT), I32, 4), offset(builder, to, WIDTH * SPREAD_WORDS), 4)
    loop.end([])


def _look_up(builder: ir.IRBuilder, table: ir.Value, indices: ir.Value) -> ir.Value:
    return builder.call(function(builder, BYTES, [BYTES] * 2, "llvm.x86.avx2.pshuf.b"), [table, indices])


def _bits(builder: ir.IRBuilder, value: ir.Value, right: int, mask: int | None = None) -> ir.Value:
    """Bytes shifted right (left if negative), by 16-bit lanes, and masked."""
    halves = builder.bitcast(value, HALVES)
    if right:
        halves = builder.lshr(halves, constant(HALVES, right)) if right > 0 else builder.shl(halves, constant(HALVES, -right))
    moved = builder.bitcast(halves, BYTES)
    return moved if mask is None else builder.and_(moved, constant(BYTES, mask))


def _table(builder: ir.IRBuilder, entries: ir.Value, indices: list[int]) -> ir.Value:
    return builder.shuffle_vector(entries, entries, ir.Constant(ir.VectorType(I32, WIDTH), indices * (WIDTH // ENTRIES)))


def _tables(builder: ir.IRBuilder, address: ir.Value, bits: int) -> tuple[list[ir.Value], ir.Value]:
    """Levels + 64 for an even and for an odd quad, and steps. Of three bits the third is an index's third in an even quad, in an odd one
    its fourth."""
    lane = ir.VectorType(BYTES.element, ENTRIES)
    levels = builder.add(load(builder, address, lane), constant(lane, LEVEL_SHIFT))
    plain = list(range(ENTRIES))
    index_lists = [plain, plain] if bits != 3 else [[i & 7 for i in plain], [i & 3 | i >> 1 & 4 for i in plain]]
    steps = load(builder, offset(builder, address, LEVELS_NBYTES), lane)
    return [_table(builder, levels, indices) for indices in index_lists], _table(builder, steps, plain)


def _indices(builder: ir.IRBuilder, address: ir.Value, bits: int, piece: int, group: int) -> list[ir.Value]:
    """Lookup indices of the four quads of a group, for one piece of a tile's rows."""

    def vector(at: int) -> ir.Value:
        return load(builder, offset(builder, address, at + WIDTH * piece), BYTES)  # tensors of a mapped file may be unaligned

    if bits == 4:
        return [_bits(builder, raw, 4 * odd, NIBBLES) for raw in (vector(128 * group), vector(128 * group + 64)) for odd in (0, 1)]
    raw = vector(64 * group)
    vectors = [_bits(builder, raw, 2 * odd, EVERY_OTHER_TWO) for odd in (0, 1)]
    vectors += [_bits(builder, half, 4) for half in vectors]
    if bits == 2:
        return vectors
    raw = vector(128)  # quad j has bit j
    thirds = [_bits(builder, raw, 4 * group + 2 * pair - 2, THIRDS) for pair in (0, 1)]
    return [builder.or_(code, thirds[j // 2]) for j, code in enumerate(vectors)]


def _steps(builder: ir.IRBuilder, table: ir.Value, address: ir.Value) -> list[list[ir.Value]]:
    """The step factors of the two groups, per piece: a row's step twice, as 16-bit numbers."""
    codes = _table(builder, load(builder, address, ir.VectorType(BYTES.element, ENTRIES)), list(range(ENTRIES)))
    steps = [_look_up(builder, table, _bits(builder, codes, 4 * odd, NIBBLES)) for odd in (0, 1)]
    rows = [[LANES * piece + i // 4 if i % 2 == 0 else ZERO_INDEX for i in range(WIDTH)] for piece in range(PIECES)]
    return [[builder.bitcast(_look_up(builder, step, ir.Constant(BYTES, indices)), HALVES) for step in steps] for indices in rows]


def single(bits: int):
    """The decode loop (one column) of a codebook with codes of `bits` bits."""

    @llvm_intrinsic
    def run(builder, table, tables, x, tiles, shift, zero_shift, out):
        """As `packed_loops.single` in all but what it reads of the column: the fourth address at `x` is that of its spread records."""
        slot = lambda base, i: load(builder, offset(builder, base, 8 * i), I64, 8)  # noqa: E731
        codes, scales, _, nexts = ([slot(table, part * STREAMS + s) for s in range(STREAMS)] for part in range(4))
        column, (levels, steps) = slot(x, 3), _tables(builder, tables, bits)
        pieces = [(s, piece) for s in range(STREAMS) for piece in range(PIECES)]
        loop = Loop(builder, tiles, [constant(FLOATS, 0.0)] * len(pieces), "tiles")
        tile, totals = loop.index, loop.values
        at = [tile_at(builder, address, following, tile, tiles, tile_nbytes(bits)) for address, following in zip(codes, nexts, strict=True)]
        scale_addresses = [builder.add(address, builder.mul(tile, I64(ROWS))) for address in scales]
        factors = [address for scale_address in scale_addresses for address in _steps(builder, steps, scale_address)]
        column = builder.add(column, builder.mul(tile, I64(SPREAD)))
        sums: list[ir.Value | None] = [None] * len(pieces)

        def word(scale_address: int, kind: ir.VectorType) -> ir.Value:
            return builder.bitcast(load(builder, offset(builder, column, WIDTH * scale_address), WORDS, WIDTH), kind)

        for group in (0, 1):
            for index, (s, piece) in enumerate(pieces):
                indices = _indices(builder, at[s], bits, piece, group)
                for pair in (0, 1):
                    pairs = word(EIGHTS_AT // 4 + 2 * group + pair, HALVES)
                    for odd in (0, 1):
                        level = _look_up(builder, levels[odd], indices[2 * pair + odd])
                        pairs = builder.add(pairs, pair_up(builder, level, word(4 * group + 2 * pair + odd, BYTES)))
                    part = scale_up(builder, pairs, factors[index][group])
                    sums[index] = part if sums[index] is None else builder.add(sums[index], part)
                # Otherwise the compiler keeps values that the next piece reads again in registers, of which there are too few.
                builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)
        x_scale = splat(builder, load(builder, offset(builder, column, WIDTH * SPREAD_WORDS), F32, 4), FLOATS)
        updated = [fma(builder, to_floats(builder, address), x_scale, total) for address, total in zip(sums, totals, strict=True)]
        end_tiles(builder, loop, updated, out)

    return run
