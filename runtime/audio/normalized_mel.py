"""Log-mel features of NVIDIA's encoders: Slaney mel bands, each normalized to zero mean and unit variance over the clip."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..config_reader import Keys
from .log_mel import BATCH_FRAMES, LogMel

FLOOR, EPS = np.float32(2**-24), 1e-5


@dataclass(frozen=True)
class NormalizedMel:
    """Settings of the spectrogram. Call it with samples."""

    bands: int
    n_fft: int
    win_length: int  # samples of the analysis window, centered in the FFT's
    hop: int  # samples between frames
    preemphasis: float  # coefficient, 0 for none

    @staticmethod
    def read(keys: Keys) -> NormalizedMel:
        n_fft = keys.integer("n_fft", 512, low=16, high=4096)
        preemphasis = keys.number("preemphasis", 0.97) if keys.raw.get("preemphasis", 0.97) else 0.0
        return NormalizedMel(keys.integer("feature_size", 80, high=512), n_fft, keys.integer("win_length", 400, low=16, high=n_fft),
                             keys.integer("hop_length", 160, high=4096), preemphasis)

    def frames(self, samples: int) -> int:
        """Number of frames that a clip fills. One more begins within it, but is masked."""
        return samples // self.hop

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """Samples float32 [n] -> normalized log-mel features float32 [frames, bands]."""
        samples = samples.astype(np.float32, copy=False)
        emphasized = np.concatenate([samples[:1], samples[1:] - np.float32(self.preemphasis) * samples[:-1]])
        frames = np.lib.stride_tricks.sliding_window_view(np.pad(emphasized, self.n_fft // 2), self.n_fft)[:: self.hop]
        left = (self.n_fft - self.win_length) // 2
        window = np.pad(np.hanning(self.win_length), (left, self.n_fft - self.win_length - left)).astype(np.float32)
        filters = LogMel(self.bands, self.n_fft, self.hop, 0).filters
        power = np.empty((self.frames(len(samples)), self.bands), np.float32)
        for begin in range(0, len(power), BATCH_FRAMES):
            batch = slice(begin, min(begin + BATCH_FRAMES, len(power)))
            spectrum = np.fft.rfft(frames[batch] * window)
            power[batch] = np.log((spectrum.real**2 + spectrum.imag**2).astype(np.float32) @ filters + FLOOR)
        power -= power.mean(0, dtype=np.float64).astype(np.float32)
        deviation = np.sqrt(np.square(power).sum(0, dtype=np.float64) / max(len(power) - 1, 1))
        return power / (deviation + EPS).astype(np.float32)
