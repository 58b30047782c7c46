"""The inner loops of a low-bit weight times a few columns, where nearly all time of decode is spent.

A loop walks along the inputs, a tile (16 rows x 32 inputs) of several row blocks at a time. Per tile and row: exact integer sums over each
group, times the group's scale, times the activations' scale of these 32 inputs, added to one float32 chain per row. So a row's bits depend
neither on its neighbors nor on the other columns, the threads or the instruction set.

`single` unpacks in registers and multiplies with one column. For more columns `expand` unpacks a stretch into a buffer in the L1 cache and
`columns` multiplies it with several columns, so that a weight is unpacked once. `packed_avx2.py` has the `columns` of AVX2 without a
four-way dot product, `packed_avx2_single.py` the `single` of its codebooks, `packed_avx512.py` the loops of AVX-512.

The compiled code of `single`, in instructions per 64 weights:

                codebook 4    3     2   8 bits
    avx512             7.4   9.2   7.1   6.6    one `vpdpbusd`, for a codebook one `vpshufb` and one `vpandq`; nothing spilled
    avx512, vbmi       6.4   8.3   6.2   6.7    one `vpdpbusd`, for a codebook one `vpermb`, which needs no mask of the bits above a code
    the same, znver5   7.5   9.4   7.3   8.1    with one row block: each activation is read for that one only
    avx2vnni          16.5  22.9  16.2   9.1    two of each, for half as many bytes
    avx2              15.3  19.4  15.0  18.6    two `vpmaddubsw`, and for codebooks one `vpmaddwd` (`packed_avx2_single.py`); with 8 bits
                                                two of that, two `vpsignb` and two `vpabsb`
    neondot           22.9  38.9  24.2  19.9    four `sdot`, for a codebook four `tbl`, of 16 bytes each; two `and` and two `ushr`
    neon              39.5  58.8  40.4  35.8    eight `smull`, four `addp` and four `sadalp` instead of the four `sdot`

At 4 bits with AVX-512 the rest is half a load, half a `vpsrlw`, half a load of activations and, per 512 weights, 16 for scales and sums.
Sixteen registers cannot hold a tile's activations in addition to two row blocks: with 32-byte vectors up to one instruction in six
accesses the stack.
"""

from __future__ import annotations

from llvmlite import ir

from ..lazy_numba import llvm_intrinsic
from ..target import cpu_features, target
from ..tiles import LEVEL_SHIFT, LEVELS_NBYTES, ROWS, tile_nbytes
from .int8_ir import (
    BYTES,
    FLOATS,
    INSTRUCTION_SET,
    LANES,
    PIECES,
    WIDTH,
    WORDS,
    constant,
    levels_of_tile,
    load,
    load_table,
    offset,
    prefetch_lines,
    splat,
    steps_table,
    store,
    unpack_tile,
    words_at,
)
from .int8_products import TABLE_SHIFT, side_by_side
from .intrinsics import F32, I32, I64
from .ir_loop import Loop
from .packed_scales import CODEBOOK, EXPONENTS, HALVES, NIBBLE, SIGNED, SMALL, TABLE, places_of, tile_of

# Row blocks that `single` processes in parallel, and the prefetch distance in each: the arithmetic of a row block hides too little of the
# memory latency. Measured per processor (docs/architecture): Zen 5 wants one stream of memory and its pages early, Zen 4 and Cascade Lake
# two streams and a tile of 4 bits, a server with AMX sixteen of these, processors with 32-byte vectors four.
LONG_LATENCY = "amx-int8" in cpu_features()  # servers since Sapphire Rapids have a higher memory latency than Zen 4 and Cascade Lake
STREAMS, PREFETCH_NBYTES = (((1, 7168) if target()[0] == "znver5" else (2, 4096) if LONG_LATENCY else (2, 256)) if WIDTH == 64
                            else (2, 1024))
NEXT = 256 if WIDTH == 64 else 1024  # the same for tiles unpacked for several columns
SUMS_NBYTES = 4 * ROWS * 16  # of a row block and the maximum number of columns
RECORD = 32 + 4 + 8  # bytes of a tile of one column: codes, scale, two seeds
COLUMNS_AT_ONCE = 4  # columns multiplied in parallel, as long as there are this many or one less
WITH_LEVELS = (CODEBOOK, EXPONENTS, SMALL, TABLE)
MAX_RAISED_LEVEL = 127  # levels are raised by 64, except those of a table, which need no such bound


