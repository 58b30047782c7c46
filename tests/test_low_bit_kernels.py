"""Products with low-bit weights against their definition, bit for bit: every format, odd shapes, any number of columns and threads.

Integer sums are exact and what follows is one float32 chain per output, so there is no tolerance: a difference is a mistake. Only norms
and activations, whose sums the compiler may reorder, are given one.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from low_bit_samples import FORMATS, NO_NORM, WITH_OUTLIERS, dims_for, few, low_bit, many, random_codes, seed_of

from effllm.kernels import reference
from effllm.kernels import reference_low_bit as definition
from effllm.kernels.cpu import linear, packed, stages
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims, Workspace
from effllm.quant.codes import Codes, bf16, dequantize
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import Linear, Norm, Weight, from_f32

ALL = FORMATS + WITH_OUTLIERS
# One of every loop, and the kinds of scales, zeros and corrections around them.
SOME = ("codebook4:16", "codebook3:16", "codebook2:16", "symmetric8:32", "symmetric6:16", "symmetric5:128", "affine4:32", "affine3:64",
        "affine8:128", "ternary:64", "codebook4:16+0.01", "symmetric2:32", "block4:32", "offset4:128", "super4:32", "super5:32",
        "signed6:16", "nibble2:16", "table4:16", "table3:16", "float8:128", "float8:32", "minimum4:32",
        "minimum5:32", "minimum8:64", "nvfp4:16")
COLUMNS = (1, 2, 3, 4, 5, 8, 15, 16)
SHAPES = ((1, 1), (16, 32), (17, 33), (31, 100), (50, 257))


def unrounded(pool: ThreadPool, dims: Dims) -> CpuOps:
    """A backend whose raw and fp8 products keep float32 activations (`test_linear_bf16.py` and `test_linear_fp8.py` test the others)."""
    return CpuOps(pool, dims, default_registry(by_neuron=True))


@pytest.fixture(autouse=True)
def always_shared(monkeypatch):
    """However small, a job goes to every thread."""
    monkeypatch.setattr(stages, "MIN_PARALLEL_SIZE", 0)


def product(cpu: CpuOps, x: np.ndarray, each: Linear) -> np.ndarray:
    return cpu.norm_linear(np.ascontiguousarray(x), NO_NORM, [each])[0].copy()


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Bit for bit, but that zeros may differ in sign and NaN in payload."""
    return a.dtype == b.dtype == np.float32 and np.array_equal(a, b, equal_nan=True)


def close(got: np.ndarray, want: np.ndarray) -> bool:
    return float(np.abs(got - want).max()) <= 3e-6 * float(np.abs(want).max())


@pytest.mark.parametrize("text", ALL)
def test_every_format_is_its_definition_for_any_shape_and_number_of_columns(pools, text):
    spec, rng = QuantSpec.parse(text), np.random.default_rng(seed_of(text))
    for index, (rows, depth) in enumerate(SHAPES):
        cpu = unrounded(pools[1 + index % 3], dims_for(depth, rows))
        codes = random_codes(rng, spec, (rows, depth), every_scale=index == 3)
        bias = rng.standard_normal(rows, np.float32) if index % 2 else None
        each = Linear(low_bit(codes, spec), bias)
        x = rng.standard_normal((16, depth), np.float32) * np.float32(10.0 ** (3 * index - 6))
        want = few(x, codes, spec, bias)
        for count in COLUMNS:  # a column has the same bits whatever stands beside it
            assert same(product(cpu, x[:count], each), want[:count]), f"{count} columns of {rows} x {depth}"
        wide = rng.standard_normal((17, depth), np.float32)
        assert same(product(cpu, wide, each), many(wide, codes, spec, bias)), f"17 columns of {rows} x {depth}"


