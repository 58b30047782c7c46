"""The torch backend's mixture of experts against the float64 definition, on CPU tensors everywhere and on a GPU where there is one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from effllm.kernels import reference_moe
from effllm.kernels.cuda.torch_ops import TorchOps
from effllm.kernels.reference_moe import Routed, Routing
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import Expert, Linear, Norm, Weight, from_f32

GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here"))
DEPTH, WIDTH, EXPERTS = 48, 40, 7
SHAPES = ((WIDTH, DEPTH), (WIDTH, DEPTH), (DEPTH, WIDTH))


@pytest.fixture(params=["cpu", GPU])
def ops(request: pytest.FixtureRequest) -> TorchOps:
    return TorchOps(request.param)


class Pair:
    """The same layer on the device and on the host."""

    def __init__(self, ops: TorchOps, stored: str, bias: bool = False) -> None:
        self.ops, self.stored, self.bias, self.random = ops, stored, bias, np.random.default_rng(3)
        experts = [[self.linear(*shape) for shape in SHAPES] for _ in range(EXPERTS)]
        self.device, self.host = (tuple(Expert(*(each[side] for each in parts)) for parts in experts) for side in (0, 1))
        self.router = self.linear(EXPERTS, DEPTH)
        weight = self.random.standard_normal(DEPTH).astype(np.float32)
        self.norm = Norm("rms", ops.put(weight, "f32")), Norm("rms", weight)

    def linear(self, rows: int, depth: int) -> tuple[Linear, Linear]:
        data = from_f32(self.random.standard_normal((rows, depth)).astype(np.float32) / np.float32(depth**0.5), self.stored)
        bias = self.random.standard_normal(rows).astype(np.float32) if self.bias else None
        weight = Weight(QuantSpec.raw(self.stored), (rows, depth), {"data": self.ops.put(data, self.stored)})
        on_device = Linear(weight, None if bias is None else self.ops.put(bias, "f32"))
        return on_device, Linear(Weight.raw(self.stored, (rows, depth), data), bias)

    def run(self, x: np.ndarray, top_k: int, renormalise: bool, act: str = "silu", see=None) -> np.ndarray:
        stream = self.ops.from_host(x)
        result = self.ops.moe(stream, self.norm[0], self.router[0], self.device, Routing(top_k, renormalise), act, see)
        assert result is stream
        return self.ops.to_host(result)

    def expected(self, x: np.ndarray, top_k: int, renormalise: bool, act: str = "silu") -> tuple[np.ndarray, Routed]:
        return reference_moe.moe(x, self.norm[1], self.router[1], self.host, Routing(top_k, renormalise), act)


def inputs(tokens: int) -> np.ndarray:
    return np.random.default_rng(tokens).standard_normal((tokens, DEPTH)).astype(np.float32)


@pytest.mark.parametrize("stored", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 2), (5, 1), (9, 3), (130, 7)])
def test_moe(ops: TorchOps, stored: str, renormalise: bool, tokens: int, top_k: int) -> None:
    layer, x, seen = Pair(ops, stored, bias=tokens == 5), inputs(tokens), []
    expected, routed = layer.expected(x, top_k, renormalise, "gelu")
    ours = layer.run(x, top_k, renormalise, "gelu", seen.append)
    assert np.abs(ours - expected).max() <= 3e-6 * np.abs(expected - x).max() + 1e-6 * np.abs(x).max()
    assert np.array_equal(seen[0].offsets, routed.offsets) and np.array_equal(seen[0].tokens, routed.tokens)
    assert np.abs(ops.to_host(seen[0].hidden) - routed.hidden).max() <= 1e-5 * np.abs(routed.hidden).max()


def test_equal_logits_go_to_the_lower_expert(ops: TorchOps) -> None:
    layer, seen = Pair(ops, "f32"), []
    layer.router[0].weight.parts["data"].zero_()
    layer.run(inputs(30), 3, True, see=seen.append)
    assert np.diff(seen[0].offsets).tolist() == [30] * 3 + [0] * (EXPERTS - 3)


def test_experts_that_nobody_visits_are_not_read(ops: TorchOps) -> None:
    layer, x, seen = Pair(ops, "bf16"), np.repeat(inputs(1), 4, 0), []
    before = layer.run(x, 2, True, see=seen.append)
    alone = np.flatnonzero(np.diff(seen[0].offsets) == 0)
    assert len(alone) == EXPERTS - 2
    for e in alone:
        for each in (layer.device[e].gate, layer.device[e].up, layer.device[e].down):
            each.weight.parts["data"].fill_(torch.nan)
    assert np.isfinite(before).all() and np.array_equal(layer.run(x, 2, True), before)


def test_an_unknown_activation_is_named(ops: TorchOps) -> None:
    with pytest.raises(ValueError, match="swish7"):
        Pair(ops, "f32").run(inputs(2), 2, True, "swish7")
