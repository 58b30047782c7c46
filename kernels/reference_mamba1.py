"""The meaning of a Mamba layer's ops, in NumPy and float64 (arXiv 2312.00752).

T tokens, V channels, N numbers a channel. S [V, N] is the state: a token lets every number decay by its own share, adds its values times
its step and B, and reads what its C finds. Convolution as in `reference_delta.py`.
"""

from __future__ import annotations

import numpy as np

from .reference import activate


def steps(raw: np.ndarray, dt: np.ndarray) -> np.ndarray:
    """softplus(raw + dt), [T, V]."""
    return np.logaddexp(0, raw.astype(np.float64) + dt)


def recur(x: np.ndarray, step: np.ndarray, b: np.ndarray, c: np.ndarray, decay: np.ndarray, skip: np.ndarray,
          state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x and step [T, V], b and c [T, N], decay [V, N], skip [V] -> (what was read [T, V], the state behind the last token)."""
    s, out = state.astype(np.float64), np.zeros(x.shape)
    for t in range(len(x)):
        s = s * np.exp(-decay * step[t][:, None].astype(np.float64)) + (step[t] * x[t].astype(np.float64))[:, None] * b[t]
        out[t] = s @ c[t].astype(np.float64) + skip * x[t]
    return out, s


def gated(out: np.ndarray, z: np.ndarray) -> np.ndarray:
    """out [T, V] times silu(z)."""
    return out * activate(z.astype(np.float64), "silu")