@pytest.mark.parametrize("text", ("codebook4:16", "symmetric8:32", "symmetric6:32+0.01", "super4:32", "signed6:16", "nvfp4:16"))
def test_what_a_head_multiplies_is_hardly_rounded(pools, text):
    """Nothing evens out what its inputs lose. A token has the same bits beside others, more than are multiplied at once too."""
    spec, rng = QuantSpec.parse(text), np.random.default_rng(seed_of(text))
    codes, bias = random_codes(rng, spec, (203, 1000)), rng.standard_normal(203, np.float32)
    head, x = Linear(low_bit(codes, spec), bias), rng.standard_normal((20, 1000), np.float32)
    x[:, 7] *= np.float32(50)  # beside it 31 inputs have steps of a half
    want, whole = few(x, codes, spec, bias, fine=True), x.astype(float) @ dequantize(codes, spec).T.astype(float) + bias
    for workers, pool in pools.items():
        cpu = unrounded(pool, dims_for(1000, 203, 32))
        for count in (1, 2, 8, 9, 16, 20):
            assert same(cpu.logits(x[:count], NO_NORM, head), want[:count]), f"{count} tokens on {workers} threads"
    error = np.abs(want - whole).max() / np.abs(product(cpu, x[:16], head) - whole[:16]).max()
    assert error < 0.01, f"{error:.2g} of what other products lose"


@pytest.mark.parametrize("text", SOME)
def test_a_weight_may_lie_anywhere(pools, text):
    """Files that other programs wrote are mapped as they are: a tensor begins where the one before it ended."""
    spec, rng = QuantSpec.parse(text), np.random.default_rng(seed_of(text))
    codes, cpu = random_codes(rng, spec, (50, 257)), unrounded(pools[1], dims_for(257, 50))
    each, x = Linear(low_bit(codes, spec, behind=2), None), rng.standard_normal((17, 257), np.float32)
    for count in (1, 5):
        assert same(product(cpu, x[:count], each), few(x[:count], codes, spec))
    assert same(product(cpu, x, each), many(x, codes, spec))


@pytest.mark.parametrize("text", SOME)
def test_long_rows_on_any_number_of_threads(pools, text):
    """Enough work for several blocks per thread, and more inputs than any stretch that is expanded at once."""
    spec, rng = QuantSpec.parse(text), np.random.default_rng(seed_of(text))
    rows, depth = 203, 5000
    codes = random_codes(rng, spec, (rows, depth))
    each = Linear(low_bit(codes, spec))
    x = rng.standard_normal((16, depth), np.float32)
    want = few(x, codes, spec)
    for workers, pool in pools.items():
        cpu = unrounded(pool, dims_for(depth, rows, 16))
        for count in (1, 5, 16):
            assert same(product(cpu, x[:count], each), want[:count]), f"{count} columns on {workers} threads"


@pytest.mark.parametrize("text", ("super4:32", "signed6:16", "nibble2:16", "table4:16", "table3:16"))
def test_many_columns_of_long_rows_of_super_blocks(pools, text):
    """More inputs and rows than are expanded at once, an embedding's rows too."""
    spec, rng = QuantSpec.parse(text), np.random.default_rng(seed_of(text))
    codes, cpu = random_codes(rng, spec, (203, 5000)), unrounded(pools[2], dims_for(5000, 203, 64))
    weight, x = low_bit(codes, spec), rng.standard_normal((40, 5000), np.float32)
    assert same(product(cpu, x, Linear(weight)), many(x, codes, spec))
    assert np.array_equal(cpu.embed(np.array([0, 202, 7]), weight, 0.5), dequantize(codes, spec)[[0, 202, 7]] * np.float32(0.5))


