"""Reference for sampling, in NumPy float64: what the fast kernel in `cpu/sampling.py` is tested against.

The order is that of transformers: penalties, temperature, top-k, top-p, min-p, typical. Of llama.cpp's samplers, DRY follows the penalties,
top-n-sigma precedes top-k, and XTC follows typical. Each filter renormalizes what the previous one left. A filter never separates equal
values: tokens that tie with the last one kept are kept too, so results do not depend on sort stability. Everything is sorted here, which
the fast kernel avoids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MASKED_LOGIT = -1e20  # below any logit of a model, whatever bias or penalty it has


def penalise(logits: np.ndarray, tokens: np.ndarray, counts: np.ndarray, repetition: float, presence: float,
             frequency: float) -> np.ndarray:
    """logits[V] with penalties for the distinct `tokens` of the history, each seen `counts` times.

    `repetition` divides positive and multiplies negative logits (CTRL, arXiv 1909.05858); `presence` is subtracted once and `frequency`
    once per occurrence.
    """
    result = np.array(logits, np.float64)
    value = result[tokens]
    result[tokens] = np.where(value < 0, value * repetition, value / repetition) - presence - frequency * np.asarray(counts, np.float64)
    return result


def penalise_repeats(logits: np.ndarray, tokens: Sequence[int], multiplier: float, base: float, allowed: int,
                     breakers: Sequence[Sequence[int]] = ()) -> np.ndarray:
    """DRY (oobabooga/text-generation-webui, pull request 5677, as in llama.cpp): penalizes tokens that would extend a repetition.

    If a token follows an earlier position of `tokens` where the n preceding tokens equal the newest n, its logit is lowered by `multiplier`
    x `base` ** (n - `allowed`) for the largest such n, if that is at least `allowed`. Matches do not extend past the newest of the
    `breakers`, and breakers themselves are not penalized.
    """
    tokens, result = list(tokens), np.array(logits, np.float64)
    broken = [begin for begin in range(len(tokens)) if any(tokens[begin : begin + len(breaker)] == list(breaker) for breaker in breakers)]
    max_length = len(tokens)
    if broken:
        begin = broken[-1]
        max_length -= begin + max(len(breaker) for breaker in breakers if tokens[begin : begin + len(breaker)] == list(breaker))
    longest: dict[int, int] = {}
    for index in range(1, len(tokens)):
        length = 0
        while length < min(index, max_length) and tokens[index - 1 - length] == tokens[-1 - length]:
            length += 1
        longest[tokens[index]] = max(longest.get(tokens[index], 0), length)
    for token, length in longest.items():
        if length >= allowed and 0 <= token < len(result) and [token] not in [list(breaker) for breaker in breakers]:
            result[token] -= multiplier * float(base) ** (length - allowed)
    return result


def above_sigmas(logits: np.ndarray, sigmas: float) -> np.ndarray:
    """Top-n-sigma (arXiv 2411.07641): logits[V] with -inf for those more than `sigmas` standard deviations below the largest. Logits below
    MASKED_LOGIT belong to tokens removed earlier and are ignored."""
    logits = np.array(logits, np.float64)
    left = logits[logits > MASKED_LOGIT]
    return np.where(logits < left.max() - sigmas * left.std(), -np.inf, logits) if len(left) else logits


def without_top(left: np.ndarray, logits: np.ndarray, threshold: float) -> np.ndarray:
    """XTC (oobabooga/text-generation-webui, pull request 6335): the mask `left` bool[V] without the tokens of probability at least
    `threshold`, except the least likely of these. Probabilities are at temperature 1, among the tokens left."""
    logits = np.array(logits, np.float64)
    weights = np.where(left, np.exp(logits - logits.max()), 0.0)
    likely = left & (weights >= threshold * weights.sum())
    return left & (logits <= logits[likely].min()) if likely.any() else left


def _reaching(keys: np.ndarray, weights: np.ndarray, target: float) -> np.ndarray:
    """Mask of everything up to the smallest key at which the cumulative weight reaches `target`."""
    order = np.argsort(keys, kind="stable")
    cumulative = np.cumsum(weights[order])
    last = min(int(np.searchsorted(cumulative, target)), len(keys) - 1)
    return keys <= keys[order[last]]


def survivors(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float) -> np.ndarray:
    """bool[V] over logits[V]: tokens that pass these filters. `temperature` > 0; `top_k` 0 is off."""
    scaled = (np.array(logits, np.float64) - np.max(logits)) / temperature
    left, weights = scaled > -np.inf, np.exp(scaled)
    if 0 < top_k < len(scaled):
        left &= _reaching(-scaled, np.ones(len(scaled)), top_k)
        weights[~left] = 0.0
    if top_p < 1.0:
        left &= _reaching(-weights, weights, top_p * weights.sum())
    left &= weights >= min_p
    if typical_p < 1.0:
        kept = np.flatnonzero(left & (weights > 0))
        share = weights[kept] / weights[kept].sum()
        surprise = -np.log(share)
        distance = np.abs(surprise - (share * surprise).sum())
        left[:] = False
        left[kept[_reaching(distance, share, typical_p)]] = True
    return left


def shares(logits: np.ndarray, temperature: float, left: np.ndarray) -> np.ndarray:
    """float64[V]: probability of each token among those `left`, 0 for the others. `temperature` > 0."""
    scaled = np.where(left, np.array(logits, np.float64), -np.inf)
    weights = np.exp((scaled - scaled.max()) / temperature)
    return weights / weights.sum()


def probabilities(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float) -> np.ndarray:
    """The distribution that is sampled from: `shares` of the `survivors`."""
    return shares(logits, temperature, survivors(logits, temperature, top_k, top_p, min_p, typical_p))


def draw(probabilities: np.ndarray, uniform: float) -> int:
    """The token at `uniform` in [0, 1) of the cumulative distribution, tokens by ascending id."""
    cumulative = np.cumsum(probabilities)
    return min(int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right")), int(np.flatnonzero(probabilities)[-1]))
