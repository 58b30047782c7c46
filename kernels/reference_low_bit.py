"""Reference for products with low-bit weights, including activation quantization to int8: compiled kernels must match it bit for bit.

Sums within a group are exact integers; float32 additions happen in the same order and with the same fused multiply-adds as in the kernels.
A weight is given as `values` v int16 [N, K], `factors` f float32 [N, G] of its groups and `rows` float32 [N]: w = row * f * v. `minima`
float32 [N, G], where given, are subtracted from f * v, via the sums of the quantized activations. Shapes: T tokens, N out, K in, G groups.

    up to 16 tokens    `packed_linear`    an activation scale per token and 32 inputs
    more, from 5 bits  `grouped_linear`   the same except for outliers (also all formats of super-blocks; on AVX2 linear codes of any width)
    more, to 4 bits    `scaled_linear`    weights as int8 of their row's range, an activation scale per token and 128 inputs
    the same on AVX2   `stepped_linear`   codebooks unchanged, an activation scale per token and 128 inputs
    more, with AMX     `halves_linear`    other codes as 16 bits of a row's range in 512 inputs, activations as 16 bits of a token's range
    fp8, up to 16      `float_linear`     activations in float32
    fp8, more          `exact_linear`     weights and activations in float32

With `one_scale` (`Dims.one_scale`, for ternary weights) a token's activations share one scale.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .layout import MIN_ABSMAX
from .tiles import SUPER_BLOCK, TILE

F32, F64 = np.float32, np.float64
INT8_MAX = F32(127)
MIN_NORMAL = F32(2.0**-126)  # the smallest normal number
SCALED_BLOCK = 128
INT16_MAX, INT16_GROUP = F32(127 * 256), 512


class Outliers(NamedTuple):
    """Outlier corrections sorted by (row, column), `value` float32."""

    row: np.ndarray
    column: np.ndarray
    value: np.ndarray


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32 with a single rounding.

    The product is exact in float64. The sum is rounded to odd there, so that rounding to float32 gives the correctly rounded result.
    """
    with np.errstate(invalid="ignore"):  # NaN and infinities pass through
        product = np.multiply(a, b, dtype=F64)
        c = np.broadcast_to(np.asarray(c, F64), product.shape)
        total = product + c
        part = total - product
        error = (product - (total - part)) + (c - part)
    bits = total.view(np.int64)
    odd = np.where((error > 0) == (total > 0), bits + 1, bits - 1).view(F64)
    return np.where(np.isfinite(total) & (error != 0) & (bits & 1 == 0), odd, total).astype(F32)


