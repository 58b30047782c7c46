"""Classification head of a reranker: hidden states of a query-document pair to a logit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..images.tower_ops import Activation, Float32Matrix, Norm


@dataclass(frozen=True)
class RankingHead:
    """Two layers on the first token's state, unless a flag says otherwise."""

    dense: Float32Matrix
    activation: Activation
    out: Float32Matrix  # one output
    norm: Norm | None = None  # before `out`
    uses_mean: bool = False  # on the mean of all states
    averages_outputs: bool = False  # on each state, and the logits are averaged

    def logit(self, states: np.ndarray) -> float:
        """The logit of one text pair's states [T, D]."""
        if self.uses_mean:
            x = states.mean(0, keepdims=True)
        else:
            x = states if self.averages_outputs else states[:1]
        x = self.activation(self.dense(x))
        return float(self.out(x if self.norm is None else self.norm(x)).mean())
