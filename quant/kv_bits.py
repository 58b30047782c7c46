"""Bit allocation of the KV cache: bits for K and V of each KV head, and for each group of 16 channels within them.

Within a side (K or V of a head), each bit goes where it reduces the cost of noise most. A group of strength s (the sum over its channels
of the diagonal of `kv_basis.noise_basis`) costs s² · NOISE[b] at b bits: the power of its values is proportional to s, and so is the
cost of noise in them. Between sides this estimate is unreliable, because coarse noise in scores raises keys that no query attends to. So
the cost of each side is measured at every number of bits (`kv_noise_cost.trial_costs`), and bits are divided by that.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 10)  # bits of a group
SIDES = (1, 2, 3, 4, 5, 6, 8, 10)  # of a side of a head
BELOW = 1  # bits that a side may have less than the mean (2 less than 8): a head that was silent on the sample may speak on another text
# With so many bits on average it would be the only one to do damage then, and by its K: coarse noise in scores makes keys stand out that no
# query looks at. So K is taken to cost this share of the mean more than was measured.
ENOUGH, DOUBT = 8, 0.05
RULE = (WIDTHS, BELOW, ENOUGH, DOUBT)  # what bits follow from, beside a profile
_DECIBELS = {1: 4.5, 2: 10.4, 3: 16.6, 4: 22.7, 5: 28.6, 6: 34.2, 8: 46.1, 10: 58.1}
NOISE = {bits: 10 ** (-decibels / 10) for bits, decibels in _DECIBELS.items()}


def allocate(strength: Sequence[float], bits: int) -> list[int]:
    """Bits of the groups [n] of one side of a head, `bits` on average. It comes out even: only steps from 6 on
    take two bits, and a single bit cannot be left over when all groups have 6, 8 or 10."""
    worth = np.square(np.asarray(strength, np.float64)).tolist()
    given, left = [WIDTHS[0]] * len(worth), (bits - WIDTHS[0]) * len(worth)
    while left:
        best, gain, step = 0, -1.0, 0
        for group, now in enumerate(given):
            more = next((width - now for width in WIDTHS if width > now), left + 1)
            removed = worth[group] * (NOISE[now] - NOISE[now + more]) / more if more <= left else -1.0
            if removed > gain:
                best, gain, step = group, removed, more
        given[best] += step
        left -= step
    return given


def side_cost(strength: Sequence[float], bits: int) -> float:
    """What the noise of one side of a head costs by the rule, 16 channels a group; at the most bits its groups share all noise."""
    if bits == WIDTHS[-1]:
        return float(np.sum(strength)) ** 2 / len(strength) * NOISE[bits] / 16
    return sum(float(each) ** 2 * NOISE[width] for each, width in zip(strength, allocate(strength, bits), strict=True)) / 16


def with_doubt(keys: np.ndarray, values: np.ndarray, mean: float) -> np.ndarray:
    """Costs of K and of V at each of `SIDES`, [..., bits] each, as so many bits on average are shared by them: [..., 2, bits]."""
    costs = np.stack([keys, values], -2)
    if mean >= ENOUGH:
        costs[..., 0, :] += DOUBT * costs.mean(tuple(range(costs.ndim - 1)))
    return costs


def share(costs: Sequence[Sequence[float]], mean: float) -> list[int]:
    """Bits of sides that cost so much at each of `SIDES`, at most `mean` on average, none with more than `BELOW` less where there is such a
    number: one step after another to where
    a bit removes the most cost. A step may be of several bits, where the first of them alone would not pay."""
    least = max(bits for bits in SIDES if bits <= max(SIDES[0], mean - BELOW))
    given = [least] * len(costs)
    left, waiting = int(mean * len(costs) + 1e-9) - least * len(costs), []

    def offer(side: int) -> None:
        now = SIDES.index(given[side])
        steps = [(bits - given[side], costs[side][place]) for place, bits in enumerate(SIDES) if now < place and bits - given[side] <= left]
        if steps:
            gain, step = max(((costs[side][now] - cost) / step, -step) for step, cost in steps)
            heapq.heappush(waiting, (-gain, side, given[side], -step))

    for side in range(len(costs)):
        offer(side)
    while waiting:
        _, side, bits, step = heapq.heappop(waiting)
        if bits != given[side]:
            continue
        if step <= left:
            given[side] += step
            left -= step
        offer(side)
    return given
