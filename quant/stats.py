"""Calibration statistics of one tensor's inputs: all that a quantization method sees besides the weights.

`hessian` is the mean over tokens of x xT, the metric in which an error of the weights becomes an error of the output: a row's error e
costs e H eT. It is factored once per tensor, however many blocks of rows there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

DAMPING = 0.02  # a share of each input's own power: large enough to forget what few tokens say by chance
SCARCE = 0.25  # and as much of inputs per token more: a covariance of fewer tokens than inputs is mostly chance


@dataclass(frozen=True)
class Stats:
    """`hessian` float32 [K, K] (symmetric) and `mean_square` float32 [K]: means over `tokens` tokens of a tensor's inputs."""

    tokens: int
    hessian: np.ndarray | None = None
    mean_square: np.ndarray | None = None

    @cached_property
    def damped(self) -> np.ndarray:
        """The Hessian with each input's power raised, float32 [K, K]; positive definite. An input that is always zero gets power 1: it
        says nothing about the others, and its weights round to the nearest."""
        damped = self.hessian.astype(np.float32, copy=True)
        power = damped.diagonal().astype(np.float64)
        share = DAMPING + SCARCE * len(power) / max(1, self.tokens)
        dead = power <= 1e-12 * power.mean()
        damped[dead] = 0
        damped[:, dead] = 0
        np.fill_diagonal(damped, np.where(dead, 1.0, power * (1 + share)))
        return damped

    @cached_property
    def order(self) -> np.ndarray:
        """Inputs by falling power, int64 [K]: those whose errors cost most are rounded first, while all others can still make up for it."""
        return np.argsort(-self.damped.diagonal(), kind="stable")

    @cached_property
    def feedback(self) -> np.ndarray:
        """A strictly upper triangular F, float32 [K, K], in `order`: what earlier errors E ask of input k is E[:, :k] @ F[:k, k].

        From H = (F + I) D (F + I)T with D diagonal (QuIP, arXiv 2307.13304, shows that this is GPTQ without an inverse).
        """
        order = self.order
        turned = self.damped[np.ix_(order, order)].astype(np.float64)[::-1, ::-1]
        lower = np.linalg.cholesky(turned)
        upper = lower[::-1, ::-1] / lower.diagonal()[::-1]
        factor = np.triu(upper, 1).astype(np.float32)
        return factor
