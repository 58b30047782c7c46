"""Resampling by a polyphase filter: a Kaiser-windowed sinc.

Each output sample lies at one of a fixed number of phases between input samples, the reduced ratio's numerator. Each phase has its own
taps, so all outputs of a phase are one matrix product with a strided view of the input.
"""

from __future__ import annotations

from math import gcd

import numpy as np

ZERO_CROSSINGS = 32  # of the sinc, to either side
KAISER_BETA = 9.0  # of the Kaiser window: a stopband attenuation of 90 dB
CUTOFF = 0.95  # in units of the lower of the two Nyquist frequencies
# With more phases, as odd rates have, filter values are interpolated in a table: an error of 3e-7.
MAX_EXACT_PHASES, POINTS_PER_CROSSING = 1000, 2048


def resample(samples: np.ndarray, rate: int, to: int) -> np.ndarray:
    """Samples float32 [n] at `rate` -> float32 [ceil(n * to / rate)] at rate `to`."""
    if rate == to or not len(samples):
        return samples.astype(np.float32, copy=False)
    common = gcd(rate, to)
    phases, stride = to // common, rate // common
    cutoff = CUTOFF * min(1.0, phases / stride)  # in units of the source's Nyquist frequency
    reach = int(np.ceil(ZERO_CROSSINGS / cutoff))
    count = -(-len(samples) * phases // stride)
    padded = np.pad(samples.astype(np.float32, copy=False), (reach, reach + stride + 1))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 2)
    output = np.empty(count, np.float32)
    points = np.linspace(0, reach, ZERO_CROSSINGS * POINTS_PER_CROSSING) if phases > MAX_EXACT_PHASES else None
    table = None if points is None else _windowed_sinc(points, cutoff, reach)
    for phase in range(min(phases, count)):
        first, remainder = divmod(phase * stride, phases)
        outputs = output[phase::phases]
        distances = np.abs(np.arange(2 * reach + 2) - reach - remainder / phases)
        taps = _windowed_sinc(distances, cutoff, reach) if points is None else np.interp(distances, points, table, right=0.0)
        # Normalized, so that a constant signal stays constant.
        outputs[:] = windows[first::stride][: len(outputs)] @ (taps / taps.sum()).astype(np.float32)
    return output


def _windowed_sinc(distance: np.ndarray, cutoff: float, reach: int) -> np.ndarray:
    """Filter values at distances in samples, not normalized."""
    window = np.i0(KAISER_BETA * np.sqrt(np.clip(1 - (distance / reach) ** 2, 0, None))) * (distance <= reach)
    return np.sinc(cutoff * distance) * window
