"""Resampling by a polyphase filter: a Kaiser-windowed sinc.

Each output sample lies at one of a fixed number of phases between input samples, the reduced ratio's numerator. Each phase has its own
taps, so all outputs of a phase are one matrix product with a strided view of the input.
"""

from __future__ import annotations

from math import gcd

import numpy as np

CROSSINGS = 32  # of the sinc to either side
BETA = 9.0  # of the Kaiser window: what passes the edge is 90 dB below
MANY_PHASES = 1000  # of odd rates: the filter is looked up between points of it, FINE to a crossing, an error of 3e-7
FINE = 2048
EDGE = 0.95  # of the lower of the two rates' halves: what lies above is cut off


def resample(samples: np.ndarray, rate: int, to: int) -> np.ndarray:
    """float32 [n] at `rate` -> float32 [ceil(n * to / rate)] at `to`."""
    if rate == to or not len(samples):
        return samples.astype(np.float32, copy=False)
    common = gcd(rate, to)
    phases, step = to // common, rate // common
    cut = EDGE * min(1.0, phases / step)  # in halves of the source's rate
    reach = int(np.ceil(CROSSINGS / cut))
    count = -(-len(samples) * phases // step)
    padded = np.pad(samples.astype(np.float32, copy=False), (reach, reach + step + 1))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 2)
    made = np.empty(count, np.float32)
    points = np.linspace(0, reach, CROSSINGS * FINE) if phases > MANY_PHASES else None
    heights = None if points is None else _filter(points, cut, reach)
    for phase in range(min(phases, count)):
        first, over = divmod(phase * step, phases)
        places = made[phase::phases]
        distance = np.abs(np.arange(2 * reach + 2) - reach - over / phases)
        taps = _filter(distance, cut, reach) if points is None else np.interp(distance, points, heights, right=0.0)
        places[:] = windows[first::step][: len(places)] @ (taps / taps.sum()).astype(np.float32)  # a constant stays what it is
    return made


def _filter(distance: np.ndarray, cut: float, reach: int) -> np.ndarray:
    """Filter value at a distance in samples, before normalization."""
    window = np.i0(BETA * np.sqrt(np.clip(1 - (distance / reach) ** 2, 0, None))) * (distance <= reach)
    return np.sinc(cut * distance) * window
