"""Scalar arithmetic that kernels inline and LLVM vectorises: 16-bit floats, exp, activations, dot products, norms.

Everything is float32. Stored types are numbered as in `layout.py`: 0 f32, 1 f16, 2 bf16. The exponential is a polynomial (Cephes'
expf reduction, error below 2 units in the last place) because a library call would stop the loop from being vectorised.
"""

from __future__ import annotations

import math

import numpy as np
from numpy import float32, int32, int64, uint16, uint32

from ..compile import REASSOCIATE
from ..layout import (
    BF16,
    CAP_SHIFT,
    CAPPED_SILU,
    CLAMPED_SILU,
    CLAMPED_SWISH,
    F16,
    GELU,
    GELU_TANH,
    MIN_ABSMAX,
    NORM_LAYER,
    NORM_NONE,
    NORM_RMS_PLUS_ONE,
    ONE_SCALE,
    RELU,
    RELU2,
    SILU,
    SILU_LIMIT,
    SWISH_LIMIT,
    SWISH_SLOPE,
)
from ..lazy_numba import inlined
from .inner_loops import (
    FEW_ROWS,
    FEW_STEP,
    MANY_STEP,
    few_rows_bf16,
    few_rows_f16,
    few_rows_f32,
    many_rows_bf16,
    many_rows_f16,
    many_rows_f32,
)
from .intrinsics import HAS_HALF, bits_to_f32, f32_at, f32_to_bits, f32_to_half, half_to_f32, i64_at, u16_at, u32_at

LOG2E, LN2_HIGH, LN2_LOW = np.float32(1.44269504088896341), np.float32(0.693359375), np.float32(-2.12194440e-4)
P0, P1, P2, P3, P4, P5 = (np.float32(c) for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5))
L1, L2, L3, L4, L5, L6, L7 = (np.float32(1 / n) for n in range(3, 17, 2))
ONE, HALF, ZERO = np.float32(1.0), np.float32(0.5), np.float32(0.0)
MIN_ABSMAX_BITS = np.float32(MIN_ABSMAX).view(np.uint32)
EXP_LOW, EXP_HIGH = np.float32(-87.3), np.float32(88.3)
HALF_MAX, HALF_SCALE = np.float32(65504.0), np.float32(2.0**112)
INV_SQRT2, TANH_INNER, GELU_CUBE = np.float32(math.sqrt(0.5)), np.float32(math.sqrt(2 / math.pi)), np.float32(0.044715)
INFINITY, MINUS_INF = np.float32(np.inf), np.float32(-np.inf)
SLOPE, LIMIT, OTHER_LIMIT = np.float32(SWISH_SLOPE), np.float32(SWISH_LIMIT), np.float32(SILU_LIMIT)
KIND = (1 << CAP_SHIFT) - 1  # the bits of an activation's number that hold its kind


@inlined({"contract"})
def exp(x):
    """e**x for x <= 88.3; exactly 0 below -87.3, so that masked scores have no weight; NaN stays NaN."""
    bounded = min(max(x, EXP_LOW), EXP_HIGH)
    n = np.floor(bounded * LOG2E + HALF)
    r = bounded - n * LN2_HIGH - n * LN2_LOW
    y = ((((P0 * r + P1) * r + P2) * r + P3) * r + P4) * r + P5
    y = y * r * r + r + ONE
    y = y * bits_to_f32(uint32((int32(n) + int32(127)) << int32(23)))
    y = y if x >= EXP_LOW else ZERO
    return y if x == x else x


@inlined({"contract"})
def softplus(x):
    """log(1 + e**x) with relative error 3e-7, vectorizable; NaN stays NaN. log(1 + u), with u at most 1, is twice the series of u / (2 +
    u)."""
    u = exp(-abs(x))
    s = u / (u + ONE + ONE)
    z = s * s
    series = ((((((L7 * z + L6) * z + L5) * z + L4) * z + L3) * z + L2) * z + L1) * z + ONE
    return max(x, ZERO) + (s + s) * series if x == x else x


@inlined()
def _capped(gate, up, bound):
    """silu(gate) * up with both clamped to the bound."""
    activated, low = gate / (ONE + exp(-gate)), -bound if up < -bound else up
    return (bound if activated > bound else activated) * (bound if low > bound else low)


@inlined()
def _bound(kind):
    return bits_to_f32(uint32(kind >> CAP_SHIFT))


