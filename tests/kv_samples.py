"""Packed caches over random tokens, and the expected attention output: for tests and their child processes."""

from __future__ import annotations

import re

import numpy as np

from effllm.kernels import reference
from effllm.kernels.cpu.kv.decode import MEAN_K, MEAN_V
from effllm.kernels.cpu.kv.prefill import MULTIPLIES_PACKED, ROWS_OF_EIGHT, ROWS_OF_EIGHT_WIDE
from effllm.kernels.cpu.kv.scratch_layout import HAS_EIGHT_ROW_TILES
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.layout import PAGE
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.kv import PackedCodec, PackedFormat, RawCodec, codec
from effllm.quant.kv_basis import KVBasis
from effllm.runtime.cache import KVCache
from effllm.runtime.kv.cache_builder import build_cache
from effllm.runtime.kv.cache_shape import AttnSpec, CacheShape

FINE = 3e-4  # 70 dB: 16 bits round 79 below the answer, and with the bytes' parabola for weights it would be 64
WIDE_SHARE = 0.02
SHARE = 0.35  # an eighth of the noise; of a basis that was made for other keys


def moments_basis(kv_heads: int, head_dim: int, profile: int = 7, seed: int = 3, of: int | None = None) -> KVBasis:
    """A basis as a profile makes it: dense matrices, groups of unequal bits. `of`: how many values it is made of, head_dim unless told;
    of more than that no direction is next to silent."""
    rng, of = np.random.default_rng(seed), of or head_dim

    def moment() -> np.ndarray:
        factors = rng.standard_normal((kv_heads, head_dim, of)) * np.exp(rng.uniform(-2, 1, (kv_heads, 1, of)))
        return factors @ factors.swapaxes(1, 2) / of

    return KVBasis.from_moments(moment(), moment(), moment(), moment(), profile=profile)


def form_of(kv: str) -> RawCodec | PackedFormat:
    """`codec`, and the 10 bits that only a profile gives: of both sides, or as k10v2 and its like."""
    if match := re.fullmatch(r"(10)bit|k(10|\d)v(10|\d)", kv):
        both, bits_k, bits_v = match.groups()
        return PackedFormat(int(both or bits_k), int(both or bits_v))
    return codec(kv)


def packed_cache(pool: ThreadPool, kv: str = "4bit", heads: int = 8, kv_heads: int = 2, head_dim: int = 64, window: int | None = None,
                 softcap: float | None = None, basis: KVBasis | None = None, shape: CacheShape | None = None) -> KVCache:
    """One layer. With `kv` as of `--kv`."""
    shape = shape or CacheShape(1024, sink=64, window=16, chunk=PAGE)
    form = form_of(kv)
    packs = isinstance(form, PackedFormat)
    ops = CpuOps(pool, Dims(8, heads, kv_heads, head_dim, 8, 8, chunk=shape.chunk, ctx=shape.ctx, logit_rows=1, packed_kv=packs))
    codecs = [PackedCodec(((form.bits_k, form.bits_v),) * kv_heads, basis)] if packs and basis is not None else None
    return build_cache([ops], [AttnSpec(heads, kv_heads, head_dim, head_dim**-0.5, window, softcap)], form, shape, codecs)


class Stream:
    """Random q, k, v of every position, run through a cache; `ruin` changes k and v [T, KVH, D] beforehand."""

    def __init__(self, cache: KVCache, heads: int, tokens: int, seed: int = 0, ruin=None, sinks: np.ndarray | None = None) -> None:
        rng = np.random.default_rng(seed)
        layout = cache.layouts[0]
        self.cache, self.heads, self.sinks = cache, heads, sinks
        self.q = (rng.standard_normal((tokens, heads * layout.head_dim)) * 2).astype(np.float32)
        k, v = rng.standard_normal((2, tokens, layout.kv_heads, layout.head_dim)).astype(np.float32)
        if ruin is not None:
            k, v = ruin(k, v)
        self.k, self.v = (np.ascontiguousarray(side.reshape(tokens, -1), np.float32) for side in (k, v))
        self.out, self.want = np.full_like(self.q, np.nan), np.full_like(self.q, np.nan)

    def run(self, tokens: int, compare: bool = True) -> None:
        """Append tokens; keeps what the kernels gave and, in `want`, plain softmax over what the cache holds, packed pages decoded."""
        for piece in self.cache.pieces(tokens):
            span = slice(self.cache.n, self.cache.n + piece)
            step = self.cache.begin(piece)
            layer = self.cache.layer(0)
            self.out[span] = layer.attend(*(np.ascontiguousarray(part[span]) for part in (self.q, self.k, self.v)), self.sinks)
            if compare:
                self.want[span] = self._expected(layer.pages, step, span)
            self.cache.commit()

    def _expected(self, pages, step, span: slice) -> np.ndarray:
        keys, values, at = [], [], []
        for sealed, index, first, count in step.blocks:
            k, v = pages.sides(sealed, index)
            keys.append(k[:count].astype(np.float32))
            values.append(v[:count].astype(np.float32))
            at.append(first + np.arange(count))
        q = self.q[span].reshape(span.stop - span.start, self.heads, -1)
        result = reference.attend(q, np.concatenate(keys), np.concatenate(values), step.position, np.concatenate(at), pages.scale,
                                  pages.window, pages.softcap, self.sinks)
        return result.reshape(len(q), -1)


