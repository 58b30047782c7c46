"""Reference for Mamba, in NumPy and float64 (arXiv 2312.00752).

T tokens, V channels, N state values per channel. The state is S [V, N]. Per token: every state value decays by its own factor, the token's
value times step and B is added, and C reads S. Convolution as in `reference_delta.py`.
"""

from __future__ import annotations

import numpy as np

from .reference import activate


def steps(raw: np.ndarray, dt: np.ndarray) -> np.ndarray:
    """softplus(raw + dt), [T, V]."""
    return np.logaddexp(0, raw.astype(np.float64) + dt)


def recur(x: np.ndarray, step: np.ndarray, b: np.ndarray, c: np.ndarray, decay: np.ndarray, skip: np.ndarray,
          state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x and step [T, V], b and c [T, N], decay [V, N], skip [V] -> (outputs [T, V], state after the last token)."""
    s, out = state.astype(np.float64), np.zeros(x.shape)
    for t in range(len(x)):
        s = s * np.exp(-decay * step[t][:, None].astype(np.float64)) + (step[t] * x[t].astype(np.float64))[:, None] * b[t]
        out[t] = s @ c[t].astype(np.float64) + skip * x[t]
    return out, s


def gated(out: np.ndarray, z: np.ndarray) -> np.ndarray:
    """out [T, V] times silu(z)."""
    return out * activate(z.astype(np.float64), "silu")
