"""Products with stored weights in one kernel each, in Triton: codes are read as they lie and opened in registers.

Without it (`low_bit.py`) a matrix is opened by a dozen passes over memory before it is multiplied. Each weight is what `quant/codes.py`
says, bit for bit, activations and sums are float32. A program has the sixteen rows of a row block, or some rows of a 16-bit matrix, and
goes along their inputs; what a token gets does not depend on how many there are. Triton comes with torch where that is built for CUDA;
`TRITON_INTERPRET=1` runs the same programs on the CPU, one after the other (`tests/test_stored_product.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import tiles
from .low_bit import COLUMN_BITS, Format

MOST_TOKENS = 8  # multiplied while their weights are in registers; beyond, weights are opened to memory
VECTORS = 64  # of 64 bytes, codes of sixteen rows and four inputs each, taken at once; half as many leave registers to more tokens
MOST_OF_ALL = 4  # tokens that leave registers for all of them
OPENED_VECTORS = 32
WARPS = 8
WIDE_ROWS, WIDE_INPUTS = 8, 512  # of a 16-bit matrix, taken at once
OUTLIERS = 64  # taken at once

_CODEBOOK, _AFFINE, _TERNARY = tl.constexpr(tiles.CODEBOOK), tl.constexpr(tiles.AFFINE), tl.constexpr(tiles.TERNARY)
_BLOCK, _MXFP, _OFFSET = tl.constexpr(tiles.BLOCK), tl.constexpr(tiles.MXFP), tl.constexpr(tiles.OFFSET)
_SUPER, _SIGNED = tl.constexpr(tiles.SUPER), tl.constexpr(tiles.SIGNED)
_ROWS, _TILE, _SUPER_BLOCK = tl.constexpr(tiles.ROWS), tl.constexpr(tiles.TILE), tl.constexpr(tiles.SUPER_BLOCK)
_LEVELS = tl.constexpr(tiles.LEVELS_NBYTES)
_SUPER_HEAD, _SUPER_TILE, _SUPER_NBYTES = tl.constexpr(tiles.SUPER_HEAD), tl.constexpr(tiles.SUPER_TILE), tl.constexpr(tiles.SUPER_NBYTES)
_SIGNED_HEAD, _SIGNED_NBYTES = tl.constexpr(tiles.SIGNED_HEAD), tl.constexpr(tiles.SIGNED_NBYTES)
_QUADS, _VECTOR = tl.constexpr(tiles.TILE // 4), tl.constexpr(4 * tiles.ROWS)
_COLUMN_BITS, _COLUMNS = tl.constexpr(COLUMN_BITS), tl.constexpr((1 << COLUMN_BITS) - 1)


@triton.jit
def _bytes(at, mask):
    return tl.load(at, mask=mask, other=0).to(tl.int32)


@triton.jit
def _half(at, mask):
    """The half-precision float in the two bytes there."""
    low, high = _bytes(at, mask), _bytes(at + 1, mask)
    return (low | high << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _brain(at):
    """The bfloat16 in the two bytes there."""
    return ((tl.load(at).to(tl.int32) | tl.load(at + 1).to(tl.int32) << 8) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _codes(tile_at, vector, quad, lane, mask, BITS: tl.constexpr, FIRST: tl.constexpr):
    """Codes int32 [V, 16, 4] of one quad of those in each vector of the FIRST plane; a second plane's bits are above them."""
    QUADS: tl.constexpr = 8 // FIRST
    code = _bytes(tile_at + vector * _VECTOR + lane, mask) >> quad % QUADS * FIRST & (1 << FIRST) - 1
    if BITS > FIRST:
        WIDTH: tl.constexpr = BITS - FIRST
        SHARE: tl.constexpr = 8 // WIDTH
        high = _bytes(tile_at + (FIRST + quad // SHARE) * _VECTOR + lane, mask)
        code |= (high >> quad % SHARE * WIDTH & (1 << WIDTH) - 1) << FIRST
    return code


@triton.jit
def _weights(blob, block, depth, first, turn, scales, zeros, tables, V: tl.constexpr, BITS: tl.constexpr, FIRST: tl.constexpr,
             GROUP: tl.constexpr, SCHEME: tl.constexpr):
    """Weights before the scale of their row, float32 [V, 16, 4]: of rows, and of the inputs of quad `turn` in each of V vectors."""
    QUADS: tl.constexpr = 8 // FIRST
    row = tl.arange(0, _ROWS)[None, :, None]
    lane = row * 4 + tl.arange(0, 4)[None, None, :]
    at = first + tl.arange(0, V)[:, None, None]
    mask = at < depth // _TILE * FIRST
    tile, vector = at // FIRST, at % FIRST
    quad = vector * QUADS + turn
    code = _codes(blob + (block * (depth // _TILE) + tile) * (_VECTOR * BITS), vector, quad, lane, mask, BITS, FIRST)
    group = (tile * _TILE + quad * 4) // GROUP
    of_group = (block * (depth // GROUP) + group) * _ROWS + row
    if SCHEME == _SUPER:
        record = blob + scales + (block * (depth // _SUPER_BLOCK) + tile // 8) * _SUPER_NBYTES
        codes = record + _SUPER_HEAD + tile % 8 * _SUPER_TILE
        low, high = _bytes(codes + row, mask), _bytes(codes + _ROWS + row % 8, mask) >> row // 8 * 4 & 15
        least = _half(record + 2 * _ROWS + 2 * row, mask) * (low >> 6 | high << 2).to(tl.float32)
        w = _half(record + 2 * row, mask) * (low & 63).to(tl.float32) * code.to(tl.float32) - least
    elif SCHEME == _SIGNED:
        record = blob + scales + (block * (depth // _SUPER_BLOCK) + tile // 8) * _SIGNED_NBYTES
        step = _bytes(record + _SIGNED_HEAD + group % (_SUPER_BLOCK // GROUP) * _ROWS + row, mask).to(tl.int8).to(tl.float32)
        w = _half(record + 2 * row, mask) * step * (code - (1 << BITS - 1)).to(tl.float32)
    elif SCHEME == _CODEBOOK:
        pair = _bytes(blob + scales + (block * (depth // _TILE) + tile) * _ROWS + row, mask)
        step = _bytes(blob + tables + _LEVELS + (pair >> quad // 4 * 4 & 15), mask).to(tl.float32)
        w = step * _bytes(blob + tables + code, mask).to(tl.int8).to(tl.float32)
    elif SCHEME == _MXFP:
        step = (_bytes(blob + scales + of_group, mask) << 23).to(tl.float32, bitcast=True)
        w = step * _bytes(blob + tables + code, mask).to(tl.int8).to(tl.float32)
    elif SCHEME == _BLOCK:
        w = _half(blob + scales + 2 * of_group, mask) * (code - (1 << BITS - 1)).to(tl.float32)
    elif SCHEME == _OFFSET:
        w = _half(blob + scales + 2 * of_group, mask) * (code - _bytes(blob + zeros + of_group, mask)).to(tl.float32)
    elif SCHEME == _AFFINE:
        w = _bytes(blob + scales + of_group, mask).to(tl.float32) * (code - _bytes(blob + zeros + of_group, mask)).to(tl.float32)
    else:
        MIDDLE: tl.constexpr = 1 if SCHEME == _TERNARY else 1 << BITS - 1
        w = _bytes(blob + scales + of_group, mask).to(tl.float32) * (code - MIDDLE).to(tl.float32)
    return w


@triton.jit
def _product_of_codes(x, blob, bias, out, rows, inputs, depth, scales, zeros, row_scales, tables, sparse, sparse_count, blocks, TOKENS,
                      T: tl.constexpr, V: tl.constexpr, BITS: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr,
                      SCHEME: tl.constexpr, OUTLIERS: tl.constexpr, WITH_BIAS: tl.constexpr):
    """A row block times TOKENS of T columns: out[T, rows]."""
    QUADS: tl.constexpr = 8 // FIRST
    block = tl.program_id(0)
    row, token = tl.arange(0, _ROWS), tl.arange(0, T)
    of_token = token[:, None, None, None]
    sums = tl.zeros([T, V, _ROWS, 4], tl.float32)
    for first in range(0, depth // _TILE * FIRST, V):
        at = first + tl.arange(0, V)[:, None, None]
        for turn in tl.static_range(QUADS):
            place = (at // FIRST * _QUADS + at % FIRST * QUADS + turn) * 4 + tl.arange(0, 4)[None, None, :]
            here = place < inputs
            w = _weights(blob, block, depth, first, turn, scales, zeros, tables, V, BITS, FIRST, GROUP, SCHEME)
            w = tl.where(here, w, 0.0)
            read = tl.load(x + of_token * inputs + place[None], mask=here[None] & (of_token < TOKENS), other=0.0)
            sums += w[None] * read
    total = tl.sum(tl.sum(sums, 3), 1) * _brain(blob + row_scales + 2 * (block * _ROWS + row))[None]
    if OUTLIERS:
        begin, end = _word(blob + sparse + 4 * block), _word(blob + sparse + 4 * block + 4)
        places = blob + sparse + 4 * (blocks + 1)
        for first in range(begin, end, OUTLIERS):
            at = first + tl.arange(0, OUTLIERS)
            real = at < end
            of_row, column, value = _outlier(places, at, sparse_count, real)
            read = tl.load(x + token[:, None] * inputs + column[None], mask=real[None] & (token[:, None] < TOKENS), other=0.0)
            mine = (of_row[:, None] == row[None, :]) & real[:, None]
            total += tl.sum(tl.where(mine[None], (read * value[None])[:, :, None], 0.0), 1)
    to = block * _ROWS + row
    if WITH_BIAS:
        total += tl.load(bias + to, mask=to < rows, other=0.0)[None]
    tl.store(out + token[:, None] * rows + to[None], total, mask=(to < rows)[None] & (token[:, None] < TOKENS))


@triton.jit
def _word(at):
    """The 32 bits there, of memory that is aligned to them."""
    return tl.load(at.to(tl.pointer_type(tl.int32)))


@triton.jit
def _outlier(places, at, count, real):
    """Row in the block, column and value of outliers."""
    place = tl.load(places.to(tl.pointer_type(tl.int32)) + at, mask=real, other=0)
    halves = (places + 4 * count).to(tl.pointer_type(tl.int16))
    value = (tl.load(halves + at, mask=real, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return place >> _COLUMN_BITS & 15, place & _COLUMNS, value


@triton.jit
def _open(blob, out, from_block, rows, inputs, depth, scales, zeros, row_scales, tables, V: tl.constexpr, BITS: tl.constexpr,
          FIRST: tl.constexpr, GROUP: tl.constexpr, SCHEME: tl.constexpr):
    """V vectors of a row block as out[rows, inputs], whose first row is that of `from_block`."""
    QUADS: tl.constexpr = 8 // FIRST
    block, first = from_block + tl.program_id(0), tl.program_id(1) * V
    row = tl.arange(0, _ROWS)[None, :, None]
    at = first + tl.arange(0, V)[:, None, None]
    scale = _brain(blob + row_scales + 2 * (block * _ROWS + row))
    to = tl.program_id(0) * _ROWS + row
    for turn in tl.static_range(QUADS):
        place = (at // FIRST * _QUADS + at % FIRST * QUADS + turn) * 4 + tl.arange(0, 4)[None, None, :]
        here = place < inputs
        w = _weights(blob, block, depth, first, turn, scales, zeros, tables, V, BITS, FIRST, GROUP, SCHEME) * scale
        tl.store(out + to.to(tl.int64) * inputs + place, w, mask=here & (block * _ROWS + row < rows))


@triton.jit
def _product_of_halves(x, weight, bias, out, rows, inputs, TOKENS, T: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
                       WITH_BIAS: tl.constexpr):
    """R rows of a 16-bit matrix [rows, inputs] times TOKENS of T columns: out[T, rows]."""
    row, token = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, T)
    sums = tl.zeros([T, R, K], tl.float32)
    for first in range(0, inputs, K):
        place = (first + tl.arange(0, K))[None]
        here = place < inputs
        w = tl.load(weight + row[:, None].to(tl.int64) * inputs + place, mask=(row[:, None] < rows) & here, other=0.0)
        read = tl.load(x + token[:, None] * inputs + place, mask=(token[:, None] < TOKENS) & here, other=0.0)
        sums += w.to(tl.float32)[None] * read[:, None]
    total = tl.sum(sums, 2)
    if WITH_BIAS:
        total += tl.load(bias + row, mask=row < rows, other=0.0)[None]
    tl.store(out + token[:, None] * rows + row[None], total, mask=(row < rows)[None] & (token[:, None] < TOKENS))


def of_codes(x: torch.Tensor, blob: torch.Tensor, form: Format, bias: torch.Tensor | None) -> torch.Tensor:
    """x float32 [T, K] of at most MOST_TOKENS times the weight [N, K] of a blob, transposed, plus bias float32 [N] -> [T, N]."""
    at, tokens, (rows, inputs) = form.at, len(x), form.shape
    out = torch.empty(tokens, rows, device=x.device)
    blocks = at.rows // tiles.ROWS
    _product_of_codes[blocks,](
        x.contiguous(), blob, out if bias is None else bias, out, rows, inputs, at.depth, at.scales, at.zeros, at.row_scales, at.tables,
        at.sparse, at.sparse_count, blocks, tokens, T=triton.next_power_of_2(tokens), V=VECTORS if tokens <= MOST_OF_ALL else VECTORS // 2,
        OUTLIERS=OUTLIERS if at.sparse_count else 0, WITH_BIAS=bias is not None, num_warps=WARPS, **_kind(form))
    return out


def opened(blob: torch.Tensor, form: Format, first: int, end: int) -> torch.Tensor:
    """`low_bit.opened` in one kernel: row blocks [first, end) without outliers, float32 [rows, K]."""
    at = form.at
    rows = min(form.shape[0], end * tiles.ROWS) - first * tiles.ROWS
    out = torch.empty(rows, form.shape[1], device=blob.device)
    vectors = at.depth // tiles.TILE * tiles.PLANES[form.bits][0]
    _open[end - first, triton.cdiv(vectors, OPENED_VECTORS)](blob, out, first, form.shape[0], form.shape[1], at.depth, at.scales, at.zeros,
                                                            at.row_scales, at.tables, V=OPENED_VECTORS, num_warps=WARPS, **_kind(form))
    return out


def of_halves(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x float32 [T, K] of at most MOST_TOKENS times a 16-bit weight [N, K] transposed, plus bias float32 [N] -> [T, N]."""
    rows, inputs = weight.shape
    out = torch.empty(len(x), rows, device=x.device)
    _product_of_halves[triton.cdiv(rows, WIDE_ROWS),](x.contiguous(), weight, out if bias is None else bias, out, rows, inputs, len(x),
                                                      T=triton.next_power_of_2(len(x)), R=WIDE_ROWS, K=WIDE_INPUTS,
                                                      WITH_BIAS=bias is not None, num_warps=WARPS)
    return out


def _kind(form: Format) -> dict[str, int]:
    return {"BITS": form.bits, "FIRST": tiles.PLANES[form.bits][0], "GROUP": form.group, "SCHEME": tiles.SCHEMES[form.scheme]}
