"""The matrix product of bfloat16 weights with activations rounded to bfloat16 (AVX-512 BF16), against float64."""

from __future__ import annotations

import numpy as np
import pytest
from low_bit_samples import NO_NORM, dims_for
from panel_product_checks import assert_products, assert_results_are_added, assert_tokens_are_apart, bf16_linear, brief, near, product

from effllm.kernels.cpu import bf16_pairs, linear_bf16
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.registry import Call
from effllm.kernels.threads import ThreadPool
from effllm.quant.codes import bf16
from effllm.quant.weight import Norm

pytestmark = pytest.mark.skipif(not bf16_pairs.HAS_PAIRS, reason="no products of bfloat16 pairs here")
MANY = linear_bf16.MAX_IN_PLACE + 9
SHAPES = ((17, 33, 1), (1, 300, 50), (33, 128, 64), (16, 31, 12), (40, 97, 200), (MANY, 64, 25), (MANY, 2 * linear_bf16.SPAN + 45, 101),
          (20, 2 * linear_bf16.SPAN + 40, 3 * linear_bf16.BLOCK_ROWS + 5))


@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_rounded_activations(pools, shape):
    assert_products(linear_bf16, pools, shape, bf16, (1, 16, 33))


def test_activations_are_rounded_to_the_nearest_ties_to_even(pools):
    bits = np.random.default_rng(1).integers(0, 1 << 32, 4096, np.uint32)
    bits[:64] = bits[:64] & 0xFFFF0000 | 0x8000  # ties
    x = bits.view(np.float32)
    x = np.where(np.isfinite(x) & (np.abs(x) < 1e38) & (np.abs(x) > 1e-30), x, 1.0).astype(np.float32)[:, None].repeat(2, 1)
    x[:, 1] = 0.0
    got = np.zeros((len(x), 1), np.float32)
    product(linear_bf16, pools[1], x, [np.array([[1.0, 0.0]], np.float32)], [None], [got])
    assert np.array_equal(got, bf16(x)[:, :1])


def test_several_matrices_are_one_job_and_results_are_added(pools):
    assert_results_are_added(linear_bf16, pools[2], bf16)


def test_tokens_that_are_not_finite_spoil_nobody_else(pools):
    assert_tokens_are_apart(linear_bf16, pools[1])


def test_heads_routers_exact_runs_and_sparse_models_keep_their_activations():
    many = Call("matrix", "bf16", 40)
    names = [default_registry(**flags).select(many).candidate.name for flags in ({}, {"exact": True}, {"by_neuron": True})]
    assert names == ["bf16 pairs, avx512", "register tiles", "register tiles"]
    assert default_registry().select(Call("matrix", "f16", 40)).candidate.name == "register tiles"
    rng = np.random.default_rng(7)
    x, weight, pool = rng.standard_normal((40, 96), np.float32), brief(rng, 50, 96), ThreadPool(2)
    ops, matrix = CpuOps(pool, dims_for(96, 50, 64)), bf16_linear(weight)
    try:
        head, inner = ops.logits(x, NO_NORM, matrix), ops.norm_linear(x, NO_NORM, [matrix])[0]
        ops.flush()
        assert near(head, x.astype(np.float64) @ weight.T) and not near(inner, x.astype(np.float64) @ weight.T)
        assert near(inner, bf16(x).astype(np.float64) @ weight.T)
        norm = Norm("rms", rng.standard_normal(96).astype(np.float32))
        normed = x / np.sqrt(np.square(x.astype(np.float64)).mean(1, keepdims=True) + norm.eps) * norm.weight
        gated = ops.gated_hidden(x, norm, matrix, matrix, "relu")
        ops.flush()
        want = normed @ weight.T
        assert np.abs(gated - np.maximum(want, 0) * want).max() <= 0.02 * np.square(want).max()
    finally:
        pool.close()
