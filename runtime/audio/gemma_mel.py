"""Log-mel features of Gemma's audio towers: magnitudes in HTK mel bands, as logarithms.

Only frames that lie within the clip, together with the sample after them, count; Gemma 4 does not pad the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..config_reader import Keys
from .log_mel import BATCH_FRAMES, MAX_HZ, hann, triangular_filters

GEMMA_4: Mapping[str, object] = {"frame_length": 320, "fft_overdrive": False, "min_frequency": 0.0, "max_frequency": MAX_HZ,
                                 "mel_floor": 1e-3, "preemphasis": 0.0}
GEMMA_3N: Mapping[str, object] = {"frame_length": 512, "fft_overdrive": True, "min_frequency": 125.0, "max_frequency": 7600.0,
                                  "mel_floor": 1e-5, "preemphasis": 0.97}
LENGTH_MULTIPLE = 128  # Gemma 3n pads clips with silence to a multiple of this number of samples


@dataclass(frozen=True)
class GemmaLogMel:
    """Settings of the spectrogram. Call it with samples.

    Gemma 4 adds the floor and pads half a frame on the left, so that the first frame is centered on the start. Gemma 3n clamps to the floor
    and pads the end.
    """

    bands: int
    frame_length: int  # samples
    hop: int  # samples between frames
    n_fft: int  # frames are zero-padded to this size
    min_hz: float  # frequency range of the bands
    max_hz: float
    preemphasis: float  # coefficient, 0 for none
    mel_floor: float  # of magnitudes
    scale: float  # of samples
    is_gemma_3n: bool

    @staticmethod
    def read(keys: Keys, defaults: Mapping[str, object]) -> GemmaLogMel:
        """From an extractor's config and its `defaults`. Raises ConfigError for settings that no known model has."""
        keys = Keys({**defaults, **{name: value for name, value in keys.raw.items() if value is not None}}, keys.where)
        for name in ("per_bin_mean", "per_bin_stddev"):
            if keys.raw.get(name) is not None:
                raise keys.fail(name, "unset: normalization per band is not supported")
        preemphasis = keys.number("preemphasis") if keys.raw["preemphasis"] else 0.0
        if preemphasis >= 1 or not keys.flag("preemphasis_htk_flavor", True):
            raise keys.fail("preemphasis", "below 1, of the HTK flavor")
        min_hz = keys.number("min_frequency") if keys.raw["min_frequency"] else 0.0
        max_hz = keys.number("max_frequency")
        if not min_hz < max_hz <= MAX_HZ:
            raise keys.fail("max_frequency", f"more than min_frequency, and {MAX_HZ:g} at most")
        frame_length = keys.integer("frame_length", low=16, high=4096)
        n_fft = 1 << (frame_length - 1).bit_length() + keys.flag("fft_overdrive")
        return GemmaLogMel(keys.integer("feature_size", 128, high=512), frame_length, keys.integer("hop_length", 160, high=4096), n_fft,
                           min_hz, max_hz, preemphasis, keys.number("mel_floor"), keys.number("input_scale_factor", 1.0),
                           defaults is GEMMA_3N)

    @cached_property
    def filters(self) -> np.ndarray:
        """Triangular HTK mel filters, float32 [1 + n_fft // 2, bands]."""
        low, high = (2595 * np.log10(1 + hz / 700) for hz in (self.min_hz, self.max_hz))
        edges = 700 * (10 ** (np.linspace(low, high, self.bands + 2) / 2595) - 1)
        return triangular_filters(edges, self.n_fft).astype(np.float32)

    def padding(self, samples: int) -> tuple[int, int]:
        """Number of samples to pad before and after a clip of this length."""
        return (0, -samples % LENGTH_MULTIPLE) if self.is_gemma_3n else (self.frame_length // 2, 0)

    def frames(self, samples: int) -> int:
        """Number of frames of a clip."""
        return max(0, (samples + sum(self.padding(samples)) - self.frame_length - 1) // self.hop + 1)

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """Samples float32 [n] -> log-mel features float32 [frames, bands]."""
        padded = np.pad(samples.astype(np.float32, copy=False) * np.float32(self.scale), self.padding(len(samples)))
        frames, window, preemphasis = self.frames(len(samples)), hann(self.frame_length), np.float32(self.preemphasis)
        all_samples = np.lib.stride_tricks.sliding_window_view(padded, self.frame_length)[:: self.hop][:frames]
        magnitudes = np.empty((frames, self.bands), np.float32)
        for begin in range(0, frames, BATCH_FRAMES):
            batch = all_samples[begin : begin + BATCH_FRAMES]
            if self.preemphasis:
                batch = np.concatenate([batch[:, :1] * (1 - preemphasis), batch[:, 1:] - preemphasis * batch[:, :-1]], axis=1)
            magnitudes[begin : begin + BATCH_FRAMES] = np.abs(np.fft.rfft(batch * window, self.n_fft)) @ self.filters
        floor = np.float32(self.mel_floor)
        return np.log(np.maximum(magnitudes, floor) if self.is_gemma_3n else magnitudes + floor)
