"""The matrix product of bfloat16 weights with Intel's AMX, against float64."""

from __future__ import annotations

import numpy as np
import pytest
from low_bit_samples import NO_NORM, dims_for
from test_gemm import Buffer

from effllm.kernels.cpu import linear, linear_amx
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.layout import ACTIVATIONS
from effllm.kernels.threads import ThreadPool
from effllm.quant.weight import Linear, Norm, Weight

pytestmark = pytest.mark.skipif(not linear_amx.AMX_FLOATS, reason="no matrix unit for floats here")
SHAPES = ((17, 33, 1), (1, 300, 50), (33, 128, 64), (40, 97, 200), (70, 2 * linear_amx.SPAN + 40, 3 * linear_amx.BLOCK_ROWS + 5))


def brief(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """float32 that bfloat16 holds."""
    return (rng.standard_normal(shape, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def product(pool: ThreadPool, x: np.ndarray, weights: list[np.ndarray], biases: list[np.ndarray | None], outs: list[np.ndarray],
            mode: int = linear.PLAIN) -> None:
    stored = [np.ascontiguousarray((each.view(np.uint32) >> 16).astype(np.uint16)) for each in weights]
    tokens, depth = x.shape
    scratch = Buffer(4 * pool.workers * linear_amx.scratch_floats(tokens, depth))
    panels = Buffer(4 * linear_amx.panel_floats(tokens, depth))
    head = [tokens, depth, 0, 0, 0, 0, scratch.address, scratch.nbytes // pool.workers, mode, ACTIVATIONS["relu"], len(weights)]
    fields = [number for weight, bias, out in zip(stored, biases, outs, strict=True)
              for number in (weight.ctypes.data, 2, len(weight), 0 if bias is None else bias.ctypes.data, out.ctypes.data, out.shape[1])]
    args = np.array([x.ctypes.data, *head, *fields], np.int64)
    args[linear.FIRST + linear.OUT] = panels.address
    pool.run(linear_amx.pack_columns, args.ctypes.data)
    args = np.array([panels.address, *head, *fields], np.int64)
    pool.run(linear_amx.multiply, args.ctypes.data)
    assert scratch.intact() and panels.intact()


def near(got: np.ndarray, want: np.ndarray) -> bool:
    return bool(np.abs(got - want).max() <= 2e-6 * np.abs(want).max())


@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_float32(pools, shape):
    tokens, depth, rows = shape
    rng = np.random.default_rng(depth)
    x, weight, bias = rng.standard_normal((tokens, depth), np.float32), brief(rng, rows, depth), rng.standard_normal(rows, np.float32)
    want = x.astype(np.float64) @ weight.T + bias
    outs = [np.full((tokens, rows), np.nan, np.float32) for _ in pools]
    for pool, out in zip(pools.values(), outs, strict=True):
        product(pool, x, [weight], [bias], [out])
    assert near(outs[0], want) and np.array_equal(outs[0], outs[1]) and np.array_equal(outs[0], outs[2])
    few = np.zeros((min(tokens, 16), rows), np.float32)
    product(pools[1], x[: len(few)].copy(), [weight], [bias], [few])
    assert np.array_equal(few, outs[0][: len(few)]), "other tokens change nothing"


def test_several_matrices_are_one_job_and_results_are_added(pools):
    rng = np.random.default_rng(5)
    x, weights = rng.standard_normal((37, 320), np.float32), [brief(rng, rows, 320) for rows in (1, 130, 75)]
    there = [rng.standard_normal((37, len(each)), np.float32) for each in weights]
    outs = [each.copy() for each in there]
    product(pools[2], x, weights, [None] * 3, outs, linear.ADD)
    for before, weight, out in zip(there, weights, outs, strict=True):
        assert near(out, before + x.astype(np.float64) @ weight.T)


def test_tokens_that_are_not_finite_spoil_nobody_else(pools):
    rng = np.random.default_rng(6)
    x, weight = rng.standard_normal((20, 100), np.float32), brief(rng, 40, 100)
    sound, got = (np.zeros((20, 40), np.float32) for _ in range(2))
    product(pools[1], x, [weight], [None], [sound])
    x[3, 50], x[5] = np.nan, 0.0
    product(pools[1], x, [weight], [None], [got])
    others = [t for t in range(20) if t not in (3, 5)]
    assert np.isnan(got[3]).all() and not got[5].any() and np.array_equal(got[others], sound[others])


def test_a_stage_of_such_weights_is_normed_and_gated(pools):
    rng = np.random.default_rng(7)
    cpu, x = CpuOps(pools[2], dims_for(120, 120)), 5 * rng.standard_normal((19, 120), np.float32)
    norm, weights = Norm("rms", rng.standard_normal(120, np.float32)), [brief(rng, 120, 120) for _ in range(2)]
    gate, up = (Linear(Weight.raw("bf16", each.shape, np.ascontiguousarray((each.view(np.uint32) >> 16).astype(np.uint16))))
                for each in weights)
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + norm.eps) * norm.weight
    first, second = (normed @ each.T for each in weights)
    assert near(cpu.gated_hidden(x, norm, gate, up, "relu").copy(), np.maximum(first, 0.0) * second)
    plain = cpu.norm_linear(x, NO_NORM, [gate, up])
    assert all(near(got, x.astype(np.float64) @ each.T) for got, each in zip(plain, weights, strict=True))
