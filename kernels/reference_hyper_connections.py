"""Reference for manifold-constrained hyper-connections (Xie et al. 2026, mHC) in float64: token streams mixed by per-token weights.

`streams` [T, S, D]. A branch reads a weighted sum of them and its output is added to all; in between the streams are mixed by a matrix made
approximately doubly stochastic by a few Sinkhorn iterations.
"""

from __future__ import annotations

import numpy as np

from .reference import normalise


def said(streams: np.ndarray, matrix: np.ndarray, eps: float) -> np.ndarray:
    """Mixing logits [T, N]: matrix [N, S * D] @ streams, divided by the streams' root mean square."""
    flat = streams.reshape(len(streams), -1)
    return normalise(flat, "rms", np.ones(flat.shape[1]), None, eps) @ matrix.astype(np.float64).T


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))


def numbers(logits: np.ndarray, scale: np.ndarray, base: np.ndarray, count: int, epsilon: float,
            rounds: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From logits `logits` [T, S * (2 + S)]: the branch's read weights [T, S], its write weights [T, S], and the stream mixing matrix [T,
    S, S], row by row; `scale` [3] and `base` [S * (2 + S)]. `epsilon` is added to divisors. Without `rounds` streams are not mixed:
    `logits` is [T, 2 * S], there is no mixing matrix, and `epsilon` is added to the write weights too."""
    if not rounds:
        (reads, writes), (of_reads, of_writes) = np.split(logits.astype(np.float64), 2, axis=1), np.split(base.astype(np.float64), 2)
        return (_sigmoid(reads * scale[0] + of_reads) + epsilon, 2 * _sigmoid(writes * scale[1] + of_writes) + epsilon,
                np.empty((len(logits), 0, 0)))
    reads, writes, mixes = np.split(logits.astype(np.float64), [count, 2 * count], axis=1)
    of_reads, of_writes, of_mixes = np.split(base.astype(np.float64), [count, 2 * count])
    reads = _sigmoid(reads * scale[0] + of_reads) + epsilon
    writes = 2 * _sigmoid(writes * scale[1] + of_writes)
    powers = (mixes * scale[2] + of_mixes).reshape(-1, count, count)
    powers = np.exp(powers - powers.max(-1, keepdims=True))
    shares = powers / powers.sum(-1, keepdims=True) + epsilon
    shares = shares / (shares.sum(-2, keepdims=True) + epsilon)
    for _ in range(rounds - 1):
        shares = shares / (shares.sum(-1, keepdims=True) + epsilon)
        shares = shares / (shares.sum(-2, keepdims=True) + epsilon)
    return reads, writes, shares


def gathered(streams: np.ndarray, reads: np.ndarray) -> np.ndarray:
    """The branch's input, [T, D]."""
    return np.einsum("ts,tsd->td", reads, streams.astype(np.float64))


def mixed(streams: np.ndarray, branch: np.ndarray, writes: np.ndarray, mixes: np.ndarray) -> np.ndarray:
    """Streams after a branch's output [T, D], [T, S, D]."""
    if not mixes.size:
        return streams + writes[..., None] * branch[:, None].astype(np.float64)
    return writes[..., None] * branch[:, None].astype(np.float64) + np.einsum("tsn,tsd->tnd", mixes, streams.astype(np.float64))


def left(streams: np.ndarray, logits: np.ndarray, scale: np.ndarray, base: np.ndarray, epsilon: float) -> np.ndarray:
    """The last layer's output [T, D], from logits `logits` [T, S]; `scale` [1] and `base` [S]."""
    return gathered(streams, _sigmoid(logits.astype(np.float64) * scale[0] + base.astype(np.float64)) + epsilon)
