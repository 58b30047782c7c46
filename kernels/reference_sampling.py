"""The meaning of sampling, in NumPy float64: what the fast kernel in `cpu/sampling.py` is held against.

The order is that of transformers: penalties, temperature, top-k, top-p, min-p, typical. Each filter renormalises what the one
before it left. A filter never separates equal values: tokens that tie with the last one kept are kept too, so a result does not
depend on the order in which a sort happens to leave them. Everything is sorted here, which the fast kernel avoids.
"""

from __future__ import annotations

import numpy as np


def penalise(logits: np.ndarray, tokens: np.ndarray, counts: np.ndarray, repetition: float, presence: float,
             frequency: float) -> np.ndarray:
    """logits[V] with the distinct `tokens` of the history, each seen `counts` times, made less likely.

    `repetition` divides positive and multiplies negative logits (CTRL, arXiv 1909.05858); `presence` is subtracted once and
    `frequency` once per occurrence.
    """
    result = np.array(logits, np.float64)
    value = result[tokens]
    result[tokens] = np.where(value < 0, value * repetition, value / repetition) - presence - frequency * np.asarray(counts, np.float64)
    return result


def _reaching(keys: np.ndarray, weights: np.ndarray, target: float) -> np.ndarray:
    """Mask of everything up to the smallest key at which the cumulative weight reaches `target`."""
    order = np.argsort(keys, kind="stable")
    cumulative = np.cumsum(weights[order])
    last = min(int(np.searchsorted(cumulative, target)), len(keys) - 1)
    return keys <= keys[order[last]]


def probabilities(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float) -> np.ndarray:
    """logits[V] -> float64[V]: what is drawn from; 0 where a filter removed the token. `temperature` > 0; `top_k` 0 is off."""
    scaled = (np.array(logits, np.float64) - np.max(logits)) / temperature
    weights = np.exp(scaled)
    if 0 < top_k < len(scaled):
        weights[~_reaching(-scaled, np.ones(len(scaled)), top_k)] = 0.0
    if top_p < 1.0:
        weights[~_reaching(-weights, weights, top_p * weights.sum())] = 0.0
    weights[weights < min_p] = 0.0
    if typical_p < 1.0:
        kept = np.flatnonzero(weights)
        share = weights[kept] / weights[kept].sum()
        surprise = -np.log(share)
        distance = np.abs(surprise - (share * surprise).sum())
        weights[kept[~_reaching(distance, share, typical_p)]] = 0.0
    return weights / weights.sum()


def draw(probabilities: np.ndarray, uniform: float) -> int:
    """The token at `uniform` in [0, 1) of the cumulative probability, tokens by ascending id."""
    cumulative = np.cumsum(probabilities)
    return min(int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right")), int(np.flatnonzero(probabilities)[-1]))