def quantize_columns(x: np.ndarray, block: int = TILE, one_scale: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """x float32 [T, K] -> codes float64 [T, blocks * block], integers up to 127, and scales float32 [T, blocks].

    A block with a non-finite value gets the scale NaN; one whose scale would be subnormal counts as zeros. `one_scale`: all blocks of a
    token share the scale of its largest activation, taken as at least MIN_ABSMAX.
    """
    depth = -(-x.shape[1] // block) * block
    blocks = _padded(x, depth).reshape(len(x), -1, block)
    finite = np.isfinite(blocks).all(-1)
    blocks = np.where(finite[..., None], blocks, F32(0))
    top = np.abs(blocks).max(-1)
    if one_scale:
        finite, top = np.broadcast_to(finite.all(-1, keepdims=True), finite.shape), np.tile(top.max(-1, keepdims=True), top.shape[1])
        top = np.maximum(top, F32(MIN_ABSMAX))
    inverse = np.divide(INT8_MAX, top, out=np.zeros_like(top), where=top / INT8_MAX >= MIN_NORMAL)
    return np.rint(blocks * inverse[..., None]).reshape(len(x), depth).astype(F64), np.where(finite, top / INT8_MAX, F32(np.nan))


def packed_linear(x: np.ndarray, values: np.ndarray, factors: np.ndarray, rows: np.ndarray, group: int, *, whole: bool,
                  outliers: Outliers | None = None, bias: np.ndarray | None = None, minima: np.ndarray | None = None,
                  supers: np.ndarray | None = None, one_scale: bool = False, fine: bool = False) -> np.ndarray:
    """x float32 [T, K] -> float32 [T, N]. `whole`: factors are integers, and a tile's groups sum to one integer (codebooks), which is
    multiplied by `supers` float32 [N, ceil(K / 256)] if given. `fine`: the rounding error of x is quantized and multiplied as well, as for
    the inputs of an LM head."""
    codes, scales = quantize_columns(x, one_scale=one_scale)
    y = _grouped(codes, scales, values, factors, group, whole, minima, supers)
    if fine:
        rest = _padded(x, codes.shape[1]) - codes.astype(F32) * np.repeat(scales, TILE, axis=1)
        y = y + _grouped(*quantize_columns(rest), values, factors, group, whole, minima, supers)
    y = y * rows
    if outliers is not None:
        for row, column, value in zip(*outliers):
            y[:, row] += value * x[:, column]
    return y if bias is None else y + bias


def grouped_linear(x: np.ndarray, values: np.ndarray, factors: np.ndarray, rows: np.ndarray, group: int, *,
                   outliers: Outliers | None = None, bias: np.ndarray | None = None, minima: np.ndarray | None = None,
                   one_scale: bool = False) -> np.ndarray:
    """x float32 [T, K] -> float32 [T, N]."""
    codes, scales = quantize_columns(x, one_scale=one_scale)
    y = _grouped(codes, scales, values, factors, group, False, minima) * rows
    return _finish(y, codes, scales, TILE, outliers, bias)


def scaled_linear(x: np.ndarray, values: np.ndarray, factors: np.ndarray, rows: np.ndarray, group: int, *, most: np.ndarray, shift: int,
                  outliers: Outliers | None = None, bias: np.ndarray | None = None, one_scale: bool = False) -> np.ndarray:
    """x float32 [T, K] -> float32 [T, N]. most, shift: as for `scaled_weights`."""
    codes, scales = quantize_columns(x, SCALED_BLOCK, one_scale)
    y = _in_blocks(codes, scales, scaled_weights(values, factors, group, most, shift))
    return _finish(y * (rows * most / INT8_MAX), codes, scales, SCALED_BLOCK, outliers, bias)


def stepped_linear(x: np.ndarray, values: np.ndarray, factors: np.ndarray, rows: np.ndarray, group: int, *,
                   outliers: Outliers | None = None, bias: np.ndarray | None = None) -> np.ndarray:
    """x float32 [T, K] -> float32 [T, N]. factors: integers, as codebooks have them."""
    codes, scales = quantize_columns(x, SCALED_BLOCK)
    steps = np.repeat(factors.astype(np.int64), group, axis=1)[:, : values.shape[1]]
    return _finish(_in_blocks(codes, scales, values * steps) * rows, codes, scales, SCALED_BLOCK, outliers, bias)


def halves_linear(x: np.ndarray, weights: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """x float32 [T, K] -> float32 [T, N] with weights float32 [N, K], both as two-byte integers; products of two low bytes are omitted. One
    fused multiply-add per span."""
    upper, lower, scales = _halves(x)
    y = np.zeros((len(x), len(weights)), F32)
    for start in range(0, x.shape[1], INT16_GROUP):
        part = slice(start, start + INT16_GROUP)
        own_upper, own_lower, factors = _halves(weights[:, part])
        main, fine = upper[:, part] @ own_upper.T, lower[:, part] @ own_upper.T + upper[:, part] @ own_lower.T
        y = fma(fma(main.astype(F32), F32(256), fine.astype(F32)) * (factors * F32(256)), scales[:, None], y)
    return y if bias is None else y + bias


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """float32 [N, K] -> high and low bytes as integers in float64, and each row's scale. A row with a non-finite value counts as zeros with
    scale NaN."""
    finite = np.isfinite(x).all(-1)
    x = np.where(finite[:, None], x, F32(0))
    top = np.abs(x).max(-1)
    inverse = np.divide(INT16_MAX, top, out=np.zeros_like(top), where=top / INT16_MAX >= MIN_NORMAL)
    numbers = np.rint(x * inverse[:, None]).astype(F64)
    upper = np.floor((numbers + 128) / 256)
    return upper, numbers - 256 * upper, np.where(finite, top / INT16_MAX, F32(np.nan))


def _in_blocks(codes: np.ndarray, scales: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Integer products with weights [N, K], one fused multiply-add per activation block."""
    weights = _padded(weights, codes.shape[1])
    y = np.zeros((len(codes), len(weights)), F32)
    for index in range(scales.shape[1]):
        part = slice(index * SCALED_BLOCK, (index + 1) * SCALED_BLOCK)
        y = fma((codes[:, part] @ weights[:, part].T).astype(F32), scales[:, index, None], y)
    return y


def scaled_weights(values: np.ndarray, factors: np.ndarray, group: int, most: np.ndarray, shift: int) -> np.ndarray:
    """f * v as integers up to 127 of each row's range, by one 16-bit multiplication.

    most: float32 [N], the largest |f * v| that a row's scales allow (0: a row of zeros). shift: how far values can be shifted up with |v <<
    shift| <= 256.
    """
    limit = np.divide(F32(127 << (15 - shift)), most, out=np.zeros_like(most), where=most > 0)
    multiplier = np.rint(factors * limit[:, None]).astype(np.int64)
    wide = np.repeat(multiplier, group, axis=1)[:, : values.shape[1]]
    return ((values.astype(np.int64) << shift) * wide + (1 << 14)) >> 15


def float_linear(x: np.ndarray, values: np.ndarray, factors: np.ndarray, rows: np.ndarray, group: int, *,
                 bias: np.ndarray | None = None) -> np.ndarray:
    """x float32 [T, K] -> float32 [T, N] for fp8 weights, `values` float32 [N, K]; x is not rounded. Within a group four chains, one per
    place in a quad of inputs, are joined in pairs; two chains run over all groups."""
    depth = factors.shape[1] * group
    x = _padded(x, depth).reshape(len(x), 1, -1, group // 4, 4)
    values = (_padded(values, depth) / F32(256)).reshape(1, len(values), -1, group // 4, 4)
    total = np.zeros((x.shape[0], values.shape[1], 2), F32)
    for g in range(factors.shape[1]):
        chains = np.zeros((x.shape[0], values.shape[1], 4), F32)
        for quad in range(group // 4):
            chains = fma(values[:, :, g, quad], x[:, :, g, quad], chains)
        total = fma(chains[..., 0::2] + chains[..., 1::2], factors[None, :, g, None], total)
    y = (total[..., 0] + total[..., 1]) * F32(256) * rows
    return y if bias is None else y + bias


def exact_linear(x: np.ndarray, weights: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """x float32 [T, K] -> float32 [T, N] with weights float32 [N, K]: one chain of fused multiply-adds in input order."""
    y = np.zeros((len(x), len(weights)), F32)
    for k in range(x.shape[1]):
        y = fma(weights[None, :, k], x[:, k, None], y)
    return y if bias is None else y + bias


def _grouped(codes: np.ndarray, scales: np.ndarray, values: np.ndarray, factors: np.ndarray, group: int, whole: bool,
             minima: np.ndarray | None = None, supers: np.ndarray | None = None) -> np.ndarray:
    """Sum over tiles of scale * (factor * integer): one fused multiply-add per tile or, where a tile has two groups, per group; a minimum
    is one more, before it."""
    values = _padded(values, codes.shape[1])
    y = np.zeros((len(codes), len(values)), F32)
    size = min(group, TILE)
    for index in range(scales.shape[1]):
        starts = [k for k in range(index * TILE, (index + 1) * TILE, size) if k // group < factors.shape[1]]
        sums = [codes[:, k : k + size] @ values[:, k : k + size].T for k in starts]
        factors_of_tile = [factors[:, k // group] for k in starts]
        if whole:
            parts = [sum(dots * factor for dots, factor in zip(sums, factors_of_tile)).astype(F32)]
            if supers is not None:
                parts = [parts[0] * supers[:, index * TILE // SUPER_BLOCK]]
        else:
            parts = [dots.astype(F32) * factor for dots, factor in zip(sums, factors_of_tile)]
        if minima is not None:
            totals = [codes[:, k : k + size].sum(1, keepdims=True).astype(F32) for k in starts]
            parts = [fma(-minima[:, k // group], total, part) for k, total, part in zip(starts, totals, parts)]
        for part in parts:
            y = fma(part, scales[:, index, None], y)
    return y


def _finish(y: np.ndarray, codes: np.ndarray, scales: np.ndarray, block: int, outliers: Outliers | None,
            bias: np.ndarray | None) -> np.ndarray:
    """Each row's outliers, summed separately with the activations as quantized; then the bias."""
    if outliers is not None:
        extra = np.zeros_like(y)
        for row, column, value in zip(*outliers):
            rounded = codes[:, column].astype(F32) * scales[:, column // block]
            extra[:, row] = fma(rounded, value, extra[:, row])
        y = y + extra
    return y if bias is None else y + bias


def _padded(array: np.ndarray, columns: int) -> np.ndarray:
    return np.pad(array, ((0, 0), (0, columns - array.shape[1])))
