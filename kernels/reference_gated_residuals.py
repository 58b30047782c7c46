"""Reference for gated residuals (Qwen 4) in float64: each token has several streams; a branch reads a gated mean of them, and its output is
added to each by per-token weights.

`streams` [T, S, D], each stream with its own norm. A low-rank projection of all streams gives a gate per channel and stream; another
projection gives the weight with which each stream receives the branch's output.
"""

from __future__ import annotations

import numpy as np

from .reference import activate, normalise


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x.astype(np.float64)))


def normed(streams: np.ndarray, weight: np.ndarray, eps: float, kind: str = "rms+1") -> np.ndarray:
    """Every stream after its norm; weight [S * D]."""
    weights = weight.reshape(streams.shape[1:])
    return np.stack([normalise(streams[:, s], kind, weights[s], None, eps) for s in range(len(weights))], 1)


def gates(projected: np.ndarray, up: np.ndarray, count: int) -> np.ndarray:
    """Gate logits per channel and stream [T, S * D], from the low-rank projection `projected` [T, R] and `up` [S * D, R]."""
    return activate(projected.astype(np.float64) / count, "silu") @ up.astype(np.float64).T


def read(streams: np.ndarray, opened: np.ndarray) -> np.ndarray:
    """The branch's input [T, D] from normed streams [T, S, D]; `opened`: as from `gates`."""
    return (sigmoid(opened).reshape(streams.shape) * streams.astype(np.float64)).mean(1)


def written(streams: np.ndarray, branch: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """Streams after a branch's output [T, D] has been added with weights `logits` [T, S]."""
    return streams.astype(np.float64) + 2 * sigmoid(logits / streams.shape[1])[..., None] * branch[:, None].astype(np.float64)
