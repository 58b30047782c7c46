"""What hyper-connections mean: streams of a token that are mixed by numbers of its own (Xie et al. 2026, mHC). In float64.

`streams` [T, S, D] lie side by side. A branch reads a sum of them and is added to all, which meanwhile change among one another by a matrix
whose rows and columns add up to 1, as far as a few rounds of dividing by them bring it there.
"""

from __future__ import annotations

import numpy as np

from .reference import normalise


def said(streams: np.ndarray, matrix: np.ndarray, eps: float) -> np.ndarray:
    """[T, N] of streams: matrix [N, S * D] @ streams over the root of their mean square."""
    flat = streams.reshape(len(streams), -1)
    return normalise(flat, "rms", np.ones(flat.shape[1]), None, eps) @ matrix.astype(np.float64).T


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))


def numbers(say: np.ndarray, scale: np.ndarray, base: np.ndarray, count: int, least: float,
            rounds: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a branch reads of each stream [T, S], what each has of the branch [T, S], and of each stream the next ones [T, S, S], row by
    row, of `say` [T, S * (2 + S)]; `scale` [3] and `base` [S * (2 + S)]. `least` is added to what is divided by. Without `rounds` streams
    are not mixed, and of `say` [T, 2 * S] none of the last kind are made; `least` is then added to those of the second too."""
    if not rounds:
        (reads, writes), (of_reads, of_writes) = np.split(say.astype(np.float64), 2, axis=1), np.split(base.astype(np.float64), 2)
        return (_sigmoid(reads * scale[0] + of_reads) + least, 2 * _sigmoid(writes * scale[1] + of_writes) + least,
                np.empty((len(say), 0, 0)))
    reads, writes, mixes = np.split(say.astype(np.float64), [count, 2 * count], axis=1)
    of_reads, of_writes, of_mixes = np.split(base.astype(np.float64), [count, 2 * count])
    reads = _sigmoid(reads * scale[0] + of_reads) + least
    writes = 2 * _sigmoid(writes * scale[1] + of_writes)
    powers = (mixes * scale[2] + of_mixes).reshape(-1, count, count)
    powers = np.exp(powers - powers.max(-1, keepdims=True))
    shares = powers / powers.sum(-1, keepdims=True) + least
    shares = shares / (shares.sum(-2, keepdims=True) + least)
    for _ in range(rounds - 1):
        shares = shares / (shares.sum(-1, keepdims=True) + least)
        shares = shares / (shares.sum(-2, keepdims=True) + least)
    return reads, writes, shares


def gathered(streams: np.ndarray, reads: np.ndarray) -> np.ndarray:
    """What a branch reads, [T, D]."""
    return np.einsum("ts,tsd->td", reads, streams.astype(np.float64))


def mixed(streams: np.ndarray, branch: np.ndarray, writes: np.ndarray, mixes: np.ndarray) -> np.ndarray:
    """The streams behind a branch [T, D], [T, S, D]."""
    if not mixes.size:
        return streams + writes[..., None] * branch[:, None].astype(np.float64)
    return writes[..., None] * branch[:, None].astype(np.float64) + np.einsum("tsn,tsd->tnd", mixes, streams.astype(np.float64))


def left(streams: np.ndarray, say: np.ndarray, scale: np.ndarray, base: np.ndarray, least: float) -> np.ndarray:
    """What leaves the last layer, [T, D], of `say` [T, S]; `scale` [1] and `base` [S]."""
    return gathered(streams, _sigmoid(say.astype(np.float64) * scale[0] + base.astype(np.float64)) + least)
