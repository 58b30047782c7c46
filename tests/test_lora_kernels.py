"""An adapter's contribution to products, against the definition: ranks, magnitudes and stored types, by tokens, threads and instruction
sets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from test_instruction_sets import TARGETS, X86, child, runs_here

from effllm.kernels.cpu.lora_loops import GROUP
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.layout import MAX_DECODE_TOKENS
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.lora_layout import LoraMatrix, LoraPair
from effllm.quant.weight import Linear, Lora, Norm, Weight, from_f32, to_f32

TOKENS = 3 * GROUP + 2
SHAPES = [(36, 7, 4), (64, 64, 8), (259, 300, 16), (1030, 70, 20), (512, 515, 68)]  # inputs, outputs, rank
SCHEMES = ("bf16", "f16", "f32")


def random(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def adapted(depth: int, rows: int, rank: int, scheme: str, seed: int) -> tuple[Linear, np.ndarray]:
    """A matrix of zeros with an adapter beside it, and B A."""
    a, b = random(rank, depth, seed=seed), random(rows, rank, seed=seed + 1)
    exact = [to_f32(from_f32(each, scheme), scheme).astype(np.float64) for each in (b, a)]
    zeros = Weight.raw("f32", (rows, depth), np.zeros((rows, depth), np.float32))
    narrow = () if scheme == "f32" else (scheme,)
    pair = LoraPair(0, LoraMatrix.into(to_f32(from_f32(a, scheme), scheme), narrow), LoraMatrix.out(to_f32(from_f32(b, scheme), scheme),
        narrow))
    assert pair.into.scheme == pair.out.scheme == scheme
    return Linear(zeros, lora=Lora((pair,))), exact[0] @ exact[1]


def ops_of(depth: int, rows: int, rank: int, threads: int) -> CpuOps:
    ops = CpuOps(ThreadPool(threads), Dims(depth, 1, 1, max(rows, depth), max(rows, depth), rows, 64, 128, 64, max_lora_rank=rank))
    ops.adapt(np.ones((1, 1), np.float32))
    return ops


def close(found: np.ndarray, wanted: np.ndarray, x: np.ndarray) -> None:
    assert np.abs(found - wanted).max() <= 3e-6 * np.abs(wanted).max() + 1e-6 * np.abs(x).max()


def check(depth: int, rows: int, rank: int) -> None:
    """A stage of three matrices, of which the middle one has no adapter and the others' are stored differently."""
    x, norm = random(TOKENS, depth, seed=1), Norm("rms", random(depth, seed=2), None, 1e-5)
    for first, last in (("bf16", "f16"), ("f32", "bf16")):
        (one, wanted), (two, other) = adapted(depth, rows, rank, first, 3), adapted(depth, rows, 4, last, 5)
        stage, n = [one, one.without_lora, two], x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5) * norm.weight
        bits = {}
        for threads in (1, 2):
            ops = ops_of(depth, rows, max(rank, 4), threads)
            found = [each.copy() for each in ops.norm_linear(x, norm, stage)]
            close(found[0], n @ wanted.T, x)
            assert not found[1].any()
            close(found[2], n @ other.T, x)
            bits[threads] = found
            for count in (1, 2, GROUP, GROUP + 1):
                for at in (0, TOKENS - count):
                    some = ops.norm_linear(np.ascontiguousarray(x[at : at + count]), norm, stage)
                    assert all(np.array_equal(own, whole[at : at + count]) for own, whole in zip(some, found, strict=True))
            ops.close()
        assert all(map(np.array_equal, bits[1], bits[2]))


@pytest.mark.parametrize("depth, rows, rank", SHAPES)
def test_what_is_added_is_right_and_depends_on_no_other_token_or_thread(depth, rows, rank):
    check(depth, rows, rank)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("act", ["silu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("which", ["gate", "up", "both"])
def test_a_gate_comes_after_what_is_added(scheme, act, which):
    depth, rows, rank = 70, 301, 12
    (gate, first), (up, second) = adapted(depth, rows, rank, scheme, 1), adapted(depth, rows, 8, scheme, 3)
    ones = Weight.raw("f32", (rows, depth), np.ones((rows, depth), np.float32))
    pair = [Linear(ones, lora=own.lora if which in (name, "both") else None) for name, own in (("gate", gate), ("up", up))]
    ops, x, norm = ops_of(depth, rows, rank, 2), random(TOKENS, depth, seed=7), Norm("none")
    sums = x.astype(np.float64).sum(1, keepdims=True)
    g, u = (sums + (x @ added.T if own.lora is not None else 0) for own, added in zip(pair, (first, second), strict=True))
    opened = {"silu": g / (1 + np.exp(-g)), "relu2": np.maximum(g, 0) ** 2,
              "gelu_tanh": g / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))}[act]
    for count in (1, TOKENS):
        found = ops.gated_hidden(np.ascontiguousarray(x[:count]), norm, *pair, act)
        wanted = (opened * u)[:count]
        assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()
    ops.close()


