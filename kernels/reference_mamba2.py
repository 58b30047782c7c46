"""Reference for Mamba 2, in NumPy and float64 (arXiv 2405.21060).

T tokens, H heads of width P in G groups, N state values per channel. The state is S [H, P, N]. Per token: S decays, the token's values
times B are added, and C reads S. Convolution as in `reference_delta.py`.
"""

from __future__ import annotations

import numpy as np

from .reference import activate, normalise


def steps(raw: np.ndarray, decay: np.ndarray, dt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(decay factor of S, step), [T, H] each, from raw [T, H]: the step is softplus(raw + dt)."""
    step = np.logaddexp(0, raw.astype(np.float64) + dt)
    return np.exp(-decay * step), step


def recur(x: np.ndarray, b: np.ndarray, c: np.ndarray, decay: np.ndarray, step: np.ndarray, skip: np.ndarray,
          state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x [T, H, P], b and c [T, G, N], decay and step [T, H], skip [H] -> (outputs [T, H, P], state after the last token)."""
    group_of = np.arange(x.shape[1]) * b.shape[1] // x.shape[1]
    x, b, c = x.astype(np.float64), b.astype(np.float64)[:, group_of], c.astype(np.float64)[:, group_of]
    s, out = state.astype(np.float64), []
    for t in range(len(x)):
        s = s * decay[t][:, None, None] + (step[t][:, None] * x[t])[:, :, None] * b[t][:, None]
        out.append(np.einsum("hpn,hn->hp", s, c[t]) + skip[:, None] * x[t])
    return np.stack(out) if out else x, s


def gated_norm(out: np.ndarray, z: np.ndarray, weight: np.ndarray | None, groups: int, eps: float) -> np.ndarray:
    """out [T, H P] times silu(z), then an RMS norm per group of channels, if there is a norm."""
    gated = (out * activate(z.astype(np.float64), "silu")).reshape(len(out), groups, -1)
    if weight is None:
        return gated.reshape(out.shape)
    return normalise(gated, "rms", np.ones(1), None, eps).reshape(out.shape) * weight
