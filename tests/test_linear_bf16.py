"""The matrix product of bfloat16 weights with activations rounded to bfloat16 (AVX-512 BF16), against float64."""

from __future__ import annotations

import numpy as np
import pytest
from low_bit_samples import NO_NORM, dims_for
from test_gemm import Buffer
from test_linear_amx import brief, near

from effllm.kernels.cpu import bf16_pairs, linear, linear_bf16
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.layout import ACTIVATIONS
from effllm.kernels.registry import Call
from effllm.kernels.threads import ThreadPool
from effllm.quant.codes import bf16
from effllm.quant.weight import Linear, Norm, Weight, from_f32

pytestmark = pytest.mark.skipif(not bf16_pairs.HAS_PAIRS, reason="no products of bfloat16 pairs here")
MANY = linear_bf16.MAX_IN_PLACE + 9
SHAPES = ((17, 33, 1), (1, 300, 50), (33, 128, 64), (16, 31, 12), (40, 97, 200), (MANY, 64, 25), (MANY, 2 * linear_bf16.SPAN + 45, 101),
          (20, 2 * linear_bf16.SPAN + 40, 3 * linear_bf16.BLOCK_ROWS + 5))


def product(pool: ThreadPool, x: np.ndarray, weights: list[np.ndarray], biases: list[np.ndarray | None], outs: list[np.ndarray],
            mode: int = linear.PLAIN) -> None:
    stored = [from_f32(weight, "bf16") for weight in weights]
    tokens, depth = x.shape
    scratch = Buffer(4 * pool.workers * (linear_bf16.scratch_floats(tokens, depth) + 15) // 16 * 16)
    panels = Buffer(4 * linear_bf16.panel_floats(tokens, depth))
    head = [tokens, depth, 0, 0, 0, 0, scratch.address, scratch.nbytes // pool.workers, mode, ACTIVATIONS["relu"], len(weights)]
    fields = [number for weight, bias, out in zip(stored, biases, outs, strict=True)
              for number in (weight.ctypes.data, 2, len(weight), 0 if bias is None else bias.ctypes.data, out.ctypes.data, out.shape[1])]
    args = np.array([x.ctypes.data, *head, *fields], np.int64)
    args[linear.FIRST + linear.OUT] = panels.address
    pool.run(linear_bf16.pack_columns, args.ctypes.data)
    args = np.array([panels.address, *head, *fields], np.int64)
    pool.run(linear_bf16.multiply, args.ctypes.data)
    assert scratch.intact() and panels.intact()


@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_rounded_activations(pools, shape):
    tokens, depth, rows = shape
    rng = np.random.default_rng(depth)
    x, weight, bias = rng.standard_normal((tokens, depth), np.float32), brief(rng, rows, depth), rng.standard_normal(rows, np.float32)
    want = bf16(x).astype(np.float64) @ weight.T + bias
    outs = [np.full((tokens, rows), np.nan, np.float32) for _ in pools]
    for pool, out in zip(pools.values(), outs, strict=True):
        product(pool, x, [weight], [bias], [out])
    assert near(outs[0], want) and np.array_equal(outs[0], outs[1]) and np.array_equal(outs[0], outs[2])
    for count in (1, 16, 33):
        few = np.zeros((min(tokens, count), rows), np.float32)
        product(pools[1], x[: len(few)].copy(), [weight], [bias], [few])
        assert np.array_equal(few, outs[0][: len(few)]), "other tokens change nothing"


def test_activations_are_rounded_to_the_nearest_ties_to_even(pools):
    bits = np.random.default_rng(1).integers(0, 1 << 32, 4096, np.uint32)
    bits[:64] = bits[:64] & 0xFFFF0000 | 0x8000  # ties
    x = bits.view(np.float32)
    x = np.where(np.isfinite(x) & (np.abs(x) < 1e38) & (np.abs(x) > 1e-30), x, 1.0).astype(np.float32)[:, None].repeat(2, 1)
    x[:, 1] = 0.0
    got = np.zeros((len(x), 1), np.float32)
    product(pools[1], x, [np.array([[1.0, 0.0]], np.float32)], [None], [got])
    assert np.array_equal(got, bf16(x)[:, :1])


def test_several_matrices_are_one_job_and_results_are_added(pools):
    rng = np.random.default_rng(5)
    x, weights = rng.standard_normal((37, 320), np.float32), [brief(rng, rows, 320) for rows in (1, 130, 75)]
    there = [rng.standard_normal((37, len(weight)), np.float32) for weight in weights]
    outs = [before.copy() for before in there]
    product(pools[2], x, weights, [None] * 3, outs, linear.ADD)
    for before, weight, out in zip(there, weights, outs, strict=True):
        assert near(out, before + bf16(x).astype(np.float64) @ weight.T)


def test_tokens_that_are_not_finite_spoil_nobody_else(pools):
    rng = np.random.default_rng(6)
    x, weight = rng.standard_normal((20, 100), np.float32), brief(rng, 40, 100)
    sound, got = (np.zeros((20, 40), np.float32) for _ in range(2))
    product(pools[1], x, [weight], [None], [sound])
    x[3, 50], x[5] = np.nan, 0.0
    product(pools[1], x, [weight], [None], [got])
    others = [t for t in range(20) if t not in (3, 5)]
    assert np.isnan(got[3]).all() and not got[5].any() and np.array_equal(got[others], sound[others])


def test_heads_routers_exact_runs_and_sparse_models_keep_their_activations():
    many = Call("matrix", "bf16", 40)
    names = [default_registry(**flags).select(many).candidate.name for flags in ({}, {"exact": True}, {"by_neuron": True})]
    assert names == ["bf16 pairs, avx512", "register tiles", "register tiles"]
    assert default_registry().select(Call("matrix", "f16", 40)).candidate.name == "register tiles"
    rng = np.random.default_rng(7)
    x, weight, pool = rng.standard_normal((40, 96), np.float32), brief(rng, 50, 96), ThreadPool(2)
    ops, matrix = CpuOps(pool, dims_for(96, 50, 64)), Linear(Weight.raw("bf16", (50, 96), from_f32(weight, "bf16")))
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
