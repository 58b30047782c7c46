"""Lookup layout: how a weight's codes are arranged for `lut_loops.py`, and the permutation between that and the layout of `tiles.py`.

    [pairs of row blocks][K/32 tiles][plane, low bit first][unit u = 0..3][32 rows]
    a byte: bits 0-3 are inputs 8u to 8u + 3 of its row, bits 4-7 inputs 8u + 4 to 8u + 7

The permutation is done in place, pair by pair, and every other section of the blob is unchanged: a weight takes the same memory in either
layout, and `canonical_blob` restores the canonical bytes. This layout exists in memory only, never in a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from llvmlite import ir

from ..compile import kernel
from ..lazy_numba import inlined, llvm_intrinsic
from ..tiles import PLANES, ROWS, TILE
from ..workspace import address
from .int8_ir import I8, constant, load, offset, store
from .intrinsics import I32, I64, fetch_add, i64_at
from .ir_loop import Loop

if TYPE_CHECKING:
    from ...quant.spec import QuantSpec
    from ..threads import ThreadPool

PAIR = 2 * ROWS  # rows of a unit: one vector of 32 bytes
QUADS = TILE // 4
LINE = ir.VectorType(I8, ROWS)
BITS = (2, 3, 4)  # bit widths that are split into planes
# Slots of the argument block of `permute`: address of the codes, numbers of pairs, tiles and bits, 1 to restore the canonical order, and a
# buffer per worker.
CODES, PAIRS, TILES, WIDTH, BACK, BUFFER, BUFFER_STRIDE = range(7)


def declines(scheme: str, bits: int, group: int = TILE, rows: int = PAIR) -> str:
    """Why a format, or a weight of this many rows, does not support lookup; empty if it does."""
    if scheme == "float":
        return "fp8 codes are not sums of bit planes"
    if scheme in ("codebook", "mxfp", "nvfp", "table"):
        return "codebook levels are not sums of bit planes"
    if scheme in ("block", "minimum", "offset", "super", "nibble", "signed"):
        return f"{scheme} formats have half-precision scales"
    if bits not in BITS:
        return f"{bits} bits need too many bit planes"
    if group < TILE:
        return f"groups of {group} are shorter than a tile"
    return "" if -(-rows // ROWS) % 2 == 0 else f"{rows} rows are not a multiple of two row blocks"


def pair_tile_nbytes(bits: int) -> int:
    """Bytes of a pair's tile."""
    return bits * 4 * PAIR


def _quads(builder: ir.IRBuilder, bits: int, address: ir.Value) -> list[ir.Value]:
    """The codes of a row block's tile, from this layout (`address`: its lines of the pair's units), a 32-bit word per row and quad."""
    words = ir.VectorType(I32, ROWS)
    quads: list[ir.Value] = []
    for unit in range(4):
        vectors = [constant(words, 0)] * 2
        for plane in range(bits):
            raw = load(builder, offset(builder, address, (4 * plane + unit) * PAIR), LINE)
            for i, nibble in enumerate((builder.and_(raw, constant(LINE, 15)), builder.lshr(raw, constant(LINE, 4)))):
                # four copies, 7 bits apart, move bit i to the lowest bit of byte i
                spread = builder.mul(builder.zext(nibble, words), constant(words, 0x00204081))
                bit = builder.shl(builder.and_(spread, constant(words, 0x01010101)), constant(words, plane))
                vectors[i] = builder.or_(vectors[i], bit)
        quads += vectors
    return quads


def expand(bits: int):
    @llvm_intrinsic
    def run(builder, codes, tiles, out):
        """`tiles` tiles of a row block, from this layout -> their quads, 512 bytes a tile. codes: its lines in the first unit."""
        loop = Loop(builder, tiles, [codes, out], "expand")
        for i, quad in enumerate(_quads(builder, bits, loop.values[0])):
            store(builder, quad, offset(builder, loop.values[1], 64 * i))
        loop.end([builder.add(loop.values[0], I64(pair_tile_nbytes(bits))), builder.add(loop.values[1], I64(64 * QUADS))])

    return run


def restore(bits: int):
    @llvm_intrinsic
    def run(builder, codes, tiles, out):
        """`tiles` tiles of a row block, from this layout to that of `tiles.py`."""
        words = ir.VectorType(I32, ROWS)
        loop = Loop(builder, tiles, [codes, out], "restore")
        quads, at, first = _quads(builder, bits, loop.values[0]), 0, 0
        for width in PLANES[bits]:
            per, keep = 8 // width, constant(words, ((1 << width) - 1) * 0x01010101)
            for start in range(0, QUADS, per):
                fields = [builder.and_(builder.lshr(quads[start + i], constant(words, first)), keep) for i in range(per)]
                packed = fields[0]
                for i in range(1, per):
                    packed = builder.or_(packed, builder.shl(fields[i], constant(words, width * i)))
                store(builder, packed, offset(builder, loop.values[1], at))
                at += 64
            first += width
        loop.end([builder.add(loop.values[0], I64(pair_tile_nbytes(bits))), builder.add(loop.values[1], I64(64 * bits))])

    return run


