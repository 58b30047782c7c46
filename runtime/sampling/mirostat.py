"""Mirostat: keeps the surprise of each token near a target (Basu et al., arXiv 2007.14966).

A token of probability p has a surprise of -log2 p bits. Tokens above the bound are filtered out, and the bound moves by the error of the
token drawn. As in llama.cpp, and unlike the paper, its surprise is computed among the tokens that were left.
"""

from __future__ import annotations

import math

import numpy as np

LOOKED_AT = 100  # of the likeliest tokens, from which version 1 tells how fast probabilities fall
NEAR = 1e-6  # to a number for which a formula has no value, but a limit


class Mirostat:
    """`target` in bits, `rate`: which part of an error moves the `bound`, in bits too, that begins at twice the target."""

    def __init__(self, target: float, rate: float) -> None:
        self.target, self.rate = target, rate
        self.reset()

    def reset(self) -> None:
        """Start a new answer."""
        self.bound = 2.0 * self.target

    def likely_enough(self, weights: np.ndarray) -> np.ndarray:
        """Version 2: mask of weights float32 [n] (largest 1) whose surprise is within the bound; the largest always is."""
        total = float(weights.sum(dtype=np.float64))
        return weights >= min(1.0, total * 2.0 ** -min(self.bound, 1000.0)) if self.bound > 0 else weights >= 1.0

    def likeliest(self, weights: np.ndarray, tokens: int) -> int:
        """Version 1: how many of so many `tokens` are left, if all fall as `weights` float32 [n] do, those of the likeliest in order, none
        of them 0: by Zipf's law, with the exponent that fits these best."""
        steps = np.log(np.arange(2, len(weights) + 1) / np.arange(1, len(weights)))
        falls = -np.diff(np.log(weights.astype(np.float64)))
        exponent = float(steps @ falls / (steps @ steps)) if len(steps) else math.inf
        if exponent == math.inf:  # there is but one
            return 1
        beyond = exponent - 1
        # The limit is 1 / log(tokens) where the exponent is 1.
        share = beyond / -math.expm1(-beyond * math.log(tokens)) if abs(beyond) > NEAR else 1 / math.log(tokens)
        log2_count = (self.bound + math.log2(share)) / max(exponent, NEAR)
        return tokens if log2_count >= math.log2(tokens) else max(1, int(2.0**log2_count))

    def drew(self, share: float) -> None:
        """The drawn token had this share of the remaining probability."""
        self.bound -= self.rate * (-math.log2(share) - self.target)
