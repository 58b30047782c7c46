"""Predicting which experts a layer will need, from its own router applied to an earlier layer's state, and how often that was right. Pure.

The hidden state changes little from layer to layer, so routers agree early (A. Eliseev and D. Mazur 2023, arXiv:2312.17238, predict one
layer ahead). How far ahead, and how many of a router's top choices are worth prefetching, differs between models and is counted: by
distance in layers and by rank, among those that were not in memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

WORTH = 1 / 2  # of the predictions must come true: fewer cost more disk time than they hide
TRUST, DOUBT = 3, 1  # prior counts of right and wrong predictions per rank
HALVE_AT = 128  # predictions per rank, so that recent ones count more


class ExpertPredictor:
    """Predictions per layer by rank, at most `most` from each of the `farthest` layers before it, and their outcomes."""

    def __init__(self, most: int, farthest: int) -> None:
        self.most, self.farthest = most, farthest
        self._right = [[float(TRUST)] * most for _ in range(farthest)]
        self._all = [[float(TRUST + DOUBT)] * most for _ in range(farthest)]
        self._pending: dict[int, list[tuple[int, int, int]]] = {}  # by layer: distance, place, expert

    def worth(self, distance: int) -> int:
        """How many of the top choices, `distance` >= 1 layers ahead, are worth reading: all ranks before the first that is not."""
        for place, (right, count) in enumerate(zip(self._right[distance - 1], self._all[distance - 1], strict=True)):
            if right < WORTH * count:
                return place
        return len(self._right[distance - 1])

    def guess(self, layer: int, distance: int, likely: Sequence[int | None]) -> None:
        """Record a prediction for a layer, likeliest first, made `distance` layers before it; None in place of experts already in
        memory."""
        self._pending.setdefault(layer, []).extend((distance - 1, place, expert)
                                                   for place, expert in enumerate(likely[: self.most]) if expert is not None)

    def forget(self) -> None:
        """A new pass begins: predictions that the last one did not reach are not judged."""
        self._pending.clear()

    def judge(self, layer: int, needed: Collection[int]) -> None:
        """Record what a layer actually needed."""
        for distance, place, expert in self._pending.pop(layer, ()):
            right, count = self._right[distance], self._all[distance]
            right[place] += expert in needed
            count[place] += 1
            if count[place] >= HALVE_AT:
                right[place], count[place] = right[place] / 2, count[place] / 2
