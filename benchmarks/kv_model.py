"""A Llama in float32 torch whose attention reads quantized K and V wherever a cache would hold packed pages. Teacher-forced.

A query at p sees as packed every page that ends at p - W or earlier, W = 128, and the first S = 64 tokens and the rest exactly: all queries
of one 128-token stretch of the page grid see the same, so a stretch is one attention call over sinks, packed pages and exact tokens.
Queries before the first packed page equal the reference and are taken from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from effllm.quant.kv_basis import KVBasis
from effllm.quant.kv_noise_cost import AttentionParams, Moments, trial_costs
from effllm.runtime.config import read_config
from effllm.runtime.kv.kv_profile import Profile
from effllm.runtime.kv.kv_recording import QUERIES_PER_WINDOW, repeat_first_half
from effllm.runtime.tokenizer import Tokenizer
from kv_codecs import PAGE

SINKS, WINDOW = 64, 128
FIRST = SINKS + PAGE + WINDOW  # the first query that sees a packed page
BATCH = 4  # windows at once
NUM_TRIALS = 4  # windows of a profile on which bits are tried


class KV(Protocol):
    """A codec of ours or of another program."""

    def keys(self, layer: int, before: Tensor, turn: Callable[[Tensor], Tensor]) -> Tensor: ...
    def values(self, layer: int, v: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Score:
    """Against the exact cache, `[window, token]`: KL divergence in nats, and whether the likeliest next token is another one."""

    each: np.ndarray
    flipped: np.ndarray

    @property
    def kld(self) -> float:
        return float(self.each.mean(dtype=np.float64))

    @property
    def error(self) -> float:
        """Standard error of the mean, over windows."""
        return float(self.each.mean(1, dtype=np.float64).std(ddof=1) / len(self.each) ** 0.5)

    @property
    def flips(self) -> float:
        return float(self.flipped.mean())

    def below(self, share: float) -> float:
        """The divergence that `share` of the tokens stay below."""
        return float(np.quantile(self.each, share))


class Model:
    """`wake`: factor on a RoPE pair of K from some token on (`kv_twins`), which the query undoes: visible to a codec, but not to
    the function."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.layers, self.heads, self.kv_heads = (config[f"num_{key}"] for key in ("hidden_layers", "attention_heads", "key_value_heads"))
        self.head_dim, self.eps, self.folder = config["head_dim"], config["rms_norm_eps"], folder
        self.theta = read_config(folder).ropes[0].theta
        self.weights = {name.removeprefix("model."): value.float() for name, value in load_file(folder / "model.safetensors").items()}
        self.bias_k: dict[int, Tensor] = {}
        self.wake: Tensor | None = None  # [tokens, head_dim]
        self.lifts_bias = False  # is the bias of K kept from the codec?

    def get(self, layer: int, name: str) -> Tensor:
        return self.weights[f"layers.{layer}.{name}.weight"]

    def turns(self, first: int, count: int) -> Callable[[Tensor], Tensor]:
        """RoPE at positions first … first + count - 1."""
        half = self.head_dim // 2
        rates = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(first, first + count, dtype=torch.float64)[:, None] * rates
        cos, sin = angle.cos().float(), angle.sin().float()

        def turn(x: Tensor) -> Tensor:
            a, b = x[..., :half], x[..., half:]
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        return turn

    def norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weights[f"{name}.weight"], self.eps)

    def project(self, layer: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v `[window, head, token, head_dim]`, before RoPE."""
        x = self.norm(x, f"layers.{layer}.input_layernorm")
        q, k, v = ((x @ self.get(layer, f"self_attn.{side}_proj").T).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for side in "qkv")
        return q, k + self.bias_k[layer][None, :, None] if layer in self.bias_k else k, v

    def finish(self, layer: int, x: Tensor, o: Tensor) -> Tensor:
        x = x + o.transpose(1, 2).flatten(2) @ self.get(layer, "self_attn.o_proj").T
        h = self.norm(x, f"layers.{layer}.post_attention_layernorm")
        gate, up = (h @ self.get(layer, f"mlp.{name}_proj").T for name in ("gate", "up"))
        return x + (F.silu(gate) * up) @ self.get(layer, "mlp.down_proj").T

    def logits(self, x: Tensor) -> Tensor:
        return self.norm(x, "norm") @ self.weights.get("lm_head.weight", self.weights["embed_tokens.weight"]).T

    def exact(self, ids: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Final states `[window, token, width]` and (K before RoPE, V) of every layer."""
        turn, x, kept = self.turns(0, ids.shape[1]), self.weights["embed_tokens.weight"][ids], []
        for layer in range(self.layers):
            q, k, v = self.project(layer, x)
            kept.append((k, v))
            x = self.finish(layer, x, F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True, enable_gqa=True))
        return x, kept


