"""Reference for AltUp token streams, of which one passes through a layer (arXiv 2301.13310), and for Gaussian top-k gates.

In float64. `streams` [T, S, D], the active one first; `say` is a token's router output.
"""

from __future__ import annotations

import numpy as np

from .reference import normalise

MIN_MEAN_SQUARE = 1e-5  # lower bound of a stream's mean square before its root divides the stream


def compute_router_outputs(x: np.ndarray, norm: tuple[str, np.ndarray, np.ndarray | None, float], router: np.ndarray) -> np.ndarray:
    """[T, S] of rows x [T, D]: tanh(router @ norm(x) / D)."""
    return np.tanh(normalise(x, *norm) @ router.astype(np.float64).T / x.shape[1])


def predict(streams: np.ndarray, router_outputs: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """Every stream plus a linear combination of all of them, [T, S, D]; `coefficients` [S * S, S]."""
    count = streams.shape[1]
    shares = (router_outputs @ coefficients.astype(np.float64).T).reshape(-1, count, count)
    return streams + np.einsum("tij,tjd->tid", shares, streams.astype(np.float64))


def correct(streams: np.ndarray, active: np.ndarray, router_outputs: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    """Every stream plus a multiple of the difference between `active` [T, D] and the first stream; `coefficients` [S, S]."""
    shares = 1 + router_outputs @ coefficients.astype(np.float64).T
    return streams + shares[..., None] * (active.astype(np.float64) - streams[:, 0])[:, None]


def enter_streams(x: np.ndarray, branches: np.ndarray) -> np.ndarray:
    """Streams [T, S, D] from one [T, D] and from branches [S - 1, T, D], rescaled to the magnitude of the first."""
    return np.stack([x, *(_matched(branch, x) for branch in branches)], 1)


def leave_streams(first: np.ndarray, branches: np.ndarray) -> np.ndarray:
    """The mean [T, D] of the first stream and of branches [S - 1, T, D], rescaled to its magnitude."""
    return np.mean([first, *(_matched(branch, first) for branch in branches)], axis=0)


def _matched(branch: np.ndarray, reference: np.ndarray) -> np.ndarray:
    values, target = branch.astype(np.float64), np.square(reference.astype(np.float64)).mean(-1, keepdims=True)
    return values * np.sqrt(target / np.maximum(np.square(values).mean(-1, keepdims=True), MIN_MEAN_SQUARE))


def gaussian_topk(gates: np.ndarray, deviations: float) -> np.ndarray:
    """Gates [T, F] minus their mean plus `deviations` standard deviations, clamped at 0 (Gaussian top-k)."""
    values = gates.astype(np.float64)
    return np.maximum(values - values.mean(-1, keepdims=True) - deviations * values.std(-1, keepdims=True), 0)
