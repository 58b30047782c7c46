"""Mixture of experts in place of an FFN (Nomic Embed v2): a router sends each token to the top experts and sums their weighted outputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from ..images.tower_ops import Activation, Float32Matrix, WorkerPool


@dataclass(frozen=True)
class Experts:
    """Experts without gates. Weights are the router's softmax over all experts, of the `per_token` largest; `bias` is added once."""

    router: Float32Matrix
    up: tuple[Float32Matrix, ...]
    down: tuple[Float32Matrix, ...]
    bias: np.ndarray | None
    per_token: int
    curve: Activation

    def __call__(self, h: np.ndarray, pool: WorkerPool | None = None) -> np.ndarray:
        """h float32 [T, D] -> [T, D]; with a `pool`, experts run in parallel."""
        scores = self.router(h)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        chosen = np.argsort(-shares, -1, kind="stable")[:, : self.per_token]
        visits = [(number, np.flatnonzero((chosen == number).any(-1))) for number in range(len(self.up))]
        visits = [(number, rows) for number, rows in visits if len(rows)]
        made: dict[int, np.ndarray] = {}

        def ask(number: int, rows: np.ndarray) -> None:
            made[number] = self.down[number](self.curve(self.up[number](h[rows])))
            made[number] *= shares[rows, number, None]

        pieces = [partial(ask, number, rows) for number, rows in visits]
        if pool is not None:
            pool.all(pieces)
        else:
            for piece in pieces:
                piece()
        out = np.zeros_like(h) if self.bias is None else np.tile(self.bias, (len(h), 1))
        for number, rows in visits:  # in a fixed order, so that results do not depend on timing
            out[rows] += made[number]
        return out