def seeds_of(builder: ir.IRBuilder, way: str, address: ir.Value) -> list[ir.Value]:
    count = 2 if way in (CODEBOOK, HALVES, NIBBLE, SIGNED, SMALL, TABLE) else 1
    return [splat(builder, load(builder, offset(builder, address, 4 * i), I32, 4), WORDS) for i in range(count)]


def quads_of_x(builder: ir.IRBuilder, address: ir.Value) -> list[ir.Value]:
    return [builder.bitcast(words, BYTES) for words in words_at(builder, address, 8)]


def end_tiles(builder: ir.IRBuilder, loop: Loop, totals: list[ir.Value], out: ir.Value) -> None:
    """The end of a loop over tiles, and the sums of all pieces to `out`, one after the other."""
    for index, value in enumerate(loop.end(totals)):
        store(builder, value, offset(builder, out, 4 * LANES * index), 4)


def tables_of(builder: ir.IRBuilder, way: str, address: ir.Value, bits: int = 4) -> tuple[list[ir.Value], list[ir.Value]]:
    """Levels of `bits`, for `weights_of`, and steps, for ways that have them."""
    if way not in WITH_LEVELS:
        return [], []
    shift = TABLE_SHIFT if way == TABLE else LEVEL_SHIFT
    steps = steps_table(builder, offset(builder, address, LEVELS_NBYTES)) if way == CODEBOOK else []
    return load_table(builder, address, bits, shift), steps


def weights_of(builder: ir.IRBuilder, way: str, levels: list[ir.Value], address: ir.Value, bits: int, piece: int) -> list[ir.Value]:
    """The eight quads of a tile as unsigned bytes: codes, or levels + 64, or + TABLE_SHIFT."""
    if way in WITH_LEVELS:
        return levels_of_tile(builder, levels, address, bits, piece)
    return unpack_tile(builder, address, bits, piece)


def tile_at(builder: ir.IRBuilder, codes: ir.Value, following: ir.Value, tile: ir.Value, tiles: ir.Value, nbytes: int) -> ir.Value:
    """Address of a row block's tile. Prefetches PREFETCH_NBYTES ahead of it; past the last tile, the codes that are read next."""
    passed = builder.mul(tile, I64(nbytes))
    at, overrun = builder.add(codes, passed), builder.sub(builder.add(passed, I64(PREFETCH_NBYTES)), builder.mul(tiles, I64(nbytes)))
    is_inside = builder.icmp_signed("<", overrun, I64(0))
    prefetch_lines(builder, builder.select(is_inside, offset(builder, at, PREFETCH_NBYTES), builder.add(following, overrun)), nbytes)
    return at


def single(bits: int, way: str, streams: int = STREAMS):
    """The decode loop of one format, for one column."""

    @llvm_intrinsic
    def run(builder, table, tables, x, tiles, shift, zero_shift, out):
        """`streams` row blocks times one column -> float32 [streams][16] at `out`, row scales not applied.

        table: addresses of the blocks' codes, then of their scales, then of their zeros, then of the codes that are read next, which are
        asked for at the end. tables: a codebook's levels and steps. x: address of three addresses: the column as int8, its scales float32
        per 32 inputs, its seeds int32 per 16. `tiles` >= 1 along the inputs; a group is 32 << `shift` inputs, and so many share a zero by
        `zero_shift` (62: all).
        """
        slot = lambda base, i: load(builder, offset(builder, base, 8 * i), I64, 8)  # noqa: E731
        codes, scales, zeros, nexts = ([slot(table, part * streams + s) for s in range(streams)] for part in range(4))
        x_codes, x_scales, x_seeds = (slot(x, i) for i in range(3))
        levels, steps = tables_of(builder, way, tables, bits)
        zero = constant(FLOATS, 0.0)
        loop = Loop(builder, tiles, [zero] * (streams * PIECES), "tiles")
        tile, totals = loop.index, loop.values
        seeds = seeds_of(builder, way, builder.add(x_seeds, builder.mul(tile, I64(8))))
        x_scale = splat(builder, load(builder, builder.add(x_scales, builder.mul(tile, I64(4))), F32, 4), FLOATS)
        values = quads_of_x(builder, builder.add(x_codes, builder.mul(tile, I64(32))))
        max_weight, updated = MAX_RAISED_LEVEL if way in WITH_LEVELS else (1 << bits) - 1, []
        for s in range(streams):
            scale_addresses = places_of(builder, way, scales[s], zeros[s], tile, shift, zero_shift)
            at = tile_at(builder, codes[s], nexts[s], tile, tiles, tile_nbytes(bits))
            for piece in range(PIECES):
                quads = weights_of(builder, way, levels, at, bits, piece)
                part = tile_of(builder, way, steps, *scale_addresses, piece, max_weight)
                updated += side_by_side([part.times(quads, values, seeds, x_scale, totals[PIECES * s + piece])])
        end_tiles(builder, loop, updated, out)

    return run