class Harness:
    """One model on one set of windows `[window, token]`, tokens a multiple of the page grid; keeps the exact run's answers."""

    def __init__(self, model: Model, ids: np.ndarray) -> None:
        self.model, self.ids = model, torch.from_numpy(ids)
        self.length = ids.shape[1]
        assert (self.length - FIRST) % PAGE == 0 and self.length > FIRST
        self.prefix, self.states = [], []
        with torch.inference_mode():
            for start in range(0, len(ids), BATCH):
                x, kept = model.exact(self.ids[start : start + BATCH])
                self.prefix.append([(k[:, :, :FIRST].clone(), v[:, :, :FIRST].clone()) for k, v in kept])
                self.states.append(x[:, FIRST:].clone())

    @torch.inference_mode()
    def score(self, kv: KV) -> Score:
        each, flipped = [], []
        for at, states in enumerate(self.states):
            there, here = self.model.logits(states).log_softmax(-1), self._logits(kv, at).log_softmax(-1)
            flipped.append((there.argmax(-1) != here.argmax(-1)).numpy())
            each.append((there.exp() * (there - here)).sum(-1).numpy())
        return Score(np.concatenate(each), np.concatenate(flipped))

    def _logits(self, kv: KV, at: int) -> Tensor:
        model, ids = self.model, self.ids[at * BATCH : (at + 1) * BATCH]
        packed = self.length - WINDOW - PAGE  # tokens packed for the last stretch of queries
        turn, turn_queries = model.turns(0, self.length), model.turns(FIRST, self.length - FIRST)
        turn_packed = model.turns(SINKS, packed - SINKS)
        gain = None if model.wake is None else model.wake[SINKS:packed]
        mask = torch.ones(PAGE, PAGE, dtype=torch.bool).tril()
        x = model.weights["embed_tokens.weight"][ids[:, FIRST:]]
        for layer in range(model.layers):
            q, k, v = model.project(layer, x)
            k, v = (torch.cat([old, new], 2) for old, new in zip(self.prefix[at][layer], (k, v), strict=True))
            q, before, after = turn_queries(q), k[:, :, SINKS:packed], turn(k)
            if model.lifts_bias:
                added = model.bias_k[layer][None, :, None].expand_as(before)
                k_packed = kv.keys(layer, before - added, turn_packed) + turn_packed(added)
            elif gain is None:
                k_packed = kv.keys(layer, before, turn_packed)
            else:
                k_packed = kv.keys(layer, before * gain, turn_packed) / gain
            v_packed = kv.values(layer, v[:, :, SINKS:packed])
            o = []
            for stretch in range((self.length - FIRST) // PAGE):
                seen, end = PAGE * (stretch + 1), FIRST + PAGE * (stretch + 1)
                keys, values = (torch.cat([exact[:, :, :SINKS], approximate[:, :, :seen], exact[:, :, SINKS + seen : end]], 2)
                                for exact, approximate in ((after, k_packed), (v, v_packed)))
                allowed = torch.cat([torch.ones(PAGE, end - PAGE, dtype=torch.bool), mask], 1)
                queries = q[:, :, PAGE * stretch : PAGE * (stretch + 1)]
                o.append(F.scaled_dot_product_attention(queries, keys, values, allowed, enable_gqa=True))
            x = model.finish(layer, x, torch.cat(o, 2))
        return model.logits(x)


def text_windows(folder: Path, text: str, count: int, length: int) -> np.ndarray:
    """The first `count` windows of a text, int64 [count, length]. Raises ValueError for a text too short."""
    ids = Tokenizer.load(folder, read_config(folder)).encode(text)
    if len(ids) < count * length:
        raise ValueError(f"{len(ids)} tokens of text, {count} windows of {length} are wanted")
    return np.array(ids[: count * length], np.int64).reshape(count, length)


def balance(model: Model) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """From the weights alone, per layer: K's powers of two and V's `[KV head, head_dim]`, V's matrix `[KV head, head_dim, head_dim]`.

    K: (E k² / E q²)^¼ of a RoPE pair. V: T with T A Tᵀ = T⁻ᵀ B T⁻¹ diagonal, A the second moment of V and B that of o's columns for
    an input of unit variance: the noise that a code adds then counts equally wherever it falls."""
    k_scale, v_scale, v_matrix = [], [], []
    size, group = model.head_dim, model.heads // model.kv_heads
    for layer in range(model.layers):
        gain = model.weights[f"layers.{layer}.input_layernorm.weight"]
        q, k, v = ((model.get(layer, f"self_attn.{side}_proj") * gain).double().unflatten(0, (-1, size)) for side in "qkv")
        o = model.get(layer, "self_attn.o_proj").double().unflatten(1, (-1, size)).permute(1, 2, 0)  # head, channel, width
        power_k = _pairs(k.square().sum(-1))
        power_q = _pairs(q.square().sum(-1).unflatten(0, (-1, group)).sum(1))
        k_scale.append(torch.exp2(torch.round(torch.log2(power_k / power_q) / 4)).float())
        a = v @ v.transpose(1, 2)
        b = (o @ o.transpose(1, 2)).unflatten(0, (-1, group)).sum(1)
        v_scale.append(torch.exp2(torch.round(torch.log2(a.diagonal(0, 1, 2) / b.diagonal(0, 1, 2)) / 4)).float())
        root = torch.linalg.cholesky(a)
        u, s, _ = torch.linalg.svd(root.transpose(1, 2) @ b @ root)  # s: squares of what T leaves on the diagonal
        v_matrix.append((s.pow(0.25)[..., None] * u.transpose(1, 2) @ torch.linalg.inv(root)).float())
    return k_scale, v_scale, v_matrix


def _pairs(power: Tensor) -> Tensor:
    half = power.shape[-1] // 2
    return (power[..., :half] + power[..., half:]).repeat(1, 2)


def static_mean(model: Model, ids: np.ndarray) -> Tensor:
    """The mean of K before RoPE `[layer, KV head, head_dim]` over a calibration text."""
    with torch.inference_mode():
        _, kept = model.exact(torch.from_numpy(ids))
    return torch.stack([k.mean((0, 2)) for k, _ in kept])


def profile(model: Model, ids: np.ndarray, num_trials: int = NUM_TRIALS) -> Profile:
    """The profile that `effllm eval kv-profile` records for a text, by the same code, through this model.

    num_trials: windows on which bits are tried.
    """
    turn, rows = model.turns(0, ids.shape[1]), np.unique(np.linspace(FIRST, ids.shape[1] - 1, QUERIES_PER_WINDOW).astype(np.int64))
    moments, reading = [Moments(model.kv_heads, model.head_dim) for _ in range(model.layers)], AttentionParams(model.head_dim**-0.5)
    seen = [Moments(model.kv_heads, model.head_dim) for _ in range(model.layers)] if model.lifts_bias else moments
    kept: list[list[tuple[np.ndarray, ...]]] = [[] for _ in moments]
    with torch.inference_mode():
        for number, plain in enumerate(ids):
            window = torch.tensor(repeat_first_half(plain) if number % 2 == 0 else plain)
            x = model.weights["embed_tokens.weight"][window[None]]
            for layer in range(model.layers):
                q, k, v = model.project(layer, x)
                q, k, w = turn(q), turn(k), model.get(layer, "self_attn.o_proj")
                o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                power = (x + o.transpose(1, 2).flatten(2) @ w.T).square().sum(-1).mean()
                x, out = model.finish(layer, x, o), w.unflatten(1, (-1, model.head_dim)).transpose(0, 1)
                gram = (out.transpose(1, 2) @ out / power).double().numpy()
                recorded = (q[0, :, rows].numpy(), k[0].numpy(), v[0].numpy(), gram, rows)
                moments[layer].add(*recorded, reading)
                if model.lifts_bias:
                    plain_k = k[0] - turn(model.bias_k[layer][:, None].expand_as(k[0]))
                    seen[layer].add(recorded[0], plain_k.numpy(), *recorded[2:], reading)
                if number < num_trials:
                    kept[layer].append(recorded)
    bases = []
    for moments_of_k, basis_moments in zip(moments, seen, strict=True):
        (k_moment, *_, k_page), (_, price_k, v_moment, price_v, _) = basis_moments.means, moments_of_k.means
        bases.append(KVBasis.from_moments(k_moment, price_k, v_moment, price_v, k_page))
    costs = []
    for basis, windows in zip(bases, kept, strict=True):
        trial_results = [trial_costs(*recorded, reading, basis) for recorded in windows]
        costs.append(tuple(np.mean(costs_of_side, 0) for costs_of_side in zip(*trial_results, strict=True)))
    return Profile(tuple(bases), tuple(costs), "", ids.size)
