"""Reference for gated delta rules, in NumPy and float64 (Gated Delta Networks, arXiv 2412.06464; with per-channel decay Kimi Delta
Attention, arXiv 2510.26692).

T tokens, C channels, H key heads, G value heads; value head g reads key head g * H // G, or g mod H if `tiled`. Widths dk and dv. The state
S [G, dv, dk] maps a key k to S k. Per token: S decays, the error between the token's value and S k is computed, and beta times the error is
written for that key; then the query reads S.
"""

from __future__ import annotations

import numpy as np

from .reference import activate, normalise

KEY_EPS = 1e-6  # added to the squared norm of a query or key


def convolve(x: np.ndarray, before: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """SiLU of the causal depthwise convolution of x [T, C], following `before` [taps - 1, C]: weight [taps, C], the last tap for the token
    itself; `bias` [C]."""
    taps = len(weight)
    inputs = np.concatenate([before, x]).astype(np.float64)
    sums = sum(weight[tap] * inputs[tap : tap + len(x)] for tap in range(taps))
    return activate(sums if bias is None else sums + bias, "silu")


def unit(heads: np.ndarray) -> np.ndarray:
    """[..., dk] normalized to unit length."""
    return heads / np.sqrt((heads * heads).sum(-1, keepdims=True) + KEY_EPS)


def gates(a: np.ndarray, b: np.ndarray, decay: np.ndarray, dt: np.ndarray, writes: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """(decay factor of S, beta), [T, G] each: exp(-decay * softplus(a + dt)) and writes * sigmoid(b)."""
    a, b = a.astype(np.float64) + dt, b.astype(np.float64)
    return np.exp(-decay * np.logaddexp(0, a)), writes / (1 + np.exp(-b))


def channel_gates(a: np.ndarray, b: np.ndarray, decay: np.ndarray, dt: np.ndarray,
                  bound: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """As `gates`, but a and dt, [T, G * dk] and [G * dk], have an entry per key channel; so do the decays [T, G * dk]. With a `bound` below
    0 they are exp(bound * sigmoid(decay * (a + dt)))."""
    rate = np.repeat(decay, a.shape[1] // len(decay))
    decays, beta = gates(a, b, rate, dt)
    return (decays if bound is None else np.exp(bound * np.exp(-np.logaddexp(0, -rate * (a.astype(np.float64) + dt))))), beta


def recur(q: np.ndarray, k: np.ndarray, v: np.ndarray, decay: np.ndarray, beta: np.ndarray,
          state: np.ndarray, tiled: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """q, k [T, H, dk], v [T, G, dv], decay [T, G] or, per channel, [T, G * dk], beta [T, G] -> (outputs [T, G, dv], state after the last
    token)."""
    heads, key_heads = np.arange(v.shape[1]), k.shape[1]
    reads = heads % key_heads if tiled else heads * key_heads // len(heads)
    q, k = (unit(side.astype(np.float64))[:, reads] for side in (q, k))
    q, s, out = q * q.shape[-1] ** -0.5, state.astype(np.float64), np.zeros(v.shape)
    decay = decay.reshape(*beta.shape, 1, -1)
    for t in range(len(v)):
        s = s * decay[t]
        difference = (v[t] - np.einsum("gvk,gk->gv", s, k[t])) * beta[t][:, None]
        s = s + difference[:, :, None] * k[t][:, None]
        out[t] = np.einsum("gvk,gk->gv", s, q[t])
    return out, s


def gated_norm(out: np.ndarray, z: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm of each head of out [T, G, dv], times silu(z)."""
    return normalise(out, "rms", weight, None, eps) * activate(z.astype(np.float64), "silu")


def sigmoid_norm(out: np.ndarray, z: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """`gated_norm` with sigmoid in place of SiLU."""
    return normalise(out, "rms", weight, None, eps) / (1 + np.exp(-z.astype(np.float64)))
