"""The matrix product of bfloat16 weights with Intel's AMX, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from low_bit_samples import NO_NORM, dims_for
from panel_product_checks import assert_products, assert_results_are_added, assert_tokens_are_apart, bf16_linear, brief, near

from effllm.kernels.cpu import linear_amx
from effllm.kernels.cpu.ops import CpuOps
from effllm.quant.weight import Norm

pytestmark = pytest.mark.skipif(not linear_amx.AMX_FLOATS, reason="no matrix unit for floats here")
SHAPES = ((17, 33, 1), (1, 300, 50), (33, 128, 64), (40, 97, 200), (70, 2 * linear_amx.SPAN + 40, 3 * linear_amx.BLOCK_ROWS + 5))


@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_float32(pools, shape):
    assert_products(linear_amx, pools, shape, lambda x: x, (16,))


def test_several_matrices_are_one_job_and_results_are_added(pools):
    assert_results_are_added(linear_amx, pools[2], lambda x: x)


def test_tokens_that_are_not_finite_spoil_nobody_else(pools):
    assert_tokens_are_apart(linear_amx, pools[1])


def test_a_stage_of_such_weights_is_normed_and_gated(pools):
    rng = np.random.default_rng(7)
    cpu, x = CpuOps(pools[2], dims_for(120, 120)), 5 * rng.standard_normal((19, 120), np.float32)
    norm, weights = Norm("rms", rng.standard_normal(120, np.float32)), [brief(rng, 120, 120) for _ in range(2)]
    gate, up = map(bf16_linear, weights)
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + norm.eps) * norm.weight
    first, second = (normed @ each.T for each in weights)
    assert near(cpu.gated_hidden(x, norm, gate, up, "relu").copy(), np.maximum(first, 0.0) * second)
    plain = cpu.norm_linear(x, NO_NORM, [gate, up])
    assert all(near(got, x.astype(np.float64) @ each.T) for got, each in zip(plain, weights, strict=True))
