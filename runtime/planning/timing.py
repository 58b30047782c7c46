"""What a piece of work takes, measured to be multiplied: what else the machine does in a few milliseconds would be multiplied with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

ENOUGH_S, MOST = 0.4, 9  # of turns, together


def median_times(measure: Callable[[], Sequence[float]]) -> list[float]:
    """The median of each of the durations, in seconds, that `measure` returns, over turns that take ENOUGH_S together. Durations that are
    held against one another belong into one turn, so that both see the same changes of the machine. A turn that takes long is the only one.
    """
    found = [measure()]
    while len(found) < MOST and sum(map(sum, found)) < ENOUGH_S:
        found.append(measure())
    return [median(each) for each in zip(*found, strict=True)]
