"""The int8 matrix product (many columns): both algorithms at every width, long inputs, every mode, and the bounds of its buffers.

`test_low_bit_kernels.py` goes over all formats in the way that each is run in; here the kernels are called as they are. Integer sums are
exact and float32 follows in one order, so results are held against the definition bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from low_bit_samples import _outliers, _range, factors_of, low_bit, random_codes, seed_of
from test_instruction_sets import X86, child, runs_here

from effllm.kernels import reference_low_bit as definition
from effllm.kernels.compile import Kernel
from effllm.kernels.cpu import gemm, linear
from effllm.kernels.cpu.gemm_tiles import HEADER, INPUTS, ITEM, TOKENS
from effllm.kernels.cpu.inner_loops import TILE_COLUMNS
from effllm.kernels.cpu.int8_ir import INSTRUCTION_SET
from effllm.kernels.layout import ACTIVATIONS
from effllm.kernels.threads import ThreadPool
from effllm.kernels.tiles import SCHEMES
from effllm.quant.codes import Codes, dequantize, values
from effllm.quant.spec import QuantSpec

WAYS = (gemm.SCALED, gemm.GROUPED)
CODEBOOKS = "codebook4:16", "codebook3:16", "codebook2:16+0.02"  # what STEPPED takes
NARROW = "block4:32", "ternary:64", "symmetric4:16", "affine4:128+0.01", "affine3:32", "affine2:64"  # what NARROW_CODES takes
# Every width, every kind of scale, outliers.
EXPONENTS = "mxfp4:32"
FORMATS = ("block4:32", "block8:32", "codebook4:16", "codebook3:16", "codebook2:16+0.02", "ternary:64", "symmetric8:16",
           "symmetric6:32", "symmetric5:128", "symmetric4:16", "affine8:32", "affine4:128+0.01", "affine3:32", "affine2:64")
GUARD = 0x5A


class Buffer:
    """Bytes on a cache line with a guard after them."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        memory = np.full(nbytes + 256, GUARD, np.uint8)
        self.bytes = memory[-memory.ctypes.data % 64 :][: nbytes + 192]
        self.address = self.bytes.ctypes.data

    def intact(self) -> bool:
        return bool((self.bytes[self.nbytes :] == GUARD).all())


class Operand:
    """A weight in the kernel's terms, and as arrays."""

    def __init__(self, text: str, shape: tuple[int, int], bias: bool = False, seed: str = "") -> None:
        self.spec = QuantSpec.parse(text)
        rng = np.random.default_rng(seed_of(text + seed))
        self.codes = random_codes(rng, self.spec, shape)
        self.bias = rng.standard_normal(shape[0], np.float32) if bias else None
        self.shape = shape
        self.pack()

    def pack(self) -> None:
        self.weight = low_bit(self.codes, self.spec)

    def fields(self, out: np.ndarray) -> list[int]:
        at, base = self.spec.sections(self.shape), self.weight.address
        sections = [base + part if part >= 0 else 0 for part in (at.codes, at.scales, at.zeros, at.row_scales, at.tables, at.sparse)]
        bias = 0 if self.bias is None else self.bias.ctypes.data
        scheme = SCHEMES[self.spec.scheme]
        return [*sections, self.spec.bits, scheme, self.spec.group, 0, self.shape[0], bias, out.ctypes.data, out.shape[1]]

    def definition(self, x: np.ndarray, way: int) -> np.ndarray:
        parts = x, values(self.codes, self.spec), factors_of(self.codes), self.codes.rows, self.spec.group
        extra = {"outliers": _outliers(self.codes), "bias": self.bias}
        if way == gemm.STEPPED != gemm.SCALED:
            return definition.stepped_linear(*parts, **extra)
        if way != gemm.SCALED:
            return definition.grouped_linear(*parts, **extra)
        most, shift = _range(self.codes, self.spec)
        return definition.scaled_linear(*parts, most=most, shift=shift, **extra)


