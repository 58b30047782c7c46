"""Table lookup against the definition of a product with low-bit weights, bit for bit, and the code permutation that it reads."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from low_bit_samples import FORMATS, NO_NORM, dims_for, factors_of, few, low_bit, many, random_codes, seed_of
from test_instruction_sets import TARGETS, X86, child, runs_here

from effllm.kernels import reference_low_bit as definition
from effllm.kernels.compile import cpu_features
from effllm.kernels.cpu import linear, lut_layout, lut_loops, stages
from effllm.kernels.cpu.int8_ir import INSTRUCTION_SET
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.cpu.stages import LOW_BIT
from effllm.kernels.lazy_numba import compiler
from effllm.kernels.threads import ThreadPool
from effllm.quant.codes import values
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import Linear, Norm, Weight

OUTLIERS = ("affine3:64+0.02", "ternary:128+0.05")
LOOKED_UP = tuple(text for text in FORMATS if not lut_layout.declines(*(
    getattr(QuantSpec.parse(text), name) for name in ("scheme", "bits", "group")))) + OUTLIERS
SHAPES = ((17, 33), (32, 32), (90, 257), (217, 1100))
COLUMNS = (1, 2, 5, 16)


@pytest.fixture(scope="module")
def pools():
    made = [ThreadPool(workers) for workers in (1, 2, 3)]
    yield made
    for each in made:
        each.close()


@pytest.fixture(autouse=True)
def always_shared(monkeypatch):
    """However small, a job goes to every thread."""
    monkeypatch.setattr(stages, "MIN_PARALLEL_SIZE", 0)


def moved(pool: ThreadPool, weight: Weight) -> Weight:
    """A copy of a weight, in lookup order."""
    blob = weight.parts["data"]
    room = np.zeros(blob.size + 64, np.uint8)
    start = -room.ctypes.data % 64
    copy = room[start : start + blob.size]
    copy[:] = blob
    lut_layout.reorder_codes(pool, copy, weight.spec, weight.shape)
    return replace(weight, parts={"data": copy}, in_lut_layout=True)


def same(a: np.ndarray, b: np.ndarray) -> bool:
    """Bit for bit, but that zeros may differ in sign and NaN in payload."""
    return a.dtype == b.dtype == np.float32 and np.array_equal(a, b, equal_nan=True)


# -- the order ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", LOOKED_UP)
def test_lookup_order_is_a_permutation_that_can_be_undone(pools, text):
    spec, rng = QuantSpec.parse(text), np.random.default_rng(seed_of(text))
    for pool, shape in zip(pools * 2, SHAPES):
        weight = low_bit(random_codes(rng, spec, shape), spec)
        own = moved(pool, weight)
        before, after = weight.parts["data"], own.parts["data"]
        end = spec.sections(shape).scales
        assert np.array_equal(before[end:], after[end:]) and not np.array_equal(before[:end], after[:end])
        assert np.unpackbits(before[:end]).sum() == np.unpackbits(after[:end]).sum()
        assert np.array_equal(lut_layout.canonical_blob(after, spec, shape), before)
        assert np.array_equal(own.to_f32(), weight.to_f32())


def in_lookup_order(codes: np.ndarray, bits: int) -> np.ndarray:
    """The bytes of codes [N, K], N a multiple of 32 rows and K of 32 inputs: [pair][tile][plane][unit][row], an input per bit."""
    rows, depth = codes.shape
    inputs = codes.reshape(rows // 32, 32, depth // 32, 4, 8)
    planes = np.stack([np.packbits(inputs >> plane & 1, axis=-1, bitorder="little")[..., 0] for plane in range(bits)])
    return planes.transpose(1, 3, 0, 4, 2).reshape(-1)


@pytest.mark.parametrize("bits", lut_layout.BITS)
def test_every_bit_lies_where_the_order_says(pools, bits):
    spec, shape = QuantSpec(bits, 32, "affine"), (64, 96)
    made = random_codes(np.random.default_rng(bits), spec, shape)
    blob = moved(pools[0], low_bit(made, spec)).parts["data"]
    assert np.array_equal(blob[: made.codes.size * bits // 8], in_lookup_order(made.codes, bits))


@pytest.mark.parametrize(("text", "rows", "reason"), [("codebook4:16", 64, "not sums of bit planes"), ("symmetric5:32", 64, "5 bits"),
                                                      ("affine8:64", 64, "8 bits"), ("symmetric2:16", 64, "groups of 16"),
                                                      ("affine3:64", 33, "33 rows")])
def test_what_cannot_be_looked_up_is_declined_with_the_reason(pools, text, rows, reason):
    spec = QuantSpec.parse(text)
    assert reason in lut_layout.declines(spec.scheme, spec.bits, spec.group, rows)
    with pytest.raises(ValueError, match=reason):
        moved(pools[0], low_bit(random_codes(np.random.default_rng(0), spec, (rows, 64)), spec))


# -- products -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", LOOKED_UP)
def test_lookup_is_the_definition_for_any_shape_columns_and_threads(pools, text):
    spec, rng = QuantSpec.parse(text), np.random.default_rng(seed_of(text))
    for index, (rows, depth) in enumerate(SHAPES):
        codes = random_codes(rng, spec, (rows, depth), every_scale=index == 2)
        bias = rng.standard_normal(rows, np.float32) if index % 2 else None
        each = Linear(moved(pools[0], low_bit(codes, spec)), bias)
        x = rng.standard_normal((16, depth), np.float32) * np.float32(10.0 ** (3 * index - 6))
        want = few(x, codes, spec, bias)
        for turn, count in enumerate(COLUMNS):
            cpu = CpuOps(pools[(index + turn) % 3], dims_for(depth, rows))
            got = cpu.norm_linear(np.ascontiguousarray(x[:count]), NO_NORM, [each])[0]
            assert same(got, want[:count]), f"{count} columns of {rows} x {depth}"
            assert {choice.candidate.name.split(",")[0] for choice in cpu.registry.choices.values() if choice.call.op == LOW_BIT} == {
                "table lookup"}
    wide = rng.standard_normal((19, depth), np.float32)
    assert same(CpuOps(pools[1], dims_for(depth, rows)).norm_linear(wide, NO_NORM, [each])[0], many(wide, codes, spec, bias))


@pytest.mark.parametrize("text", ("affine4:32", "symmetric4:64", "affine3:64", "affine2:128", "ternary:64"))
def test_the_largest_sums_do_not_overflow(pools, text):
    """Every code and every activation at an end of its range, signs equal and alternating: no byte, no 16 bits may run over."""
    spec, depth = QuantSpec.parse(text), 256
    base = random_codes(np.random.default_rng(1), spec, (32, depth))
    top = 2 if spec.scheme == "ternary" else (1 << spec.bits) - 1
    ends = np.where(np.arange(32)[:, None] % 2, np.uint8(0), np.uint8(top)) + np.zeros((32, depth), np.uint8)
    ends[16:, ::2] = top - ends[16:, ::2]
    base = replace(base, codes=ends, scales=np.full_like(base.scales, 255))
    if spec.scheme == "affine":
        base = replace(base, zeros=np.where(np.arange(32)[:, None] % 4 < 2, np.uint8(0), np.uint8(255)) + np.zeros_like(base.scales))
    each, cpu = Linear(moved(pools[0], low_bit(base, spec))), CpuOps(pools[1], dims_for(depth, 32))
    sign = np.where(np.arange(depth) % 2, -1.0, 1.0).astype(np.float32)
    for x in (np.ones(depth, np.float32), -np.ones(depth, np.float32), sign, -sign):
        want = few(x[None] * np.float32(3.3), base, spec)
        assert same(cpu.norm_linear(x[None] * np.float32(3.3), NO_NORM, [each])[0], want)
        assert np.abs(want).max() > 0


def test_numbers_that_are_not_finite_stay_visible(pools):
    spec, rng = QuantSpec.parse("affine3:64"), np.random.default_rng(3)
    each, cpu = Linear(moved(pools[0], low_bit(random_codes(rng, spec, (32, 128)), spec))), CpuOps(pools[0], dims_for(128, 32))
    for bad in (np.nan, np.inf, -np.inf):
        x = rng.standard_normal((1, 128), np.float32)
        x[0, 70] = bad
        assert np.isnan(cpu.norm_linear(x, NO_NORM, [each])[0]).all()
    assert not cpu.norm_linear(np.zeros((1, 128), np.float32), NO_NORM, [each])[0].any()


@pytest.mark.parametrize("count", (1, 3, 18))
def test_stages_give_the_same_bits_in_either_order_and_mixed(pools, count):
    """Norms, several matrices, a gated pair, a residual; in lookup order, in the order of dot products, and one of each."""
    rng = np.random.default_rng(count)
    x, norm = rng.standard_normal((count, 200), np.float32), Norm("rms", rng.standard_normal(200, np.float32))
    specs = [QuantSpec.parse(text) for text in ("affine3:64", "symmetric2:32", "ternary:64")]
    plain = [low_bit(random_codes(rng, spec, (96, 200)), spec) for spec in specs]
    results = []
    for turn, orders in enumerate(((0, 0, 0), (1, 1, 1), (0, 1, 1), (1, 0, 0))):
        cpu = CpuOps(pools[turn % 3], dims_for(200, 96))
        linears = [Linear(moved(pools[0], weight) if order else weight, np.ones(96, np.float32))
                   for weight, order in zip(plain, orders, strict=True)]
        gated = np.zeros((count, 96), np.float32)
        cpu._run_stage(x, norm, linears[:2], [gated], linear.GATED, "silu")
        added = cpu.linear_add(x, linears[2], np.full((count, 96), 0.5, np.float32))
        results.append([y.copy() for y in (*cpu.norm_linear(x, norm, linears), gated, added)])
    for other in results[1:]:
        assert all(same(a, b) for a, b in zip(results[0], other, strict=True))


# -- instruction sets ---------------------------------------------------------------------------------------------------------------------

LOOPS = ("affine3:64", "symmetric4:32")


@cache
def compiled_loops() -> dict[str, object]:
    """The loop and the tables of two widths, each alone in a function."""
    def build(bits: int):
        loop, make_tables, make_seeds = lut_loops.look_up_sums(bits), lut_loops.make_tables, lut_loops.make_seeds

        @compiler().njit("void(int64,int64,int64,int64,int64,int64,int64,int64,int64)", error_model="numpy")
        def run(table, x, tiles, in_group, zero_stride, column, totals, seeds, out):
            make_tables(column, tiles, seeds + 8 * tiles)
            make_seeds(bits, totals, seeds, tiles)
            loop(table, x, tiles // in_group, in_group, zero_stride, out)

        return run

    return {text: build(QuantSpec.parse(text).bits) for text in LOOPS}


def check_loops() -> None:
    """Hold them against the definition. Only they are compiled for it."""
    depth, rows = 256, lut_loops.SUMS
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1, depth), np.float32)
    column, scales = (found[0].astype(kind) for found, kind in zip(definition.quantize_columns(x), (np.int8, np.float32)))
    totals = column.reshape(-1, 16).sum(1, dtype=np.int32)
    room = np.zeros(depth // 32 * (8 + lut_loops.TABLES_NBYTES) + 64, np.uint8)
    seeds = room.ctypes.data + -room.ctypes.data % 64
    for text, loop in compiled_loops().items():
        spec = QuantSpec.parse(text)
        made = random_codes(rng, spec, (rows, depth))
        weight, codes = low_bit(made, spec), in_lookup_order(made.codes, spec.bits)
        at, blocks, zeros = spec.sections((rows, depth)), np.arange(rows // 16), np.full(16, 1 << (spec.bits - 1), np.uint8)
        step = depth // spec.group * 16
        table = np.concatenate([codes.ctypes.data + np.arange(lut_loops.PAIRS_AT_ONCE) * depth * 4 * spec.bits,
                                weight.address + at.scales + blocks * step,
                                weight.address + at.zeros + blocks * step if at.zeros >= 0 else np.full(len(blocks), zeros.ctypes.data)])
        of_x = np.array([column.ctypes.data, scales.ctypes.data, seeds, seeds + 8 * (depth // 32)])
        out = np.zeros((1, rows), np.float32)
        loop(table.ctypes.data, of_x.ctypes.data, depth // 32, spec.group // 32, 16 if at.zeros >= 0 else 0, column.ctypes.data,
             totals.ctypes.data, seeds, out.ctypes.data)
        want = definition.packed_linear(x, values(made, spec), factors_of(made), np.ones(rows, np.float32), spec.group, whole=False)
        assert same(out, want), text


def test_loops_are_right_on_this_machine():
    check_loops()
    shuffles = [loop for loop in compiled_loops().values() if "pshufb" in "\n".join(loop.inspect_asm().values())]
    assert len(shuffles) == (0 if INSTRUCTION_SET == "portable" or not X86 else len(LOOPS))


@pytest.mark.skipif(not X86, reason="the sets that can be forced are those of x86")
@pytest.mark.parametrize("name", [name if name == "avx2" else pytest.param(name, marks=pytest.mark.slow)  # where it is meant to win
                                  for name in TARGETS if name not in (INSTRUCTION_SET, "avx2vnni")])  # which is avx2 here
def test_loops_are_right_on(name, tmp_path):
    """Forced where the machine has the set, else with its instructions emulated."""
    if not runs_here(name) and "avx2" not in cpu_features():
        pytest.skip("the emulation is written in AVX2")
    child("import test_lut; test_lut.check_loops()", tmp_path, **{"forced" if runs_here(name) else "emulated": name})
