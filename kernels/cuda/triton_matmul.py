"""Triton matmul kernels for stored weights: codes are read as stored and dequantized in registers.

Without this (`low_bit.py`) a matrix is dequantized by some thirty passes over memory before it is multiplied. Weights are bit-identical to
`quant/codes.py`; activations and sums are float32. A program handles the sixteen rows of a row block. It loads the codes of the next tiles
before it multiplies the current ones (`triton_dequantize.py`): waiting for memory in every iteration is several times as slow. Triton comes
with torch builds for CUDA; `TRITON_INTERPRET=1` runs the same programs on the CPU, one after the other (`tests/test_stored_product.py`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .. import tiles
from .low_bit import COLUMN_BITS, Format
from .triton_dequantize import (
    ASM,
    LEVELS,
    MINIMUM,
    NIBBLE,
    ROWS,
    SUPER,
    TILE,
    block_rows,
    factors,
    read_tiles,
    row_scales_of,
    table_words,
    values,
    weights_of,
    word_at,
)

# A thread processes two rows of a tile at a time. Rows of many matrices have no more tiles than WARPS warps take at once. Long rows get
# more warps, unless the sums of several tokens need the registers (`docs/architecture/gpu.md`).
WARPS, WARPS_OF_LONG, LONG, SHORT = 8, 16, 128, 2
TILES_OF_WARP = 4
TILES_PER_PROGRAM, DEQUANTIZE_WARPS = 16, 4  # tiles that a program dequantizes to memory
WIDE_ROWS, WIDE_INPUTS, HALF_WARPS = 4, 512, 4  # rows and inputs of a 16-bit matrix taken at once
OUTLIERS = 64  # taken at once

_COLUMN_BITS, _COLUMNS = tl.constexpr(COLUMN_BITS), tl.constexpr((1 << COLUMN_BITS) - 1)
# Values that differ from call to call must not trigger a new compilation, and fused multiply-adds are required for reproducible bits.
_VARYING = ("rows", "TOKENS", "from_block", "blocks", "sparse_count", "factor")


@triton.jit(do_not_specialize=_VARYING)
def _product_of_codes(x, blob, bias, out, rows, inputs, depth, scales, zeros, row_scales, tables, TOKENS, factor, T: tl.constexpr,
                      V: tl.constexpr, BITS: tl.constexpr, FIRST: tl.constexpr, GROUP: tl.constexpr, SCHEME: tl.constexpr,
                      EVEN: tl.constexpr, BIAS: tl.constexpr, ADDS: tl.constexpr, ASM: tl.constexpr):
    """A row block times TOKENS of T columns: out[TOKENS, rows], or added to it `factor` times."""
    block, count = tl.program_id(0), depth // TILE
    row, token, lane = block_rows(rows), tl.arange(0, T), tl.arange(0, 4)
    a, b, c, d, e, f, g, h = table_words(blob + tables, SCHEME, ASM)
    levels, steps = (a, b, c, d), (e, f, g, h)
    sums = tl.zeros([8, V, 2, T], tl.float32)
    vector_index = tl.arange(0, V)
    read = read_tiles(blob, block, depth, tl.minimum(vector_index, count - 1)[None, :, None], row, scales, zeros, BITS, GROUP, SCHEME)
    for first in range(0, count, V):
        # Tiles beyond the last one repeat it and count as zero.
        then = tl.minimum(first + V + vector_index, count - 1)[None, :, None]
        ahead = read_tiles(blob, block, depth, then, row, scales, zeros, BITS, GROUP, SCHEME)
        tile = tl.minimum(first + vector_index, count - 1)
        input_index = (tile * TILE)[None, :, None, None] + lane[None, None, None, :]
        input_index = tl.broadcast_to(input_index, [8, V, T, 4])
        of_token = (token * inputs)[None, None, :, None]
        real = (first + vector_index < count)[None, :, None]
        for half in tl.static_range(2):
            step, base, less = factors(read, steps, blob + tables + LEVELS, row, half, BITS, GROUP, SCHEME, ASM)
            step = tl.where(real, step, 0.0)
            if SCHEME == SUPER or SCHEME == NIBBLE or SCHEME == MINIMUM:
                less = tl.where(real, less, 0.0)
            part = tl.zeros([8, V, 2, T], tl.float32)
            for pair in tl.static_range(2):
                low, high = values(read, levels, blob + tables, half * 2 + pair, BITS, FIRST, SCHEME, ASM)
                for which in tl.static_range(2):
                    at = input_index + (half * 16 + pair * 8 + which * 4)
                    if EVEN:
                        activations = tl.load(x + of_token + at)
                    else:
                        activations = tl.load(x + of_token + at, mask=(at < inputs) & (token < TOKENS)[None, None, :, None], other=0.0)
                    even, odd = tl.split(tl.reshape(activations, [8, V, T, 2, 2]))
                    x0, x2 = tl.split(even)
                    x1, x3 = tl.split(odd)
                    w0, w1, w2, w3 = weights_of(high if which else low, step, base, less, SCHEME, ASM)
                    # By shapes instead of new axes: a new axis would make Triton move everything through shared memory.
                    part += tl.reshape(x0, [8, V, 1, T]) * tl.reshape(w0, [8, V, 2, 1])
                    part += tl.reshape(x1, [8, V, 1, T]) * tl.reshape(w1, [8, V, 2, 1])
                    part += tl.reshape(x2, [8, V, 1, T]) * tl.reshape(w2, [8, V, 2, 1])
                    part += tl.reshape(x3, [8, V, 1, T]) * tl.reshape(w3, [8, V, 2, 1])
            if SCHEME == SUPER or SCHEME == NIBBLE or SCHEME == MINIMUM:
                sums += part
            else:
                sums += part * tl.reshape(step, [8, V, 2, 1])
        read = ahead
    to = block * ROWS + tl.arange(0, 8)[:, None, None] + (tl.arange(0, 2) * 8)[None, :, None]
    products = tl.sum(sums, 1) * row_scales_of(blob + row_scales, to, SCHEME)
    _keep(products, out + token[None, None, :] * rows + to, bias + to, (to < rows) & (token < TOKENS)[None, None, :], factor, BIAS, ADDS)


@triton.jit
def _keep(products, to, bias, mask, factor, BIAS: tl.constexpr, ADDS: tl.constexpr):
    if BIAS:
        products += tl.load(bias, mask=mask, other=0.0)
    if ADDS:
        products = products * factor + tl.load(to, mask=mask, other=0.0)
    tl.store(to, products, mask=mask)


@triton.jit
def _outliers(blob, sparse, count, blocks, at, real):
    """Row in the block, column and value of outliers, by their numbers."""
    positions_at = blob + sparse + 4 * (blocks + 1)
    position = tl.load(positions_at.to(tl.pointer_type(tl.int32)) + at, mask=real, other=0)
    halves = (positions_at + 4 * count).to(tl.pointer_type(tl.int16))
    value = (tl.load(halves + at, mask=real, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return position >> _COLUMN_BITS & 15, position & _COLUMNS, value


@triton.jit(do_not_specialize=_VARYING)
def _add_outliers(x, blob, out, rows, inputs, sparse, sparse_count, blocks, TOKENS, factor, T: tl.constexpr, O: tl.constexpr):  # noqa: E741
    """A row block's outliers, added `factor` times to out[TOKENS, rows]."""
    block = tl.program_id(0)
    row, token = tl.arange(0, ROWS), tl.arange(0, T)
    begin, end = word_at(blob + sparse + 4 * block), word_at(blob + sparse + 4 * block + 4)
    sums = tl.zeros([T, O, ROWS], tl.float32)
    for first in range(begin, end, O):
        at = first + tl.arange(0, O)
        real = at < end
        of_row, column, value = _outliers(blob, sparse, sparse_count, blocks, at, real)
        read = tl.load(x + token[:, None] * inputs + column[None], mask=real[None] & (token[:, None] < TOKENS), other=0.0)
        sums += tl.where(((of_row[:, None] == row[None, :]) & real[:, None])[None], (read * value[None])[:, :, None], 0.0)
    to = out + token[:, None] * rows + (block * ROWS + row)[None]
    _keep(tl.sum(sums, 1), to, out, (block * ROWS + row < rows)[None] & (token[:, None] < TOKENS), factor, False, True)


