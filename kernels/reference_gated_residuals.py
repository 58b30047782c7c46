"""What gated residuals mean (Qwen 4): streams of a token of which a branch reads a gated mean and to which it is added by numbers of the
token's own. In float64.

`streams` [T, S, D] lie side by side, each with a norm of its own. What all of them say goes through few numbers to a gate for every channel
of every stream; another product says how much of a branch each stream gets.
"""

from __future__ import annotations

import numpy as np

from .reference import activate, normalise


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x.astype(np.float64)))


def normed(streams: np.ndarray, weight: np.ndarray, eps: float, kind: str = "rms+1") -> np.ndarray:
    """Every stream under its norm; weight [S * D]."""
    own = weight.reshape(streams.shape[1:])
    return np.stack([normalise(streams[:, s], kind, own[s], None, eps) for s in range(len(own))], 1)


def gates(said: np.ndarray, up: np.ndarray, count: int) -> np.ndarray:
    """What opens a channel of a stream, before the sigmoid: [T, S * D] of the few numbers `said` [T, R] and `up` [S * D, R]."""
    return activate(said.astype(np.float64) / count, "silu") @ up.astype(np.float64).T


def read(streams: np.ndarray, opened: np.ndarray) -> np.ndarray:
    """What a branch reads of normed streams [T, S, D], [T, D]; `opened`: as of `gates`."""
    return (sigmoid(opened).reshape(streams.shape) * streams.astype(np.float64)).mean(1)


def written(streams: np.ndarray, branch: np.ndarray, said: np.ndarray) -> np.ndarray:
    """The streams behind a branch [T, D] of which they `said` [T, S]."""
    return streams.astype(np.float64) + 2 * sigmoid(said / streams.shape[1])[..., None] * branch[:, None].astype(np.float64)
