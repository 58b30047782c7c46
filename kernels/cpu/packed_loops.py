"""The inner loops of a low-bit weight times a few columns: all time of decode is spent here.

A loop walks along the inputs, a tile (16 rows x 32 inputs) of several row blocks at a time. Per tile and row: exact integer sums over each
group, times the group's scale, times the activations' scale of these 32 inputs, added to one float32 chain per row. So a row's bits depend
neither on its neighbours nor on the other columns, the threads or the instruction set.

`single` unpacks in registers and multiplies at once with one column. For more columns `expand` unpacks a stretch into a buffer in the
first-level cache and `columns` multiplies it with several columns, so that a weight is unpacked once.

What `single` became, read from the assembly, in instructions per 64 weights:

                codebook 4    3     2   8 bits
    avx512             6.0   8.0   6.0   4.3    one `vpdpbusd`, for a codebook one `vpshufb` and one `vpandq`; nothing spilled
    avx2vnni          16.5  22.9  16.2   9.1    two of each, for half as many bytes
    avx2              19.3  26.1  19.1  18.6    two `vpmaddubsw` and two `vpmaddwd`; with 8 bits two `vpsignb` and two `vpabsb` more

At 4 bits with AVX-512 the rest is half a load, half a `vpsrlw` and, per 512 weights, 16 for scales and sums. Sixteen registers do not hold
a tile's activations beside two row blocks: with 32-byte vectors about one instruction in six goes to the stack.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ..tiles import LEVELS_NBYTES, ROWS, TILE, tile_nbytes
from .inner_loops import VECTOR
from .int8_ir import (
    BYTES,
    FLOATS,
    I8,
    LANES,
    OFFSET_WHEN_WIDE,
    PIECES,
    WIDTH,
    WORDS,
    codebook_sum,
    constant,
    dot,
    fma,
    function,
    load,
    load_table,
    look_up,
    look_up_steps,
    offset,
    splat,
    steps_table,
    store,
    to_floats,
    unpack_tile,
    widen_bytes,
)
from .intrinsics import F16, F32, HAS_HALF, I16, I32, I64

STREAMS = 4 if WIDTH == 64 else 2  # row blocks that `single` takes side by side: what the registers hold
# Software prefetch: with 32-byte vectors a row block's arithmetic hides too little of its way from memory (67% of the read roof without
# it, 85% with 1 KiB ahead); the 64-byte loops run far enough ahead by themselves.
AHEAD = 0 if WIDTH == 64 else 1024
MAGIC, MAGIC_BITS = 1.5 * 2**23, 0x4B400000  # added to a small float, it leaves the nearest whole number in the low bits
SMALLEST = 2.0**-126  # scale of activations; below it, its inverse could be infinite
# Ways of scaling: a codebook has two groups in a tile; the others at most one, and a zero that is stored or the same everywhere, but for
# symmetric groups of 16, which are halves of a tile; blocks have a half-precision scale for every tile, exponents a power of two beside
# levels.
CODEBOOK, PLAIN, HALVES, BLOCKS, EXPONENTS = "codebook", "plain", "halves", "blocks", "exponents"
WITH_LEVELS = (CODEBOOK, EXPONENTS)


def byte_scales(builder: ir.IRBuilder, address: ir.Value, piece: int) -> ir.Value:
    """The scales of a group in eight bits, for the rows of a piece."""
    return to_floats(builder, widen_bytes(builder, offset(builder, address, LANES * piece)))


def exponent_scales(builder: ir.IRBuilder, address: ir.Value, piece: int) -> ir.Value:
    """Powers of two from the exponents of float32 numbers, for the rows of a piece."""
    return builder.bitcast(builder.shl(widen_bytes(builder, offset(builder, address, LANES * piece)), constant(WORDS, 23)), FLOATS)


def half_scales(builder: ir.IRBuilder, address: ir.Value, piece: int) -> ir.Value:
    """Half-precision scales of the rows of a piece. Without the conversion instruction by a multiplication, exact for finite halves."""
    address = offset(builder, address, 2 * LANES * piece)
    if HAS_HALF:
        return builder.fpext(load(builder, address, ir.VectorType(F16, LANES), 2), FLOATS)
    bits = builder.zext(load(builder, address, ir.VectorType(I16, LANES), 2), WORDS)
    magnitude = builder.bitcast(builder.shl(builder.and_(bits, constant(WORDS, 0x7FFF)), constant(WORDS, 13)), FLOATS)
    scaled = builder.bitcast(builder.fmul(magnitude, constant(FLOATS, 2.0**112)), WORDS)
    return builder.bitcast(builder.or_(scaled, builder.shl(builder.and_(bits, constant(WORDS, 0x8000)), constant(WORDS, 16))), FLOATS)


class _Tile:
    """What a tile's rows are multiplied by, for one piece: made once, used for every column."""

    def __init__(self, builder: ir.IRBuilder, way: str, steps: list[ir.Value], scales: ir.Value, zeros: ir.Value, piece: int,
                 wide: bool) -> None:
        self.builder, self.way, self.wide = builder, way, wide
        if way == CODEBOOK:
            self.factors = look_up_steps(builder, steps, scales, piece)
            return
        if way == BLOCKS:
            self.factors = [half_scales(builder, scales, piece)]
        elif way == EXPONENTS:
            self.factors = [exponent_scales(builder, scales, piece)]
        else:
            self.factors = [byte_scales(builder, offset(builder, scales, ROWS * half), piece) for half in range(2 if way == HALVES else 1)]
        self.zeros = widen_bytes(builder, offset(builder, zeros, LANES * piece))
        if wide and OFFSET_WHEN_WIDE:
            self.zeros = builder.sub(self.zeros, constant(WORDS, 128))

    def times(self, quads: list[ir.Value], x: list[ir.Value], seeds: list[ir.Value], x_scale: ir.Value, total: ir.Value) -> ir.Value:
        """total + x_scale * sum over groups of factor * (values . x); the seeds turn codes into values."""
        builder = self.builder
        if self.way == CODEBOOK:
            return fma(builder, to_floats(builder, codebook_sum(builder, quads, x, seeds, self.factors)), x_scale, total)
        # two chains of four: a dot product takes several cycles
        low = high = constant(WORDS, 0)
        for j in range(4):
            low, high = dot(builder, low, quads[j], x[j], self.wide), dot(builder, high, quads[j + 4], x[j + 4], self.wide)
        for part, seed, factor in zip((low, high) if self.way == HALVES else (builder.add(low, high),), seeds, self.factors):
            own = builder.sub(part, builder.mul(self.zeros, seed))
            total = fma(builder, builder.fmul(to_floats(builder, own), factor), x_scale, total)
        return total


