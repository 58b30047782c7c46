"""Which experts a layer will need, predicted by its own router from the state of an earlier layer, and how often that was right. Pure.

The state changes little from layer to layer, so routers agree early (A. Eliseev and D. Mazur 2023, arXiv:2312.17238, guess one layer
ahead). How far ahead, and how many of a router's favourites are worth reading, differs from model to model and is counted: by how many
layers lie between and by place in the order, among those that were not in memory, since nothing else would be read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

WORTH = 1 / 2  # of the guesses must come true: fewer cost more of the disk than they hide
TRUST, DOUBT = 3, 1  # right and wrong guesses that each place begins with
HALVE_AT = 128  # guesses of a place, so that what is newer counts more


class ExpertPredictor:
    """Guesses for each layer, in the order of likelihood, at most `most` from each of the `farthest` layers before it, and how they came
    out."""

    def __init__(self, most: int, farthest: int) -> None:
        self.most, self.farthest = most, farthest
        self._right = [[float(TRUST)] * most for _ in range(farthest)]
        self._all = [[float(TRUST + DOUBT)] * most for _ in range(farthest)]
        self._pending: dict[int, list[tuple[int, int, int]]] = {}  # by layer: distance, place, expert

    def worth(self, distance: int) -> int:
        """How many of the likeliest, `distance` >= 1 layers ahead, are worth reading: all places before the first that is not."""
        for place, (right, count) in enumerate(zip(self._right[distance - 1], self._all[distance - 1], strict=True)):
            if right < WORTH * count:
                return place
        return len(self._right[distance - 1])

    def guess(self, layer: int, distance: int, likely: Sequence[int | None]) -> None:
        """A layer's experts, likeliest first, as seen from `distance` layers before it; None in the place of those in memory."""
        self._pending.setdefault(layer, []).extend((distance - 1, place, expert)
                                                   for place, expert in enumerate(likely[: self.most]) if expert is not None)

    def forget(self) -> None:
        """A new pass begins: what the last one did not come to stays unjudged."""
        self._pending.clear()

    def judge(self, layer: int, needed: Collection[int]) -> None:
        """What a layer turned out to need."""
        for distance, place, expert in self._pending.pop(layer, ()):
            right, count = self._right[distance], self._all[distance]
            right[place] += expert in needed
            count[place] += 1
            if count[place] >= HALVE_AT:
                right[place], count[place] = right[place] / 2, count[place] / 2
