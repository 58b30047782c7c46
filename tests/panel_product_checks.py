"""Checks of matrix products with bfloat16 weights, of which processors have different ones: each against float64, within its buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import numpy as np
from test_gemm import Buffer

from effllm.kernels.cpu import linear
from effllm.kernels.layout import ACTIVATIONS
from effllm.kernels.threads import ThreadPool
from effllm.quant.weight import Linear, Weight, from_f32

Rounding = Callable[[np.ndarray], np.ndarray]  # what a product does to activations


def brief(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """float32 that bfloat16 holds."""
    return (rng.standard_normal(shape, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def bf16_linear(weight: np.ndarray) -> Linear:
    """A matrix without bias of weights that bfloat16 holds."""
    return Linear(Weight.raw("bf16", weight.shape, from_f32(weight, "bf16")))


def near(got: np.ndarray, want: np.ndarray) -> bool:
    return bool(np.abs(got - want).max() <= 2e-6 * np.abs(want).max())


def product(module: ModuleType, pool: ThreadPool, x: np.ndarray, weights: list[np.ndarray], biases: list[np.ndarray | None],
            outs: list[np.ndarray], mode: int = linear.PLAIN) -> None:
    """The product of a kernel module (`pack_columns`, `multiply`), to `outs`."""
    stored = [from_f32(weight, "bf16") for weight in weights]
    tokens, depth = x.shape
    scratch = Buffer(4 * pool.workers * -(-module.scratch_floats(tokens, depth) // 16) * 16)
    panels = Buffer(4 * module.panel_floats(tokens, depth))
    head = [tokens, depth, 0, 0, 0, 0, scratch.address, scratch.nbytes // pool.workers, mode, ACTIVATIONS["relu"], len(weights)]
    fields = [number for weight, bias, out in zip(stored, biases, outs, strict=True)
              for number in (weight.ctypes.data, 2, len(weight), 0 if bias is None else bias.ctypes.data, out.ctypes.data, out.shape[1])]
    args = np.array([x.ctypes.data, *head, *fields], np.int64)
    args[linear.FIRST + linear.OUT] = panels.address
    pool.run(module.pack_columns, args.ctypes.data)
    args = np.array([panels.address, *head, *fields], np.int64)
    pool.run(module.multiply, args.ctypes.data)
    assert scratch.intact() and panels.intact()


def assert_products(module: ModuleType, pools: Mapping[int, ThreadPool], shape: tuple[int, int, int], rounded: Rounding,
                    counts: Sequence[int]) -> None:
    """Right for `shape` (tokens, inputs, rows), whatever the threads, and for the first tokens whatever the others (`counts`)."""
    tokens, depth, rows = shape
    rng = np.random.default_rng(depth)
    x, weight, bias = rng.standard_normal((tokens, depth), np.float32), brief(rng, rows, depth), rng.standard_normal(rows, np.float32)
    want = rounded(x).astype(np.float64) @ weight.T + bias
    outs = [np.full((tokens, rows), np.nan, np.float32) for _ in pools]
    for pool, out in zip(pools.values(), outs, strict=True):
        product(module, pool, x, [weight], [bias], [out])
    assert near(outs[0], want) and all(np.array_equal(outs[0], out) for out in outs[1:])
    for count in counts:
        few = np.zeros((min(tokens, count), rows), np.float32)
        product(module, pools[1], x[: len(few)].copy(), [weight], [bias], [few])
        assert np.array_equal(few, outs[0][: len(few)]), "other tokens change nothing"


def assert_results_are_added(module: ModuleType, pool: ThreadPool, rounded: Rounding) -> None:
    """Several matrices are one job, and mode ADD adds."""
    rng = np.random.default_rng(5)
    x, weights = rng.standard_normal((37, 320), np.float32), [brief(rng, rows, 320) for rows in (1, 130, 75)]
    there = [rng.standard_normal((37, len(weight)), np.float32) for weight in weights]
    outs = [before.copy() for before in there]
    product(module, pool, x, weights, [None] * 3, outs, linear.ADD)
    for before, weight, out in zip(there, weights, outs, strict=True):
        assert near(out, before + rounded(x).astype(np.float64) @ weight.T)


def assert_tokens_are_apart(module: ModuleType, pool: ThreadPool) -> None:
    """A token that is not finite spoils no other."""
    rng = np.random.default_rng(6)
    x, weight = rng.standard_normal((20, 100), np.float32), brief(rng, 40, 100)
    sound, got = (np.zeros((20, 40), np.float32) for _ in range(2))
    product(module, pool, x, [weight], [None], [sound])
    x[3, 50], x[5] = np.nan, 0.0
    product(module, pool, x, [weight], [None], [got])
    others = [t for t in range(20) if t not in (3, 5)]
    assert np.isnan(got[3]).all() and not got[5].any() and np.array_equal(got[others], sound[others])