def uneven_error(pool: ThreadPool, heads: int) -> float:
    """`relative` of single tokens where a group of 10 bits lies behind groups of fewer, and keys and values are as large as their bits
    say: what is done for the wrong group shows."""
    strength = np.tile(np.array([1, 0.25, 4, 1], np.float32), (2, 1))
    eye = np.broadcast_to(np.eye(64, dtype=np.float32), (2, 64, 64))
    basis = KVBasis(np.ones((2, 64), np.float32), eye, eye, strength_k=strength, strength_v=strength)
    assert basis.widths(8, 8)[0].tolist() == basis.widths(8, 8)[1].tolist() == [[8, 6, 10, 8]] * 2
    sizes = np.repeat(strength[0], 16) / 4
    stream = Stream(packed_cache(pool, "8bit", heads, basis=basis), heads, 420, ruin=lambda k, v: (k * sizes, v * sizes))
    for tokens in (400, *[1] * 20):
        stream.run(tokens, compare=tokens == 1)
    return relative(stream.out[400:], stream.want[400:])


def worst_error(pool: ThreadPool, kv: str, **options) -> float:
    """`excess` of a prompt or of single tokens behind it, the worse of both."""
    heads, kv_basis = options.get("heads", 8), moments_basis(options.get("kv_heads", 2), options.get("head_dim", 64))
    basis = options.pop("basis", kv_basis)
    packed = Stream(packed_cache(pool, kv, basis=basis, **options), heads, 420)
    exact = Stream(packed_cache(pool, "32bit", **options), heads, 420)
    for stream in (packed, exact):
        for tokens in (400, *[1] * 20):
            stream.run(tokens, compare=stream is packed)
    prompt, group = slice(0, 400), heads // options.get("kv_heads", 2)
    return max(excess(packed, exact, kv, prompt, as_they_lie(kv, group)), excess(packed, exact, kv, slice(400, 420), True))