@inlined()
def activate(x, kind):
    """The gate's activation; numbered as in `layout.py`."""
    if kind == SILU:
        return x / (ONE + exp(-x))
    if kind == RELU:
        return max(x, ZERO)
    if kind == RELU2:
        return max(x, ZERO) * max(x, ZERO)
    if kind == GELU_TANH:
        inner = TANH_INNER * (x + GELU_CUBE * x * x * x)
        return x * (ONE - ONE / (ONE + exp(inner + inner)))
    if kind == GELU:
        return float32(HALF * x * (ONE + float32(math.erf(x * INV_SQRT2))))
    if kind == CLAMPED_SWISH:
        bounded = LIMIT if x > LIMIT else x
        return bounded / (ONE + exp(-SLOPE * bounded))
    if kind & KIND == CAPPED_SILU:
        activated, bound = x / (ONE + exp(-x)), _bound(kind)
        return bound if activated > bound else activated
    if kind == CLAMPED_SILU:
        bounded = OTHER_LIMIT if x > OTHER_LIMIT else x
        return bounded / (ONE + exp(-bounded))
    return x


@inlined()
def gated(gate, up, kind):
    """act(gate) * up, with `up` preprocessed as the activation requires. NaN stays NaN."""
    if kind & KIND == CAPPED_SILU:
        return _capped(gate, up, _bound(kind))
    if kind == CLAMPED_SWISH:
        low = -LIMIT if up < -LIMIT else up
        up = ONE + (LIMIT if low > LIMIT else low)
    elif kind == CLAMPED_SILU:
        low = -OTHER_LIMIT if up < -OTHER_LIMIT else up
        up = OTHER_LIMIT if low > OTHER_LIMIT else low
    return activate(gate, kind) * up


@inlined()
def gate_values(gate, up, count, kind):
    """gate = act(gate) * up for `count` values, both addresses. Common kinds are dispatched outside the loop so that it is vectorized, and
    reads and writes go through one array: with two that might alias (and do) the compiler would process one value at a time."""
    values, second = f32_at(gate), f32_at(up)
    if kind == SILU:
        for i in range(count):
            values[i] = gated(values[i], second[i], SILU)
    elif kind == CLAMPED_SWISH:
        for i in range(count):
            values[i] = gated(values[i], second[i], CLAMPED_SWISH)
    elif kind & KIND == CAPPED_SILU:
        bound = _bound(kind)
        for i in range(count):
            values[i] = _capped(values[i], second[i], bound)
    elif kind == CLAMPED_SILU:
        for i in range(count):
            values[i] = gated(values[i], second[i], CLAMPED_SILU)
    else:
        for i in range(count):
            values[i] = gated(values[i], second[i], kind)


if HAS_HALF:

    @inlined()
    def widen_half(bits):
        return half_to_f32(bits)

    @inlined()
    def narrow_half(value):
        return f32_to_half(min(max(value, -HALF_MAX), HALF_MAX) if abs(value) < INFINITY else value)
else:

    @inlined()
    def widen_half(bits):
        """Shift the fields into place and rescale: subnormals come out right, infinities and NaN keep the largest exponent."""
        wide = uint32(bits)
        magnitude = bits_to_f32((wide & uint32(0x7FFF)) << uint32(13)) * HALF_SCALE
        pattern = f32_to_bits(magnitude)
        if (wide & uint32(0x7C00)) == uint32(0x7C00):
            pattern = uint32(0x7F800000) | ((wide & uint32(0x3FF)) << uint32(13))
        return bits_to_f32(pattern | ((wide & uint32(0x8000)) << uint32(16)))

    @inlined()
    def narrow_half(value):
        """Nearest half, ties to even; finite values saturate at the largest, infinity and NaN stay what they are."""
        pattern = f32_to_bits(value)
        sign = (pattern >> uint32(16)) & uint32(0x8000)
        magnitude = pattern & uint32(0x7FFFFFFF)
        if magnitude > uint32(0x7F800000):
            return uint16(sign | uint32(0x7E00))
        if magnitude == uint32(0x7F800000):
            return uint16(sign | uint32(0x7C00))
        if magnitude >= uint32(0x477FE000):
            return uint16(sign | uint32(0x7BFF))
        if magnitude < uint32(0x38800000):
            # Subnormal: adding 0.5 makes the hardware round the low bits to even.
            shifted = f32_to_bits(bits_to_f32(magnitude) + HALF) - uint32(0x3F000000)
            return uint16(sign | shifted)
        rounded = magnitude + uint32(0xFFF) + ((magnitude >> uint32(13)) & uint32(1))
        return uint16(sign | ((rounded - uint32(0x38000000)) >> uint32(13)))


@inlined()
def widen(address, dtype, index):
    """One stored value as float32."""
    if dtype == BF16:
        return bits_to_f32(uint32(u16_at(address)[index]) << uint32(16))
    if dtype == F16:
        return widen_half(u16_at(address)[index])
    return f32_at(address)[index]


@inlined(REASSOCIATE)
def _shifted_dot(w, x, depth):
    total = ZERO
    for i in range(depth):
        total += widen_half(w[i]) * x[i]
    return total


if HAS_HALF:

    @inlined()
    def _halves(rows, count, x, steps, out):
        if count == FEW_ROWS:
            few_rows_f16(rows, x, steps, out)
        else:
            many_rows_f16(rows, x, steps, out)