@pytest.mark.parametrize("text", SOME)
def test_the_largest_numbers_of_a_format_do_not_overflow(pools, text):
    """Every code at an end of its range, every activation at an end of its own, signs equal and alternating."""
    spec, depth = QuantSpec.parse(text), 256
    cpu, rng = unrounded(pools[1], dims_for(depth, 32)), np.random.default_rng(1)
    base = random_codes(rng, replace(spec, outliers=0.0), (32, depth))
    top = 2 if spec.scheme == "ternary" else (1 << spec.bits) - 1
    ends = np.repeat(np.where(np.arange(32)[:, None] % 2, np.uint8(0), np.uint8(top)), depth, axis=1)
    ends[16:, ::2] = top - ends[16:, ::2]
    if spec.scheme == "float":  # the largest of either sign
        ends = np.where(ends == 0, np.uint8(0xFE), np.uint8(0x7E))
    most = {"codebook": 15, "super": 63, "nibble": 15, "signed": -128, "table": -32, "block": 0x7BFF,
            "offset": 0x7BFF, "minimum": 0x7BFF, "nvfp": 0x7E}.get(spec.scheme, 255)
    base = replace(base, codes=ends, scales=np.full_like(base.scales, most))
    if base.minima is not None:
        base = replace(base, minima=np.full_like(base.minima, most))
    if spec.scheme == "codebook":
        base = replace(base, levels=np.linspace(-64, 63, 1 << spec.bits).astype(np.int8), steps=np.arange(112, 128, dtype=np.uint8))
    if spec.scheme == "table":
        base = replace(base, levels=np.linspace(-128, 127, 1 << spec.bits).astype(np.int8))
    if spec.scheme in ("affine", "offset"):
        base = replace(base, zeros=np.where(np.arange(32)[:, None] % 4 < 2, np.uint8(0), np.uint8(255)) + np.zeros_like(base.scales))
    each = Linear(low_bit(base, replace(spec, outliers=0.0)))
    sign = np.where(np.arange(depth) % 2, -1.0, 1.0).astype(np.float32)
    x = np.stack([np.ones(depth, np.float32), -np.ones(depth, np.float32), sign, -sign]) * np.float32(3.3)
    want = few(x, base, replace(spec, outliers=0.0))
    assert same(product(cpu, x, each), want) and same(product(cpu, x[:1], each), want[:1])
    assert np.abs(want).max() > 0
    wide = np.concatenate([x] * 5)
    assert same(product(cpu, wide, each), many(wide, base, replace(spec, outliers=0.0)))


@pytest.mark.parametrize("text", SOME)
def test_zero_rows_and_zero_inputs_give_zeros(pools, text):
    spec, rng = QuantSpec.parse(text), np.random.default_rng(2)
    codes = random_codes(rng, replace(spec, outliers=0.0), (20, 96))
    codes = replace(codes, rows=np.where(np.arange(20) == 7, np.float32(0), codes.rows))
    if spec.scheme == "float":  # whose scales are of several rows
        codes = replace(codes, codes=np.where(np.arange(20)[:, None] == 11, np.uint8(0), codes.codes))
    elif spec.scheme != "codebook":  # whose least step is 1
        codes = replace(codes, scales=np.where(np.arange(20)[:, None] == 11, np.zeros_like(codes.scales), codes.scales))
    if codes.minima is not None:
        codes = replace(codes, minima=np.where(np.arange(20)[:, None] == 11, np.uint8(0), codes.minima))
    cpu, each = unrounded(pools[2], dims_for(96, 20)), Linear(low_bit(codes, replace(spec, outliers=0.0)))
    x = rng.standard_normal((4, 96), np.float32)
    x[1] = 0
    x[2, 32:64] = 0
    for count in (1, 4):
        got = product(cpu, x[-count:] if count == 1 else x, each)
        assert not got[:, 7].any() and got[-1].any() and got[:, 11].any() == (spec.scheme == "codebook")
    assert not product(cpu, x[1:2], each).any() and not product(cpu, x, each)[1].any()
    assert same(product(cpu, x, each), few(x, codes, replace(spec, outliers=0.0)))
    wide = np.concatenate([x] * 5)
    assert same(product(cpu, wide, each), many(wide, codes, replace(spec, outliers=0.0)))


@pytest.mark.parametrize("text", ("codebook4:16", "symmetric8:32", "symmetric8:16", "affine3:64", "ternary:64", "codebook4:16+0.01",
                                  "super5:32", "signed6:16", "nibble2:16", "table4:16", "offset8:64", "minimum4:32", "nvfp4:16"))
def test_nan_and_infinity_stay_visible_in_their_column_alone(pools, text):
    spec, rng = QuantSpec.parse(text), np.random.default_rng(3)
    codes = random_codes(rng, spec, (20, 100))
    cpu, each = unrounded(pools[1], dims_for(100, 20)), Linear(low_bit(codes, spec))
    x = rng.standard_normal((6, 100), np.float32)
    clean = product(cpu, x, each)
    x[1, 40], x[3, 99], x[4, 0] = np.nan, np.inf, -np.inf
    bad = np.array([False, True, False, True, True, False])
    got = product(cpu, x, each)
    assert np.isnan(got[bad]).all() and same(got[~bad], clean[~bad])
    assert all(np.isnan(product(cpu, x[t : t + 1], each)).all() for t in np.flatnonzero(bad))
    many_columns = product(cpu, np.concatenate([x, x, x]), each)
    assert np.isnan(many_columns[:6][bad]).all() and np.isfinite(many_columns[:6][~bad]).all()


