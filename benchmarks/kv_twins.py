"""Model variants that compute the same function with a cache that is harder to quantize. `verify` checks that exact outputs are unchanged.

- alpha: a RoPE pair of K times 64 in W_k, divided in W_q. - matrix: V ← M V, W_o ← W_o M⁻¹, a random M of condition number 64. - wake: from
the third page on a pair of K is 64 times as large, and the query's share of it as much smaller. No weight shows this: the harness scales
what the codec sees and undoes it after the codec. - bias: 10 times the head's deviation added to a pair of K before RoPE, as Qwen2's biases
do; the pair is the one that queries use least. This is a different function (RoPE makes the bias depend on distance), so this variant is
measured against its own exact outputs, and its loss against that of the same function with a cache that is no harder: `lifted`, where the
harness removes the bias from what the codec sees and adds it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import numpy as np
import torch
from torch import Tensor

from kv_codecs import PAGE
from kv_model import SINKS, Model

ALPHA, WAKE, CONDITION, DEVIATIONS = 64.0, 64.0, 64.0, 10.0
PAIR = 3  # a fast one


def _copy(model: Model) -> Model:
    twin = copy(model)
    twin.weights, twin.bias_k = dict(model.weights), {}
    return twin


def _set(model: Model, layer: int, name: str, value: Tensor) -> None:
    model.weights[f"layers.{layer}.self_attn.{name}.weight"] = value


def alpha(model: Model) -> Model:
    twin, size = _copy(model), model.head_dim
    factor = torch.ones(size)
    factor[[PAIR, PAIR + size // 2]] = ALPHA
    for layer in range(model.layers):
        _set(twin, layer, "k_proj", model.get(layer, "self_attn.k_proj") * factor.repeat(model.kv_heads)[:, None])
        _set(twin, layer, "q_proj", model.get(layer, "self_attn.q_proj") / factor.repeat(model.heads)[:, None])
    return twin


def matrix(model: Model) -> Model:
    twin, size, rng = _copy(model), model.head_dim, np.random.default_rng(0)
    for layer in range(model.layers):
        v = model.get(layer, "self_attn.v_proj").double().unflatten(0, (-1, size))
        o = model.get(layer, "self_attn.o_proj").double().unflatten(1, (-1, size))
        new_v, new_o = torch.empty_like(v), torch.empty_like(o)
        for head in range(model.kv_heads):
            left, right = (np.linalg.qr(rng.standard_normal((size, size)))[0] for _ in range(2))
            m = torch.from_numpy(left * np.geomspace(CONDITION**-0.5, CONDITION**0.5, size) @ right)
            new_v[head] = m @ v[head]
            for query in range(head * model.heads // model.kv_heads, (head + 1) * model.heads // model.kv_heads):
                new_o[:, query] = o[:, query] @ torch.linalg.inv(m)
        _set(twin, layer, "v_proj", new_v.flatten(0, 1).float())
        _set(twin, layer, "o_proj", new_o.flatten(1).float())
    return twin


def wake(model: Model, tokens: int = 8192) -> Model:
    twin = _copy(model)
    twin.wake = torch.ones(tokens, model.head_dim)
    twin.wake[SINKS + 2 * PAGE :, [PAIR, PAIR + model.head_dim // 2]] = WAKE
    return twin


def bias(model: Model) -> Model:
    twin, size = _copy(model), model.head_dim
    for layer in range(model.layers):
        gain = model.weights[f"layers.{layer}.input_layernorm.weight"]
        q, k = ((model.get(layer, f"self_attn.{side}_proj") * gain).unflatten(0, (-1, size)).square().sum(-1) for side in "qk")
        fast = size // 4
        use = q.unflatten(0, (model.kv_heads, -1)).sum(1)
        pair = (use[:, :fast] + use[:, size // 2 : size // 2 + fast]).argmin(-1)
        value = torch.zeros(model.kv_heads, size)
        for head in range(model.kv_heads):
            value[head, pair[head]] = DEVIATIONS * k[head].mean().sqrt()
        twin.bias_k[layer] = value
    return twin


def lifted(model: Model) -> Model:
    """The bias variant's function, with a codec that never sees the bias."""
    twin = bias(model)
    twin.lifts_bias = True
    return twin


TWINS: dict[str, Callable[[Model], Model]] = {"alpha": alpha, "matrix": matrix, "wake": wake, "lifted": lifted, "bias": bias}
EASIER = {"bias": "lifted"}  # what a twin is compared with, where that is not the model


def verify(model: Model, twin: Model, ids: np.ndarray) -> float:
    """The largest difference of exact logits, divided by their standard deviation."""
    with torch.inference_mode():
        a, b = (one.logits(one.exact(torch.from_numpy(ids))[0]) for one in (model, twin))
    return float((a - b).abs().max() / a.std())
