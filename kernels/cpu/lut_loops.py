"""Weights of 2 to 4 bits as bit planes, multiplied by table lookup (T-MAC, arXiv 2407.00088), with exact sums.

Four activations have sixteen subset sums, and four bits of a plane index one of them. So a row's sum over a tile (32 inputs) takes eight
lookups per plane, and a byte shuffle does one for each of 16 rows. Codes are in lookup layout (`lut_layout.py`), 32 rows side by side.

Exact: a sum of four int8, -508 to 508, is stored as 32 * high + low with low in 0..31, in two byte tables. Eight of each still fit a byte,
so a tile is summed with byte additions only, and the planes are combined in 16 bits: |sum (code - 2**(bits - 1)) * x| is at most 32,512.
From there on everything is bit-identical to `packed_loops.py`: the same integers in the same chain of float32.

AVX2 at 2 bits, per 32 rows x 32 inputs: 157 instructions, of them 32 `vpshufb`, 28 `vpaddb`, 24 `vpand` and `vpsrlw` for indices, 8 table
broadcasts (shared by two pairs of row blocks) and some 30 for sums and scaling, plus 30 per group for scales and zeros; the dot product
takes 245. At 3 bits 222 against 337, at 4 bits 296 against 248. The vector units are the bottleneck. Tried and slower: 16-bit sums,
interleaved after each lookup (15% at 2 and 3 bits); rows gathered from row blocks left in place (13% at 2 bits); one pair at a time (equal
at 2 bits, 10% at 3).
"""

from __future__ import annotations

from llvmlite import ir
from numpy import float32, int32

from ..lazy_numba import inlined, llvm_intrinsic, types
from ..tiles import ROWS, TILE
from .int8_ir import (
    BYTES,
    FLOATS,
    HALVES,
    I8,
    WIDTH,
    WORDS,
    constant,
    fma,
    function,
    load,
    offset,
    prefetch_lines,
    splat,
    store,
    to_floats,
)
from .intrinsics import F32, I16, I32, I64, f32_at, i8_at, i16_at, i32_at, i64_at, u8_at
from .ir_loop import Loop
from .lut_layout import LINE, PAIR, QUADS, pair_tile_nbytes

PAIRS_AT_ONCE = 2  # pairs that share a table while it is in a register
SUMS = PAIRS_AT_ONCE * PAIR  # results of `look_up_sums`
GROUP_NBYTES = 32  # tables of four activations
TABLES_NBYTES = QUADS * GROUP_NBYTES  # of a tile
SEEDS_NBYTES = 8  # of a tile
LOW_TABLE_BITS = 5  # bits of a sum in the low table
# Offset of the first low table of a tile, so that its sum is a signed byte.
BIAS = 128
SHUFFLES = WIDTH > 16
PREFETCH_NBYTES = 2048  # prefetch distance
PER_LINE = WIDTH // 16
VECTORS = PAIRS_AT_ONCE * PAIR // WIDTH


def _shuffle(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, order: list[int]) -> ir.Value:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, len(order)), order))


def _interleave(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, part: int) -> ir.Value:
    """Alternate elements of two vectors, from the first (`part` 0) or second half of every 16 bytes: one unpack instruction."""
    count = a.type.count
    per = count // PER_LINE
    chosen = [line + part * per // 2 + i for line in range(0, count, per) for i in range(per // 2)]
    return _shuffle(builder, a, b, [i + source * count for i in chosen for source in (0, 1)])


def _join(builder: ir.IRBuilder, parts: list[ir.Value]) -> ir.Value:
    """Concatenate vectors; a power of two of them."""
    while len(parts) > 1:
        both = list(range(2 * parts[0].type.count))
        parts = [_shuffle(builder, parts[i], parts[i + 1], both) for i in range(0, len(parts), 2)]
    return parts[0]


class _Sums:
    """The sums of a tile for WIDTH rows, accumulated lookup by lookup: per plane a vector of low bytes and one of high bytes."""

    def __init__(self, builder: ir.IRBuilder, bits: int) -> None:
        self.builder, self.bits = builder, bits
        self.parts: list[tuple[ir.Value, ir.Value] | None] = [None] * bits

    def look_up(self, plane: int, index: ir.Value, low: ir.Value, high: ir.Value) -> None:
        builder = self.builder
        name = "llvm.x86.avx512.pshuf.b.512" if WIDTH == 64 else "llvm.x86.avx2.pshuf.b"
        shuffle = function(builder, BYTES, [BYTES] * 2, name)
        entries = builder.call(shuffle, [low, index]), builder.call(shuffle, [high, index])
        before = self.parts[plane]
        self.parts[plane] = entries if before is None else (builder.add(before[0], entries[0]), builder.add(before[1], entries[1]))

    def words(self, seed: ir.Value) -> list[ir.Value]:
        """sum (code - 2**(bits - 1)) * x in 16 bits, given the seeds from `make_seeds`: two vectors, by halves of every 16 rows."""
        return [self._words(part, seed) for part in (0, 1)]

    def _words(self, part: int, seed: ir.Value) -> ir.Value:
        builder, name = self.builder, "llvm.x86.avx512.pmaddubs.w.512" if WIDTH == 64 else "llvm.x86.avx2.pmadd.ub.sw"
        pair_up = function(builder, HALVES, [BYTES] * 2, name)

        def plane(number: int, weight: int) -> ir.Value:
            weights = ir.Constant(BYTES, [weight, weight << LOW_TABLE_BITS] * (WIDTH // 2))
            return builder.call(pair_up, [weights, _interleave(builder, *self.parts[number], part)])

        total = builder.add(seed, builder.add(plane(0, 1), plane(1, 2)))
        if self.bits == 3:
            total = builder.add(total, plane(2, 4))
        if self.bits == 4:  # 8 << LOW_TABLE_BITS does not fit an unsigned byte
            total = builder.add(total, builder.shl(builder.add(plane(2, 1), plane(3, 2)), constant(HALVES, 2)))
        return total


def _shuffled_sums(bits: int):
    """The loop for one bit width."""

    @llvm_intrinsic
    def run(builder, table, x, groups, in_group, zero_stride, out):
        """PAIRS_AT_ONCE pairs of row blocks times one column -> float32 [PAIRS_AT_ONCE][32] at `out`, row scales not applied.

        table: addresses of the pairs' codes, then of the row blocks' scales, then of their zeros. x: address of four addresses, of which
        the last three are read: the column's scales, float32 per tile, its seeds and its tables. `groups` >= 1 groups of `in_group` tiles;
        `zero_stride`: bytes from a group's zeros to the next one's, 0 where all have the same.
        """
        slot = lambda base, i: load(builder, offset(builder, base, 8 * i), I64, 8)  # noqa: E731
        blocks = 2 * PAIRS_AT_ONCE
        codes = [slot(table, i) for i in range(PAIRS_AT_ONCE)]
        scales, zeros = ([slot(table, PAIRS_AT_ONCE + part * blocks + i) for i in range(blocks)] for part in (0, 1))
        scale_at, seed_at, tables_at = (slot(x, i) for i in (1, 2, 3))
        sums = constant(FLOATS, 0.0)
        outer = Loop(builder, groups, [*codes, scale_at, seed_at, tables_at, *[sums] * (4 * VECTORS)], "groups")
        at = builder.mul(outer.index, I64(ROWS))
        factors = _factors(builder, [builder.add(address, at) for address in scales])
        at = builder.mul(outer.index, zero_stride)
        shifts = _zeros(builder, [builder.add(address, at) for address in zeros], bits)
        inner = Loop(builder, in_group, outer.values, "tiles")
        values = _tile(builder, bits, inner.values, factors, shifts)
        values = outer.end(inner.end(values))
        for index, value in enumerate(values[PAIRS_AT_ONCE + 3 :]):  # [vector][4 rows of every 16]
            vector, four = divmod(index, 4)
            for line in range(PER_LINE):
                lane = _shuffle(builder, value, value, list(range(4 * line, 4 * line + 4)))
                store(builder, lane, offset(builder, out, 4 * (vector * WIDTH + ROWS * line + 4 * four)), 4)

    return run


def _factors(builder: ir.IRBuilder, addresses: list[ir.Value]) -> list[list[ir.Value]]:
    """The four scale vectors of each vector of rows."""
    vectors = []
    for vector in range(VECTORS):
        codes = _join(builder, [load(builder, address, LINE) for address in addresses[PER_LINE * vector : PER_LINE * (vector + 1)]])
        wide = [builder.bitcast(_interleave(builder, codes, constant(BYTES, 0), part), HALVES) for part in (0, 1)]
        words = [builder.bitcast(_interleave(builder, wide[i // 2], constant(HALVES, 0), i % 2), WORDS) for i in range(4)]
        vectors.append([to_floats(builder, address) for address in words])
    return vectors


def _zeros(builder: ir.IRBuilder, addresses: list[ir.Value], bits: int) -> list[list[ir.Value]]:
    """Two 16-bit vectors per vector of rows: the zero points' offset from 2**(bits - 1)."""
    vectors = []
    for vector in range(VECTORS):
        zeros = _join(builder, [load(builder, address, LINE) for address in addresses[PER_LINE * vector : PER_LINE * (vector + 1)]])
        wide = [builder.bitcast(_interleave(builder, zeros, constant(BYTES, 0), part), HALVES) for part in (0, 1)]
        vectors.append([builder.sub(address, constant(HALVES, 1 << (bits - 1))) for address in wide])
    return vectors


def _tile(builder: ir.IRBuilder, bits: int, carried: list[ir.Value], factors: list[list[ir.Value]],
          zeros: list[list[ir.Value]]) -> list[ir.Value]:
    """One tile of every row; returns what `carried` (addresses of codes, scales, seeds, tables, then sums) becomes."""
    codes, (scale_at, seed_at,
            tables_at), totals = carried[:PAIRS_AT_ONCE], carried[PAIRS_AT_ONCE : PAIRS_AT_ONCE + 3], carried[PAIRS_AT_ONCE + 3 :]
    name = "llvm.x86.avx512.pmaddw.d.512" if WIDTH == 64 else "llvm.x86.avx2.pmadd.wd"
    sum_up = function(builder, WORDS, [HALVES] * 2, name)
    for code in codes:
        prefetch_lines(builder, offset(builder, code, PREFETCH_NBYTES), pair_tile_nbytes(bits))
    sums = [_Sums(builder, bits) for _ in range(VECTORS)]
    half = ir.VectorType(I8, min(WIDTH, PAIR))
    keep = constant(BYTES, 15)
    for unit in range(4):
        tables = []
        for i in range(4):  # low and high bytes of the first four inputs, then of the other four
            entries = load(builder, offset(builder, tables_at, 2 * GROUP_NBYTES * unit + 16 * i), LINE, 16)
            tables.append(_shuffle(builder, entries, entries, [i % 16 for i in range(WIDTH)]))
        for vector in range(VECTORS):
            vector_codes = codes[PAIRS_AT_ONCE // VECTORS * vector : PAIRS_AT_ONCE // VECTORS * (vector + 1)]
            for plane in range(bits):
                raw = _join(builder, [load(builder, offset(builder, code, (4 * plane + unit) * PAIR), half) for code in vector_codes])
                above = builder.bitcast(builder.lshr(builder.bitcast(raw, HALVES), constant(HALVES, 4)), BYTES)
                sums[vector].look_up(plane, builder.and_(raw, keep), *tables[:2])
                sums[vector].look_up(plane, builder.and_(above, keep), *tables[2:])
    scale = splat(builder, load(builder, scale_at, F32, 4), FLOATS)
    seed = splat(builder, load(builder, seed_at, I16, 2), HALVES)
    with_zero = builder.bitcast(splat(builder, load(builder, offset(builder, seed_at, 4), I32, 4), WORDS), HALVES)
    updated = []
    for vector in range(VECTORS):
        words = sums[vector].words(seed)
        for i in range(4):  # the widening multiplication includes the zero points
            both = _interleave(builder, words[i // 2], zeros[vector][i // 2], i % 2)
            vector_codes = to_floats(builder, builder.call(sum_up, [both, with_zero]))
            updated.append(fma(builder, builder.fmul(vector_codes, factors[vector][i]), scale, totals[4 * vector + i]))
    moved = [builder.add(code, I64(pair_tile_nbytes(bits))) for code in codes]
    steps = zip((scale_at, seed_at, tables_at), (4, SEEDS_NBYTES, TABLES_NBYTES))
    return [*moved, *(builder.add(code, I64(step)) for code, step in steps), *updated]


def _scalar_sums(bits: int):
    """The same without a byte shuffle: 16-bit sums, row by row."""

    @inlined()
    def run(table, x, groups, in_group, zero_stride, out):
        address, where, total = i64_at(table), i64_at(x), f32_at(out)
        for row in range(SUMS):
            pair, block, line = row // PAIR, row // ROWS, row % ROWS
            code = u8_at(address[pair] + row % PAIR)
            at, sums = 0, float32(0.0)
            for group in range(groups):
                scale = u8_at(address[PAIRS_AT_ONCE + block] + ROWS * group)[line]
                zero = int32(u8_at(address[3 * PAIRS_AT_ONCE + block] + zero_stride * group)[line])
                factor = float32(scale)
                for tile in range(group * in_group, (group + 1) * in_group):
                    entries = i16_at(where[3] + TABLES_NBYTES * tile)
                    zero_term = -zero * i32_at(where[2])[2 * tile]
                    for plane in range(bits):
                        for unit in range(4):
                            index = code[at]
                            zero_term += (int32(entries[32 * unit + (index & 15)]) + int32(entries[32 * unit + 16 + (index >> 4)])) << plane
                            at += PAIR
                    sums = fused(float32(zero_term) * factor, f32_at(where[1])[tile], sums)
            total[row] = sums

    return run


look_up_sums = _shuffled_sums if SHUFFLES else _scalar_sums


@llvm_intrinsic
def fused(builder, a: types.float32, b: types.float32, c: types.float32) -> types.float32:
    """a * b + c of float32, rounded once."""
    return builder.call(function(builder, F32, [F32] * 3, "llvm.fma.f32"), [a, b, c])


@llvm_intrinsic
def _shuffled_tables(builder, codes, tiles, out):
    """int8 activations -> per four of them, 16 low bytes and 16 high bytes of the subset sums."""
    bytes_, halves = ir.VectorType(I8, 32), ir.VectorType(I16, 16)
    pair_up = function(builder, halves, [bytes_] * 2, "llvm.x86.avx2.pmadd.ub.sw")
    subsets = [ir.Constant(bytes_, [entry >> (2 * pair + i) & 1 for entry in range(16) for i in (0, 1)]) for pair in (0, 1)]
    loop = Loop(builder, tiles, [codes, out], "tables")
    for quad in range(QUADS):
        pairs = [load(builder, offset(builder, loop.values[0], 4 * quad + 2 * pair), I16, 2) for pair in (0, 1)]
        sums = builder.add(*(builder.call(pair_up, [subset, builder.bitcast(splat(builder, pair, halves), bytes_)])
                             for subset, pair in zip(subsets, pairs)))
        low = builder.and_(sums, constant(halves, (1 << LOW_TABLE_BITS) - 1))
        if quad == 0:
            low = builder.sub(low, constant(halves, BIAS))
        for i, part in enumerate((low, builder.ashr(sums, constant(halves, LOW_TABLE_BITS)))):
            store(builder, builder.trunc(part, LINE), offset(builder, loop.values[1], GROUP_NBYTES * quad + 16 * i), 16)
    loop.end([builder.add(loop.values[0], I64(TILE)), builder.add(loop.values[1], I64(TABLES_NBYTES))])


@inlined()
def _scalar_tables(codes, tiles, out):
    """int8 activations -> per four of them, 16 subset sums, int16."""
    x, entry = i8_at(codes), i16_at(out)
    for group in range(tiles * QUADS):
        for index in range(16):
            total = int32(0)
            for i in range(4):
                total += int32(x[4 * group + i]) * ((index >> i) & 1)
            entry[16 * group + index] = total


make_tables = _shuffled_tables if SHUFFLES else _scalar_tables


@inlined()
def make_seeds(bits, totals, seeds, tiles):
    """Initial values of a tile's sums, from int32 totals of its halves: a 16-bit value that undoes the bias and 2**(bits - 1), then the
    factors 1 and -total of a sum and of its zero. Without shuffles: the total."""
    total, seed = i32_at(totals), i16_at(seeds)
    for tile in range(tiles):
        both = total[2 * tile] + total[2 * tile + 1]
        if SHUFFLES:
            seed[4 * tile] = BIAS * ((1 << bits) - 1) - (both << (bits - 1))
            seed[4 * tile + 2], seed[4 * tile + 3] = 1, -both
        else:
            i32_at(seeds)[2 * tile] = both