@pytest.mark.parametrize("text", ("codebook4:16", "symmetric8:32", "affine8:64", "symmetric6:16", "super4:32", "signed6:16", "table4:16"))
def test_inputs_at_the_ends_of_float32(pools, text):
    """Tiny inputs, whose inverse would overflow, count as zeros; huge ones are exact as long as the result is finite."""
    spec, rng = QuantSpec.parse(text), np.random.default_rng(4)
    codes = random_codes(rng, spec, (17, 33))
    cpu, each = unrounded(pools[1], dims_for(33, 17)), Linear(low_bit(codes, spec))
    unit = rng.standard_normal((1, 33), np.float32)
    for exponent in (-149, -140, -127, -121, -119, -60, 60, 100):
        x = np.ldexp(unit, exponent)
        got = product(cpu, x, each)
        assert same(got, few(x, codes, spec)) and np.isfinite(got).all()
        assert same(product(cpu, np.repeat(x, 3, 0), each), np.repeat(got, 3, 0))
    assert not product(cpu, np.ldexp(unit, -127), each).any() and product(cpu, np.ldexp(unit, -60), each).any()


@pytest.mark.parametrize("text", SOME)
def test_results_are_added_to_what_is_there(pools, text):
    spec, rng = QuantSpec.parse(text), np.random.default_rng(5)
    codes, bias = random_codes(rng, spec, (40, 90)), rng.standard_normal(40, np.float32)
    cpu, each = unrounded(pools[3], dims_for(90, 40)), Linear(low_bit(codes, spec), bias)
    for count in (1, 3, 16, 20):
        x, residual = (rng.standard_normal((count, width), np.float32) for width in (90, 40))
        want = residual + (few if count <= packed.MAX_COLUMNS else many)(x, codes, spec, bias)
        assert cpu.linear_add(x, each, residual) is residual and same(residual, want)


PAIRS = (("codebook4:16", "codebook4:16"), ("codebook4:16", "codebook2:16+0.02"), ("symmetric8:32", "symmetric6:128"),
         ("affine4:32", "ternary:64"), ("symmetric8:16", "symmetric8:32"), ("symmetric8:16", "symmetric5:16"),
         ("minimum4:32", "minimum5:32"), ("minimum5:32", "super4:32"), ("nvfp4:16", "nvfp4:16"), ("nvfp4:16", "symmetric6:16"),
         ("float8:128", "float8:32"), ("float8:64", "nvfp4:16"), ("super4:32", "super5:32"),
         ("super4:32", "signed6:16"), ("table4:16", "table3:16"), ("table4:16", "signed6:16"),
         ("nibble2:16", "table3:16"), ("nibble2:16", "symmetric6:16"),
         ("signed6:16", "codebook4:16"), ("offset4:64", "block4:32"), ("codebook4:16", "symmetric8:32"),
         ("affine8:64", "affine4:64"), ("codebook3:16", "bf16"), ("f32", "symmetric6:32"))


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_gate_and_up_of_any_two_formats(pools, pair):
    """As one job where the loops agree, else as two and a third: the same numbers."""
    rng, rows, depth = np.random.default_rng(6), 75, 110
    cpu = unrounded(pools[2], dims_for(depth, rows))
    made = [_linear(rng, text, rows, depth) for text in pair]
    for count, act in ((1, "silu"), (2, "gelu"), (16, "gelu_tanh"), (19, "silu")):
        x = rng.standard_normal((count, depth), np.float32) / 64
        out = np.zeros((count, rows), np.float32)
        cpu._run_stage(x, NO_NORM, [each for each, _ in made], [out], linear.GATED, act)
        gate, up = (want(x) for _, want in made)
        assert close(out, reference.activate(gate.astype(np.float64), act) * up)
        cpu._run_stage(x, NO_NORM, [each for each, _ in made], [out], linear.GATED, "relu")
        exact = not any(QuantSpec.parse(text).is_raw for text in pair)
        assert (same if exact else close)(out, np.maximum(gate, np.float32(0)) * up)


