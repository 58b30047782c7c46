"""Reference implementations of the ops, in NumPy and float64: they define each op, and fast kernels are tested against them.

They are also the last candidate of the CPU registry: slow, but they accept everything. Shapes: T tokens, N out, K in, H query heads, D head
size.
"""

from __future__ import annotations

import math

import numpy as np

from .layout import SILU_LIMIT, SWISH_LIMIT, SWISH_SLOPE, bound_of

_erf = np.vectorize(math.erf, otypes=[np.float64])


def widen(data: np.ndarray, stored: str) -> np.ndarray:
    """Stored values (bf16 and f16 as uint16) -> float64."""
    if stored == "bf16":
        return (data.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return (data.view(np.float16) if stored == "f16" else data).astype(np.float64)

CURVE_SLOPE, CURVE_EDGE = 0.5, -1e-6  # beta and eps of xIELU, the same in every model

def normalise(x: np.ndarray, kind: str, weight: np.ndarray | None, bias: np.ndarray | None, eps: float) -> np.ndarray:
    """x[..., K] normalized over the last axis; `kind`: rms, rms+1 (weight stored minus one), layer, none."""
    x = x.astype(np.float64)
    if kind == "none":
        return x
    if kind == "layer":
        x = x - x.mean(-1, keepdims=True)
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
        return y * (1 if weight is None else weight) + (0 if bias is None else bias)
    y = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return y * (weight.astype(np.float64) + (1.0 if kind == "rms+1" else 0.0))


def linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """x[T, K] @ weight[N, K].T + bias, weight already widened."""
    y = x.astype(np.float64) @ weight.T
    return y if bias is None else y + bias


def activate(x: np.ndarray, kind: str) -> np.ndarray:
    """silu, gelu (exact), gelu_tanh, relu, relu2 (its square), none; clamped_swish, clamped_silu and silu with a bound apply to gates, see
    `gated`."""
    if (bound := bound_of(kind)) is not None:
        return np.minimum(activate(x, "silu"), bound)
    if kind == "silu":
        return x / (1 + np.exp(-x))
    if kind == "gelu":
        return 0.5 * x * (1 + _erf(x / math.sqrt(2)))
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if kind == "clamped_swish":
        x = np.minimum(x, SWISH_LIMIT)
        return x / (1 + np.exp(-SWISH_SLOPE * x))
    if kind == "clamped_silu":
        x = np.minimum(x, SILU_LIMIT)
        return x / (1 + np.exp(-x))
    if kind == "relu2":
        return np.maximum(x, 0) ** 2
    return np.maximum(x, 0) if kind == "relu" else x


def curved(x: np.ndarray, above: float, below: float) -> np.ndarray:
    """xIELU (arXiv 2411.13010): x / 2 + above * x squared, and below zero x / 2 + below * (exp(x) - 1 - x)."""
    x = x.astype(np.float64)
    return CURVE_SLOPE * x + np.where(x > 0, above * x * x, below * (np.expm1(np.minimum(x, CURVE_EDGE)) - x))


def gated(gate: np.ndarray, up: np.ndarray, kind: str) -> np.ndarray:
    """act(gate) * up. clamped_swish clamps `up` to its limit on both sides and adds 1 to it; clamped_silu and silu with a bound clamp `up`
    to theirs."""
    if (bound := bound_of(kind)) is not None:
        return activate(gate, kind) * np.clip(up, -bound, bound)
    if kind == "clamped_silu":
        return activate(gate, kind) * np.clip(up, -SILU_LIMIT, SILU_LIMIT)
    return activate(gate, kind) * (np.clip(up, -SWISH_LIMIT, SWISH_LIMIT) + 1 if kind == "clamped_swish" else up)


def add_branch(stream: np.ndarray, branch: np.ndarray, norm: tuple | None, factor: float) -> np.ndarray:
    """stream + factor * norm(branch); `norm` are the arguments of `normalise` after x, None for none."""
    branch = branch.astype(np.float64)
    return stream + factor * (branch if norm is None else normalise(branch, *norm))


def rotate_heads(y: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool = False) -> np.ndarray:
    """Rotary embedding of y[T, H, D] by cos, sin [T, R/2]: channels i and i + R/2 of the first R are rotated together, the rest unchanged.
    With `interleaved` the pairs are 2i and 2i + 1, and come out as i and i + R/2."""
    y = y.astype(np.float64)
    half = cos.shape[1]
    low, high, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
    if interleaved:
        low, high = y[..., : 2 * half : 2], y[..., 1 : 2 * half : 2]
    c, s = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    return np.concatenate([low * c - high * s, high * c + low * s, rest], -1)


def grown_heads(y: np.ndarray, logs: np.ndarray, scales: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """y[T, H, D], each head scaled by a factor that grows with the logarithm of the token's position, logs [T]: scales [H] times it, plus
    offsets [H]."""
    return y * (logs.astype(np.float64)[:, None] * scales + offsets)[..., None]


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, first: np.ndarray, scale: float, window: int | None,
           softcap: float | None, sinks: np.ndarray | None = None, ends: np.ndarray | None = None,
           among: np.ndarray | None = None, seen: np.ndarray | None = None) -> np.ndarray:
    """Attention of q[T, H, D] at positions `position`... over k and v [n, KVH, D] at positions `first`[n] -> [T, H, D].

    A query sees keys up to its own position and, with a window, later than its position minus the window. `sinks` [H]: a logit per head
    that joins the softmax, neither scaled nor capped nor masked, and has no value. `ends` [T]: the last position that each query sees, if
    not its own; `among` [T]: which tokens from `position` on are visible to earlier queries, 0 for those that are not; None for all. `seen`
    bool [T, KVH, n]: which of those keys a query sees (`reference_indexer.py`); None for all.
    """
    tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    k, v = (np.repeat(side.astype(np.float64), group, axis=1) for side in (k, v))
    scores = q.astype(np.float64).swapaxes(0, 1) @ k.transpose(1, 2, 0) * scale  # [H, T, n]
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    at = position + np.arange(tokens)[:, None]
    hidden = first[None] > (at if ends is None else ends[:, None])
    if among is not None:
        hidden |= (first[None] > at) & (among[np.clip(first - position, 0, tokens - 1)] == 0)
    if window:
        hidden |= first[None] <= at - window
    hidden = hidden[None] if seen is None else hidden[None] | ~np.repeat(seen, group, axis=1).swapaxes(0, 1)
    scores = np.where(hidden, -np.inf, scores)
    sink_logits = np.full(heads, -np.inf) if sinks is None else sinks.astype(np.float64)
    top = np.maximum(scores.max(-1, keepdims=True), sink_logits[:, None, None])
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True) + np.exp(sink_logits[:, None, None] - top)
    return (weights / total @ v.swapaxes(0, 1)).swapaxes(0, 1)