@triton.jit(do_not_specialize=_VARYING)
def _open(blob, out, from_block, rows, inputs, depth, scales, zeros, row_scales, tables, V: tl.constexpr, BITS: tl.constexpr,
          FIRST: tl.constexpr, GROUP: tl.constexpr, SCHEME: tl.constexpr, ASM: tl.constexpr):
    """V tiles of a row block as out[rows, inputs], whose first row is that of `from_block`."""
    block, count = from_block + tl.program_id(0), depth // TILE
    row, lane = block_rows(rows), tl.arange(0, 4)[None, None, None, :]
    a, b, c, d, e, f, g, h = table_words(blob + tables, SCHEME, ASM)
    levels, steps = (a, b, c, d), (e, f, g, h)
    tile = (tl.program_id(1) * V + tl.arange(0, V))[None, :, None]
    read = read_tiles(blob, block, depth, tl.minimum(tile, count - 1), row, scales, zeros, BITS, GROUP, SCHEME)
    scale = row_scales_of(blob + row_scales, block * ROWS + row, SCHEME)
    to = out + (tl.program_id(0) * ROWS + row).to(tl.int64)[:, :, :, None] * inputs
    mask = (block * ROWS + row < rows)[:, :, :, None]
    for half in tl.static_range(2):
        step, base, less = factors(read, steps, blob + tables + LEVELS, row, half, BITS, GROUP, SCHEME, ASM)
        for pair in tl.static_range(2):
            low, high = values(read, levels, blob + tables, half * 2 + pair, BITS, FIRST, SCHEME, ASM)
            for which in tl.static_range(2):
                a, b, c, d = weights_of(high if which else low, step, base, less, SCHEME, ASM)
                w = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [8, V, 2, 4])
                if SCHEME != SUPER and SCHEME != NIBBLE and SCHEME != MINIMUM:
                    w = w * tl.reshape(step, [8, V, 2, 1])
                w = w * tl.reshape(scale, [8, 1, 2, 1])
                input_index = (tile * TILE)[:, :, :, None] + (half * 16 + pair * 8 + which * 4) + lane
                tl.store(to + input_index, w, mask=mask & (input_index < inputs))


