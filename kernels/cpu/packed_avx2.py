"""Several columns of a low-bit weight on AVX2 without VNNI, i.e. without a four-way dot product: one column after the other.

A group of sixteen rows, half a tile, stays in eight registers while all columns are processed, so an activation is read once for both
pieces of the rows. Sixteen registers cannot hold the sums of several columns: those are in the L1 cache. A column's data for a tile is one
cache line, its record:

    0 codes, int8 [32] · 32 seeds of each 8 inputs, int16 [4][2] · 48 seeds of each 16, int16 [2][2] · 56 scale · 60 sum of codes, float32

A codebook's levels are unsigned because they are offset by 64, and then 16 bits hold pair sums of one quad only. But the intended values,
of levels up to 64, would fit for two quads, and an overflowed sum wraps back when the seed is added, -64 times the inputs. So two quads
share the multiplication that widens to 32 bits; for signed super-blocks, offset by 32, four.

Compiled, in instructions per piece (8 rows x 32 inputs) and column: a 4-bit codebook 37, 8 `vpmaddubsw`, 4 `vpmaddwd`, 8 `vpaddw`, 3
`vpaddd`, 6.5 broadcasts and one reload from the stack; with four columns abreast it was 54.6, 8 and 10 and 10, and 12.6 moves to and from
the stack.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from ..lazy_numba import llvm_intrinsic
from ..tiles import LEVEL_SHIFT, ROWS
from . import packed_scales as ways
from .int8_ir import (
    BYTES,
    FLOATS,
    HALVES,
    I1,
    I8,
    INSTRUCTION_SET,
    PIECES,
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
    to_floats,
)
from .int8_products import SIGNED_SHIFT, Emitting
from .intrinsics import F32, I16, I32, I64
from .ir_loop import Loop
from .packed_loops import tables_of
from .packed_scales import places_of, tile_of

USES_AVX2 = INSTRUCTION_SET == "avx2"
RECORD = STRIDE = 64  # bytes of a record and between columns; also the distance between the sums of columns
assert STRIDE == 4 * ROWS
SEPARATE_GROUPS = (ways.HALVES, ways.NIBBLE, ways.SMALL)  # the two groups of a tile have separate sums
EIGHTS_AT, SIXTEENTHS_AT, SCALE_AT, TOTAL_AT = 32, 48, 56, 60


@llvm_intrinsic
def make_column(builder, codes, scales, tiles, pitch, records):
    """A column's int8 [tiles * 32] and float32 scales per 32 -> its records, `pitch` bytes apart. `tiles` >= 1."""
    loop = Loop(builder, tiles, [], "records")
    tile = loop.index
    code = load(builder, builder.add(codes, builder.mul(tile, I64(32))), ir.VectorType(I8, 32))
    to = builder.add(records, builder.mul(tile, pitch))
    store(builder, code, to)
    sums = builder.sext(code, ir.VectorType(I16, 32))
    # Inputs 2i and 2i + 1; then those of two quads, and of four that share 32-bit positions.
    for distance, at, shift in ((1, None, 0), (2, EIGHTS_AT, LEVEL_SHIFT), (2, SIXTEENTHS_AT, SIGNED_SHIFT)):
        count = sums.type.count
        first = [i for i in range(count) if i // distance % 2 == 0]
        sums = builder.add(*(builder.shuffle_vector(sums, sums, ir.Constant(ir.VectorType(I32, count // 2), [i + part for i in first]))
                             for part in (0, distance)))
        if at is not None:
            store(builder, builder.mul(sums, constant(sums.type, -shift)), offset(builder, to, at))
    total = I16(0)
    for i in range(4):
        total = builder.add(total, builder.extract_element(sums, I32(i)))
    store(builder, load(builder, builder.add(scales, builder.mul(tile, I64(4))), I32, 4), offset(builder, to, SCALE_AT))
    store(builder, builder.sitofp(total, F32), offset(builder, to, TOTAL_AT))
    loop.end([])


class _Record:
    """Lazy loads from a column's record: a word broadcast to all lanes, loaded where it is first used."""

    def __init__(self, builder: ir.IRBuilder, address: ir.Value) -> None:
        self.builder, self.address = builder, address
        self._words: dict[int, ir.Value] = {}

    def _word(self, index: int) -> ir.Value:
        if index not in self._words:
            self._words[index] = splat(self.builder, load(self.builder, offset(self.builder, self.address, index), I32, 4), WORDS)
        return self._words[index]

    def x(self, quad: int) -> ir.Value:
        return self.builder.bitcast(self._word(4 * quad), BYTES)

    def seed(self, index: int) -> ir.Value:
        return self.builder.bitcast(self._word(index), HALVES)

    def real(self, index: int) -> ir.Value:
        return self.builder.bitcast(self._word(index), FLOATS)


def pair_up(builder: ir.IRBuilder, quad: ir.Value, x: ir.Value) -> ir.Value:
    return builder.call(function(builder, HALVES, [BYTES] * 2, "llvm.x86.avx2.pmadd.ub.sw"), [quad, x])


def scale_up(builder: ir.IRBuilder, pairs: ir.Value, steps: ir.Value) -> ir.Value:
    return builder.call(function(builder, WORDS, [HALVES] * 2, "llvm.x86.avx2.pmadd.wd"), [pairs, steps])


def _dots(builder: ir.IRBuilder, way: str, tile: object, group: int, weights: list[ir.Value], signs: Sequence[ir.Value],
          record: _Record) -> Emitting:
    """A group (half a tile) times a column: int32 per row, times the group's step if steps are integers.

    Codes above 127, and table levels, are given as magnitudes; `signs` are the addresses of the signed values. Yields where new activations
    begin.
    """
    steps, seeds = constant(HALVES, 1), ()
    if way in (ways.CODEBOOK, ways.EXPONENTS):
        per, seeds = 2, (EIGHTS_AT + 8 * group, EIGHTS_AT + 8 * group + 4)
    elif way == ways.SIGNED:
        per, seeds = 4, (SIXTEENTHS_AT + 4 * group,)
    elif way == ways.TABLE:
        per = 1
    else:
        per = 1 if tile.max_weight > 127 else min(4, 32767 // (2 * 127 * tile.max_weight))
    if way in (ways.CODEBOOK, ways.SIGNED, ways.TABLE):
        steps = (tile.factors if way == ways.CODEBOOK else tile.steps)[group]
    elif way == ways.SUPER:
        steps = tile.steps
    total = pairs = None
    for j, weight in enumerate(weights):
        if j and j % 2 == 0:
            yield
        x = record.x(4 * group + j)
        if signs:
            x = builder.call(function(builder, BYTES, [BYTES] * 2, "llvm.x86.avx2.psign.b"), [x, load(builder, signs[j], BYTES, WIDTH)])
        if j % per == 0:
            pairs = record.seed(seeds[j // per]) if seeds else None
        products = pair_up(builder, weight, x)
        pairs = products if pairs is None else builder.add(pairs, products)
        if j % per == per - 1:
            part = scale_up(builder, pairs, steps)
            total = part if total is None else builder.add(total, part)
    return total


def _abreast(builder: ir.IRBuilder, emitting: list[Emitting]) -> list[ir.Value]:
    """Interleaves several emitters. Loads stay after the yield that precedes them: the compiler would hoist all of them, which takes more
    registers than there are."""
    results: list[ir.Value] = []
    while not results:
        for generator in emitting:
            try:
                next(generator)
            except StopIteration as end:
                results.append(end.value)
        builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)
    return results


def _add(builder: ir.IRBuilder, way: str, tile: object, group: int, dots: ir.Value, record: _Record, total: ir.Value) -> ir.Value:
    """total + the scaled dots of a tile or group: the float32 operations of `packed_loops.single` in their order."""
    scale, dots = record.real(SCALE_AT), to_floats(builder, dots)
    if way == ways.CODEBOOK:
        return fma(builder, dots, scale, total)
    if way in (ways.SIGNED, ways.TABLE):
        return fma(builder, builder.fmul(dots, tile.factor), scale, total)
    if way == ways.EXPONENTS:  # the zero point is the 64 that the seeds subtract
        return fma(builder, builder.fmul(dots, tile.factors[0]), scale, total)
    if way == ways.MINIMA:
        dots = tile.whole(dots, record.real(TOTAL_AT))
    if way in (ways.SUPER, ways.MINIMA):
        return fma(builder, fma(builder, tile.minimum, record.real(TOTAL_AT), builder.fmul(dots, tile.factor)), scale, total)
    if way in SEPARATE_GROUPS:  # the seed is -32 times the sum of the codes, in two parts
        seed = to_floats(builder, scale_up(builder, record.seed(SIXTEENTHS_AT + 4 * group), constant(HALVES, -1)))
        seed = builder.fmul(seed, constant(FLOATS, 1 / SIGNED_SHIFT))
        if way == ways.NIBBLE:
            return fma(builder, fma(builder, tile.minima[group], seed, builder.fmul(dots, tile.factors[group])), scale, total)
    else:
        seed = record.real(TOTAL_AT)
    corrected = fma(builder, tile.below, seed, dots)  # exact: both are below 2**20
    return fma(builder, builder.fmul(corrected, tile.factors[group if way in SEPARATE_GROUPS else 0]), scale, total)


def next_column(loop: Loop) -> None:
    """The end of a loop over columns. The trip count is hidden from the compiler: it would unroll the loop and spill registers."""
    builder = loop.builder
    following = opaque_address(builder, builder.add(loop.index, I64(STRIDE)))
    loop.index.add_incoming(following, builder.basic_block)
    builder.cbranch(builder.icmp_signed("<", following, loop.count), loop.body, loop.done)
    builder.position_at_end(loop.done)


def columns(way: str, max_weight: int):
    """The loop over expanded tiles for any number of columns, codes up to `max_weight`."""

    @llvm_intrinsic
    def run(builder, count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, offsets):
        """Tiles [begin, end) of a row block, expanded at `quads`, times `count` >= 1 columns; adds to float32 [count][16] at `sums`.

        x: records [tile][count], from tile 0 on. Before `quads` there is room for int32 [count][16]. The others are those of
        `packed_loops.columns`; row blocks are multiplied one by one, so `offsets` says nothing.
        """
        _, steps = tables_of(builder, way, tables)
        nbytes = builder.mul(count, I64(STRIDE))
        parts = builder.sub(quads, nbytes)
        loop = Loop(builder, end, [], "tiles", begin)
        tile = loop.index
        scale_addresses = places_of(builder, way, scales, zeros, tile, shift, zero_shift)
        passed = builder.sub(tile, begin)
        prefetch_at, part = builder.add(ahead, builder.mul(passed, share)), builder.lshr(share, I64(2))
        for i in range(4):
            prefetch_lines(builder, builder.add(prefetch_at, builder.mul(part, I64(i))), 64, 2)
        at = builder.add(quads, builder.mul(passed, I64(64 * 8)))
        records = builder.add(x, builder.mul(tile, nbytes))
        factors = [tile_of(builder, way, steps, *scale_addresses, piece, max_weight) for piece in range(PIECES)]
        for group in (0, 1):
            addresses = [[offset(builder, at, 64 * j + WIDTH * piece) for j in range(4 * group, 4 * group + 4)] for piece in range(PIECES)]
            weights = [[load(builder, address, BYTES, WIDTH) for address in row_addresses] for row_addresses in addresses]
            if max_weight > 127:
                size = function(builder, BYTES, [BYTES, I1], f"llvm.abs.v{WIDTH}i8")
                weights = [[builder.call(size, [address, I1(0)]) for address in row_addresses] for row_addresses in weights]
            column_loop = Loop(builder, nbytes, [], "turns")
            byte_offset = column_loop.index
            record = _Record(builder, builder.add(records, byte_offset))
            signs = addresses if max_weight > 127 else [()] * PIECES
            dots = _abreast(builder, [_dots(builder, way, factors[piece], group, weights[piece], signs[piece], record)
                                      for piece in range(PIECES)])
            for piece, row_addresses in enumerate(dots):
                spot, total_at = (offset(builder, builder.add(address, byte_offset), WIDTH * piece) for address in (sums, parts))
                if group == 0 and way not in SEPARATE_GROUPS:
                    store(builder, row_addresses, total_at, WIDTH)
                    continue
                if way not in SEPARATE_GROUPS:
                    row_addresses = builder.add(row_addresses, load(builder, total_at, WORDS, WIDTH))
                store(builder, _add(builder, way, factors[piece], group, row_addresses, record, load(builder, spot, FLOATS, 4)), spot, 4)
            next_column(column_loop)
        loop.end([])

    return run
