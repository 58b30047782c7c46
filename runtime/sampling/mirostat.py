"""Mirostat: keeps the surprise of each token near a target (Basu et al., arXiv 2007.14966).

A token of probability p has a surprise of -log2 p bits. Tokens above the bound are filtered out, and the bound moves by the error of the
sampled token. As in llama.cpp, and unlike the paper, its surprise is computed among the tokens that were kept.
"""

from __future__ import annotations

import math

import numpy as np

V1_SAMPLE = 100  # most likely tokens from which version 1 estimates how fast probabilities fall
EPSILON = 1e-6  # closer to a singularity the limit is used instead of the formula


class Mirostat:
    """The state of an answer.

    target: surprise in bits (tau).
    rate: the share of an error by which the bound moves (eta).
    bound: the maximum surprise of the next token, in bits; twice the target at first.
    """

    def __init__(self, target: float, rate: float) -> None:
        self.target, self.rate = target, rate
        self.reset()

    def reset(self) -> None:
        """Start a new answer."""
        self.bound = 2.0 * self.target

    def within_bound(self, weights: np.ndarray) -> np.ndarray:
        """Version 2: mask of weights float32 [n] (largest 1) whose surprise is within the bound; the largest always is."""
        total = float(weights.sum(dtype=np.float64))
        return weights >= min(1.0, total * 2.0 ** -min(self.bound, 1000.0)) if self.bound > 0 else weights >= 1.0

    def top_k(self, weights: np.ndarray, vocab_size: int) -> int:
        """Version 1: the number of tokens to keep, by the exponent of Zipf's law that fits the largest weights best.

        weights: float32 [n], descending, none of them 0.
        """
        steps = np.log(np.arange(2, len(weights) + 1) / np.arange(1, len(weights)))
        falls = -np.diff(np.log(weights.astype(np.float64)))
        exponent = float(steps @ falls / (steps @ steps)) if len(steps) else math.inf
        if exponent == math.inf:  # a single token
            return 1
        excess = exponent - 1
        # The limit is 1 / log(vocab_size) where the exponent is 1.
        share = excess / -math.expm1(-excess * math.log(vocab_size)) if abs(excess) > EPSILON else 1 / math.log(vocab_size)
        log2_count = (self.bound + math.log2(share)) / max(exponent, EPSILON)
        return vocab_size if log2_count >= math.log2(vocab_size) else max(1, int(2.0**log2_count))

    def update(self, probability: float) -> None:
        """Move the bound; `probability` is that of the sampled token among the kept ones."""
        self.bound -= self.rate * (-math.log2(probability) - self.target)
