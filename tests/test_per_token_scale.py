"""Ternary products with one activation scale per token, as in BitNet's training: bit-identical to their definition, which is
transformers'."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from low_bit_samples import NO_NORM, dims_for, few, low_bit, many, random_codes, seed_of
from transformers.integrations.bitnet import ActQuant as Rounding

from effllm.kernels import reference_low_bit as definition
from effllm.kernels.cpu import amx, amx_int16, lut_layout, stages
from effllm.kernels.cpu.int8_ir import INSTRUCTION_SET
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.quant.codes import dequantize
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import Linear, Norm, Weight

SHAPES = ((16, 32), (31, 100), (50, 257), (203, 1024))
COLUMNS = (1, 2, 5, 8, 16)


@pytest.fixture(autouse=True)
def always_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "MIN_PARALLEL_SIZE", 0)


def columns(count: int, depth: int, seed: int = 0) -> np.ndarray:
    """Tokens whose ranges of inputs differ in size, so that one scale is not many."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, depth), np.float32) * np.exp(2 * rng.standard_normal((1, depth))).astype(np.float32)


def rounded(x: np.ndarray) -> np.ndarray:
    """As transformers rounds activations, but for its compiler, which takes half a minute."""
    with torch.compiler.set_stance("force_eager"):
        return Rounding.apply(torch.from_numpy(x)).numpy()


def product(cpu: CpuOps, x: np.ndarray, each: Linear) -> np.ndarray:
    return cpu.norm_linear(np.ascontiguousarray(x), NO_NORM, [each])[0].copy()


@pytest.mark.parametrize("text", ("ternary:32", "ternary:64", "ternary:128"))
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_their_definition(pools, text, shape):
    spec, (rows, depth) = QuantSpec.parse(text), shape
    codes = random_codes(np.random.default_rng(seed_of(text)), spec, shape)
    each, x, wide = Linear(low_bit(codes, spec)), columns(16, depth), columns(40, depth, 1)
    x[3] = 0
    cpu = CpuOps(pools[2], replace(dims_for(depth, rows, 64), per_token_scale=True))
    want = few(x, codes, spec, one_scale=True)
    assert not np.array_equal(want, few(x, codes, spec)) or depth <= 32
    for count in COLUMNS:
        assert np.array_equal(product(cpu, x[:count], each), want[:count]), f"{count} columns"
    assert np.array_equal(product(cpu, wide, each), many(wide, codes, spec, one_scale=True))


def test_products_by_lookup_are_the_same(pools):
    spec, shape = QuantSpec.parse("ternary:128"), (64, 640)
    codes, x = random_codes(np.random.default_rng(1), spec, shape), columns(16, 640)
    codes = replace(codes, scales=np.ones_like(codes.scales))
    weight = low_bit(codes, spec)
    blob = weight.parts["data"].copy()
    lut_layout.reorder_codes(pools[1], blob, spec, shape)
    cpu = CpuOps(pools[1], replace(dims_for(640, 64), per_token_scale=True))
    for count in (1, 4):
        got = product(cpu, x[:count], Linear(Weight(spec, shape, {"data": blob}, in_lut_layout=True)))
        assert np.allclose(got, few(x[:count], codes, spec, one_scale=True), rtol=0, atol=1e-6 * np.abs(got).max())


def test_activations_are_rounded_as_transformers_rounds_them():
    x = columns(9, 320)
    x[4] *= 1e-12  # below what counts as the largest activation
    codes, scales = definition.quantize_columns(x, one_scale=True)
    want = rounded(x)
    assert np.allclose(codes * scales[:, :1], want, rtol=1e-6, atol=0) and not codes[4].any()
    assert np.isnan(definition.quantize_columns(np.full((1, 64), np.inf, np.float32), one_scale=True)[1]).all()


def test_other_formats_and_other_models_round_by_blocks(pools):
    """A head of other codes is no matrix that was trained so."""
    x = columns(4, 256)
    for text, one_scale in (("symmetric4:32", True), ("ternary:64", False)):
        spec = QuantSpec.parse(text)
        codes = random_codes(np.random.default_rng(2), spec, (48, 256))
        cpu = CpuOps(pools[1], replace(dims_for(256, 48), per_token_scale=one_scale))
        assert np.array_equal(product(cpu, x, Linear(low_bit(codes, spec))), few(x, codes, spec))


def test_a_norm_before_the_product_is_what_it_is_without(pools):
    spec, x = QuantSpec.parse("ternary:64"), columns(24, 256)
    codes = random_codes(np.random.default_rng(3), spec, (48, 256))
    norm = Norm("rms", np.linspace(0.5, 2, 256, dtype=np.float32), None, 1e-5)
    cpu = CpuOps(pools[1], replace(dims_for(256, 48, 64), per_token_scale=True))
    normed = (x / np.sqrt(np.square(x.astype(np.float64)).mean(-1, keepdims=True) + 1e-5)).astype(np.float32) * norm.weight
    for count, means in ((3, few), (24, many)):
        got = cpu.norm_linear(x[:count].copy(), norm, [Linear(low_bit(codes, spec))])[0]
        want = means(normed[:count], codes, spec, one_scale=True)
        assert np.abs(got - want).max() < 0.01 * np.abs(want).max()


def test_torch_rounds_by_one_scale_too():
    spec, x = QuantSpec.parse("ternary:64"), columns(5, 256)
    codes = random_codes(np.random.default_rng(4), spec, (48, 256))
    weight = Weight(spec, (48, 256), {"data": torch.from_numpy(low_bit(codes, spec).parts["data"].copy())})
    got = TorchOps("cpu", one_scale=True)._linear(torch.from_numpy(x), Linear(weight)).numpy()
    want = rounded(x) @ dequantize(codes, spec).T
    assert np.allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.skipif(INSTRUCTION_SET != "avx512", reason="of processors with AVX-512")
@pytest.mark.parametrize("least", [0.0, 9.0])
def test_the_bytes_that_the_matrix_unit_reads(least: float):
    """Packed without it: a block of a token by its own largest activation, or by what that is at least."""
    x, scale, steps = columns(1, amx.BLOCK), np.zeros(1, np.float32), np.zeros(2 * amx_int16.STEP_NBYTES, np.int8)
    x /= np.abs(x).max()
    amx_int16.pack_byte_block(x.ctypes.data, scale.ctypes.data, steps.ctypes.data, int(np.float32(least).view(np.uint32)))
    top = np.float32(max(1.0, least))
    got = np.concatenate([steps[at : at + amx_int16.INPUTS] for at in (0, amx_int16.STEP_NBYTES)])
    assert scale[0] == top / np.float32(127) and np.array_equal(got, np.rint(x[0] * (np.float32(127) / top)))