else:

    @inlined()
    def _halves(rows, count, x, steps, out):
        width = FEW_STEP if count == FEW_ROWS else MANY_STEP
        for i in range(count):
            f32_at(out)[i] = _shifted_dot(u16_at(i64_at(rows)[i]), f32_at(x), steps * width)


@inlined()
def dot(rows, count, dtype, x, depth, out):
    """`count` (FEW_ROWS or MANY_ROWS) stored rows, given by addresses at `rows`, times float32 `x` -> as many float32 at `out`.

    The bits of a sum do not depend on the other rows.
    """
    width = FEW_STEP if count == FEW_ROWS else MANY_STEP
    steps = depth // width
    sums = f32_at(out)
    if steps == 0:
        for i in range(count):
            sums[i] = ZERO
    elif dtype == F16:
        _halves(rows, count, x, steps, out)
    elif dtype == BF16:
        if count == FEW_ROWS:
            few_rows_bf16(rows, x, steps, out)
        else:
            many_rows_bf16(rows, x, steps, out)
    elif count == FEW_ROWS:
        few_rows_f32(rows, x, steps, out)
    else:
        many_rows_f32(rows, x, steps, out)
    for k in range(steps * width, depth):
        for i in range(count):
            sums[i] += widen(i64_at(rows)[i], dtype, k) * f32_at(x)[k]


@inlined()
def sigmoid(x):
    """1 / (1 + e**-x)."""
    return ONE / (ONE + exp(-x))


@inlined()
def expand(address, dtype, out, count):
    """`count` stored values -> float32 at `out`."""
    target = f32_at(out)
    if dtype == BF16:
        source = u16_at(address)
        for i in range(count):
            target[i] = bits_to_f32(uint32(source[i]) << uint32(16))
    elif dtype == F16:
        source = u16_at(address)
        for i in range(count):
            target[i] = widen_half(source[i])
    else:
        plain = f32_at(address)
        for i in range(count):
            target[i] = plain[i]


@inlined(REASSOCIATE)
def dot_of(x, y, depth):
    total = ZERO
    for i in range(depth):
        total += x[i] * y[i]
    return total


@inlined(REASSOCIATE)
def squares_of(x, depth):
    total = ZERO
    for i in range(depth):
        total += x[i] * x[i]
    return total


@inlined(REASSOCIATE)
def mean_of(x, depth):
    total = ZERO
    for i in range(depth):
        total += x[i]
    return total / float32(depth)


@inlined(REASSOCIATE)
def variance_of(x, mean, depth):
    total = ZERO
    for i in range(depth):
        total += (x[i] - mean) * (x[i] - mean)
    return total / float32(depth)


@inlined()
def normalise(source, out, depth, kind, weight, bias, eps):
    """Normalize one row of `depth` float32 from `source` to `out`, a different row. `weight` and `bias` are addresses, 0 if absent."""
    x, y = f32_at(source), f32_at(out)
    for i in range(depth):
        y[i] = x[i]
    if kind != NORM_NONE:
        normalise_here(out, depth, kind, weight, bias, eps)


@inlined()
def normed_row(source, out, depth, padded, kind, weight, bias, eps):
    """`normalise` of a row, zero-padded to `padded` float32; with `depth` 0 (no token) all zeros."""
    if depth > 0:
        normalise(source, out, depth, kind, weight, bias, eps)
    y = f32_at(out)
    for i in range(depth, padded):
        y[i] = ZERO


@inlined()
def least_of(row, count, norm):
    """Lower bound for a block's largest magnitude, as the bits of a float: the maximum over all `count` float32 of a row if `norm`, a kind
    as stored in an argument block, says that they share one scale; else 0."""
    if norm < ONE_SCALE:
        return int64(0)
    value, top = u32_at(row), MIN_ABSMAX_BITS
    for i in range(count):
        top = max(top, value[i] & np.uint32(0x7FFFFFFF))
    return int64(top)


@inlined()
def normalise_here(row, depth, kind, weight, bias, eps):
    """`normalise` in place, for a kind other than NORM_NONE. Reads and writes go through one array: with two that alias the compiler would
    process one value at a time."""
    y, w = f32_at(row), f32_at(weight)
    if kind == NORM_LAYER:
        mean = mean_of(y, depth)
        scale = ONE / np.sqrt(variance_of(y, mean, depth) + eps)
        for i in range(depth):
            value = (y[i] - mean) * scale
            y[i] = value * w[i] if weight != 0 else value
        if bias != 0:
            b = f32_at(bias)
            for i in range(depth):
                y[i] += b[i]
        return
    scale = ONE / np.sqrt(squares_of(y, depth) / float32(depth) + eps)
    shift = ONE if kind == NORM_RMS_PLUS_ONE else ZERO
    for i in range(depth):
        y[i] = y[i] * scale * (w[i] + shift)
