"""Samples as Gemma's towers are given them: magnitudes of frequencies in bands of O'Shaughnessy's mel scale (HTK's), as logarithms.

A frame counts where all of its samples, and the one behind them, are of the sound; so nothing is made up at its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..config_reader import Keys
from .log_mel import FRAMES, HIGHEST_HZ, hann, triangles


@dataclass(frozen=True)
class LogMagnitudes:
    """`frame`: samples that a transform of `window` sees, the rest of which is nothing; `hop` from one to the next; `lowest` and `highest`
    hertz of the bands; `floor` is added to each, so that silence has a logarithm. Half a frame of silence goes before the sound, so that
    the first frame has its beginning in the middle."""

    bands: int
    frame: int
    hop: int
    window: int
    lowest: float
    highest: float
    floor: float
    scale: float

    @staticmethod
    def read(keys: Keys) -> LogMagnitudes:
        """Raises ConfigError for what no model that is known has."""
        frame = keys.integer("frame_length", 320, low=16, high=4096)
        if keys.raw.get("preemphasis") not in (None, 0):
            raise keys.fail("preemphasis", "0: frames are taken as they are")
        for name in ("per_bin_mean", "per_bin_stddev"):
            if keys.raw.get(name) is not None:
                raise keys.fail(name, "left away: bands are taken as they are")
        window = 1 << (frame - 1).bit_length() + keys.flag("fft_overdrive", False)
        lowest = keys.number("min_frequency") if keys.raw.get("min_frequency") else 0.0
        highest = keys.number("max_frequency", HIGHEST_HZ)
        if not lowest < highest <= HIGHEST_HZ:
            raise keys.fail("max_frequency", f"more than min_frequency, and {HIGHEST_HZ:g} at most")
        return LogMagnitudes(keys.integer("feature_size", 128, high=512), frame, keys.integer("hop_length", 160, high=4096), window, lowest,
                             highest, keys.number("mel_floor", 1e-3), keys.number("input_scale_factor", 1.0))

    @cached_property
    def filters(self) -> np.ndarray:
        """float32 [1 + window // 2, bands]."""
        low, high = (2595 * np.log10(1 + hertz / 700) for hertz in (self.lowest, self.highest))
        edges = 700 * (10 ** (np.linspace(low, high, self.bands + 2) / 2595) - 1)
        return triangles(edges, self.window).astype(np.float32)

    def frames(self, samples: int) -> int:
        """Those that a sound of so many samples has."""
        return max(0, -(-(samples - self.frame + self.frame // 2) // self.hop))

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """float32 [n] -> float32 [frames, bands]."""
        around = np.pad(samples.astype(np.float32, copy=False) * np.float32(self.scale), (self.frame // 2, 0))
        frames, shape = self.frames(len(samples)), hann(self.frame)
        each = np.lib.stride_tricks.sliding_window_view(around, self.frame)[:: self.hop][:frames]
        made = np.empty((frames, self.bands), np.float32)
        for begin in range(0, frames, FRAMES):
            some = slice(begin, begin + FRAMES)
            made[some] = np.abs(np.fft.rfft(each[some] * shape, self.window)) @ self.filters
        return np.log(made + np.float32(self.floor))