def _seeds(builder: ir.IRBuilder, way: str, address: ir.Value) -> list[ir.Value]:
    count = 2 if way in (CODEBOOK, HALVES) else 1
    return [splat(builder, load(builder, offset(builder, address, 4 * i), I32, 4), WORDS) for i in range(count)]


def _quads_of_x(builder: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    return [builder.bitcast(splat(builder, load(builder, offset(builder, address, 4 * j), I32, 4), WORDS), BYTES) for j in range(8)]


def _scale_stride(builder: ir.IRBuilder, way: str, tile: ir.Value, shift: ir.Value) -> ir.Value:
    """Bytes from the first tile's scales to this one's; `shift`: a group is 32 << shift inputs."""
    if way in (PLAIN, EXPONENTS):
        return builder.mul(builder.lshr(tile, shift), I64(ROWS))
    return builder.mul(tile, I64(ROWS if way == CODEBOOK else 2 * ROWS))


def _begin_loop(builder: ir.IRBuilder, name: str, start: ir.Value, kinds: list[tuple[ir.Type, ir.Value]]) -> tuple[object, ir.Value, list]:
    """A loop head: (blocks, counter, values carried with their first ones)."""
    entry = builder.basic_block
    loop, done = builder.append_basic_block(name), builder.append_basic_block(name + ".done")
    builder.branch(loop)
    builder.position_at_end(loop)
    counter = builder.phi(I64)
    counter.add_incoming(start, entry)
    carried = []
    for kind, first in kinds:
        phi = builder.phi(kind)
        phi.add_incoming(first, entry)
        carried.append(phi)
    return (loop, done), counter, carried


def _end_loop(builder: ir.IRBuilder, blocks: tuple, counter: ir.Value, end: ir.Value, carried: list, updated: list) -> None:
    loop, done = blocks
    here = builder.basic_block
    following = builder.add(counter, I64(1))
    counter.add_incoming(following, here)
    for phi, value in zip(carried, updated):
        phi.add_incoming(value, here)
    builder.cbranch(builder.icmp_signed("<", following, end), loop, done)
    builder.position_at_end(done)


def _prefetch(builder: ir.IRBuilder, address: ir.Value, nbytes: int) -> None:
    kinds = [I8.as_pointer(), I32, I32, I32]
    fetch = function(builder, ir.VoidType(), kinds, "llvm.prefetch.p0")
    for line in range(0, nbytes, 64):
        where = builder.inttoptr(offset(builder, address, AHEAD + line), I8.as_pointer())
        builder.call(fetch, [where, I32(0), I32(3), I32(1)])  # for reading, into the first-level cache


def _tables(builder: ir.IRBuilder, way: str, address: ir.Value) -> tuple[list[ir.Value], list[ir.Value]]:
    if way not in WITH_LEVELS:
        return [], []
    return load_table(builder, address), steps_table(builder, offset(builder, address, LEVELS_NBYTES)) if way == CODEBOOK else []


def single(bits: int, way: str, streams: int = STREAMS):
    """The decode loop of one format."""

    @intrinsic
    def run(typingctx, table, tables, x, tiles, shift, zero_shift, out):
        """`streams` row blocks times one column -> float32 [streams][16] at `out`, row scales not applied.

        table: addresses of the blocks' codes, then of their scales, then of their zeros. tables: a codebook's levels and steps. x: address
        of three addresses: the column as int8, its scales float32 per 32 inputs, its seeds int32 per 16. `tiles` >= 1 along the inputs;
        a group is 32 << `shift` inputs, and so many share a zero by `zero_shift` (62: all).
        """

        def codegen(context, builder, signature, args):
            table, tables, x, tiles, shift, zero_shift, out = args
            slot = lambda base, i: load(builder, offset(builder, base, 8 * i), I64, 8)  # noqa: E731
            codes, scales, zeros = ([slot(table, part * streams + s) for s in range(streams)] for part in range(3))
            x_codes, x_scales, x_seeds = (slot(x, i) for i in range(3))
            levels, steps = _tables(builder, way, tables)
            zero = constant(FLOATS, 0.0)
            blocks, tile, totals = _begin_loop(builder, "tiles", I64(0), [(FLOATS, zero)] * (streams * PIECES))
            seeds = _seeds(builder, way, builder.add(x_seeds, builder.mul(tile, I64(8))))
            x_scale = splat(builder, load(builder, builder.add(x_scales, builder.mul(tile, I64(4))), F32, 4), FLOATS)
            values = _quads_of_x(builder, builder.add(x_codes, builder.mul(tile, I64(32))))
            stride, own, updated = _scale_stride(builder, way, tile, shift), builder.mul(builder.lshr(tile, zero_shift), I64(ROWS)), []
            for s in range(streams):
                at = builder.add(codes[s], builder.mul(tile, I64(tile_nbytes(bits))))
                if AHEAD:
                    _prefetch(builder, at, tile_nbytes(bits))
                for piece in range(PIECES):
                    quads = unpack_tile(builder, at, bits, piece)
                    if way in WITH_LEVELS:
                        quads = [look_up(builder, levels, each, bits) for each in quads]
                    part = _Tile(builder, way, steps, builder.add(scales[s], stride), builder.add(zeros[s], own), piece, bits == 8)
                    updated.append(part.times(quads, values, seeds, x_scale, totals[PIECES * s + piece]))
            _end_loop(builder, blocks, tile, tiles, totals, updated)
            for index, value in enumerate(updated):
                store(builder, value, offset(builder, out, 4 * LANES * index), 4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), codegen

    return run


def expand(bits: int, way: str):
    """Unpacking of one format, for several columns."""

    @intrinsic
    def run(typingctx, codes, tables, tiles, out):
        """`tiles` tiles of a row block -> their quads, 512 bytes a tile, as unsigned bytes (codes, or levels + 64)."""

        def codegen(context, builder, signature, args):
            codes, tables, tiles, out = args
            levels, _ = _tables(builder, way, tables)
            blocks, tile, _ = _begin_loop(builder, "expand", I64(0), [])
            at = builder.add(codes, builder.mul(tile, I64(tile_nbytes(bits))))
            to = builder.add(out, builder.mul(tile, I64(64 * 8)))
            if AHEAD:
                _prefetch(builder, at, tile_nbytes(bits))
            for piece in range(PIECES):
                for j, quad in enumerate(unpack_tile(builder, at, bits, piece)):
                    value = look_up(builder, levels, quad, bits) if way in WITH_LEVELS else quad
                    store(builder, value, offset(builder, to, 64 * j + WIDTH * piece), WIDTH)
            _end_loop(builder, blocks, tile, tiles, [], [])
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), codegen

    return run


