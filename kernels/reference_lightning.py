"""Reference for lightning attention, in NumPy and float64 (arXiv 2501.08313).

T tokens, H heads of width P. The state is S [H, P, P]. Per token: S decays by the head's constant, the outer product of value and key is
added, and the query reads S.
"""

from __future__ import annotations

import numpy as np

from .reference import activate, normalise


def recur(v: np.ndarray, k: np.ndarray, q: np.ndarray, decay: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """v, k and q [T, H, P]; decay [H], the factor left after a token -> (outputs [T, H, P], the last state)."""
    v, k, q, s, out = v.astype(np.float64), k.astype(np.float64), q.astype(np.float64), state.astype(np.float64), []
    for t in range(len(v)):
        s = s * decay[:, None, None] + v[t][:, :, None] * k[t][:, None]
        out.append(np.einsum("hpn,hn->hp", s, q[t]))
    return np.stack(out) if out else v, s


def activated(x: np.ndarray) -> np.ndarray:
    """SiLU of queries, keys and values."""
    return activate(x.astype(np.float64), "silu")


def normed_gates(out: np.ndarray, z: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """RMS norm of out [T, H P] over all heads, times sigmoid(z)."""
    return normalise(out, "rms", weight, None, eps) / (1 + np.exp(-z.astype(np.float64)))