@triton.jit(do_not_specialize=_VARYING)
def _correct(blob, out, from_block, inputs, sparse, sparse_count, blocks, O: tl.constexpr):  # noqa: E741
    """Add the outliers of a row block to the output of `_open`."""
    block = from_block + tl.program_id(0)
    begin, end = word_at(blob + sparse + 4 * block), word_at(blob + sparse + 4 * block + 4)
    for first in range(begin, end, O):
        at = first + tl.arange(0, O)
        real = at < end
        of_row, column, value = _outliers(blob, sparse, sparse_count, blocks, at, real)
        to = out + (tl.program_id(0) * ROWS + of_row).to(tl.int64) * inputs + column
        tl.store(to, tl.load(to, mask=real, other=0.0) + value, mask=real)


@triton.jit(do_not_specialize=_VARYING)
def _product_of_halves(x, weight, bias, out, rows, inputs, TOKENS, factor, T: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
                       EVEN: tl.constexpr, BIAS: tl.constexpr, ADDS: tl.constexpr):
    """R rows of a 16-bit matrix [rows, inputs] times TOKENS of T columns: out[TOKENS, rows], or added to it `factor` times."""
    row, token = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, T)
    sums = tl.zeros([T, R, K], tl.float32)
    for first in range(0, inputs, K):
        input_index = tl.broadcast_to((first + tl.arange(0, K))[None], [R, K])
        there, read_at = weight + row[:, None].to(tl.int64) * inputs + input_index, x + token[:, None, None] * inputs + input_index[None]
        if EVEN:
            w, read = tl.load(there), tl.load(read_at)
        else:
            w = tl.load(there, mask=(row[:, None] < rows) & (input_index < inputs), other=0.0)
            read = tl.load(read_at, mask=(token < TOKENS)[:, None, None] & (input_index < inputs)[None], other=0.0)
        sums += w.to(tl.float32)[None] * read
    mask = (row < rows)[None] & (token[:, None] < TOKENS)
    _keep(tl.sum(sums, 2), out + token[:, None] * rows + row[None], bias + row[None], mask, factor, BIAS, ADDS)