def block(x: int, shape: tuple[int, int], scratch: Buffer, pool: ThreadPool, mode: int, way: int, operands: list[Operand],
          outs: list[np.ndarray], act: str = "relu", at_once: int = 1) -> np.ndarray:
    head = [x, *shape, 0, 0, 0, 0, scratch.address, scratch.nbytes // pool.workers, mode, ACTIVATIONS[act], way, at_once, len(operands)]
    for each, out in zip(operands, outs, strict=True):
        head += each.fields(out)
    return np.array(head, np.int64)


class Kernels(NamedTuple):
    """The packing and multiplying kernels, and the sizes of their buffers for the planner: by tokens and inputs, and by the panels of an
    algorithm."""

    pack: Kernel
    multiply: Kernel
    scratch_nbytes: Callable[[int, int], int]
    panels_nbytes: Callable[[int, int, int], int]


VECTORS = Kernels(gemm.pack_tokens, gemm.multiply, gemm.gemm_scratch, gemm.panel_nbytes)


def product(pool: ThreadPool, x: np.ndarray, operands: list[Operand], way: int, mode: int = linear.PLAIN,
            outs: list[np.ndarray] | None = None, by: Kernels = VECTORS) -> list[np.ndarray]:
    """Packed and multiplied, in buffers of those sizes."""
    tokens, depth = x.shape
    scratch, panels = Buffer(pool.workers * by.scratch_nbytes(tokens, depth)), Buffer(by.panels_nbytes(tokens, depth, way))
    if outs is None:
        outs = [np.full((tokens, each.shape[0]), np.nan, np.float32) for each in operands[: 1 if mode == linear.GATED else None]]
    targets = [outs[min(i, len(outs) - 1)] for i in range(len(operands))]
    args = block(x.ctypes.data, x.shape, scratch, pool, mode, way, operands, targets)
    args[gemm.FIRST + gemm.OUT] = panels.address
    pool.run(by.pack, args.ctypes.data)
    begun = [out.copy() for out in outs]
    for at_once, own in ((gemm.STRIPES // (2 if mode == linear.GATED else 1), begun), (1, outs)):
        targets = [own[min(i, len(own) - 1)] for i in range(len(operands))]
        args = block(panels.address, x.shape, scratch, pool, mode, way, operands, targets, at_once=at_once)
        pool.run(by.multiply, args.ctypes.data)
    assert all(np.array_equal(few, one, equal_nan=True) for few, one in zip(begun, outs, strict=True)), "stripes at once"
    assert scratch.intact() and panels.intact()
    return outs


def test_few_rows_are_cut_finer():
    whole = gemm.STRIPES * gemm.STRIPE
    assert gemm.stripes_at_once(8 * whole, linear.PLAIN, 2) == gemm.STRIPES
    assert gemm.stripes_at_once(8 * whole - 1, linear.PLAIN, 2) == gemm.stripes_at_once(8 * whole, linear.PLAIN, 3) == 1
    assert gemm.stripes_at_once(4 * whole, linear.GATED, 2) == gemm.STRIPES // 2


def sample(tokens: int, depth: int) -> np.ndarray:
    return np.random.default_rng(tokens + depth).standard_normal((tokens, depth), np.float32)


@pytest.mark.parametrize("way", WAYS, ids=("scaled", "grouped"))
@pytest.mark.parametrize("text", FORMATS)
def test_both_ways_of_every_width(pools, text, way):
    for index, (tokens, depth, rows) in enumerate(((17, 33, 1), (1, 300, 50), (TOKENS + 1, 128, 64), (40, 97, 200))):
        each, x = Operand(text, (rows, depth), bias=index % 2 == 1), sample(tokens, depth)
        got, = product(pools[1 + index % 3], x, [each], way)
        assert np.array_equal(got, each.definition(x, way)), f"{tokens} x {depth} x {rows}"


@pytest.mark.parametrize("text", NARROW)
def test_codes_of_up_to_four_bits_as_bytes_give_what_the_groups_give(pools, text):
    spec = QuantSpec.parse(text)
    for index, (tokens, depth, rows) in enumerate(((17, 33, 1), (1, 300, 50), (40, 2 * gemm.SPAN + 200, 3 * gemm.BLOCK_ROWS + 5))):
        each, x = Operand(text, (rows, depth), bias=index == 1), sample(tokens, depth)
        got, = product(pools[1 + index], x, [each], gemm.NARROW_CODES)
        assert np.array_equal(got, each.definition(x, gemm.GROUPED))
    assert gemm.method_of(spec.bits, spec.scheme) == (gemm.NARROW_CODES if INSTRUCTION_SET == "avx2" else gemm.SCALED)


@pytest.mark.parametrize("x", (1.0, -1.0))
@pytest.mark.parametrize("text", NARROW)
def test_the_largest_sums_of_bytes_fit_16_bits(pools, text, x):
    """With zeros farther off than any code: a file may say so."""
    each, ones = Operand(text, (33, 512)), np.full((TOKENS + 1, 512), np.float32(x))
    top = 2 if text.startswith("ternary") else (1 << each.spec.bits) - 1
    for code, zero in ((top, 0), (top, 255), (0, 255)):
        zeros = None if each.codes.zeros is None else np.full_like(each.codes.zeros, zero)
        each.codes = replace(each.codes, codes=np.full_like(each.codes.codes, code), zeros=zeros)
        each.pack()
        got, = product(pools[1], ones, [each], gemm.NARROW_CODES)
        assert np.array_equal(got, each.definition(ones, gemm.GROUPED)) and np.abs(got).max() > 0


@pytest.mark.parametrize("text", CODEBOOKS)
def test_levels_as_bytes_take_their_steps_along(pools, text):
    spec = QuantSpec.parse(text)
    assert gemm.method_of(spec.bits, spec.scheme) == gemm.STEPPED and (gemm.STEPPED != gemm.SCALED) == (INSTRUCTION_SET == "avx2")
    shapes = ((17, 33, 1), (1, 300, 50), (TOKENS + 1, 128, 64), (40, 2 * gemm.SPAN + 200, 3 * gemm.BLOCK_ROWS + 5))
    for index, (tokens, depth, rows) in enumerate(shapes):
        each, x = Operand(text, (rows, depth), bias=index == 1), sample(tokens, depth)
        got, = product(pools[1 + index % 3], x, [each], gemm.STEPPED)
        assert np.array_equal(got, each.definition(x, gemm.STEPPED)), f"{tokens} x {depth} x {rows}"
        assert np.array_equal(product(pools[2], x[:1], [each], gemm.STEPPED)[0], got[:1])


@pytest.mark.parametrize("x", (1.0, -1.0))
@pytest.mark.parametrize("level", (-64, 63))
def test_sums_of_steps_that_leave_16_bits_come_back(pools, x, level):
    each, ones = Operand("codebook4:16", (33, 544)), np.full((TOKENS + 1, 544), np.float32(x))
    codes, scales = (np.full_like(part, 15) for part in (each.codes.codes, each.codes.scales))
    each.codes = replace(each.codes, codes=codes, scales=scales, levels=np.linspace(-level - 1, level, 16).astype(np.int8))
    each.pack()
    got, = product(pools[1], ones, [each], gemm.STEPPED)
    assert np.array_equal(got, each.definition(ones, gemm.STEPPED)) and np.abs(got).min() > 0


@pytest.mark.parametrize("rows", (1, 75))
def test_gated_pairs_and_additions_by_steps(pools, rows):
    x, pair = sample(TOKENS + 5, 260), [Operand("codebook4:16+0.01", (rows, 260), bias=True, seed=seed) for seed in ("gate", "up")]
    first, second = (each.definition(x, gemm.STEPPED) for each in pair)
    out, = product(pools[2], x, pair, gemm.STEPPED, linear.GATED)
    assert np.array_equal(out, np.maximum(first, np.float32(0)) * second)
    there = sample(len(x), rows)
    product(pools[2], x, pair[:1], gemm.STEPPED, linear.ADD, [there])
    assert np.array_equal(there, sample(len(x), rows) + first)


def check_bytes() -> None:
    """The tests above of the ways that AVX2 alone has; elsewhere they go the others."""
    assert gemm.STEPPED not in WAYS and gemm.NARROW_CODES not in WAYS
    pools = {workers: ThreadPool(workers) for workers in (1, 2, 3)}
    for text in CODEBOOKS:
        test_levels_as_bytes_take_their_steps_along(pools, text)
    for text in NARROW:
        test_codes_of_up_to_four_bits_as_bytes_give_what_the_groups_give(pools, text)
    for x in (1.0, -1.0):
        for text in NARROW:
            test_the_largest_sums_of_bytes_fit_16_bits(pools, text, x)
        for level in (-64, 63):
            test_sums_of_steps_that_leave_16_bits_come_back(pools, x, level)
    for rows in (1, 75):
        test_gated_pairs_and_additions_by_steps(pools, rows)
    for pool in pools.values():
        pool.close()


@pytest.mark.slow
@pytest.mark.skipif(not X86 or INSTRUCTION_SET == "avx2" or not runs_here("avx2"), reason="AVX2 is this machine's own set, or none of its")
def test_what_avx2_multiplies_as_bytes(tmp_path):
    child("import test_gemm; test_gemm.check_bytes()", tmp_path, forced="avx2")


def test_powers_of_two_for_scales_are_multiplied_as_they_are(pools):
    for index, (tokens, depth, rows) in enumerate(((17, 33, 1), (1, 300, 50), (40, 2 * gemm.SPAN + 200, 3 * gemm.BLOCK_ROWS + 5))):
        each, x = Operand(EXPONENTS, (rows, depth), bias=index == 1), sample(tokens, depth)
        got, = product(pools[1 + index], x, [each], gemm.GROUPED)
        assert np.array_equal(got, each.definition(x, gemm.GROUPED))
    assert gemm.method_of(4, "mxfp") == gemm.GROUPED


@pytest.mark.parametrize("way", WAYS, ids=("scaled", "grouped"))
@pytest.mark.parametrize("text", ("codebook4:16", "symmetric8:16", "affine4:128+0.01"))
def test_more_inputs_and_rows_than_are_expanded_at_once(pools, text, way):
    """The same bits on any number of threads and in any batch."""
    depth, rows = 2 * gemm.SPAN + 200, 3 * gemm.BLOCK_ROWS + 5
    each, x = Operand(text, (rows, depth)), sample(4 * TOKENS + 3, depth)
    want = each.definition(x, way)
    for pool in pools.values():
        assert np.array_equal(product(pool, x, [each], way)[0], want)
    for tokens in (1, TOKENS, 2 * TOKENS + 1):
        assert np.array_equal(product(pools[2], x[:tokens], [each], way)[0], want[:tokens])


@pytest.mark.parametrize("way", WAYS, ids=("scaled", "grouped"))
def test_several_matrices_of_different_formats_are_one_job(pools, way):
    depth, x = 150, sample(20, 150)
    operands = [Operand(text, (30 + 41 * i, depth), bias=i == 1) for i, text in enumerate(FORMATS)]
    for each, got in zip(operands, product(pools[3], x, operands, way), strict=True):
        assert np.array_equal(got, each.definition(x, way)), str(each.spec)


@pytest.mark.parametrize("way", WAYS, ids=("scaled", "grouped"))
@pytest.mark.parametrize("rows", (1, 32, 75, 4 * gemm.BLOCK_ROWS + 17))
def test_gated_pairs_and_additions(pools, rows, way):
    x = sample(TOKENS + 5, 260)
    gate, up = Operand("codebook4:16+0.01", (rows, 260), bias=True), Operand("affine4:128", (rows, 260), bias=rows == 75, seed="up")
    first, second = (each.definition(x, way) for each in (gate, up))
    out, = product(pools[2], x, [gate, up], way, linear.GATED)
    assert np.array_equal(out, np.maximum(first, np.float32(0)) * second)
    there = sample(len(x), rows)
    product(pools[2], x, [gate], way, linear.ADD, [there])
    assert np.array_equal(there, sample(len(x), rows) + first)


def test_the_largest_sums_fit_32_bits(pools):
    """Every product of a block at the end of its range."""
    for text, code, x in (("symmetric8:32", 0, -1.0), ("affine8:128", 255, 1.0), ("affine8:128", 0, 1.0), ("codebook4:16", 0, 1.0)):
        each = Operand(text, (33, 512))
        codes = replace(each.codes, codes=np.full_like(each.codes.codes, code), scales=np.full_like(each.codes.scales, 15))
        if text == "affine8:128":
            codes = replace(codes, zeros=np.full_like(codes.zeros, 0 if code else 255))
        if codes.levels is not None:
            codes = replace(codes, levels=np.linspace(-64, 63, 16).astype(np.int8))
        each.codes = codes
        each.pack()
        ones = np.full((18, 512), np.float32(x))
        for way in WAYS:
            got, = product(pools[1], ones, [each], way)
            assert np.array_equal(got, each.definition(ones, way)), text
            assert np.abs(got).min() > 0


def test_rows_whose_scales_are_zero_are_zero(pools):
    each, x = Operand("affine4:32", (20, 128)), sample(18, 128)
    scales = each.codes.scales.copy()
    scales[5], scales[7, 1:] = 0, 0
    each.codes = replace(each.codes, scales=scales)
    each.pack()
    for way in WAYS:
        got, = product(pools[1], x, [each], way)
        assert not got[:, 5].any() and got[:, 7].any() and np.isfinite(got).all()
        alone = replace(each.codes, **{name: getattr(each.codes, name)[[4, 7]] for name in ("codes", "scales", "zeros", "rows")})
        assert np.array_equal(got[:, [4, 7]], _of(alone, each.spec, x, way))


def _of(codes: Codes, spec: QuantSpec, x: np.ndarray, way: int) -> np.ndarray:
    each = Operand.__new__(Operand)
    each.spec, each.codes, each.bias, each.shape = spec, codes, None, codes.codes.shape
    return each.definition(x, way)


@pytest.mark.parametrize("way", WAYS, ids=("scaled", "grouped"))
def test_panels_hold_the_quantized_activations(pools, way):
    """Codes, scales and sums of every token, zeros beyond the last one; a NaN marks its own block alone."""
    tokens, depth = 2 * TOKENS + 1, 200
    x, size = sample(tokens, depth), gemm.SCALED_BLOCK if way == gemm.SCALED else gemm.GROUPED_BLOCK
    x[0, 130] = np.nan
    each = Operand("symmetric8:32", (16, depth))
    panels, scratch = Buffer(gemm.panel_nbytes(tokens, depth, way)), Buffer(gemm.gemm_scratch(tokens, depth))
    args = block(x.ctypes.data, x.shape, scratch, pools[1], linear.PLAIN, way, [each], [np.zeros((tokens, 16), np.float32)])
    args[gemm.FIRST + gemm.OUT] = panels.address
    pools[1].run(gemm.pack_tokens, args.ctypes.data)
    padded = np.zeros((3 * TOKENS, 256), np.float32)
    padded[:tokens, :depth] = x
    codes, scales = definition.quantize_columns(padded, size)
    stored = panels.bytes[: 3 * (256 // size) * (HEADER + size * TOKENS * ITEM)].reshape(3, 256 // size, -1)
    head = stored[:, :, :HEADER].reshape(3, -1, 3, 4 * TOKENS)
    found = {"scale": head[:, :, 0].copy().view(np.float32), "sum": head[:, :, 1].copy().view(np.int32),
             "half": head[:, :, 2].copy().view(np.int32)}
    steps = stored[:, :, HEADER:].copy().view(np.int8 if ITEM == 1 else np.int16)
    numbers = steps.reshape(3, -1, size // INPUTS, TOKENS, INPUTS).transpose(0, 3, 1, 2, 4).reshape(3 * TOKENS, 256 // size, size)
    by_token = {name: each.transpose(0, 2, 1).reshape(3 * TOKENS, -1) for name, each in found.items()}
    assert np.array_equal(by_token["scale"], scales, equal_nan=True) and np.isnan(scales).sum() == 1
    sound = ~np.isnan(scales)
    assert np.array_equal(numbers[sound], codes.reshape(numbers.shape)[sound])
    factor = -gemm.SCALED_SHIFT if way == gemm.SCALED else 1  # what sums of scaled weights begin with
    assert np.array_equal(by_token["sum"][sound], factor * codes.reshape(numbers.shape).sum(-1, dtype=np.int32)[sound])
    assert np.array_equal(by_token["half"][sound], codes.reshape(numbers.shape)[:, :, : size // 2].sum(-1)[sound])


@pytest.mark.parametrize("text", (*FORMATS, EXPONENTS))
def test_the_exact_product_is_that_of_what_the_weights_mean(pools, text):
    """With an identity for x it gives the weights themselves, bit for bit."""
    for pool, (rows, depth) in zip(pools.values(), ((50, 100), (97, 256), (20, linear.DEPTH_BLOCK + 70))):
        each = Operand(text, (rows, depth))
        for x in (np.eye(depth, dtype=np.float32), sample(21, depth)):
            out = np.zeros((len(x), rows), np.float32)
            panels = Buffer(4 * -(-len(x) // TILE_COLUMNS) * TILE_COLUMNS * depth)
            scratch = Buffer(pool.workers * max(gemm.gemm_scratch(*x.shape), 4 * TILE_COLUMNS * depth))
            args = np.zeros(linear.FIRST + linear.FIELDS, np.int64)
            args[[linear.X, linear.TOKENS, linear.DEPTH]] = x.ctypes.data, *x.shape
            args[[linear.SCRATCH, linear.SCRATCH_STRIDE]] = scratch.address, scratch.nbytes // pool.workers
            args[linear.FIRST + linear.OUT] = panels.address
            pool.run(linear.pack_columns, args.ctypes.data)
            args = block(panels.address, x.shape, scratch, pool, linear.ADD, 0, [each], [out])
            pool.run(gemm.multiply_exact, args.ctypes.data)
            assert scratch.intact() and panels.intact()
            want = dequantize(each.codes, each.spec)
            if len(x) == depth:
                assert np.array_equal(out, want.T)
            else:
                exact = x.astype(np.float64) @ want.T
                assert np.abs(out - exact).max() <= 3e-6 * np.abs(exact).max()


def test_all_ways_are_near_the_exact_product(pools):
    """Int8 activations cost less than a percent, int8 rows about as much again; anything else would be a mistake."""
    x = sample(30, 1024)
    for text in FORMATS:
        each = Operand(text, (64, 1024))
        exact = x.astype(np.float64) @ dequantize(each.codes, each.spec).T
        for way, most in [*zip(WAYS, (0.02, 0.01)), *([(gemm.STEPPED, 0.02)] if text in CODEBOOKS else [])]:
            got, = product(pools[2], x, [each], way)
            assert np.sqrt(((got - exact) ** 2).mean() / (exact**2).mean()) < most, f"{text}, way {way}"