def arrange_block(bits: int):
    @llvm_intrinsic
    def run(builder, codes, tiles, out):
        """`tiles` tiles of a row block, from the layout of `tiles.py` to this one. out: its lines in the first unit."""
        words = ir.VectorType(I32, ROWS)
        loop = Loop(builder, tiles, [codes, out], "arrange")
        at = first = 0
        for width in PLANES[bits]:
            per = 8 // width
            raw = [load(builder, offset(builder, loop.values[0], at + 64 * i), words) for i in range(QUADS // per)]
            for plane in range(first, first + width):
                for unit in range(4):
                    nibbles = []
                    for quad in (2 * unit, 2 * unit + 1):
                        down = width * (quad % per) + plane - first
                        bit = builder.and_(builder.lshr(raw[quad // per], constant(words, down)), constant(words, 0x01010101))
                        # moves bit 0 of byte i to bit 24 + i with one multiplication
                        nibbles.append(builder.lshr(builder.mul(bit, constant(words, 0x01020408)), constant(words, 24)))
                    both = builder.or_(nibbles[0], builder.shl(nibbles[1], constant(words, 4)))
                    store(builder, builder.trunc(both, LINE), offset(builder, loop.values[1], (4 * plane + unit) * PAIR))
            at, first = at + 64 * (QUADS // per), first + width
        loop.end([builder.add(loop.values[0], I64(64 * bits)), builder.add(loop.values[1], I64(pair_tile_nbytes(bits)))])

    return run


_expand2, _expand3, _expand4 = (expand(bits) for bits in BITS)
_restore2, _restore3, _restore4 = (restore(bits) for bits in BITS)
_arrange2, _arrange3, _arrange4 = (arrange_block(bits) for bits in BITS)


@inlined()
def expand_tiles(bits, codes, tiles, out):
    """Tiles of a row block in lookup layout -> quads; `codes` as from `pair_at`."""
    if bits == 2:
        _expand2(codes, tiles, out)
    elif bits == 3:
        _expand3(codes, tiles, out)
    else:
        _expand4(codes, tiles, out)


@inlined()
def pair_at(bits, tiles, block, tile):
    """Offset of a row block's lines in the first unit of a tile."""
    return ((block >> 1) * tiles + tile) * (bits * 4 * PAIR) + (block & 1) * ROWS


@kernel()
def permute(args, worker, counter):
    """Codes into lookup layout, or back, in place. Blocks are pairs; a worker's buffer holds one of them."""
    a = i64_at(args)
    tiles, bits = a[TILES], a[WIDTH]
    block_nbytes = tiles * bits * (ROWS * TILE // 8)
    buffer = a[BUFFER] + worker * a[BUFFER_STRIDE]
    words, half = i64_at(buffer), block_nbytes
    while True:
        pair = fetch_add(counter, 1)
        if pair >= a[PAIRS]:
            return
        codes = a[CODES] + 2 * pair * block_nbytes
        source = i64_at(codes)
        for i in range(2 * block_nbytes // 8):
            words[i] = source[i]
        for line in range(2):
            canonical, looked_up = half * line, ROWS * line
            if a[BACK] != 0:
                if bits == 2:
                    _restore2(buffer + looked_up, tiles, codes + canonical)
                elif bits == 3:
                    _restore3(buffer + looked_up, tiles, codes + canonical)
                else:
                    _restore4(buffer + looked_up, tiles, codes + canonical)
            elif bits == 2:
                _arrange2(buffer + canonical, tiles, codes + looked_up)
            elif bits == 3:
                _arrange3(buffer + canonical, tiles, codes + looked_up)
            else:
                _arrange4(buffer + canonical, tiles, codes + looked_up)


def reorder_codes(pool: ThreadPool, blob: np.ndarray, spec: QuantSpec, shape: tuple[int, int], back: bool = False) -> None:
    """Convert the codes of a blob to lookup layout, or `back`, in place. Raises ValueError for a weight that does not support it."""
    if reason := declines(spec.scheme, spec.bits, spec.group, shape[0]):
        raise ValueError(f"no lookup layout for {spec} of shape {shape}: {reason}")
    at = spec.sections(shape)
    tiles = at.depth // TILE
    nbytes = tiles * pair_tile_nbytes(spec.bits)
    buffers = np.empty((pool.workers, nbytes + 64), np.uint8)
    args = np.array([address(blob), at.rows // PAIR, tiles, spec.bits, back, address(buffers), nbytes + 64], np.int64)
    pool.run(permute, address(args))


def canonical_blob(blob: np.ndarray, spec: QuantSpec, shape: tuple[int, int]) -> np.ndarray:
    """A copy of a weight in lookup layout, converted back to the canonical layout."""
    from ..threads import ThreadPool

    copy, alone = blob.copy(), ThreadPool(1)
    reorder_codes(alone, copy, spec, shape, back=True)
    alone.close()
    return copy
