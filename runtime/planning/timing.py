"""Timing short work whose duration will be multiplied, so that a few milliseconds of noise do not matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

MIN_TOTAL_S, MAX_ROUNDS = 0.4, 9  # of all rounds together


def median_times(measure: Callable[[], Sequence[float]]) -> list[float]:
    """The median of each duration, in seconds, that `measure` returns, over rounds that take MIN_TOTAL_S together. Durations to be compared
    belong in one round, so that both see the same state of the machine. A long round is the only one."""
    rounds = [measure()]
    while len(rounds) < MAX_ROUNDS and sum(map(sum, rounds)) < MIN_TOTAL_S:
        rounds.append(measure())
    return [median(times) for times in zip(*rounds, strict=True)]