@pytest.mark.parametrize("act", ("silu", "gelu_tanh"))
def test_a_gated_column_has_the_same_bits_beside_any_others(pools, act):
    rng, rows, depth = np.random.default_rng(16), 203, 320
    cpu = unrounded(pools[2], dims_for(depth, rows))
    both = [_linear(rng, "codebook4:16", rows, depth)[0] for _ in range(2)]
    x, found = rng.standard_normal((16, depth), np.float32) / 64, {}
    for count in COLUMNS:
        found[count] = np.zeros((count, rows), np.float32)
        cpu._run_stage(np.ascontiguousarray(x[:count]), NO_NORM, both, [found[count]], linear.GATED, act)
    assert all(same(found[count], found[16][:count]) for count in COLUMNS)


def _linear(rng: np.random.Generator, text: str, rows: int, depth: int):
    """A linear of this format with a bias, and its definition as a function of x."""
    spec, bias = QuantSpec.parse(text), rng.standard_normal(rows, np.float32)
    if spec.is_raw:
        weight = Weight.raw(text, (rows, depth), from_f32(rng.standard_normal((rows, depth), np.float32), text))
        return Linear(weight, bias), lambda x: reference.linear(x, weight.to_f32(), bias).astype(np.float32)
    codes = random_codes(rng, spec, (rows, depth))
    each = Linear(low_bit(codes, spec), bias)
    return each, lambda x: (few if len(x) <= packed.MAX_COLUMNS else many)(x, codes, spec, bias)


@pytest.mark.parametrize("workers", (1, 2, 3))
def test_formats_meet_in_one_stage(pools, workers):
    rng, depth = np.random.default_rng(7), 200
    texts = ("codebook4:16", "bf16", "symmetric8:32", "symmetric6:16", "affine3:128", "codebook2:16", "ternary:32", "super4:32")
    made = [_linear(rng, text, 30 + 7 * i, depth) for i, text in enumerate(texts)]
    cpu = unrounded(pools[workers], dims_for(depth, 80))
    cpu.workspace = Workspace({**cpu.workspace.floats, **{f"y{i}": 32 * 80 for i in range(len(texts))}})
    for count in (1, 4, 16, 30):
        x = rng.standard_normal((count, depth), np.float32)
        for text, (_, want), got in zip(texts, made, cpu.norm_linear(x, NO_NORM, [each for each, _ in made]), strict=True):
            assert (close if text == "bf16" else same)(got, want(x)), f"{text}, {count} columns"


@pytest.mark.parametrize("kind", ("rms", "rms+1", "layer", "layer without parameters", "none"))
def test_norms_before_the_product(pools, kind):
    """Beside the low-bit weights stands an identity in float32: what it gives is what the others were multiplied with."""
    rng, depth = np.random.default_rng(8), 120
    weight, bias = (rng.standard_normal(depth, np.float32) for _ in range(2))
    norm = {"rms": Norm("rms", weight), "rms+1": Norm("rms+1", weight, eps=1e-3), "layer": Norm("layer", weight, bias),
            "layer without parameters": Norm("layer"), "none": NO_NORM}[kind]
    identity = Linear(Weight.raw("f32", (depth, depth), np.eye(depth, dtype=np.float32)))
    texts = ("codebook4:16+0.01", "symmetric8:32")
    made = [_linear(rng, text, 50, depth) for text in texts]
    cpu = unrounded(pools[2], dims_for(depth, depth))
    for count in (1, 7, 16, 18):
        x = 5 * rng.standard_normal((count, depth), np.float32) + 1
        normed, *got = (y.copy() for y in cpu.norm_linear(x, norm, [identity, *(each for each, _ in made)]))
        assert close(normed, reference.normalise(x, norm.kind, norm.weight, norm.bias, norm.eps))
        for (_, want), y in zip(made, got, strict=True):
            assert close(y, want(normed))


