"""Log-mel features of NVIDIA's encoders: Slaney mel bands, each normalized to zero mean and unit variance over the clip."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..config_reader import Keys
from .log_mel import FRAMES, LogMel

FLOOR, EPS = np.float32(2**-24), 1e-5


@dataclass(frozen=True)
class NormalizedMel:
    """`window`: FFT size, `heard`: samples of the analysis window, centered; `hop` between frames. `emphasis`: pre-emphasis coefficient."""

    bands: int
    window: int
    heard: int
    hop: int
    emphasis: float

    @staticmethod
    def read(keys: Keys) -> NormalizedMel:
        window = keys.integer("n_fft", 512, low=16, high=4096)
        emphasis = keys.number("preemphasis", 0.97) if keys.raw.get("preemphasis", 0.97) else 0.0
        return NormalizedMel(keys.integer("feature_size", 80, high=512), window, keys.integer("win_length", 400, low=16, high=window),
                         keys.integer("hop_length", 160, high=4096), emphasis)

    def frames(self, samples: int) -> int:
        """Frames that a clip fills. One more begins within it, but is masked."""
        return samples // self.hop

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """float32 [n] -> float32 [frames, bands]."""
        samples = samples.astype(np.float32, copy=False)
        steep = np.concatenate([samples[:1], samples[1:] - np.float32(self.emphasis) * samples[:-1]])
        each = np.lib.stride_tricks.sliding_window_view(np.pad(steep, self.window // 2), self.window)[:: self.hop]
        left = (self.window - self.heard) // 2
        shape = np.pad(np.hanning(self.heard), (left, self.window - self.heard - left)).astype(np.float32)
        filters = LogMel(self.bands, self.window, self.hop, 0).filters
        made = np.empty((self.frames(len(samples)), self.bands), np.float32)
        for begin in range(0, len(made), FRAMES):
            some = slice(begin, min(begin + FRAMES, len(made)))
            found = np.fft.rfft(each[some] * shape)
            made[some] = np.log((found.real**2 + found.imag**2).astype(np.float32) @ filters + FLOOR)
        made -= made.mean(0, dtype=np.float64).astype(np.float32)
        spread = np.sqrt(np.square(made).sum(0, dtype=np.float64) / max(len(made) - 1, 1))
        return made / (spread + EPS).astype(np.float32)