def expand(bits: int, way: str):
    """Unpacking of one format, for several columns."""

    @llvm_intrinsic
    def run(builder, codes, tables, tiles, out):
        """`tiles` tiles of a row block -> their quads, 512 bytes a tile, as unsigned bytes (codes, or levels as `weights_of` has them);
        codes of eight bits 128 lower as `packed_avx2.py` takes them."""
        levels, _ = tables_of(builder, way, tables, bits)
        loop = Loop(builder, tiles, [], "expand")
        tile = loop.index
        at = builder.add(codes, builder.mul(tile, I64(tile_nbytes(bits))))
        to = builder.add(out, builder.mul(tile, I64(64 * 8)))
        prefetch_lines(builder, offset(builder, at, NEXT), tile_nbytes(bits))
        for piece in range(PIECES):
            for j, value in enumerate(weights_of(builder, way, levels, at, bits, piece)):
                if bits == 8 and INSTRUCTION_SET == "avx2":
                    value = builder.xor(value, constant(BYTES, 128))
                store(builder, value, offset(builder, to, 64 * j + WIDTH * piece), WIDTH)
        loop.end([])

    return run


def columns(way: str, max_weight: int):
    """The loop over expanded tiles for COLUMNS_AT_ONCE columns or for one, codes up to `max_weight`."""

    @llvm_intrinsic
    def run(builder, count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, offsets):
        """Tiles [begin, end) of a row block, expanded at `quads`, times `count` columns; adds to float32 [count][16] at `sums`.

        x: records of the columns' tiles, from tile 0 on: the codes of all columns, int8 [count][32], their scales, float32 [count], their
        seeds, int32 [count][2]. scales, zeros: of the row block's first tile. `share` bytes per tile from `ahead` on are asked for
        meanwhile: memory is idle while a stretch is multiplied, and what is unpacked next would be waited for. apart: see
        `packed_avx512.columns`; here row blocks are multiplied one by one.
        """
        arguments = [quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share]
        with builder.if_else(builder.icmp_signed(">", count, I64(1))) as (has_columns, one):
            with has_columns:
                _multiply(builder, way, COLUMNS_AT_ONCE, max_weight, arguments)
            with one:
                _multiply(builder, way, 1, max_weight, arguments)

    return run


def _multiply(builder: ir.IRBuilder, way: str, count: int, max_weight: int, args: list[ir.Value]) -> None:
    """The loop of `columns` for so many of them."""
    quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share = args
    _, steps = tables_of(builder, way, tables)
    spots = [offset(builder, sums, 4 * LANES * (c * PIECES + piece)) for c in range(count) for piece in range(PIECES)]
    loop = Loop(builder, end, [load(builder, spot, FLOATS, 4) for spot in spots], "columns", begin)
    tile, totals = loop.index, loop.values
    updated = list(totals)
    passed, quarter = builder.sub(tile, begin), builder.lshr(share, I64(2))
    prefetch_at = builder.add(ahead, builder.mul(passed, share))
    for i in range(4):
        prefetch_lines(builder, builder.add(prefetch_at, builder.mul(quarter, I64(i))), 64, 2)
    record, at = builder.add(x, builder.mul(tile, I64(RECORD * count))), builder.add(quads, builder.mul(passed, I64(64 * 8)))
    codes, x_scales, seeds = [], [], []
    for c in range(count):
        addresses = [offset(builder, record, offset_bytes) for offset_bytes in (32 * c, 32 * count + 4 * c, 36 * count + 8 * c)]
        codes.append(quads_of_x(builder, addresses[0]))
        x_scales.append(splat(builder, load(builder, addresses[1], F32, 4), FLOATS))
        seeds.append(seeds_of(builder, way, addresses[2]))
    for piece in range(PIECES):
        weights = [load(builder, offset(builder, at, 64 * j + WIDTH * piece), BYTES, WIDTH) for j in range(8)]
        part = tile_of(builder, way, steps, *places_of(builder, way, scales, zeros, tile, shift, zero_shift), piece, max_weight)
        updated[piece::PIECES] = side_by_side([part.times(weights, codes[c], seeds[c], x_scales[c], totals[c * PIECES + piece])
                                               for c in range(count)])
    loop.end(updated)
    for spot, value in zip(spots, updated):
        store(builder, value, spot, 4)
