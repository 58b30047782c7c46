"""Test data for every kind of recurrent layer: shapes, weights, inputs, expected outputs, and a layer on a backend.

Inputs resemble those of real layers: decays from almost none to complete, keys that recur.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from effllm.kernels import (
    reference,
    reference_conv,
    reference_delta,
    reference_lightning,
    reference_mamba1,
    reference_mamba2,
    reference_rwkv7,
)
from effllm.kernels.conv_shape import ConvShape
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.delta_shape import DeltaShape
from effllm.kernels.kda_shape import KdaShape
from effllm.kernels.lightning_shape import LightningShape
from effllm.kernels.mamba1_shape import Mamba1Shape
from effllm.kernels.mamba2_shape import Mamba2Shape
from effllm.kernels.rwkv7_shape import Rwkv7Shape
from effllm.kernels.state_shape import AFTER, FROM, KEPT, NO_SLOT, TO, StateShape
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import Linear, Norm, Weight
from effllm.runtime.kv.states import controls

DELTAS = {"usual": DeltaShape(2, 4, 128, 128, 4), "odd": DeltaShape(3, 3, 24, 40, 2), "one head, narrow": DeltaShape(1, 2, 7, 5, 3),
          "one tap": DeltaShape(1, 1, 16, 33, 1), "tiled": DeltaShape(2, 6, 24, 20, 4, tiled=True),
          "doubled": DeltaShape(2, 4, 24, 20, 3, beta_scale=2.0)}
CONVS = {"usual convolution": ConvShape(256, 3), "odd convolution": ConvShape(37, 5), "convolution of one tap": ConvShape(20, 1)}
MAMBAS = {"usual state space": Mamba2Shape(4, 64, 1, 128, 4), "odd state space": Mamba2Shape(6, 10, 2, 24, 3),
          "state space of one tap": Mamba2Shape(2, 7, 2, 256, 1), "state space without a norm": Mamba2Shape(3, 20, 1, 24, 4, normed=False)}
KDAS = {"usual channels": KdaShape.of(4, 128, 4), "odd channels": KdaShape.of(3, 40, 2), "narrow channels": KdaShape.of(1, 7, 3),
        "channels of one tap": KdaShape.of(2, 33, 1), "bounded channels": KdaShape.of(3, 24, 4, low_rank_gates=False, decay_bound=-5.0)}
MAMBA_1S = {"usual channels of states": Mamba1Shape(640, 16, 20, 4, normed=True), "odd channels of states": Mamba1Shape(37, 5, 3, 3),
            "channels of states, one tap": Mamba1Shape(130, 24, 8, 1, biased=False)}
LIGHTNINGS = {"usual lightning": LightningShape(2, 128), "odd lightning": LightningShape(3, 20)}
RWKVS = {"usual time mixing": Rwkv7Shape(3, 64, (8, 8, 8, 8)), "odd time mixing": Rwkv7Shape(3, 20, (4, 4, 4, 4), 1e-4)}
SHAPES: dict[str, StateShape] = {**DELTAS, **CONVS, **MAMBAS, **KDAS, **MAMBA_1S, **LIGHTNINGS, **RWKVS}
EPS = 1e-6
Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Kind:
    """Functions that make the test data of one kind of recurrent layer.

    weights: random weights for a shape.
    adjust: changes random projections [T, width] in place, so that they resemble those of a real layer.
    expected: outputs, and the last state (flat), by the reference.
    """

    weights: Callable[[StateShape], SimpleNamespace]
    adjust: Callable[[StateShape, list[np.ndarray]], None]
    expected: Callable[[StateShape, SimpleNamespace, Arrays], tuple[np.ndarray, np.ndarray]]


def normal(seed: int, *size: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def matrix(seed: int, *shape: int) -> Linear:
    """Random, with rows of about unit length."""
    return Linear(Weight(QuantSpec.raw("f32"), shape, {"data": normal(seed, *shape) / np.float32(np.sqrt(shape[1]))}))


def delta_weights(shape: DeltaShape) -> SimpleNamespace:
    return SimpleNamespace(conv=normal(1, shape.taps, shape.channels), decay=np.exp(normal(2, shape.value_heads)),
                           dt_bias=normal(3, shape.value_heads), norm=SimpleNamespace(weight=normal(4, shape.value_dim), eps=EPS))


def delta_inputs(shape: DeltaShape, products: list[np.ndarray]) -> None:
    qkv, _, _, a = products
    qkv[2::3, : 2 * shape.keys] = qkv[: len(qkv[2::3]), : 2 * shape.keys]  # a token in three has the keys of an earlier one
    a *= 3
    a[::5] = -100  # nothing decays
    a[::17] = 100  # all of it


def delta_expected(shape: DeltaShape, w: SimpleNamespace, products: Arrays) -> tuple[np.ndarray, np.ndarray]:
    qkv, z, b, a = products
    mixed = reference_delta.convolve(qkv, np.zeros((shape.taps - 1, shape.channels)), w.conv)
    q, k, v = np.split(mixed, (shape.keys, 2 * shape.keys), axis=1)
    heads = lambda x, count: x.reshape(len(x), count, -1)  # noqa: E731
    decay, beta = reference_delta.gates(a, b, w.decay, w.dt_bias, shape.beta_scale)
    out, state = reference_delta.recur(heads(q, shape.key_heads), heads(k, shape.key_heads), heads(v, shape.value_heads), decay, beta,
                                       np.zeros((shape.value_heads, shape.value_dim, shape.key_dim)), shape.tiled)
    return reference_delta.gated_norm(out, heads(z, shape.value_heads), w.norm.weight, EPS).reshape(len(qkv), -1), state.reshape(-1)


def kda_weights(shape: KdaShape) -> SimpleNamespace:
    return SimpleNamespace(conv=normal(1, shape.taps, shape.channels), decay=np.exp(normal(2, shape.value_heads)),
                           dt_bias=normal(3, shape.keys), norm=SimpleNamespace(weight=normal(4, shape.value_dim), eps=EPS),
                           gate_up=matrix(5, shape.values, shape.value_dim) if shape.low_rank_gates else None,
                           decay_up=matrix(6, shape.keys, shape.key_dim) if shape.low_rank_gates else None)


def kda_inputs(shape: KdaShape, products: list[np.ndarray]) -> None:
    qkv, _, decay_inputs, _ = products
    qkv[2::3, : 2 * shape.keys] = qkv[: len(qkv[2::3]), : 2 * shape.keys]  # a token in three has the keys of an earlier one
    decay_inputs[::5] *= 30  # some channels forget all, some nothing
    decay_inputs[::17] *= 100


def kda_expected(shape: KdaShape, w: SimpleNamespace, products: Arrays) -> tuple[np.ndarray, np.ndarray]:
    qkv, z, a, b = products
    if shape.low_rank_gates:
        z, a = (reference.linear(x, linear.weight.parts["data"], None) for x, linear in ((z, w.gate_up), (a, w.decay_up)))
    mixed = reference_delta.convolve(qkv, np.zeros((shape.taps - 1, shape.channels)), w.conv)
    q, k, v = (projection.reshape(len(qkv), shape.key_heads, -1) for projection in np.split(mixed, 3, axis=1))
    out, state = reference_delta.recur(q, k, v, *reference_delta.channel_gates(a, b, w.decay, w.dt_bias, shape.decay_bound),
                                       np.zeros((shape.value_heads, shape.value_dim, shape.key_dim)))
    return reference_delta.sigmoid_norm(out, z.reshape(v.shape), w.norm.weight, EPS).reshape(len(qkv), -1), state.reshape(-1)


def conv_expected(shape: ConvShape, w: SimpleNamespace, products: Arrays) -> tuple[np.ndarray, np.ndarray]:
    b, c, x = np.split(products[0], 3, axis=1)
    return reference_conv.mix(b, c, x, np.zeros((shape.taps - 1, shape.width)), w.conv), np.zeros(0)


def mamba_weights(shape: Mamba2Shape) -> SimpleNamespace:
    return SimpleNamespace(conv=normal(1, shape.taps, shape.channels), conv_bias=normal(5, shape.channels) if shape.taps > 1 else None,
                           decay=np.exp(normal(2, shape.heads)), dt_bias=normal(3, shape.heads), skip=normal(6, shape.heads),
                           norm=SimpleNamespace(weight=normal(4, shape.values), eps=EPS) if shape.normed else None,
                           gate_multiplier=1.0 if shape.normed else 0.7, dt_multiplier=1.0 if shape.normed else 1.3)


def mamba_inputs(shape: Mamba2Shape, products: list[np.ndarray]) -> None:
    steps = products[2]
    steps[::5] = -30  # nothing is written, nothing decays
    steps[::17] = 30  # all of it


def mamba_expected(shape: Mamba2Shape, w: SimpleNamespace, products: Arrays) -> tuple[np.ndarray, np.ndarray]:
    xbc, z, steps = products
    mixed = reference_delta.convolve(xbc, np.zeros((shape.taps - 1, shape.channels)), w.conv, w.conv_bias)
    x, b, c = np.split(mixed, (shape.values, shape.values + shape.groups * shape.depth), axis=1)
    heads = lambda x, count: x.reshape(len(x), count, -1)  # noqa: E731
    out, state = reference_mamba2.recur(heads(x, shape.heads), heads(b, shape.groups), heads(c, shape.groups),
                                        *reference_mamba2.steps(steps * np.float64(w.dt_multiplier), w.decay, w.dt_bias), w.skip,
                                        np.zeros((shape.heads, shape.head_dim, shape.depth)))
    weight, gates = None if w.norm is None else w.norm.weight, z * np.float64(w.gate_multiplier)
    return reference_mamba2.gated_norm(out.reshape(len(xbc), -1), gates, weight, shape.groups, EPS), state.reshape(-1)


def lightning_weights(shape: LightningShape) -> SimpleNamespace:
    """Heads that forget all but the last tokens, and heads that hardly forget."""
    return SimpleNamespace(decay=np.linspace(0.3, 0.9999, shape.heads, dtype=np.float32),
                           norm=SimpleNamespace(weight=normal(4, shape.values), eps=EPS))


def lightning_expected(shape: LightningShape, w: SimpleNamespace, products: Arrays) -> tuple[np.ndarray, np.ndarray]:
    vkq, z = products
    v, k, q = (projection.reshape(len(vkq), shape.heads, -1) for projection in np.split(reference_lightning.activated(vkq), 3, axis=1))
    out, state = reference_lightning.recur(v, k, q, w.decay, np.zeros((shape.heads, shape.head_dim, shape.head_dim)))
    return reference_lightning.normed_gates(out.reshape(len(vkq), -1), z, w.norm.weight, EPS), state.reshape(-1)


def mamba_1_weights(shape: Mamba1Shape) -> SimpleNamespace:
    norm = lambda seed, size: Norm("rms", normal(seed, size), None, EPS) if shape.normed else None  # noqa: E731
    return SimpleNamespace(conv=normal(1, shape.taps, shape.values), conv_bias=normal(5, shape.values) if shape.biased else None,
                           decay=np.exp(normal(2, shape.values * shape.depth)), dt_bias=normal(3, shape.values),
                           skip=normal(6, shape.values), dt_down=matrix(7, shape.rank, shape.values),
                           bc_proj=matrix(8, 2 * shape.depth, shape.values), dt_up=matrix(9, shape.values, shape.rank),
                           dt_norm=norm(10, shape.rank), b_norm=norm(11, shape.depth), c_norm=norm(12, shape.depth))


def mamba_1_inputs(shape: Mamba1Shape, products: list[np.ndarray]) -> None:
    products[0][::5] *= 10  # long steps and short ones
    products[0][::17] *= 0.01


def mamba_1_expected(shape: Mamba1Shape, w: SimpleNamespace, products: Arrays) -> tuple[np.ndarray, np.ndarray]:
    x, z = products
    mixed = reference_delta.convolve(x, np.zeros((shape.taps - 1, shape.channels)), w.conv, w.conv_bias)
    times = lambda values, linear: reference.linear(values, linear.weight.parts["data"], None)  # noqa: E731
    normed = lambda values, norm: values if norm is None else reference.normalise(values, norm.kind, norm.weight, None, norm.eps)  # noqa: E731
    steps = reference_mamba1.steps(times(normed(times(mixed, w.dt_down), w.dt_norm), w.dt_up), w.dt_bias)
    b, c = np.split(times(mixed, w.bc_proj), 2, axis=1)
    size = shape.values, shape.depth
    out, state = reference_mamba1.recur(mixed, steps, normed(b, w.b_norm), normed(c, w.c_norm), w.decay.reshape(size), w.skip,
                                        np.zeros(size))
    return reference_mamba1.gated(out, z), state.reshape(-1)


def rwkv_weights(shape: Rwkv7Shape) -> SimpleNamespace:
    return SimpleNamespace(k_k=normal(1, shape.values), k_a=normal(2, shape.values), r_k=normal(3, shape.values),
                           norm=SimpleNamespace(weight=normal(4, shape.values), bias=normal(5, shape.values), eps=shape.eps))


def rwkv_inputs(shape: Rwkv7Shape, products: list[np.ndarray]) -> None:
    _, k, _, decay, rate, _ = products
    k[2::3] = k[: len(k[2::3])]  # a token in three has the keys of an earlier one
    decay[::5], decay[::17] = -100, 100  # channels forget nothing, or as fast as any can
    rate[::7], rate[::11] = 100, -100  # all that lies in a direction is replaced, or taken out


def rwkv_expected(shape: Rwkv7Shape, w: SimpleNamespace, products: Arrays) -> tuple[np.ndarray, np.ndarray]:
    r, k, v, decay, rate, gate = products
    k, *gates = reference_rwkv7.gates(k, decay, rate, w.k_k, w.k_a, shape.heads)
    out, state = reference_rwkv7.recur(r, k, v, *gates, np.zeros((shape.heads, shape.head_dim, shape.head_dim)))
    return reference_rwkv7.finished(out, r, k, v, gate, w.r_k, w.norm.weight, w.norm.bias, shape.eps, shape.heads), state.reshape(-1)


KINDS = {Rwkv7Shape: Kind(rwkv_weights, rwkv_inputs, rwkv_expected),
         LightningShape: Kind(lightning_weights, lambda *_: None, lightning_expected),
         Mamba1Shape: Kind(mamba_1_weights, mamba_1_inputs, mamba_1_expected),
         Mamba2Shape: Kind(mamba_weights, mamba_inputs, mamba_expected),
         KdaShape: Kind(kda_weights, kda_inputs, kda_expected),
         DeltaShape: Kind(delta_weights, delta_inputs, delta_expected),
         ConvShape: Kind(lambda shape: SimpleNamespace(conv=normal(1, shape.taps, shape.width)), lambda *_: None, conv_expected)}


def weights(shape: StateShape) -> SimpleNamespace:
    return KINDS[type(shape)].weights(shape)


def inputs(shape: StateShape, tokens: int) -> Arrays:
    """A text's projections."""
    products = [normal(10 + i, tokens, width) for i, width in enumerate(shape.projection_widths)]
    KINDS[type(shape)].adjust(shape, products)
    return tuple(products)