def extreme_error(pool: ThreadPool, kv: str, head_dim: int, heads: int, sign: int) -> float:
    """`relative` of single tokens where a token's keys are the same number in every channel, as far from zero as zeros of K reach, and so
    are queries: no sums of products, of their digits or of zeros are larger."""
    eye = np.broadcast_to(np.eye(head_dim, dtype=np.float32), (1, head_dim, head_dim))
    basis = KVBasis(np.ones((1, head_dim), np.float32), eye, eye)

    def ruin(k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        k[:] = sign * 1.85 + np.random.default_rng(1).uniform(-0.5, 0.5, (len(k), 1, 1)).astype(np.float32)
        return k, v

    stream = Stream(packed_cache(pool, kv, heads, 1, head_dim, basis=basis), heads, 404, ruin=ruin)
    stream.q[:] = head_dim**-0.5
    for tokens in (400, *[1] * 4):
        stream.run(tokens, compare=tokens == 1)
    return relative(stream.out[400:], stream.want[400:])


def check_wide(pool: ThreadPool) -> None:
    """Heads wider than 256, whose bits are stored in two places and whose sums are split."""
    for heads, head_dim in ((8, 512), (12, 576)):
        basis = moments_basis(1, head_dim, of=4 * head_dim)
        for kv in ("8bit", "4bit", "k2v10"):
            assert worst_error(pool, kv, heads=heads, kv_heads=1, head_dim=head_dim, basis=basis) < 5e-3, (kv, heads, head_dim)
    cases = (("10bit", 8, 512, 1e-3), ("8bit", 3, 576, 3.5e-4), ("6bit", 16, 512, 3.5e-4), ("4bit", 2, 512, 0.025))
    for kv, heads, head_dim, limit in cases:
        assert fine_error(pool, kv, heads, 1, head_dim) < limit, (kv, heads, head_dim)
    for kv, head_dim, heads, sign in (("8bit", 512, 4, -1), ("8bit", 512, 8, 1), ("10bit", 576, 8, -1), ("10bit", 576, 4, 1)):
        assert extreme_error(pool, kv, head_dim, heads, sign) < 1e-4, (kv, head_dim, heads, sign)


def as_they_lie(kv: str, group: int) -> bool:
    """Does prefill multiply packed pages in packed form, for this many query heads per KV head? Otherwise it dequantizes them to float32.
    """
    form, tile = form_of(kv), 8 if group > 4 else 4
    eighths = ROWS_OF_EIGHT if form.bits_k <= MEAN_K and form.bits_v <= MEAN_V else ROWS_OF_EIGHT_WIDE
    return MULTIPLIES_PACKED and 8 * group >= eighths * (-(-group // tile) * tile)


def excess(packed: Stream, exact: Stream, kv: str, span: slice, lie: bool) -> float:
    """Root mean square of the kernels' error over that of the answer. Where codes of few bits are multiplied as bytes, SHARE of what the
    codec loses itself is taken off, WIDE_SHARE where groups of 10 bits lie beside such of few: for keys that the basis was not made for the
    codec loses up to a half there. `lie`: are codes multiplied as they lie, not opened?"""
    form = form_of(kv)
    rounded = lie and (form.bits_k <= MEAN_K or form.bits_v <= MEAN_V)
    share = SHARE if rounded else WIDE_SHARE if lie and {form.bits_k, form.bits_v} <= {6, 8} else 0.0
    allowed = share * relative(packed.want[span], exact.out[span]) if share else 0.0
    return relative(packed.out[span], packed.want[span]) - allowed


def fine_error(pool: ThreadPool, kv: str, heads: int = 8, kv_heads: int = 2, head_dim: int = 64, **options) -> float:
    """`relative` of single tokens, keys and values as the basis takes them to be: FINE at most where both sides meet 16 bits."""
    basis = KVBasis.plain(kv_heads, head_dim)
    stream = Stream(packed_cache(pool, kv, heads, kv_heads, head_dim, basis=basis, **options), heads, 420)
    for tokens in (400, *[1] * 20):
        stream.run(tokens, compare=tokens == 1)
    return relative(stream.out[400:], stream.want[400:])


def relative(result: np.ndarray, expected: np.ndarray) -> float:
    """Root mean square of the difference divided by that of the expected output."""
    return float(np.sqrt(np.square(result - expected).mean() / np.square(expected).mean()))


def check_largest_products() -> None:
    """The extreme codes, zeros, queries and weights: sums of their products are exact on this instruction set."""
    from effllm.kernels.cpu.kv import int8_products
    from effllm.kernels.lazy_numba import compiler

    @compiler().njit("void(int64,int64,int64,int64,int64)", error_model="numpy")
    def keys(codes, widths, queries, terms, out):
        for unit in range(0, PAGE // int8_products.UNIT_TOKENS, int8_products.UNITS_AT_ONCE):
            int8_products.dot_units_4(codes, widths, queries, terms, unit, out, 4, codes, 0)

    @compiler().njit("void(int64,int64,int64,int64,int64,int64)", error_model="numpy")
    def values(codes, bits, zeros, weights, out, factors):
        int8_products.dot_values_4(codes, bits, zeros, weights, np.float32(1.0), out, 64, factors, factors + 16, codes, 0)

    terms = np.repeat(np.array([1, 0], np.float32), 4)
    for fill in (0, 255):
        codes = np.full(4 * 16 * PAGE, fill, np.uint8)
        for bits in range(1, int8_products.MAX_K_BITS + 1):
            widths = np.full(16, bits, np.uint8)
            for query in (-127, 127):
                queries, out = np.full((16, 4, 4), query, np.int8), np.full((4, PAGE), np.nan, np.float32)
                keys(codes.ctypes.data, widths.ctypes.data, queries.ctypes.data, terms.ctypes.data, out.ctypes.data)
                assert (out == 64 * query * (fill & (1 << bits) - 1)).all(), (bits, fill, query)
        for bits in range(1, int8_products.MAX_V_BITS + 1):
            up, less = int8_products.value_zero(bits)
            for zero in (-less, (15 << up) - less):
                weights, zeros, out = np.full((4, PAGE), 255, np.uint8), np.full(PAGE, zero, np.int8), np.zeros((4, 16), np.float32)
                factors = np.repeat(np.array([0, 1], np.float32), 4)
                values(codes.ctypes.data, bits, zeros.ctypes.data, weights.ctypes.data, out.ctypes.data, factors.ctypes.data)
                value = ((fill & (1 << bits) - 1) << int8_products.value_multiple(bits)) + zero
                assert abs(value) <= less and (out == 255 * PAGE * value).all(), (bits, fill, zero)


def check_largest_digits(rows: int) -> None:
    """The same for 16-bit products, in tiles of this many rows."""
    from effllm.kernels.cpu.kv import int8_products, int16_products
    from effllm.kernels.lazy_numba import compiler

    quads, groups = 64, 16  # of the widest head
    scale, dot_unit, dot_value = (getattr(int16_products, f"{name}_digits_{rows}") for name in ("scale", "dot_unit", "dot_value"))
    scale_coarse, dot_rests = (getattr(int16_products, f"{name}_{rows}") for name in ("scale_coarse", "dot_rests"))
    many = rows * 4 * quads  # queries

    @compiler().njit("void(int64,int64,int64,int64,int64,int64,int64,int64,int64,int64,int64)", error_model="numpy")
    def keys(queries, scales, high, low, words, codes, widths, starts, terms, out, parts):
        scale(queries, scales, high, low, words, quads)
        if parts > groups:
            scale_coarse(queries, scales + 8 * quads, high + many, low + many, words + 2 * many, quads)
        for unit in range(PAGE // int8_products.UNIT_TOKENS):
            first = high if int16_products.DIGITS else words
            dot_unit(codes, widths, starts, first, low, terms, terms + 64, unit, out, groups, parts - groups, codes, 0)

    @compiler().njit("void(int64,int64,int64,int64,int64,int64,int64,int64)", error_model="numpy")
    def values(codes, bits, multiple, zeros, weights, lower, out, factors):
        step = np.float32(1.0)
        dot_value(codes, bits, multiple, zeros, weights, lower, step, out, 64, factors, factors + 4 * rows, codes, 0)

    @compiler().njit("void(int64,int64,int64,int64)", error_model="numpy")
    def rest_of_values(codes, weights, out, take):
        dot_rests(codes, weights, np.float32(1.0), out, 64, take)

    terms = np.zeros((2, 16), np.float32)
    terms[0, :rows] = 256
    for fill in (0, 255):
        codes = np.full(10 * 16 * PAGE * groups, fill, np.uint8)
        for bits in (10, 8, 6, 5, 4, 3, 2, 1):
            # behind groups of 8 bits the 2 that they have beyond, with a quarter of the scale
            parts, full = 2 * groups if bits > 8 else groups, np.full(groups, min(bits, 8), np.uint8)
            widths, starts = np.concatenate([full, full * 0 + 2]), np.arange(2 * groups, dtype=np.int32) % groups * 256 * bits
            starts[groups:] += 2048
            for query in (-32512, 32512, 128, -127):
                queries, scales = np.full((2 * quads, rows, 4), query, np.int16), np.full((2 * quads, 4), 32767, np.int16)
                scales[quads:] >>= 2
                high, low, words = (np.zeros((2 * quads, rows, 4), kind) for kind in (np.int8, np.int8, np.int16))
                out = np.full((rows, PAGE), np.nan, np.float32)
                keys(*(array.ctypes.data for array in (queries, scales, high, low, words, codes, widths, starts, terms, out)), parts)
                scaled = (query * scales[::quads, 0].astype(int) + (1 << 14)) >> 15
                scaled += scaled & 255 == 128
                scaled[1] = (scaled[1] + 128) & -256
                array = 256 * high[: 4 * parts].astype(int) + low[: 4 * parts]
                assert (array.reshape(parts // groups, -1) == scaled[: parts // groups, None]).all() and low.min() > -128, query
                want = scaled[0] * (fill & (1 << min(bits, 8)) - 1) + (scaled[1] * (fill & 3) if bits > 8 else 0)
                assert abs(4 * quads * want) < 1 << 31 and (out == np.float32(4 * quads * want)).all(), (bits, fill, query)
            largest = 32766
            lower = np.full((rows, PAGE), largest & 127, np.uint8)
            weights = np.full((rows, PAGE), largest >> 7, np.uint8) if int16_products.DIGITS else np.full((rows, PAGE), largest, np.int16)
            factors = np.repeat(np.array([0, 1], np.float32), rows)
            if bits > 8:
                out = np.ones((rows, 16), np.float32)
                rest_of_values(*(array.ctypes.data for array in (codes, weights, out, factors[rows:])))
                assert (out == np.float32(1 + (largest & -128) * PAGE * (2 * (fill & 3) - 3))).all(), fill
                continue
            up, less = int16_products.value_zero(bits)
            for zero in (-less, (15 << up) - less):
                zeros, out = np.full(PAGE, zero, np.int8), np.zeros((rows, 16), np.float32)
                multiple = int8_products.value_multiple(bits)
                values(codes.ctypes.data, bits, multiple, *(array.ctypes.data for array in (zeros, weights, lower, out, factors)))
                code = (fill & (1 << bits) - 1) - (1 << bits - 1)
                assert zero == np.int8(zero) and (out == np.float32(largest * PAGE * ((code << multiple) + zero))).all(), (bits, fill, zero)


def check_unknown_scores(rows: int) -> None:
    """Scores that are no numbers show in the sum of their row's weights and in no other row's: by digits even one, wherever it is; by bytes
    a row of them."""
    from effllm.kernels.cpu.kv import int16_products, softmax_weights
    from effllm.kernels.lazy_numba import compiler

    by_bytes, by_digits = getattr(softmax_weights, f"weigh_{rows}"), getattr(int16_products, f"weigh_digits_{rows}")

    @compiler().njit("void(int64,int64,int64,int64,int64,int64,int64,int64)", error_model="numpy")
    def weigh(scores, low, up, fractions, tables, out, tops, totals):
        by_bytes(scores, low, up, fractions, tables, out, 0, 1, tops, totals)

    @compiler().njit("void(int64,int64,int64,int64,int64,int64,int64,int64)", error_model="numpy")
    def weigh_digits(scores, low, rise, fractions, tables, out, tops, totals):
        by_digits(scores, low, rise, fractions, out, out + 2 * rows * PAGE, 0, 1, tops, totals)

    scores = np.random.default_rng(rows).standard_normal((rows, PAGE)).astype(np.float32)
    scores[:, -3:] = -np.inf  # masked
    want = np.exp2(scores - scores.max(1, keepdims=True)).sum(1)
    low, rise, up = np.zeros(PAGE, np.float32), np.ones(PAGE, np.float32), np.full(PAGE, softmax_weights.UP, np.uint16)
    fractions, tables, out = np.full(PAGE, 65535, np.uint16), softmax_weights.tables(), np.zeros(3 * rows * PAGE, np.uint8)
    tokens = [slice(token, token + 1) for token in range(PAGE)]
    for kernel, raised, off, nan_slices in ((weigh, up, 3e-3, []), (weigh_digits, rise, 1e-4, tokens)):
        for index, nan_slice in enumerate((slice(0, 0), slice(0, PAGE), *nan_slices)):
            scores_with_nan, (tops, totals) = scores.copy(), np.zeros((2, rows), np.float32)
            scores_with_nan[index % rows, nan_slice] = np.nan if index // rows % 2 else -np.nan
            kernel(*(array.ctypes.data for array in (scores_with_nan, low, raised, fractions, tables, out, tops, totals)))
            unknown = np.isnan(scores_with_nan).any(1)
            assert np.isnan(totals[unknown]).all(), (kernel, nan_slice)
            assert np.allclose(totals[~unknown], want[~unknown], rtol=off), (kernel, nan_slice)


def check_all() -> None:
    """Every width and a few shapes on this instruction set."""
    check_largest_products()
    for rows in (4, 8) if HAS_EIGHT_ROW_TILES else (4,):
        check_largest_digits(rows)
        check_unknown_scores(rows)
    pool = ThreadPool(2)
    for kv in ("10bit", "8bit", "6bit", "5bit", "4bit", "3bit", "2bit", "k8v2", "k2v10"):
        assert worst_error(pool, kv) < 5e-3, kv
    for kv in ("10bit", "8bit", "6bit"):
        assert fine_error(pool, kv) < FINE, kv
    for heads in (2, 6, 12):
        assert uneven_error(pool, heads) < FINE, heads
    assert worst_error(pool, "4bit", heads=4, kv_heads=4, head_dim=80) < 5e-3
    assert worst_error(pool, "8bit", heads=8, kv_heads=1, head_dim=256, softcap=20.0) < 5e-3
    assert worst_error(pool, "k3v6", heads=6, kv_heads=2, head_dim=96, window=100, softcap=20.0) < 5e-3
    check_wide(pool)
    pool.close()
