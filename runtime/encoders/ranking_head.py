"""Classification head of a reranker: hidden states of a query-document pair to a logit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..images.tower_ops import Activation, Float32Matrix, Norm


@dataclass(frozen=True)
class RankingHead:
    """`dense` with activation `curve`, an optional `norm`, then `last` with one output; on the first token, the `mean` of all, or `late`:
    averaged after the head."""

    dense: Float32Matrix
    curve: Activation
    last: Float32Matrix
    norm: Norm | None = None
    mean: bool = False
    late: bool = False

    def logit(self, states: np.ndarray) -> float:
        """Of one text's states [T, D]."""
        x = states.mean(0, keepdims=True) if self.mean else states if self.late else states[:1]
        x = self.curve(self.dense(x))
        return float(self.last(x if self.norm is None else self.norm(x)).mean())
