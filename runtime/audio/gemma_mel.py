"""Log-mel features of Gemma's audio towers: magnitudes in HTK mel bands, as logarithms.

Only frames whose samples, and the one after them, are all within the clip count, so its end is not padded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..config_reader import Keys
from .log_mel import FRAMES, HIGHEST_HZ, hann, triangular_filters

GEMMA_4: Mapping[str, object] = {"frame_length": 320, "fft_overdrive": False, "min_frequency": 0.0, "max_frequency": HIGHEST_HZ,
                                 "mel_floor": 1e-3, "preemphasis": 0.0}
GEMMA_3N: Mapping[str, object] = {"frame_length": 512, "fft_overdrive": True, "min_frequency": 125.0, "max_frequency": 7600.0,
                                  "mel_floor": 1e-5, "preemphasis": 0.97}
FILLED = 128  # samples of which a sound of the earlier ones is made a multiple, by silence


@dataclass(frozen=True)
class GemmaLogMel:
    """`frame`: samples of a frame, zero-padded to an FFT of `window`; `hop` between frames; `lowest` and `highest` hertz of the bands;
    `emphasis`: pre-emphasis coefficient; `floor`: of magnitudes. Gemma 4 adds the floor and pads half a frame on the left, so that the
    first frame is centered on the start; the `earlier` kind, Gemma 3n's, clamps to the floor and pads the end."""

    bands: int
    frame: int
    hop: int
    window: int
    lowest: float
    highest: float
    emphasis: float
    floor: float
    scale: float
    earlier: bool

    @staticmethod
    def read(keys: Keys, usual: Mapping[str, object]) -> GemmaLogMel:
        """`usual`: the extractor's defaults. Raises ConfigError for settings that no known model has."""
        keys = Keys({**usual, **{name: value for name, value in keys.raw.items() if value is not None}}, keys.where)
        for name in ("per_bin_mean", "per_bin_stddev"):
            if keys.raw.get(name) is not None:
                raise keys.fail(name, "unset: normalization per band is not supported")
        emphasis = keys.number("preemphasis") if keys.raw["preemphasis"] else 0.0
        if emphasis >= 1 or not keys.flag("preemphasis_htk_flavor", True):
            raise keys.fail("preemphasis", "below 1, of the HTK flavor")
        lowest, highest = keys.number("min_frequency") if keys.raw["min_frequency"] else 0.0, keys.number("max_frequency")
        if not lowest < highest <= HIGHEST_HZ:
            raise keys.fail("max_frequency", f"more than min_frequency, and {HIGHEST_HZ:g} at most")
        frame = keys.integer("frame_length", low=16, high=4096)
        window = 1 << (frame - 1).bit_length() + keys.flag("fft_overdrive")
        return GemmaLogMel(keys.integer("feature_size", 128, high=512), frame, keys.integer("hop_length", 160, high=4096), window, lowest,
                             highest, emphasis, keys.number("mel_floor"), keys.number("input_scale_factor", 1.0), usual is GEMMA_3N)

    @cached_property
    def filters(self) -> np.ndarray:
        """float32 [1 + window // 2, bands]."""
        low, high = (2595 * np.log10(1 + hertz / 700) for hertz in (self.lowest, self.highest))
        edges = 700 * (10 ** (np.linspace(low, high, self.bands + 2) / 2595) - 1)
        return triangular_filters(edges, self.window).astype(np.float32)

    def around(self, samples: int) -> tuple[int, int]:
        """Padding before and after a clip of so many samples."""
        return (0, -samples % FILLED) if self.earlier else (self.frame // 2, 0)

    def frames(self, samples: int) -> int:
        """Number of frames of a clip."""
        return max(0, (samples + sum(self.around(samples)) - self.frame - 1) // self.hop + 1)

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """float32 [n] -> float32 [frames, bands]."""
        around = np.pad(samples.astype(np.float32, copy=False) * np.float32(self.scale), self.around(len(samples)))
        frames, shape, before = self.frames(len(samples)), hann(self.frame), np.float32(self.emphasis)
        each = np.lib.stride_tricks.sliding_window_view(around, self.frame)[:: self.hop][:frames]
        made = np.empty((frames, self.bands), np.float32)
        for begin in range(0, frames, FRAMES):
            some = each[begin : begin + FRAMES]
            if self.emphasis:
                some = np.concatenate([some[:, :1] * (1 - before), some[:, 1:] - before * some[:, :-1]], axis=1)
            made[begin : begin + FRAMES] = np.abs(np.fft.rfft(some * shape, self.window)) @ self.filters
        return np.log(np.maximum(made, np.float32(self.floor)) if self.earlier else made + np.float32(self.floor))