def columns(way: str, count: int, wide: bool):
    """The loop over expanded tiles for `count` columns."""

    @intrinsic
    def run(typingctx, quads, tables, scales, zeros, x, x_stride, begin, end, shift, zero_shift, sums):
        """Tiles [begin, end) of a row block, expanded at `quads`, times `count` columns; adds to float32 [count][16] at `sums`.

        x: as for `single`, of the first column; the following ones lie `x_stride` bytes apart in all three parts. scales, zeros: of the
        row block's first tile.
        """

        def codegen(context, builder, signature, args):
            quads, tables, scales, zeros, x, x_stride, begin, end, shift, zero_shift, sums = args
            x_codes, x_scales, x_seeds = (load(builder, offset(builder, x, 8 * i), I64, 8) for i in range(3))
            _, steps = _tables(builder, way, tables)
            spots = [offset(builder, sums, 4 * LANES * (c * PIECES + piece)) for c in range(count) for piece in range(PIECES)]
            carried = [(FLOATS, load(builder, spot, FLOATS, 4)) for spot in spots]
            blocks, tile, totals = _begin_loop(builder, "columns", begin, carried)
            stride, updated = _scale_stride(builder, way, tile, shift), list(totals)
            own_zeros = builder.add(zeros, builder.mul(builder.lshr(tile, zero_shift), I64(ROWS)))
            at = builder.add(quads, builder.mul(builder.sub(tile, begin), I64(64 * 8)))
            for piece in range(PIECES):
                weights = [load(builder, offset(builder, at, 64 * j + WIDTH * piece), BYTES, WIDTH) for j in range(8)]
                part = _Tile(builder, way, steps, builder.add(scales, stride), own_zeros, piece, wide)
                for c in range(count):
                    shifted = builder.mul(x_stride, I64(c))
                    own = [builder.add(base, builder.add(shifted, builder.mul(tile, I64(size))))
                           for base, size in ((x_codes, 32), (x_scales, 4), (x_seeds, 8))]
                    x_scale = splat(builder, load(builder, own[1], F32, 4), FLOATS)
                    index = c * PIECES + piece
                    updated[index] = part.times(weights, _quads_of_x(builder, own[0]), _seeds(builder, way, own[2]), x_scale, totals[index])
            _end_loop(builder, blocks, tile, end, totals, updated)
            for spot, value in zip(spots, updated):
                store(builder, value, spot, 4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 11), codegen

    return run