@pytest.mark.parametrize("text", ALL)
def test_embedding_rows_are_what_the_weight_means(pools, text):
    spec, rng = QuantSpec.parse(text), np.random.default_rng(9)
    for rows, depth in ((1, 1), (37, 100), (50, 300)):
        codes = random_codes(rng, spec, (rows, depth), every_scale=True)
        ids = np.array([0, rows - 1, rows // 2, 0])
        got = unrounded(pools[2], dims_for(depth, rows)).embed(ids, low_bit(codes, spec), 0.3)
        assert same(got, dequantize(codes, spec)[ids] * np.float32(0.3))


def test_a_stage_that_is_replayed_reads_its_input_again(pools):
    rng, depth = np.random.default_rng(10), 96
    spec = QuantSpec.parse("4bit")
    codes = random_codes(rng, spec, (40, depth))
    cpu, each = unrounded(pools[2], dims_for(depth, 40)), Linear(low_bit(codes, spec))
    for collected in (False, True):
        for _ in range(3):
            x = cpu.workspace.take("x", 1, depth)
            x[:] = rng.standard_normal((1, depth), np.float32)
            if collected:
                with cpu.collecting():
                    out, = cpu.norm_linear(x, NO_NORM, [each])
            else:
                out, = cpu.norm_linear(x, NO_NORM, [each])
            assert same(out, few(x, codes, spec))


@pytest.mark.parametrize("text", ("codebook4:16", "affine8:64", "symmetric6:16", "ternary:32", "super4:32", "signed6:16",
                                  "offset4:32"))
def test_which_kernels_take_low_bit_weights(pools, text):
    rng, spec = np.random.default_rng(13), QuantSpec.parse(text)
    each = Linear(low_bit(random_codes(rng, spec, (20, 64)), spec))
    for count, kernel in ((1, "dot products"), (16, "dot products"), (17, "int8 tiles")):
        cpu = unrounded(pools[1], dims_for(64, 20))
        product(cpu, rng.standard_normal((count, 64), np.float32), each)
        chosen = [choice.candidate for choice in cpu.registry.choices.values() if choice.call.stored == spec.scheme]
        assert len(chosen) == 1 and chosen[0].name.startswith(kernel) and not chosen[0].fallback
        assert not cpu.registry.announcements()


# -- the definition itself -----------------------------------------------------------------------------------------------------------


def test_the_definition_rounds_a_fused_step_once():
    """Against exact fractions, halfway cases of float32 included."""
    rng = np.random.default_rng(11)
    a, b = (rng.standard_normal(3000, np.float32) for _ in range(2))
    c = np.concatenate([rng.standard_normal(1000), np.ldexp(rng.standard_normal(1000), 40), np.ldexp(rng.standard_normal(1000), -40)])
    c = c.astype(np.float32)
    a[:500] = np.ldexp(np.float32(1), -rng.integers(20, 60, 500))  # less than half a unit of c, or just it
    for got, *exact in zip(definition.fma(a, b, c), a, b, c):
        x, y, z = (Fraction(float(each)) for each in exact)
        below, above = np.nextafter(got, np.float32(-np.inf)), np.nextafter(got, np.float32(np.inf))
        error = abs(Fraction(float(got)) - (x * y + z))
        for neighbour in (below, above):
            other = abs(Fraction(float(neighbour)) - (x * y + z))
            assert error < other or error == other and not got.view(np.uint32) & 1


def test_the_definition_is_near_the_weight_times_the_input():
    """Rounding activations costs less than a percent; a definition of something else would be far off."""
    rng = np.random.default_rng(12)
    x = rng.standard_normal((20, 300), np.float32)
    for text in ALL:
        spec = QuantSpec.parse(text)
        codes = random_codes(rng, spec, (40, 300))
        exact = x.astype(np.float64) @ dequantize(codes, spec).T
        for got, most in ((few(x, codes, spec), 0.01), (many(x, codes, spec), 0.02)):
            assert np.sqrt(((got - exact) ** 2).mean() / (exact**2).mean()) < most, text


def test_a_codebook_is_the_sum_of_its_levels():
    """One row by hand: 32 inputs of one and of minus one half, so that codes are 127 and -64 (ties go to even)."""
    spec = QuantSpec.parse("codebook2:16")
    codes = Codes(codes=np.array([[0] * 16 + [3] * 16], np.uint8), scales=np.array([[2, 5]], np.uint8), zeros=None, rows=bf16(np.ones(1)),
                  levels=np.array([-60, -10, 10, 50], np.int8), steps=np.arange(1, 17, dtype=np.uint8))
    x = np.array([[1.0] * 16 + [-0.5] * 16], np.float32)
    want = np.float32(3 * 16 * -60 * 127 + 6 * 16 * 50 * -64) * (np.float32(1) / np.float32(127))
    assert few(x, codes, spec)[0, 0] == want
