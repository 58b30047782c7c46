"""Score-based policies: a share of the pages gets more bits, those whose score is among the highest so far.

Each page is decided once, when it leaves the exact window, and never repacked. So the share holds as an upper bound at every length, and
falls short of it by at most one page: where two are free, the next page gets one whatever its score. The first page is always upgraded.
Deterministic: the same tokens give the same pages.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .keep import Action, PageStats, max_upgraded


class Salient:
    """More bits for the pages with the highest scores.

    `score`: from attention float32 [layers, KV heads, blocks] to a number. `share`: of the pages, an upper bound (rounded up)."""

    probes = True

    def __init__(self, score: Callable[[np.ndarray], float], share: float) -> None:
        self.score, self.share = score, share
        self._scores: list[float] = []
        self._is_upgraded: list[bool] = []

    def act(self, stats: PageStats) -> Action:
        """Raises ValueError for a page out of order."""
        if stats.page > len(self._scores):
            raise ValueError(f"page {stats.page} comes before page {len(self._scores)}")
        del self._scores[stats.page :], self._is_upgraded[stats.page :]
        self._scores.append(self.score(stats.attention))
        num_better = sum(score > self._scores[-1] for score in self._scores)
        limit = max_upgraded(self.share, len(self._scores))
        num_left = limit - sum(self._is_upgraded)
        self._is_upgraded.append(num_left >= 2 or (num_left == 1 and num_better < limit))
        return Action.MORE if self._is_upgraded[-1] else Action.FEWER
