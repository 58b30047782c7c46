"""The compiled quantization search against its NumPy definition, for any block of rows, number of threads and odd depth."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effllm.kernels.threads import ThreadPool
from effllm.quant import codebooks
from effllm.quant.codes import Codes, bf16, dequantize
from effllm.quant.methods import rtn
from effllm.quant.spec import QuantSpec

F32 = np.float32
SPECS = ("codebook4:16", "codebook3:16", "codebook2:16", "symmetric8:32", "symmetric6:16", "symmetric4:128", "affine4:32", "affine2:64",
         "ternary:64")
FINE, MOST_FINE = F32(16), F32(4095)


@pytest.fixture(scope="module", params=(1, 3), ids=lambda workers: f"{workers} threads")
def pool(request):
    pool = ThreadPool(request.param)
    yield pool
    pool.close()


def groups_of(row: np.ndarray, group: int) -> np.ndarray:
    return np.pad(row, (0, -len(row) % group)).reshape(-1, group)


def lanes(values: np.ndarray) -> np.float32:
    """Sum of float32 in sixteen lanes, then of the lanes pairwise."""
    total = np.zeros(16, F32)
    for part in values.reshape(-1, 16):
        total = total + part
    for half in (8, 4, 2, 1):
        total = total + np.roll(total, -half)
    return total[0]


def book_group(x: np.ndarray, table: np.ndarray, steps: np.ndarray, window: tuple[int, int], scale: np.float32):
    """(step index, codes, level * weight and level * level in fine units) of 16 weights."""
    borders, fine_levels = 8 * (table[1:] + table[:-1]), 16 * table

    def fine(inverse):
        return np.rint(np.clip(x * inverse, -MOST_FINE, MOST_FINE)).astype(np.int64)

    largest = np.abs(x).max()
    if largest * F32(2) <= F32(np.abs(table).min()) * F32(steps[1]) * scale:
        chosen, rounded = 0, fine(F32(0))
    else:
        wanted = max(x.max() / F32(table[-1]), x.min() / F32(table[0])) / scale
        low, high = (wanted * F32(bound) * F32(0.001) for bound in window)
        first = next((i for i in range(1, 15) if steps[i] >= low), 15)
        tried = [i for i in range(first, 16) if i == first or steps[i] <= high]

        def error(index):
            rounded = fine(FINE / (F32(steps[index]) * scale))
            return ((rounded - fine_levels[np.searchsorted(borders, rounded)]) ** 2).sum() * steps[index] ** 2

        chosen = min(tried, key=error)
        rounded = fine(FINE / (F32(steps[chosen]) * scale))
    codes = np.searchsorted(borders, rounded)
    return chosen, codes, (rounded * fine_levels[codes]).sum(), (fine_levels[codes] ** 2).sum()


def book_row(row: np.ndarray, spec: QuantSpec):
    table, steps = codebooks.levels(spec.bits).astype(np.int64), codebooks.steps().astype(np.int64)
    groups = groups_of(row, 16)
    need = max(max(x.max() / F32(table[-1]), x.min() / F32(table[0])) for x in groups)
    scale = bf16(np.array([need / F32(127)]))[0]
    found = [book_group(x, table, steps, rtn.BOOK_WINDOW[spec.bits], scale) for x in groups]
    product = sum(int(steps[index]) ** 2 * int(product) for index, _, product, _ in found)
    square = sum(int(steps[index]) ** 2 * int(square) for index, _, _, square in found)
    fitted = bf16(np.array([F32(float(scale) * (product / square))]))[0] if square else F32(0)
    return np.concatenate([codes for _, codes, _, _ in found])[: len(row)], [index for index, *_ in found], None, fitted


def grid_group(x: np.ndarray, spec: QuantSpec, scale: np.float32, tries: int):
    """(scale code, zero, codes, sums of q * weight and q * q) of one group."""
    low, high, bias = (-1, 1, 1) if spec.scheme == "ternary" else (-(1 << spec.bits - 1), (1 << spec.bits - 1) - 1, 1 << spec.bits - 1)
    affine, span = spec.scheme == "affine", high - low
    least, most = min(x.min(), F32(0)), max(x.max(), F32(0))
    need = (most - least) / F32(span) if affine else max(x.max() / (F32(high) + F32(0.5)), x.min() / (F32(low) - F32(0.5)))
    narrowest, widest = rtn.GRID_WINDOW[spec.bits]

    def zero_of(factor):
        return int(np.clip(np.floor(F32(span) * F32(0.5) - (least + most) * F32(0.5) / factor + F32(0.5)), 0, span)) if affine else bias

    def fit(inverse, zero):
        y = x * inverse
        q = np.rint(np.clip(y, F32(-zero), F32(span - zero)))
        return y, q, lanes((y - q) ** 2)

    best, chosen, last = np.inf, 0, 0
    for i in range(tries):
        share = F32(widest * (tries - 1 - i) + narrowest * i) / F32(1000 * (tries - 1))
        code = int(min(np.floor(need / scale * share + F32(0.5)), 255))
        if code not in (last, 0):
            last = code
            error = fit(F32(1) / (F32(code) * scale), zero_of(F32(code) * scale))[2] * (F32(code) * F32(code))
            if error < best:
                best, chosen = error, code
    factor = F32(max(chosen, 1)) * scale
    zero = zero_of(factor)
    y, q, _ = fit(F32(1) / factor if chosen else F32(0), zero)
    return chosen, zero, (q + zero).astype(np.uint8), lanes(q * y), lanes(q * q), need


def grid_row(row: np.ndarray, spec: QuantSpec):
    groups = groups_of(row, spec.group)
    scale = bf16(np.array([max(grid_group(x, spec, F32(1), 2)[5] for x in groups) / F32(250)]))[0]
    for tries in (4, 16):
        found = [grid_group(x, spec, scale, tries) for x in groups]
        product = square = 0.0
        for code, _, _, products, squares, _ in found:
            product += float(code) ** 2 * float(products)
            square += float(code) ** 2 * float(squares)
        scale = bf16(np.array([F32(float(scale) * (product / square))]))[0]
    codes = np.concatenate([codes for _, _, codes, *_ in found])[: len(row)]
    return codes, [code for code, *_ in found], [zero for _, zero, *_ in found], scale


def searched(rows: np.ndarray, spec: QuantSpec) -> Codes:
    found = [(book_row if spec.scheme == "codebook" else grid_row)(row, spec) for row in rows]
    codes, scales, zeros, fitted = zip(*found)
    return Codes(np.array(codes, np.uint8), np.array(scales, np.uint8), np.array(zeros, np.uint8) if spec.scheme == "affine" else None,
                 np.array(fitted, F32))


def same(made: Codes, wanted: Codes) -> None:
    for name in ("codes", "scales", "zeros", "rows"):
        np.testing.assert_array_equal(getattr(made, name), getattr(wanted, name), err_msg=name)


@settings(max_examples=12)
@given(text=st.sampled_from(SPECS), depth=st.integers(1, 200), seed=st.integers(0, 2**32 - 1), size=st.sampled_from((1e-20, 0.02, 1e15)),
       uneven=st.sampled_from((0.0, 1.0, 3.0)))
def test_the_search_is_its_definition(text, depth, seed, size, uneven):
    rng, spec = np.random.default_rng(seed), QuantSpec.parse(text)
    rows = (size * rng.standard_normal((2, depth)) * np.exp(uneven * rng.standard_normal(depth))).astype(F32)
    same(rtn.quantize(rows, spec), searched(rows, spec))


@pytest.mark.parametrize("text", SPECS)
def test_neither_threads_nor_blocks_of_rows_matter(pool, text):
    rng, spec = np.random.default_rng(5), QuantSpec.parse(text)
    rows = rng.standard_normal((37, 176), F32)
    whole = rtn.quantize(rows, spec, None, pool)
    same(whole, rtn.quantize(rows, spec))
    blocks = [rtn.quantize(rows[begin : begin + 16], spec, None, pool) for begin in (0, 16, 32)]
    for name in ("codes", "scales", "rows"):
        np.testing.assert_array_equal(np.concatenate([getattr(block, name) for block in blocks]), getattr(whole, name))


@pytest.mark.parametrize("text", SPECS)
def test_the_row_scale_is_a_number_that_bfloat16_holds(text):
    rows = np.random.default_rng(6).standard_normal((8, 96), F32)
    made = rtn.quantize(rows, QuantSpec.parse(text))
    np.testing.assert_array_equal(made.rows, bf16(made.rows))
    assert np.isfinite(dequantize(made, QuantSpec.parse(text))).all()