@intrinsic
def quantize_tiles(typingctx, x, tiles, codes, scales, totals):
    """float32 [tiles * 32] -> int8 of the same count, float32 scales per 32 (largest magnitude / 127), int32 totals per 16. `tiles` >= 1.

    Rounds to nearest, ties to even; with a scale below the normal numbers all are zeros. NaN and infinity make the scale NaN, so that
    they stay visible.
    """

    def codegen(context, builder, signature, args):
        x, tiles, codes, scales, totals = args
        parts = TILE // VECTOR
        words, small = ir.VectorType(I32, VECTOR), ir.VectorType(I8, VECTOR)
        wide = ir.VectorType(F32, VECTOR)
        reduce = lambda name, kind, *values: builder.call(  # noqa: E731
            function(builder, kind, [value.type for value in values],
                     f"llvm.vector.reduce.{name}.v{VECTOR}{'f32' if kind is F32 else 'i32'}"),
            values)
        magnitude = function(builder, wide, [wide], f"llvm.fabs.v{VECTOR}f32")
        blocks, tile, _ = _begin_loop(builder, "quantize", I64(0), [])
        at = builder.add(x, builder.mul(tile, I64(4 * TILE)))
        values = [load(builder, offset(builder, at, 4 * VECTOR * i), wide, 4) for i in range(parts)]
        top = builder.call(magnitude, [values[0]])
        seen = builder.fmul(values[0], constant(wide, 0.0))
        for value in values[1:]:
            other = builder.call(magnitude, [value])
            top = builder.select(builder.fcmp_ordered(">", other, top), other, top)
            seen = builder.fadd(seen, builder.fmul(value, constant(wide, 0.0)))
        top = builder.call(function(builder, F32, [wide], f"llvm.vector.reduce.fmax.v{VECTOR}f32"), [top])
        seen = builder.call(function(builder, F32, [F32, wide], f"llvm.vector.reduce.fadd.v{VECTOR}f32"), [F32(0.0), seen],
                            fastmath=("reassoc",))
        scale = builder.fdiv(top, F32(127.0))
        inverse = builder.select(builder.fcmp_ordered(">=", scale, F32(SMALLEST)), builder.fdiv(F32(127.0), top), F32(0.0))
        store(builder, builder.fadd(scale, seen), builder.add(scales, builder.mul(tile, I64(4))), 4)
        inverse, sums = splat(builder, inverse, wide), []
        for i, value in enumerate(values):
            moved = builder.fadd(builder.fmul(value, inverse), constant(wide, MAGIC))
            number = builder.sub(builder.bitcast(moved, words), constant(words, MAGIC_BITS))
            store(builder, builder.trunc(number, small), builder.add(codes, builder.add(builder.mul(tile, I64(TILE)), I64(VECTOR * i))))
            sums.append(reduce("add", I32, number))
        for half in (0, 1):
            own = sums[half * parts // 2]
            for more in sums[half * parts // 2 + 1 : (half + 1) * parts // 2]:
                own = builder.add(own, more)
            store(builder, own, builder.add(totals, builder.add(builder.mul(tile, I64(8)), I64(4 * half))), 4)
        _end_loop(builder, blocks, tile, tiles, [], [])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


@intrinsic
def scale_rows(typingctx, sums, row_scales):
    """16 float32 at `sums` times 16 bfloat16 at `row_scales`, in place."""

    def codegen(context, builder, signature, args):
        halves, words, wide = ir.VectorType(I16, VECTOR), ir.VectorType(I32, VECTOR), ir.VectorType(F32, VECTOR)
        for i in range(ROWS // VECTOR):
            at = offset(builder, args[0], 4 * VECTOR * i)
            bits = builder.zext(load(builder, offset(builder, args[1], 2 * VECTOR * i), halves, 2), words)
            scale = builder.bitcast(builder.shl(bits, constant(words, 16)), wide)
            store(builder, builder.fmul(load(builder, at, wide, 4), scale), at, 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def put_block(typingctx, sums, target, add):
    """16 float32 from `sums` to `target`, added to what is there where `add` is not 0."""

    def codegen(context, builder, signature, args):
        wide = ir.VectorType(F32, VECTOR)
        adding = builder.icmp_signed("!=", args[2], I64(0))
        for i in range(ROWS // VECTOR):
            value = load(builder, offset(builder, args[0], 4 * VECTOR * i), wide, 4)
            to = offset(builder, args[1], 4 * VECTOR * i)
            with builder.if_else(adding) as (then, otherwise):
                with then:
                    store(builder, builder.fadd(load(builder, to, wide, 4), value), to, 4)
                with otherwise:
                    store(builder, value, to, 4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen
