"""Scales and zero points of every format family, as vectors: what a tile's exact sums are multiplied by in the loops of `packed_loops.py`.
"""

from __future__ import annotations

from llvmlite import ir

from ..tiles import (
    NIBBLE_NBYTES,
    NIBBLE_TILE_NBYTES,
    ROWS,
    SIGNED_HEADER_NBYTES,
    SIGNED_NBYTES,
    SIGNED_TILE_NBYTES,
    SUPER_HEADER_NBYTES,
    SUPER_NBYTES,
    SUPER_TILE_NBYTES,
)
from .fp8_vectors import small_scales
from .int8_ir import (
    FLOATS,
    I8,
    LANES,
    OFFSET_WHEN_WIDE,
    WORDS,
    constant,
    fma,
    load,
    look_up_steps,
    offset,
    step_form,
    to_floats,
    widen_bytes,
)
from .int8_products import SIGNED_SHIFT, TABLE_SHIFT, Emitting, codebook_sum, sum_quads
from .intrinsics import F16, HAS_HALF, I16, I32, I64

# How sums are scaled. CODEBOOK: two groups per tile. PLAIN: at most one group per tile and a zero point, stored or constant; HALVES:
# symmetric groups of 16, half a tile each. BLOCKS: a half-precision scale per group. SUPER: super-blocks with minima, one group per tile;
# SIGNED and TABLE: super-blocks with signed scales, of codes or table levels, two groups per tile. EXPONENTS: a power of two per tile, of
# levels. MINIMA: half-precision minima next to the scale of every group. SMALL: scales as 8-bit floats, of levels, two per tile.
CODEBOOK, PLAIN, HALVES, BLOCKS, SUPER, SIGNED, EXPONENTS = "codebook", "plain", "halves", "blocks", "super", "signed", "exponents"
TABLE, NIBBLE, MINIMA, SMALL = "table", "nibble", "minima", "small"


SIGNED_RECORD = SIGNED_NBYTES, SIGNED_HEADER_NBYTES, SIGNED_TILE_NBYTES
# Bytes of a super-block's record, of its header, and of a tile's part.
RECORDS = {SUPER: (SUPER_NBYTES, SUPER_HEADER_NBYTES, SUPER_TILE_NBYTES),
           NIBBLE: (NIBBLE_NBYTES, SUPER_HEADER_NBYTES, NIBBLE_TILE_NBYTES),
           SIGNED: SIGNED_RECORD, TABLE: SIGNED_RECORD}


def byte_scales(builder: ir.IRBuilder, address: ir.Value, piece: int) -> ir.Value:
    """8-bit group scales for the rows of a piece."""
    return to_floats(builder, widen_bytes(builder, offset(builder, address, LANES * piece)))


def half_scales(builder: ir.IRBuilder, address: ir.Value, piece: int) -> ir.Value:
    """Half-precision scales for the rows of a piece. Without the conversion instruction by a multiplication, exact for finite halves."""
    address = offset(builder, address, 2 * LANES * piece)
    if HAS_HALF:
        return builder.fpext(load(builder, address, ir.VectorType(F16, LANES), 2), FLOATS)
    bits = builder.zext(load(builder, address, ir.VectorType(I16, LANES), 2), WORDS)
    magnitude = builder.bitcast(builder.shl(builder.and_(bits, constant(WORDS, 0x7FFF)), constant(WORDS, 13)), FLOATS)
    scaled = builder.bitcast(builder.fmul(magnitude, constant(FLOATS, 2.0**112)), WORDS)
    return builder.bitcast(builder.or_(scaled, builder.shl(builder.and_(bits, constant(WORDS, 0x8000)), constant(WORDS, 16))), FLOATS)


def exponent_scales(builder: ir.IRBuilder, address: ir.Value, piece: int) -> ir.Value:
    """Powers of two from float32 exponents, for the rows of a piece."""
    return builder.bitcast(builder.shl(widen_bytes(builder, offset(builder, address, LANES * piece)), constant(WORDS, 23)), FLOATS)


def six_bits(builder: ir.IRBuilder, address: ir.Value, piece: int) -> tuple[ir.Value, ir.Value]:
    """Scale and minimum codes of a tile of a super-block (`tiles.py`), for the rows of a piece, as 32-bit integers."""
    low, narrow = widen_bytes(builder, offset(builder, address, LANES * piece)), ir.VectorType(I8, min(LANES, ROWS // 2))
    first = LANES * piece % (ROWS // 2)
    high = load(builder, offset(builder, address, ROWS + first), narrow)
    if LANES == ROWS:
        nibbles = [builder.and_(high, constant(narrow, 15)), builder.lshr(high, constant(narrow, 4))]
        high = builder.shuffle_vector(*nibbles, ir.Constant(ir.VectorType(I32, ROWS), list(range(ROWS))))
    elif LANES * piece >= ROWS // 2:
        high = builder.lshr(high, constant(narrow, 4))
    else:
        high = builder.and_(high, constant(narrow, 15))
    high = builder.shl(builder.zext(high, WORDS), constant(WORDS, 2))
    return builder.and_(low, constant(WORDS, 63)), builder.or_(builder.lshr(low, constant(WORDS, 6)), high)


def signed_bytes(builder: ir.IRBuilder, address: ir.Value, piece: int) -> ir.Value:
    """Signed bytes of the rows of a piece, as 32-bit integers."""
    return builder.sext(load(builder, offset(builder, address, LANES * piece), ir.VectorType(I8, LANES)), WORDS)


class _Tile:
    """The scaling of a tile's rows, for one piece: built once, used for every column. `max_weight`: the largest code."""

    def __init__(self, builder: ir.IRBuilder, way: str, steps: list[ir.Value], scales: ir.Value, zeros: ir.Value, piece: int,
                 max_weight: int) -> None:
        self.builder, self.way, self.max_weight = builder, way, max_weight
        if way == CODEBOOK:
            self.factors = look_up_steps(builder, steps, scales, piece)
            return
        if way == BLOCKS:
            self.factors = [half_scales(builder, scales, piece)]
        elif way == SMALL:
            self.factors = [small_scales(builder, offset(builder, scales, ROWS * half), piece) for half in (0, 1)]
        elif way == EXPONENTS:
            self.factors = [exponent_scales(builder, scales, piece)]
        else:
            self.factors = [byte_scales(builder, offset(builder, scales, ROWS * half), piece) for half in range(2 if way == HALVES else 1)]
        zeros = widen_bytes(builder, offset(builder, zeros, LANES * piece))
        if max_weight > 127 and OFFSET_WHEN_WIDE:
            zeros = builder.sub(zeros, constant(WORDS, 128))
        self.below = builder.fneg(to_floats(builder, zeros))

    def times(self, quads: list[ir.Value], x: list[ir.Value], seeds: list[ir.Value], x_scale: ir.Value, total: ir.Value) -> Emitting:
        """total + x_scale * sum over groups of factor * (values . x); the seeds turn codes into values."""
        builder = self.builder
        if self.way == CODEBOOK:
            tile_sum = yield from codebook_sum(builder, quads, x, seeds, self.factors)
            yield
            return fma(builder, tile_sum, x_scale, total)
        groups = (range(4), range(4, 8)) if self.way in (HALVES, SMALL) else (range(8),)
        for group, seed, factor in zip(groups, seeds, self.factors):
            part = yield from sum_quads(builder, [quads[j] for j in group], [x[j] for j in group], self.max_weight)
            corrected = fma(builder, self.below, to_floats(builder, seed), part)  # exact: both are below 2**20
            total = fma(builder, builder.fmul(corrected, factor), x_scale, total)
        return total


class _SuperTile:
    """For a tile of a super-block with minima: d * s * (codes . x) - e * m * (sum of x)."""

    def __init__(self, builder: ir.IRBuilder, record: ir.Value, codes: ir.Value, piece: int, max_weight: int) -> None:
        self.builder, self.max_weight = builder, max_weight
        scales, minima = six_bits(builder, codes, piece)
        self.steps = step_form(builder, scales)
        self.factor, minimum = (half_scales(builder, offset(builder, record, 2 * ROWS * i), piece) for i in (0, 1))
        self.minimum = builder.fneg(builder.fmul(minimum, to_floats(builder, minima)))

    def times(self, quads: list[ir.Value], x: list[ir.Value], seeds: list[ir.Value], x_scale: ir.Value, total: ir.Value) -> Emitting:
        builder = self.builder
        tile_sum = yield from sum_quads(builder, quads, x, self.max_weight, self.steps)
        corrected = fma(builder, self.minimum, to_floats(builder, seeds[0]), builder.fmul(tile_sum, self.factor))
        return fma(builder, corrected, x_scale, total)


class _MinimaTile:
    """For scales and minima stored as halves: d * (codes . x) + m * (sum of x)."""

    def __init__(self, builder: ir.IRBuilder, scales: ir.Value, piece: int, max_weight: int) -> None:
        self.builder, self.max_weight = builder, max_weight
        self.factor, self.minimum = (half_scales(builder, offset(builder, scales, 2 * ROWS * i), piece) for i in (0, 1))

    def whole(self, dots: ir.Value, seed: ir.Value) -> ir.Value:
        """codes . x from its parts, both floats: exact, since below 2**24."""
        return fma(self.builder, constant(FLOATS, 128.0), seed, dots) if self.max_weight > 127 and OFFSET_WHEN_WIDE else dots

    def times(self, quads: list[ir.Value], x: list[ir.Value], seeds: list[ir.Value], x_scale: ir.Value, total: ir.Value) -> Emitting:
        builder = self.builder
        dots = yield from sum_quads(builder, quads, x, self.max_weight)
        seed = to_floats(builder, seeds[0])
        corrected = fma(builder, self.minimum, seed, builder.fmul(self.whole(dots, seed), self.factor))
        return fma(builder, corrected, x_scale, total)


class _NibbleTile:
    """For 4-bit scale and minimum codes of each of a tile's two groups, which stay separate."""

    def __init__(self, builder: ir.IRBuilder, record: ir.Value, codes: ir.Value, piece: int, max_weight: int) -> None:
        self.builder, self.max_weight = builder, max_weight
        factor, minimum = (half_scales(builder, offset(builder, record, 2 * ROWS * i), piece) for i in (0, 1))
        self.factors, self.minima = [], []
        for half in (0, 1):
            both = widen_bytes(builder, offset(builder, codes, ROWS * half + LANES * piece))
            self.factors.append(builder.fmul(factor, to_floats(builder, builder.and_(both, constant(WORDS, 15)))))
            self.minima.append(builder.fneg(builder.fmul(minimum, to_floats(builder, builder.lshr(both, constant(WORDS, 4))))))

    def times(self, quads: list[ir.Value], x: list[ir.Value], seeds: list[ir.Value], x_scale: ir.Value, total: ir.Value) -> Emitting:
        builder = self.builder
        for half, (seed, factor, minimum) in enumerate(zip(seeds, self.factors, self.minima, strict=True)):
            part = yield from sum_quads(builder, quads[4 * half : 4 * half + 4], x[4 * half : 4 * half + 4], self.max_weight)
            corrected = fma(builder, minimum, to_floats(builder, seed), builder.fmul(part, factor))
            total = fma(builder, corrected, x_scale, total)
        return total


class _SignedTile:
    """For a tile of a super-block with signed scales: d * sum over its two groups of s * (codes - 32 . x), or of levels instead of codes.
    """

    def __init__(self, builder: ir.IRBuilder, way: str, record: ir.Value, codes: ir.Value, piece: int) -> None:
        self.builder, self.factor = builder, half_scales(builder, record, piece)
        self.above = TABLE_SHIFT if way == TABLE else SIGNED_SHIFT
        words = (signed_bytes(builder, offset(builder, codes, ROWS * half), piece) for half in (0, 1))
        self.steps = tuple(step_form(builder, word) for word in words)

    def times(self, quads: list[ir.Value], x: list[ir.Value], seeds: list[ir.Value], x_scale: ir.Value, total: ir.Value) -> Emitting:
        builder = self.builder
        tile_sum = yield from codebook_sum(builder, quads, x, seeds, self.steps, self.above)
        return fma(builder, builder.fmul(tile_sum, self.factor), x_scale, total)


def tile_of(builder: ir.IRBuilder, way: str, steps: list[ir.Value], scales: ir.Value, zeros: ir.Value, piece: int,
            max_weight: int) -> _Tile | _SuperTile | _MinimaTile | _NibbleTile | _SignedTile:
    """The scaling of a tile whose scales and zeros are at these addresses (`places_of`). `steps`: those of a codebook."""
    if way == SUPER:
        return _SuperTile(builder, scales, zeros, piece, max_weight)
    if way == MINIMA:
        return _MinimaTile(builder, scales, piece, max_weight)
    if way == NIBBLE:
        return _NibbleTile(builder, scales, zeros, piece, max_weight)
    if way in (SIGNED, TABLE):
        return _SignedTile(builder, way, scales, zeros, piece)
    return _Tile(builder, way, steps, scales, zeros, piece, max_weight)


def places_of(builder: ir.IRBuilder, way: str, scales: ir.Value, zeros: ir.Value, tile: ir.Value, shift: ir.Value,
              zero_shift: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Addresses of a tile's scales and zeros, from those of the row block; for super-blocks the record and the tile's part of it.

    A group is 32 << `shift` inputs, and `zero_shift` likewise gives how many share a zero.
    """
    if way in RECORDS:
        nbytes, head, tile_offset = RECORDS[way]
        record = builder.add(scales, builder.mul(builder.lshr(tile, I64(3)), I64(nbytes)))
        return record, builder.add(offset(builder, record, head), builder.mul(builder.and_(tile, I64(7)), I64(tile_offset)))
    zeros = builder.add(zeros, builder.mul(builder.lshr(tile, zero_shift), I64(ROWS)))
    if way in (PLAIN, BLOCKS, EXPONENTS, MINIMA):
        tile = builder.lshr(tile, shift)
    nbytes = ROWS if way in (PLAIN, CODEBOOK, EXPONENTS) else 4 * ROWS if way == MINIMA else 2 * ROWS
    return builder.add(scales, builder.mul(tile, I64(nbytes))), zeros
