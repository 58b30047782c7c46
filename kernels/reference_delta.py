"""The meaning of a gated delta rule's ops, in NumPy and float64 (Gated Delta Networks, arXiv 2412.06464; with a decay for every channel of
a key Kimi Delta Attention, arXiv 2510.26692).

T tokens, C channels, H heads of keys, G of values, each of which reads the keys of head g * H // G, or g mod H where they are tiled,
widths dk and dv. S [G, dv, dk] is the state: what it returns for a key is S k. A token lets it decay, sees how far its value is from what
S returns for its key, and writes the share beta of the difference there; then its query reads.
"""

from __future__ import annotations

import numpy as np

from .reference import activate, normalise

KEY_EPS = 1e-6  # beside the squares of a query or key


def convolve(x: np.ndarray, before: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """silu of the causal convolution of x [T, C] behind `before` [taps - 1, C], channel by channel: weight [taps, C], the last of `x`;
    `bias` [C]."""
    taps = len(weight)
    whole = np.concatenate([before, x]).astype(np.float64)
    made = sum(weight[tap] * whole[tap : tap + len(x)] for tap in range(taps))
    return activate(made if bias is None else made + bias, "silu")


def unit(heads: np.ndarray) -> np.ndarray:
    """[..., dk] -> as long as one."""
    return heads / np.sqrt((heads * heads).sum(-1, keepdims=True) + KEY_EPS)


def gates(a: np.ndarray, b: np.ndarray, decay: np.ndarray, dt: np.ndarray, writes: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """(what S is multiplied by, beta), [T, G] each: exp(-decay * softplus(a + dt)) and writes * sigmoid(b)."""
    a, b = a.astype(np.float64) + dt, b.astype(np.float64)
    return np.exp(-decay * np.logaddexp(0, a)), writes / (1 + np.exp(-b))


def channel_gates(a: np.ndarray, b: np.ndarray, decay: np.ndarray, dt: np.ndarray,
                  bound: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """As `gates` of a and dt with every channel of a key, [T, G * dk] and [G * dk]; the decays are [T, G * dk] then. With a `bound` below 0
    they are exp(bound * sigmoid(decay * (a + dt)))."""
    rate = np.repeat(decay, a.shape[1] // len(decay))
    made, beta = gates(a, b, rate, dt)
    return (made if bound is None else np.exp(bound * np.exp(-np.logaddexp(0, -rate * (a.astype(np.float64) + dt))))), beta


def recur(q: np.ndarray, k: np.ndarray, v: np.ndarray, decay: np.ndarray, beta: np.ndarray,
          state: np.ndarray, tiled: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """q, k [T, H, dk], v [T, G, dv], decay [T, G], or [T, G * dk] with one for every channel, beta [T, G] -> (what was read [T, G, dv],
    the state behind the last token)."""
    heads, own = np.arange(v.shape[1]), k.shape[1]
    reads = heads % own if tiled else heads * own // len(heads)
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
    """rms norm of every head of out [T, G, dv], then times silu(z)."""
    return normalise(out, "rms", weight, None, eps) * activate(z.astype(np.float64), "silu")


def sigmoid_norm(out: np.ndarray, z: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """`gated_norm` with the sigmoid alone."""
    return normalise(out, "rms", weight, None, eps) / (1 + np.exp(-z.astype(np.float64)))