def low_bit_matmul(x: torch.Tensor, blob: torch.Tensor, form: Format, bias: torch.Tensor | None, residual: torch.Tensor | None = None,
             factor: float = 1.0) -> torch.Tensor:
    """x float32 [T, K] of at most `matmul.FEW` tokens times the weight [N, K] of a blob, transposed, plus bias float32 [N] -> [T, N], which
    is added `factor` times to `residual` [T, N] if given."""
    at, tokens, (rows, inputs), x = form.at, len(x), form.shape, x.contiguous()
    blocks, columns = at.rows // tiles.ROWS, triton.next_power_of_2(tokens)
    out = torch.empty(tokens, rows, device=x.device) if residual is None else residual
    warps = WARPS_OF_LONG if at.depth // tiles.TILE >= LONG and columns <= SHORT else WARPS
    is_even = inputs == at.depth and columns == tokens
    _product_of_codes[blocks,](x, blob, x if bias is None else bias, out, rows, inputs, at.depth, at.scales, at.zeros, at.row_scales,
                               at.tables, tokens, factor, T=columns, V=TILES_OF_WARP * warps, EVEN=is_even, BIAS=bias is not None,
                               ADDS=residual is not None, num_warps=warps, **_kind(form))
    if at.sparse_count:
        _add_outliers[blocks,](x, blob, out, rows, inputs, at.sparse, at.sparse_count, blocks, tokens, factor, T=columns, O=OUTLIERS)
    return out


def dequantize(blob: torch.Tensor, form: Format, first: int, end: int) -> torch.Tensor:
    """`low_bit.dequantize` in one or two kernels: row blocks [first, end), float32 [rows, K]."""
    at, inputs = form.at, form.shape[1]
    out = torch.empty(min(form.shape[0], end * tiles.ROWS) - first * tiles.ROWS, inputs, device=blob.device)
    _open[end - first, triton.cdiv(at.depth // tiles.TILE, TILES_PER_PROGRAM)](
        blob, out, first, form.shape[0], inputs, at.depth, at.scales, at.zeros, at.row_scales, at.tables, V=TILES_PER_PROGRAM,
        num_warps=DEQUANTIZE_WARPS, **_kind(form))
    if at.sparse_count:
        _correct[end - first,](blob, out, first, inputs, at.sparse, at.sparse_count, at.rows // tiles.ROWS, O=OUTLIERS)
    return out


def half_matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None = None,
              factor: float = 1.0) -> torch.Tensor:
    """`low_bit_matmul` with a 16-bit weight [N, K]."""
    tokens, (rows, inputs), x = len(x), weight.shape, x.contiguous()
    out, columns = torch.empty(tokens, rows, device=x.device) if residual is None else residual, triton.next_power_of_2(tokens)
    is_even = rows % WIDE_ROWS == 0 and inputs % WIDE_INPUTS == 0 and columns == tokens
    _product_of_halves[triton.cdiv(rows, WIDE_ROWS),](x, weight, x if bias is None else bias, out, rows, inputs, tokens, factor, T=columns,
                                                      R=WIDE_ROWS, K=WIDE_INPUTS, EVEN=is_even, BIAS=bias is not None,
                                                      ADDS=residual is not None, num_warps=HALF_WARPS)
    return out


def _kind(form: Format) -> dict[str, int]:
    return {"BITS": form.bits, "FIRST": tiles.PLANES[form.bits][0], "GROUP": form.group, "SCHEME": tiles.SCHEMES[form.scheme], "ASM": ASM}
