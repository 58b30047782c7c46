"""A sound at another rate: a polyphase filter, a sinc in a Kaiser window.

A sample of the result lies between samples of the source, at one of as many phases as the reduced ratio has. Every phase has taps of its
own, so all samples of one phase are a product of a strided view of the source with those.
"""

from __future__ import annotations

from math import gcd

import numpy as np

CROSSINGS = 32  # of the sinc to either side
BETA = 9.0  # of the Kaiser window: what passes the edge is 90 dB below
EDGE = 0.95  # of the lower of the two rates' halves: what lies above is cut off


def resampled(samples: np.ndarray, rate: int, to: int) -> np.ndarray:
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
    for phase in range(min(phases, count)):
        first, over = divmod(phase * step, phases)
        places = made[phase::phases]
        places[:] = windows[first::step][: len(places)] @ _taps(over / phases, cut, reach)
    return made


def _taps(over: float, cut: float, reach: int) -> np.ndarray:
    """float32 [2 * reach + 2]: what a sample takes of those from `reach` before the one that it lies `over` behind, a part of one, on."""
    distance = np.arange(2 * reach + 2) - reach - over
    window = np.i0(BETA * np.sqrt(np.clip(1 - (distance / reach) ** 2, 0, None))) * (np.abs(distance) <= reach)
    taps = np.sinc(cut * distance) * window
    return (taps / taps.sum()).astype(np.float32)  # a constant stays what it is