def test_what_is_added_to_the_stream_comes_on_top():
    ops = ops_of(96, 96, 16, 2)
    own, wanted = adapted(96, 96, 16, "bf16", 1)
    for count in (1, 3, TOKENS):
        x, stream = random(count, 96, seed=3), random(count, 96, seed=4)
        close(ops.linear_add(x, own, stream.copy()), stream + x @ wanted.T, stream)
    ops.close()


@pytest.mark.parametrize("count", [1, 5, GROUP + 2])
def test_each_number_between_has_the_scale_of_its_adapter(count):
    """Of a text's all tokens, or of each token's text; nothing of any leaves products out."""
    depth, rows = 300, 90
    (own, first), (other, second) = adapted(depth, rows, 8, "bf16", 1), adapted(depth, rows, 4, "bf16", 3)
    pairs = own.lora.pairs[0], replace(other.lora.pairs[0], adapter=2)
    both, ops, x = Linear(own.weight, lora=Lora(pairs)), ops_of(depth, rows, 12, 2), random(count, depth, seed=5)
    for scales in (random(1, 3, seed=6), random(count if count <= MAX_DECODE_TOKENS else 1, 3, seed=7)):
        ops.adapt(scales)
        (found,) = ops.norm_linear(x, None, [both])
        close(found, scales[:, :1] * (x @ first.T) + scales[:, 2:] * (x @ second.T), x)
        found = found.copy()
        for at in range(count):
            ops.adapt(scales[[at % len(scales)]])
            assert np.array_equal(found[[at]], ops.norm_linear(x[at : at + 1], None, [both])[0])
    some = random(count if count <= MAX_DECODE_TOKENS else 1, 3, seed=8)
    some[::2, 0] = some[1::2, 2] = 0  # by turns
    ops.adapt(some)
    found = ops.norm_linear(x, None, [both])[0].copy()
    for pair, column in zip(pairs, (0, 2), strict=True):
        alone = Linear(own.weight, lora=Lora((pair,)))
        rows_of = np.broadcast_to(some[:, column] != 0, count)
        ops.adapt(some)
        assert np.array_equal(found[rows_of], ops.norm_linear(x, None, [alone])[0][rows_of])
    for nothing in (None, np.zeros((1, 3), np.float32)):
        ops.adapt(nothing)
        assert not ops.norm_linear(x, None, [both])[0].any()
    ops.close()


@pytest.mark.parametrize("count", [1, 5, GROUP + 2])
def test_of_a_product_there_is_more_or_less_by_the_scale_of_each_adapter(count):
    """Not of its bias, also where it is added to the stream."""
    depth, rows = 300, 300
    own, wanted = adapted(depth, rows, 8, "bf16", 1)
    values, bias, gains = random(rows, depth, seed=8), random(rows, seed=9), random(3, rows, seed=10)
    weight = Weight.raw("f32", values.shape, values)
    each = Linear(weight, bias, Lora(own.lora.pairs, gains))
    ops, x, stream = ops_of(depth, rows, 8, 2), random(count, depth, seed=5), random(count, rows, seed=6)
    for scales in (np.ones((1, 3), np.float32), random(1, 3, seed=6), random(count if count <= MAX_DECODE_TOKENS else 1, 3, seed=7)):
        ops.adapt(scales)
        expected = (1 + scales @ gains) * (x @ values.T) + bias + scales[:, :1] * (x @ wanted.T)
        close(ops.norm_linear(x, None, [each])[0], expected, x)
        close(ops.linear_add(x, each, stream.copy()), stream + expected, x)
    ops.adapt(None)
    assert np.array_equal(ops.norm_linear(x, None, [each])[0].copy(), ops.norm_linear(x, None, [each.without_lora])[0])
    ops.close()


@pytest.mark.slow
@pytest.mark.skipif(not X86, reason="the sets that can be forced are those of x86")
@pytest.mark.parametrize("name", [each for each in TARGETS if runs_here(each)])
def test_every_instruction_set_adds_the_same(name, tmp_path):
    child("import test_lora_kernels as t\nfor shape in t.SHAPES: t.check(*shape)\n"
          "t.test_of_a_product_there_is_more_or_less_by_the_scale_of_each_adapter(5)", tmp_path, forced=name)