def expected(shape: StateShape, products: Arrays) -> tuple[np.ndarray, np.ndarray]:
    """(outputs, last state) for a text from its beginning."""
    return KINDS[type(shape)].expected(shape, weights(shape), products)


class Layer:
    """A layer on a backend, run pass by pass from the beginning."""

    def __init__(self, ops: object, shape: StateShape) -> None:
        self.ops, self.shape, self.pass_slots = ops, shape, controls()
        self.states = ops.state_layer(shape, np.zeros(shape.nbytes, np.uint8), self.pass_slots)
        self.w = self._put(weights(shape))
        self.slot = NO_SLOT

    def _put(self, w: SimpleNamespace) -> SimpleNamespace:
        return SimpleNamespace(**{name: self._to_device(value) for name, value in vars(w).items()})

    def _to_device(self, value: object) -> object:
        if isinstance(value, Linear):
            weight = value.weight
            return Linear(Weight(weight.spec, weight.shape, {"data": self.ops.put(weight.parts["data"], "f32")}))
        if isinstance(value, Norm):
            return Norm(value.kind, self.ops.put(value.weight, "f32"), None, value.eps)
        if isinstance(value, np.ndarray):
            return self.ops.put(value, "f32")
        return self._put(value) if isinstance(value, SimpleNamespace) else value

    def run(self, products: Arrays, after: int = 0, keeps_state: bool = True) -> np.ndarray:
        target = 1 if self.slot == 0 else 0
        self.pass_slots[FROM], self.pass_slots[TO], self.pass_slots[AFTER], self.pass_slots[KEPT] = self.slot, target, after, 3
        device_products = [x.copy() if self.ops.name == "cpu" else torch.from_numpy(x) for x in products]
        out = np.array(self.ops.to_host(self.states.mix(device_products, self.w)))
        self.slot = target if keeps_state else self.slot
        return out

    def text(self, products: Arrays, cuts: list[int]) -> np.ndarray:
        self.slot = NO_SLOT
        ends = np.cumsum(cuts)
        assert ends[-1] == len(products[0])
        return np.concatenate([self.run(tuple(x[end - cut : end] for x in products)) for end, cut in zip(ends, cuts, strict=True)])

    def slot_values(self, slot: int) -> np.ndarray:
        return self.states.read_slot(slot).view(np.float32)

    def state(self) -> np.ndarray:
        """The current state, flat, without the convolution's inputs."""
        return self.slot_values(self.slot)[self.shape.state_offset :][: self.shape.state_floats]


def cpu(shape: StateShape, threads: int = 2, only: str | None = None) -> CpuOps:
    dims = Dims(64, 2, 1, 16, 64, 64, 128, 128, 4, recurrent=shape)
    return CpuOps(ThreadPool(threads), dims, default_registry(only))


def assert_close(result: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert result.shape == expected.shape
    assert not expected.size or np.abs(result - expected).max() <= tolerance * np.abs(expected).max()
