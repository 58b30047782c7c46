"""The int8 matrix product with Intel's AMX: bit-identical to the definition, within its buffers. Without AMX only the fallback is
tested."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from low_bit_samples import FORMATS, WITH_OUTLIERS
from test_gemm import Kernels, Operand, sample
from test_gemm import product as gemm_product

from effllm.kernels import reference_low_bit as definition
from effllm.kernels import target
from effllm.kernels.compile import kernel
from effllm.kernels.cpu import amx, candidates, gemm, gemm_amx, linear
from effllm.kernels.cpu.amx import QUAD_NBYTES
from effllm.kernels.cpu.bf16_pairs import HAS_PAIRS
from effllm.kernels.cpu.gemm_scaled import (
    SCALED_SHIFT,
    scaled_codebook_2,
    scaled_codebook_3,
    scaled_codebook_4,
    signed_codebook_2,
    signed_codebook_3,
    signed_codebook_4,
)
from effllm.kernels.cpu.gemm_tiles import STEP
from effllm.kernels.cpu.int8_ir import INSTRUCTION_SET
from effllm.kernels.cpu.intrinsics import i64_at
from effllm.kernels.cpu.stages import LOW_BIT
from effllm.kernels.registry import Call
from effllm.quant.codes import dequantize

needs_amx = pytest.mark.skipif(not amx.AMX, reason="no matrix unit here")
ALL = tuple(text for text in (*FORMATS, *WITH_OUTLIERS) if not text.startswith("float8"))  # those are multiplied as float32 everywhere
BOTH = pytest.mark.parametrize("way", (gemm_amx.BYTES, gemm_amx.HALVES), ids=("bytes", "halves"))
TEXTS = {gemm_amx.BYTES: ("codebook4:16", "affine4:128"), gemm_amx.HALVES: ("codebook4:16+0.01", "super4:32")}


def way_of(each: Operand) -> int:
    return gemm_amx.method_of(each.spec.bits, each.spec.scheme, bool(each.spec.outliers))


def defined(each: Operand, x: np.ndarray, way: int) -> np.ndarray:
    if way == gemm_amx.BYTES:
        return each.definition(x, gemm.SCALED)
    return definition.halves_linear(x, dequantize(each.codes, each.spec), each.bias)


UNIT = Kernels(gemm_amx.pack_tokens, gemm_amx.multiply, gemm_amx.scratch_nbytes,
               lambda tokens, depth, _: gemm_amx.panels_nbytes(tokens, depth))
product = partial(gemm_product, by=UNIT)


@needs_amx
@pytest.mark.parametrize("text", ALL)
def test_every_format_is_its_definition(pools, text):
    shapes = ((17, 33, 1), (1, 300, 50), (33, 128, 64), (40, 97, 200), (5, 2 * gemm_amx.SPAN + 200, 150))
    for index, (tokens, depth, rows) in enumerate(shapes):
        each, x = Operand(text, (rows, depth), bias=index % 2 == 1), sample(tokens, depth)
        got, = product(pools[1 + index % 3], x, [each], way_of(each))
        assert np.array_equal(got, defined(each, x, way_of(each))), f"{tokens} x {depth} x {rows}"


@needs_amx
@BOTH
def test_a_token_has_the_same_bits_on_any_number_of_threads_and_in_any_batch(pools, way):
    for text in TEXTS[way]:
        each, x = Operand(text, (3 * gemm.BLOCK_ROWS + 5, gemm_amx.SPAN + 100)), sample(75, gemm_amx.SPAN + 100)
        want = defined(each, x, way)
        for pool in pools.values():
            assert np.array_equal(product(pool, x, [each], way)[0], want)
        for tokens in (1, 16, 33):
            assert np.array_equal(product(pools[2], x[:tokens], [each], way)[0], want[:tokens])


@needs_amx
@BOTH
@pytest.mark.parametrize("rows", (1, 32, 75, 2 * gemm.BLOCK_ROWS + 17))
def test_gated_pairs_additions_and_several_matrices(pools, rows, way):
    x, pair = sample(37, 700), [Operand(text, (rows, 700), bias=True, seed="pair") for text in TEXTS[way]]
    first, second = (defined(each, x, way) for each in pair)
    out, = product(pools[2], x, pair, way, linear.GATED)
    assert np.array_equal(out, np.maximum(first, np.float32(0)) * second)
    there = sample(len(x), rows)
    product(pools[2], x, pair[:1], way, linear.ADD, [there])
    assert np.array_equal(there, sample(len(x), rows) + first)
    assert all(map(np.array_equal, product(pools[3], x, pair, way), (first, second)))


@needs_amx
@BOTH
def test_tokens_that_are_not_finite_spoil_nobody_else(pools, way):
    each, x = Operand(TEXTS[way][0], (40, 300)), sample(20, 300)
    sound, = product(pools[1], x, [each], way)
    x[3, 130], x[5] = np.nan, 0.0
    got, = product(pools[1], x, [each], way)
    others = [t for t in range(20) if t not in (3, 5)]
    assert np.isnan(got[3]).all() and not got[5].any() and np.array_equal(got[others], sound[others])


@needs_amx
def test_the_largest_sums_of_both_bytes(pools):
    """Every product at the end of its range, over more inputs than a span has."""
    each, ones = Operand("symmetric8:32", (33, 2048)), np.full((18, 2048), np.float32(-1.0))
    each.codes = replace(each.codes, codes=np.full_like(each.codes.codes, 0), scales=np.full_like(each.codes.scales, 255))
    each.pack()
    got, = product(pools[1], ones, [each], gemm_amx.HALVES)
    assert np.array_equal(got, defined(each, ones, gemm_amx.HALVES)) and np.abs(got).min() > 0


@needs_amx
def test_two_bytes_are_nearer_to_the_exact_product_than_groups_with_bytes(pools):
    x = sample(30, 1024)
    for text in ("symmetric8:32", "super4:32"):
        each = Operand(text, (64, 1024))
        exact = x.astype(np.float64) @ dequantize(each.codes, each.spec).T
        got, = product(pools[2], x, [each], gemm_amx.HALVES)
        assert np.sqrt(((got - exact) ** 2).mean() / (exact**2).mean()) < 3e-4, text


def test_floats_of_eight_bits_stay_floats(monkeypatch):
    """No integer of two bytes holds their range. Holds where there is no such unit too: only the choice is asked."""
    monkeypatch.setattr(candidates, "AMX", True)
    registry = candidates.default_registry()
    taken = {stored: registry.select(Call(LOW_BIT, stored, 100, bits=8)).candidate.name for stored in ("float", "symmetric", "super")}
    floats = "bf16 pairs, avx512" if HAS_PAIRS else "register tiles"
    assert taken == {"float": f"eight-bit floats, {floats}", "symmetric": "int8 tiles, amx", "super": "int8 tiles, amx"}


def test_a_system_that_gives_no_tiles_is_compiled_for_without_them(monkeypatch):
    """Touching them would end the process."""
    monkeypatch.setattr(target.llvm, "get_host_cpu_features", lambda: Features("+amx-bf16,+amx-int8,+amx-tile,+avx2"))
    monkeypatch.delenv("NUMBA_CPU_FEATURES", raising=False)
    monkeypatch.delenv("NUMBA_CPU_NAME", raising=False)
    for may, want in ((True, "+amx-bf16,+amx-int8,+amx-tile,+avx2"), (False, "+avx2")):
        monkeypatch.setattr(target, "request_amx_tiles", lambda may=may: may)
        assert target.target.__wrapped__()[1] == want


class Features(str):
    def flatten(self, sort: bool) -> str:
        return str(self)


TILE_PITCH, SIGNED_PITCH = 8 * STEP, 8 * QUAD_NBYTES


@kernel()
def in_both_forms(args, worker, counter):
    """A tile of codebooks of 4, 3 and 2 bits as bytes `SCALED_SHIFT` above themselves, and as signed ones."""
    a = i64_at(args)
    source, scales, tables, limits, above, signed = a[0], a[1], a[2], a[3], a[4], a[5]
    scaled_codebook_4(source, scales, tables, limits, 1, 1, above)
    scaled_codebook_3(source, scales, tables + 32, limits, 2, 1, above + TILE_PITCH)
    scaled_codebook_2(source, scales, tables + 64, limits, 3, 1, above + 2 * TILE_PITCH)
    signed_codebook_4(source, scales, tables, limits, 1, 1, signed)
    signed_codebook_3(source, scales, tables + 32, limits, 2, 1, signed + SIGNED_PITCH)
    signed_codebook_2(source, scales, tables + 64, limits, 3, 1, signed + 2 * SIGNED_PITCH)


@pytest.mark.skipif(INSTRUCTION_SET != "avx512", reason="the unit's rows are made by AVX-512 alone")
def test_the_units_bytes_are_those_that_vectors_multiply(pools):
    rng = np.random.default_rng(3)
    inputs = np.zeros(4096, np.uint8)
    inputs[:1024] = rng.integers(0, 256, 1024)
    limits = rng.uniform(20, 63, 16).astype(np.float32)  # with the largest step and level still within a byte
    for index, bits in enumerate((4, 3, 2)):
        inputs[1024 + 32 * index :][: 1 << bits] = rng.integers(-64, 64, 1 << bits).astype(np.int8).view(np.uint8)
        inputs[1040 + 32 * index :][:16] = np.linspace(14, 127, 16).astype(np.uint8)
    above, signed = np.zeros((3, 8, STEP), np.uint8), np.zeros((3, 8, QUAD_NBYTES), np.int8)
    assert above[0].nbytes == TILE_PITCH and signed[0].nbytes == SIGNED_PITCH
    at = inputs.ctypes.data
    args = np.array([at, at + 512, at + 1024, limits.ctypes.data, above.ctypes.data, signed.ctypes.data], np.int64)
    pools[1].run(in_both_forms, args.ctypes.data)
    rows = signed[:, :, :64].astype(int)
    assert np.array_equal(above[:, :, :64].astype(int) - SCALED_SHIFT, rows) and len(np.unique(rows)) > 50 and not signed[:, :, 64:].any()
