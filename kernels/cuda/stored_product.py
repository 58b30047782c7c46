"""Products with stored weights in one kernel each, in Triton: codes are read as they lie and opened in registers.

Without it (`low_bit.py`) a matrix is opened by some thirty passes over memory before it is multiplied. Each weight is what `quant/codes.py`
says, bit for bit, activations and sums are float32. A program has the sixteen rows of a row block and a share of their inputs, so that
narrow matrices fill a card too; the shares follow from the shape alone, and their sums are added in order. Triton comes with torch where
that is built for CUDA; `TRITON_INTERPRET=1` runs the same programs on the CPU, one after the other (`tests/test_stored_product.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import tiles
from .low_bit import COLUMN_BITS, Format

TILES = 8  # taken at once
PROGRAMS = 1024  # of which a matrix should have as many: several for each unit of a large card
LEAST_STEPS = 2  # of TILES in a share
WARPS = 4
WIDE_ROWS, WIDE_INPUTS = 4, 512  # of a 16-bit matrix, taken at once
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
# Numbers that differ from call to call are no reason to compile anew, and fused multiply-adds are what bits are promised with.
_VARYING = ("rows", "TOKENS", "from_block", "blocks", "sparse_count")
_LAUNCH = {"num_warps": WARPS, "enable_fp_fusion": True}


@triton.jit
def _bytes(at, mask, EVEN: tl.constexpr):
    """The bytes there as whole numbers; where nothing is beyond an edge, EVEN, no mask is looked at."""
    if EVEN:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=mask, other=0)
    return found.to(tl.int32)


@triton.jit
def _halves(at, mask, EVEN: tl.constexpr):
    """The half-precision floats there, as float32."""
    there = at.to(tl.pointer_type(tl.float16))
    if EVEN:
        found = tl.load(there)
    else:
        found = tl.load(there, mask=mask, other=0.0)
    return found.to(tl.float32)


@triton.jit
def _row_scales(at):
    """The bfloat16 numbers there, as float32."""
    return (tl.load(at.to(tl.pointer_type(tl.int16))).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _steps(blob, block, depth, tile, half, mask, scales, zeros, tables, BITS: tl.constexpr, GROUP: tl.constexpr, SCHEME: tl.constexpr,
           EVEN: tl.constexpr):
    """Of the inputs of half a tile: what their codes' values are multiplied by, and what is then taken off; float32 [V, 16, 1]."""
    row = tl.arange(0, _ROWS)[None, :, None]
    of_group = (block * (depth // GROUP) + (tile * _TILE + half * 16) // GROUP) * _ROWS + row
    if SCHEME == _SUPER:
        record = blob + scales + (block * (depth // _SUPER_BLOCK) + tile // 8) * _SUPER_NBYTES
        codes = record + _SUPER_HEAD + tile % 8 * _SUPER_TILE
        low, high = _bytes(codes + row, mask, EVEN), _bytes(codes + _ROWS + row % 8, mask, EVEN) >> row // 8 * 4 & 15
        step = _halves(record + 2 * row, mask, EVEN) * (low & 63).to(tl.float32)
        less = _halves(record + 2 * _ROWS + 2 * row, mask, EVEN) * (low >> 6 | high << 2).to(tl.float32)
    elif SCHEME == _SIGNED:
        record = blob + scales + (block * (depth // _SUPER_BLOCK) + tile // 8) * _SIGNED_NBYTES
        code = _bytes(record + _SIGNED_HEAD + (tile % 8 * 2 + half) * _ROWS + row, mask, EVEN).to(tl.int8)
        step = _halves(record + 2 * row, mask, EVEN) * code.to(tl.float32)
        less = step * (1 << BITS - 1)
    elif SCHEME == _CODEBOOK:
        pair = _bytes(blob + scales + (block * (depth // _TILE) + tile) * _ROWS + row, mask, EVEN)
        step = _bytes(blob + tables + _LEVELS + (pair >> half * 4 & 15), mask, EVEN).to(tl.float32)
        less = step
    elif SCHEME == _MXFP:
        step = (_bytes(blob + scales + of_group, mask, EVEN) << 23).to(tl.float32, bitcast=True)
        less = step
    elif SCHEME == _BLOCK:
        step = _halves(blob + scales + 2 * of_group, mask, EVEN)
        less = step * (1 << BITS - 1)
    elif SCHEME == _OFFSET:
        step = _halves(blob + scales + 2 * of_group, mask, EVEN)
        less = step * _bytes(blob + zeros + of_group, mask, EVEN).to(tl.float32)
    elif SCHEME == _AFFINE:
        step = _bytes(blob + scales + of_group, mask, EVEN).to(tl.float32)
        less = step * _bytes(blob + zeros + of_group, mask, EVEN).to(tl.float32)
    else:
        step = _bytes(blob + scales + of_group, mask, EVEN).to(tl.float32)
        less = step * (1 if SCHEME == _TERNARY else 1 << BITS - 1)
    return step, less


@triton.jit
def _codes(at, low, high, mask, quad: tl.constexpr, BITS: tl.constexpr, FIRST: tl.constexpr, EVEN: tl.constexpr):
    """Codes int32 [V, 16, 4] of a quad of each tile, and the vectors of the first and second plane that hold them: those of the quad
    before, or read here where it is the first of a vector."""
    IN_VECTOR: tl.constexpr = 8 // FIRST
    IN_SECOND: tl.constexpr = 8 // (BITS - FIRST) if BITS > FIRST else 8
    if quad % IN_VECTOR == 0:
        low = _bytes(at + quad // IN_VECTOR * _VECTOR, mask, EVEN)
    code = low >> quad % IN_VECTOR * FIRST & (1 << FIRST) - 1
    if BITS > FIRST:
        if quad % IN_SECOND == 0:
            high = _bytes(at + (FIRST + quad // IN_SECOND) * _VECTOR, mask, EVEN)
        code |= (high >> quad % IN_SECOND * (BITS - FIRST) & (1 << BITS - FIRST) - 1) << FIRST
    return code, low, high


@triton.jit
def _opened(code, step, less, blob, tables, mask, SCHEME: tl.constexpr, EVEN: tl.constexpr):
    """Weights of codes before the scale of their row. Nothing is rounded: products have at most 24 bits, and are multiples of one step."""
    if SCHEME == _CODEBOOK or SCHEME == _MXFP:
        w = step * _bytes(blob + tables + code, mask, EVEN).to(tl.int8).to(tl.float32)
    else:  # a conversion, by units of which a card has more
        w = step * ((code | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0) - less
    return w


@triton.jit(do_not_specialize=_VARYING)
def _product_of_codes(x, blob, out, rows, inputs, depth, scales, zeros, row_scales, tables, TOKENS, T: tl.constexpr, V: tl.constexpr,
                      BITS: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr, SCHEME: tl.constexpr, EVEN: tl.constexpr):
    """A row block and a share of its inputs times TOKENS of T columns: out[share, TOKENS, rows]."""
    block, share, shares = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    row, input_, token = tl.arange(0, _ROWS), tl.arange(0, 4)[None, None, :], tl.arange(0, T)
    of_token, lane = token[:, None, None, None] * inputs, row[None, :, None] * 4 + input_
    sums = tl.zeros([T, V, _ROWS, 4], tl.float32)
    for first in range(share * V, depth // _TILE, shares * V):
        tile = first + tl.arange(0, V)[:, None, None]
        mask = tile < depth // _TILE
        at = blob + (block * (depth // _TILE) + tile) * (_VECTOR * BITS) + lane
        step, less = _steps(blob, block, depth, tile, 0, mask, scales, zeros, tables, BITS, GROUP, SCHEME, EVEN)
        low, high = tl.zeros([V, _ROWS, 4], tl.int32), tl.zeros([V, _ROWS, 4], tl.int32)
        for quad in tl.static_range(_QUADS):
            if quad == 4 and GROUP == 16:
                step, less = _steps(blob, block, depth, tile, 1, mask, scales, zeros, tables, BITS, GROUP, SCHEME, EVEN)
            code, low, high = _codes(at, low, high, mask, quad, BITS, FIRST, EVEN)
            w = _opened(code, step, less, blob, tables, mask, SCHEME, EVEN)
            place = tl.broadcast_to(tile * _TILE + quad * 4 + input_, [V, _ROWS, 4])  # in the order of the weights: nothing is exchanged
            if EVEN:
                read = tl.load(x + of_token + place[None])
            else:
                read = tl.load(x + of_token + place[None], mask=(place < inputs)[None] & (token < TOKENS)[:, None, None, None], other=0.0)
            sums += w[None] * read
    to = block * _ROWS + row
    total = tl.sum(tl.sum(sums, 3), 1) * _row_scales(blob + row_scales + 2 * to)[None]
    tl.store(out + (share * TOKENS + token[:, None]) * rows + to[None], total, mask=(to < rows)[None] & (token[:, None] < TOKENS))


@triton.jit
def _word(at):
    """The 32 bits there, of memory that is aligned to them."""
    return tl.load(at.to(tl.pointer_type(tl.int32)))


@triton.jit
def _outliers(blob, sparse, count, blocks, at, real):
    """Row in the block, column and value of outliers, by their numbers."""
    places = blob + sparse + 4 * (blocks + 1)
    place = tl.load(places.to(tl.pointer_type(tl.int32)) + at, mask=real, other=0)
    halves = (places + 4 * count).to(tl.pointer_type(tl.int16))
    value = (tl.load(halves + at, mask=real, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return place >> _COLUMN_BITS & 15, place & _COLUMNS, value


@triton.jit(do_not_specialize=_VARYING)
def _add_outliers(x, blob, out, rows, inputs, sparse, sparse_count, blocks, TOKENS, T: tl.constexpr, O: tl.constexpr):  # noqa: E741
    """What the outliers of a row block give, added to out[TOKENS, rows]."""
    block = tl.program_id(0)
    row, token = tl.arange(0, _ROWS), tl.arange(0, T)
    begin, end = _word(blob + sparse + 4 * block), _word(blob + sparse + 4 * block + 4)
    sums = tl.zeros([T, O, _ROWS], tl.float32)
    for first in range(begin, end, O):
        at = first + tl.arange(0, O)
        real = at < end
        of_row, column, value = _outliers(blob, sparse, sparse_count, blocks, at, real)
        read = tl.load(x + token[:, None] * inputs + column[None], mask=real[None] & (token[:, None] < TOKENS), other=0.0)
        sums += tl.where(((of_row[:, None] == row[None, :]) & real[:, None])[None], (read * value[None])[:, :, None], 0.0)
    to = out + token[:, None] * rows + (block * _ROWS + row)[None]
    mask = (block * _ROWS + row < rows)[None] & (token[:, None] < TOKENS)
    tl.store(to, tl.load(to, mask=mask, other=0.0) + tl.sum(sums, 1), mask=mask)


@triton.jit(do_not_specialize=_VARYING)
def _open(blob, out, from_block, rows, inputs, depth, scales, zeros, row_scales, tables, V: tl.constexpr, BITS: tl.constexpr,
          FIRST: tl.constexpr, GROUP: tl.constexpr, SCHEME: tl.constexpr):
    """V tiles of a row block as out[rows, inputs], whose first row is that of `from_block`."""
    block = from_block + tl.program_id(0)
    row, input_ = tl.arange(0, _ROWS)[None, :, None], tl.arange(0, 4)[None, None, :]
    tile = tl.program_id(1) * V + tl.arange(0, V)[:, None, None]
    mask = tile < depth // _TILE
    at = blob + (block * (depth // _TILE) + tile) * (_VECTOR * BITS) + row * 4 + input_
    scale = _row_scales(blob + row_scales + 2 * (block * _ROWS + row))
    to = out + (tl.program_id(0) * _ROWS + row).to(tl.int64) * inputs
    step, less = _steps(blob, block, depth, tile, 0, mask, scales, zeros, tables, BITS, GROUP, SCHEME, False)
    low, high = tl.zeros([V, _ROWS, 4], tl.int32), tl.zeros([V, _ROWS, 4], tl.int32)
    for quad in tl.static_range(_QUADS):
        if quad == 4 and GROUP == 16:
            step, less = _steps(blob, block, depth, tile, 1, mask, scales, zeros, tables, BITS, GROUP, SCHEME, False)
        code, low, high = _codes(at, low, high, mask, quad, BITS, FIRST, False)
        place = tile * _TILE + quad * 4 + input_
        w = _opened(code, step, less, blob, tables, mask, SCHEME, False) * scale
        tl.store(to + place, w, mask=(place < inputs) & (block * _ROWS + row < rows))


@triton.jit(do_not_specialize=_VARYING)
def _correct(blob, out, from_block, inputs, sparse, sparse_count, blocks, O: tl.constexpr):  # noqa: E741
    """The outliers of a row block, added to what `_open` left."""
    block = from_block + tl.program_id(0)
    begin, end = _word(blob + sparse + 4 * block), _word(blob + sparse + 4 * block + 4)
    for first in range(begin, end, O):
        at = first + tl.arange(0, O)
        real = at < end
        of_row, column, value = _outliers(blob, sparse, sparse_count, blocks, at, real)
        to = out + (tl.program_id(0) * _ROWS + of_row).to(tl.int64) * inputs + column
        tl.store(to, tl.load(to, mask=real, other=0.0) + value, mask=real)


@triton.jit(do_not_specialize=_VARYING)
def _product_of_halves(x, weight, out, rows, inputs, TOKENS, T: tl.constexpr, R: tl.constexpr, K: tl.constexpr, EVEN: tl.constexpr):
    """R rows of a 16-bit matrix [rows, inputs] times TOKENS of T columns: out[TOKENS, rows]."""
    row, token = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, T)
    sums = tl.zeros([T, R, K], tl.float32)
    for first in range(0, inputs, K):
        place = tl.broadcast_to((first + tl.arange(0, K))[None], [R, K])
        there, read_at = weight + row[:, None].to(tl.int64) * inputs + place, x + token[:, None, None] * inputs + place[None]
        if EVEN:
            w, read = tl.load(there), tl.load(read_at)
        else:
            w = tl.load(there, mask=(row[:, None] < rows) & (place < inputs), other=0.0)
            read = tl.load(read_at, mask=(token < TOKENS)[:, None, None] & (place < inputs)[None], other=0.0)
        sums += w.to(tl.float32)[None] * read
    tl.store(out + token[:, None] * rows + row[None], tl.sum(sums, 2), mask=(row < rows)[None] & (token[:, None] < TOKENS))


def of_codes(x: torch.Tensor, blob: torch.Tensor, form: Format, bias: torch.Tensor | None) -> torch.Tensor:
    """x float32 [T, K] of at most `products.FEW` tokens times the weight [N, K] of a blob, transposed, plus bias float32 [N] -> [T, N]."""
    at, tokens, (rows, inputs), x = form.at, len(x), form.shape, x.contiguous()
    blocks, count, columns = at.rows // tiles.ROWS, shares(form), triton.next_power_of_2(tokens)
    parts = torch.empty(count, tokens, rows, device=x.device)
    is_even = inputs == at.depth and at.depth // tiles.TILE % TILES == 0 and columns == tokens
    _product_of_codes[blocks, count](x, blob, parts, rows, inputs, at.depth, at.scales, at.zeros, at.row_scales, at.tables, tokens,
                                     T=columns, V=TILES, EVEN=is_even, **_kind(form), **_LAUNCH)
    out = parts.sum(0) if count > 1 else parts[0]
    if at.sparse_count:
        _add_outliers[blocks,](x, blob, out, rows, inputs, at.sparse, at.sparse_count, blocks, tokens, T=columns, O=OUTLIERS, **_LAUNCH)
    return out if bias is None else out.add_(bias)


def shares(form: Format) -> int:
    """In how many parts the inputs of a weight are multiplied: for PROGRAMS of some steps each."""
    steps = triton.cdiv(form.at.depth // tiles.TILE, TILES)
    return max(1, min(steps // LEAST_STEPS, PROGRAMS * tiles.ROWS // form.at.rows))


def opened(blob: torch.Tensor, form: Format, first: int, end: int) -> torch.Tensor:
    """`low_bit.opened` in a kernel or two: row blocks [first, end), float32 [rows, K]."""
    at, inputs = form.at, form.shape[1]
    out = torch.empty(min(form.shape[0], end * tiles.ROWS) - first * tiles.ROWS, inputs, device=blob.device)
    _open[end - first, triton.cdiv(at.depth // tiles.TILE, TILES)](blob, out, first, form.shape[0], inputs, at.depth, at.scales, at.zeros,
                                                                  at.row_scales, at.tables, V=TILES, **_kind(form), **_LAUNCH)
    if at.sparse_count:
        _correct[end - first,](blob, out, first, inputs, at.sparse, at.sparse_count, at.rows // tiles.ROWS, O=OUTLIERS, **_LAUNCH)
    return out


def of_halves(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x float32 [T, K] of at most `products.FEW` tokens times a 16-bit weight [N, K] transposed, plus bias float32 [N] -> [T, N]."""
    tokens, (rows, inputs) = len(x), weight.shape
    out, columns = torch.empty(tokens, rows, device=x.device), triton.next_power_of_2(tokens)
    is_even = rows % WIDE_ROWS == 0 and inputs % WIDE_INPUTS == 0 and columns == tokens
    _product_of_halves[triton.cdiv(rows, WIDE_ROWS),](x.contiguous(), weight, out, rows, inputs, tokens, T=columns, R=WIDE_ROWS,
                                                      K=WIDE_INPUTS, EVEN=is_even, **_LAUNCH)
    return out if bias is None else out.add_(bias)


def _kind(form: Format) -> dict[str, int]:
    return {"BITS": form.bits, "FIRST": tiles.PLANES[form.bits][0], "GROUP": form.group, "SCHEME": tiles.SCHEMES[form.scheme]}
