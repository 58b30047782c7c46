"""Mixture of experts in place of an FFN (Nomic Embed v2): a router sends each token to the top experts and sums their weighted outputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from ..images.tower_ops import Activation, Float32Matrix, WorkerPool


@dataclass(frozen=True)
class Experts:
    """Experts without gates, weighted by the router's softmax over all experts."""

    router: Float32Matrix
    up: tuple[Float32Matrix, ...]
    down: tuple[Float32Matrix, ...]
    bias: np.ndarray | None  # added once, not per expert
    num_experts_per_token: int
    activation: Activation

    def __call__(self, h: np.ndarray, pool: WorkerPool | None = None) -> np.ndarray:
        """h float32 [T, D] -> [T, D]; with a `pool`, experts run in parallel."""
        scores = self.router(h)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        top = np.argsort(-weights, -1, kind="stable")[:, : self.num_experts_per_token]
        expert_rows = [(number, np.flatnonzero((top == number).any(-1))) for number in range(len(self.up))]
        expert_rows = [(number, rows) for number, rows in expert_rows if len(rows)]
        outputs: dict[int, np.ndarray] = {}

        def run_expert(number: int, rows: np.ndarray) -> None:
            outputs[number] = self.down[number](self.activation(self.up[number](h[rows])))
            outputs[number] *= weights[rows, number, None]

        tasks = [partial(run_expert, number, rows) for number, rows in expert_rows]
        if pool is not None:
            pool.all(tasks)
        else:
            for task in tasks:
                task()
        out = np.zeros_like(h) if self.bias is None else np.tile(self.bias, (len(h), 1))
        for number, rows in expert_rows:  # in a fixed order, so that results do not depend on timing
            out[rows] += outputs[number]
        return out
