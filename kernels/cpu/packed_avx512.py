"""Several columns of a low-bit weight on AVX-512 (32 registers of 64 bytes): a tile of two row blocks stays in sixteen of them while the
columns are processed one after the other.

So a weight is unpacked once and never stored, and an activation is read once for both row blocks. The columns' sums are in the L1 cache. A
column's data for a tile is one cache line, its record:

    0 codes, int8 [32] · 32 scale, float32 · 36 seeds, int32 [2]

Compiled for a 4-bit codebook: 22 instructions per column for the multipliers (16 `vpdpbusd`, 2 `vmulps`, 4 `vfmadd`), 4 conversions, 13
loads, nothing spilled; 93 for a tile of two row blocks whatever the columns, 10 of them prefetches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from llvmlite import ir

from ..lazy_numba import llvm_intrinsic
from ..target import target
from ..tiles import tile_nbytes
from .int8_ir import BYTES, FLOATS, INSTRUCTION_SET, WIDTH, load, offset, prefetch_lines, splat, store
from .int8_products import side_by_side
from .intrinsics import F32, I64
from .ir_loop import Loop
from .packed_avx2 import next_column
from .packed_loops import MAX_RAISED_LEVEL, SUMS_NBYTES, WITH_LEVELS, quads_of_x, seeds_of, tables_of, weights_of
from .packed_scales import places_of, tile_of

USES_AVX512 = INSTRUCTION_SET == "avx512"
PAIR = 2
RECORD = STRIDE = 64  # bytes of a record and between columns; also the distance between the sums of columns
SCALE_AT, SEEDS_AT = 32, 36
# Prefetch distance in a row block, and the number of columns up to which a row block is processed alone: their arithmetic hides behind
# memory, which is faster for one run than for two. The default, for unmeasured processors, is harmless.
PREFETCH_NBYTES, FEW_COLUMNS = {"znver5": (7168, 2), "znver4": (1024, 2)}.get(target()[0], (5120, 0))


class _RowBlock(NamedTuple):
    """Addresses of a row block, of what is prefetched after its end, and of its sums."""

    codes: ir.Value
    scales: ir.Value
    zeros: ir.Value
    next_codes: ir.Value
    next_scales: ir.Value
    sums: ir.Value


def _columns_go_by(builder: ir.IRBuilder, way: str, weights: list[list[ir.Value]], parts: list, sums: Sequence[ir.Value], records: ir.Value,
                   nbytes: ir.Value) -> None:
    """A tile of some row blocks, in registers, times all columns."""
    column_loop = Loop(builder, nbytes, [], "turns")
    byte_offset = column_loop.index
    record = builder.add(records, byte_offset)
    codes, seeds = quads_of_x(builder, record), seeds_of(builder, way, offset(builder, record, SEEDS_AT))
    scale = splat(builder, load(builder, offset(builder, record, SCALE_AT), F32, 4), FLOATS)
    spots = [builder.add(address, byte_offset) for address in sums]
    totals = side_by_side([part.times(quads, codes, seeds, scale, load(builder, spot, FLOATS, 4))
                           for part, quads, spot in zip(parts, weights, spots, strict=True)])
    for total, spot in zip(totals, spots, strict=True):
        store(builder, total, spot, 4)
    next_column(column_loop)


def pairs(bits: int, way: str):
    """The loop of one format."""
    max_weight = MAX_RAISED_LEVEL if way in WITH_LEVELS else (1 << bits) - 1

    @llvm_intrinsic
    def run(builder, count, row_blocks, table, tables, x, tiles, shift, zero_shift, sums):
        """`row_blocks` row blocks, PAIR or one, times `count` columns: adds to float32 [PAIR][16][16] at `sums`.

        table: addresses of the blocks' codes, then of their scales, then of their zeros, then of the codes and of the scales that are read
        next, which are asked for. x: records [tile][count]. The others are those of `packed_loops.single`.
        """
        levels, steps = tables_of(builder, way, tables, bits)
        nbytes, end = builder.mul(count, I64(STRIDE)), builder.mul(tiles, I64(tile_nbytes(bits)))
        slots = [[load(builder, offset(builder, table, 8 * (PAIR * part + r)), I64, 8) for part in range(5)] for r in range(PAIR)]
        blocks = [_RowBlock(*row_block, offset(builder, sums, SUMS_NBYTES * r)) for r, row_block in enumerate(slots)]

        def walk(row_blocks: list[_RowBlock]) -> None:
            loop = Loop(builder, tiles, [], "tiles")
            tile = loop.index
            passed, weights, parts = builder.mul(tile, I64(tile_nbytes(bits))), [], []
            for row_block in row_blocks:
                at, overrun = builder.add(row_block.codes, passed), builder.sub(builder.add(passed, I64(PREFETCH_NBYTES)), end)
                is_inside = builder.icmp_signed("<", overrun, I64(0))
                prefetch_at = builder.select(is_inside, offset(builder, at, PREFETCH_NBYTES), builder.add(row_block.next_codes, overrun))
                prefetch_lines(builder, prefetch_at, tile_nbytes(bits))
                scale_addresses = places_of(builder, way, row_block.scales, row_block.zeros, tile, shift, zero_shift)
                prefetch_lines(builder, builder.add(row_block.next_scales, builder.sub(scale_addresses[0], row_block.scales)), 64)
                weights.append(weights_of(builder, way, levels, at, bits, 0))
                parts.append(tile_of(builder, way, steps, *scale_addresses, 0, max_weight))
            records, spots = builder.add(x, builder.mul(tile, nbytes)), [row_block.sums for row_block in row_blocks]
            _columns_go_by(builder, way, weights, parts, spots, records, nbytes)
            loop.end([])

        if not FEW_COLUMNS:
            walk(blocks)
            return
        with builder.if_else(builder.icmp_signed("==", row_blocks, I64(PAIR))) as (both, one):
            with both:
                walk(blocks)
            with one:
                walk(blocks[:1])

    return run


def columns(way: str, max_weight: int):
    """The same from expanded tiles, codes up to `max_weight`."""

    @llvm_intrinsic
    def run(builder, count, quads, tables, scales, zeros, x, begin, end, shift, zero_shift, sums, ahead, share, offsets):
        """Tiles [begin, end) of PAIR row blocks, expanded at `quads`, times `count` columns: adds to float32 [PAIR][16][16] at `sums`.

        x: records [tile][count], from tile 0 on. apart: address of how far a second row block's quads, scales, zeros and `ahead` lie behind
        the first one's. The others are those of `packed_loops.columns`.
        """
        _, steps = tables_of(builder, way, tables)
        firsts = quads, scales, zeros, ahead
        seconds = [builder.add(address, load(builder, offset(builder, offsets, 8 * i), I64, 8)) for i, address in enumerate(firsts)]
        nbytes, quarter = builder.mul(count, I64(STRIDE)), builder.lshr(share, I64(2))
        loop = Loop(builder, end, [], "tiles", begin)
        tile = loop.index
        passed, weights, parts = builder.sub(tile, begin), [], []
        for block_quads, scale, zero, following in (firsts, seconds):
            prefetch_at = builder.add(following, builder.mul(passed, share))
            for i in range(4):
                prefetch_lines(builder, builder.add(prefetch_at, builder.mul(quarter, I64(i))), 64, 2)
            at = builder.add(block_quads, builder.mul(passed, I64(64 * 8)))
            weights.append([load(builder, offset(builder, at, 64 * j), BYTES, WIDTH) for j in range(8)])
            parts.append(tile_of(builder, way, steps, *places_of(builder, way, scale, zero, tile, shift, zero_shift), 0, max_weight))
        spots = [offset(builder, sums, SUMS_NBYTES * r) for r in range(PAIR)]
        _columns_go_by(builder, way, weights, parts, spots, builder.add(x, builder.mul(tile, nbytes)), nbytes)
        loop.end([])

    return run
