"""Whisper's log-mel spectrogram: power in mel bands, as logarithms.

Slaney's mel scale (linear to 1 kHz, logarithmic above) with area-normalized bands; a Hann window; clipped at 8 (80 dB) below the maximum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ... import ModelNotFound, UsageError
from ..config_reader import ConfigError, Keys, read_json, show
from ..images.modality import SAMPLE_RATE

WHISPER = ("WhisperFeatureExtractor",)
FILE, OUTER = "preprocessor_config.json", "processor_config.json"
EDGE_HZ, EDGE_MEL, PER_MEL, OCTAVES = 1000.0, 15.0, 200 / 3, 27 / np.log(6.4)  # of Slaney's scale
HIGHEST_HZ = 8000.0
FRAMES = 4096  # of a spectrogram at once


@dataclass(frozen=True)
class LogMel:
    """`bands`: mel bands; `window`: samples of a frame, `hop` between frames; `samples`: length of the encoder's input."""

    bands: int
    window: int
    hop: int
    samples: int

    @property
    def frames(self) -> int:
        """Frames of the encoder's input."""
        return self.samples // self.hop

    @cached_property
    def filters(self) -> np.ndarray:
        """float32 [1 + window // 2, bands]."""
        edges = _hertz(np.linspace(0, _mels(HIGHEST_HZ), self.bands + 2))
        return (triangular_filters(edges, self.window) * (2 / (edges[2:] - edges[:-2]))).astype(np.float32)

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """float32 [n], at least a window -> float32 [n // hop, bands]."""
        return log_powers(samples, hann(self.window), self.hop, len(samples) // self.hop, self.filters)


def hann(window: int) -> np.ndarray:
    """Periodic Hann window, float32 [window]."""
    return np.hanning(window + 1)[:-1].astype(np.float32)


def triangular_filters(edges: np.ndarray, window: int) -> np.ndarray:
    """Triangular filters between `edges` in hertz [bands + 2], over the FFT bins of a window [1 + window // 2, bands]."""
    slopes = edges[None] - np.linspace(0, SAMPLE_RATE // 2, 1 + window // 2)[:, None]
    widths = np.diff(edges)
    return np.maximum(0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))


def log_powers(samples: np.ndarray, shape: np.ndarray, hop: int, frames: int, filters: np.ndarray) -> np.ndarray:
    """The first `frames` frames of samples float32 [n], windowed by `shape` [window] -> float32 [frames, bands]."""
    around = np.pad(samples.astype(np.float32, copy=False), len(shape) // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(around, len(shape))[::hop][:frames]
    made = np.empty((len(windows), filters.shape[1]), np.float32)
    for begin in range(0, len(windows), FRAMES):
        some = slice(begin, begin + FRAMES)
        found = np.fft.rfft(windows[some] * shape)
        made[some] = (found.real**2 + found.imag**2).astype(np.float32) @ filters
    np.log10(np.maximum(made, 1e-10, out=made), out=made)
    np.maximum(made, made.max(initial=-10) - 8, out=made)
    return (made + 4) / 4


def _mels(hertz: float) -> float:
    return hertz / PER_MEL if hertz < EDGE_HZ else EDGE_MEL + OCTAVES * np.log(hertz / EDGE_HZ)


def _hertz(mels: np.ndarray) -> np.ndarray:
    return np.where(mels < EDGE_MEL, mels * PER_MEL, EDGE_HZ * np.exp((mels - EDGE_MEL) / OCTAVES))


def log_mel_of(keys: Keys) -> LogMel:
    """From the config of a Whisper feature extractor."""
    found = LogMel(keys.integer("feature_size", 80, high=512), keys.integer("n_fft", 400, low=16, high=4096),
                   keys.integer("hop_length", 160, high=4096), SAMPLE_RATE * keys.integer("chunk_length", 30, high=600))
    if found.samples % found.hop:
        raise keys.fail("hop_length", "a divisor of the encoder's input length")
    return found


def read_extractor(folder: Path, known: Sequence[str], usual: Mapping[str, object] | None = None) -> Keys:
    """The feature extractor's config, of one of the `known` types, the first where it names none; `usual`: for families whose folders may
    have none. Raises UsageError where there is none, or another type."""
    inside, where = _json(folder / FILE), FILE
    if inside is None or "feature_extractor_type" not in inside and "image_processor_type" in inside:  # of pictures alone
        outer, where = _json(folder / OUTER) or {}, OUTER
        inside = outer.get("feature_extractor", outer.get("audio_processor"))
    if inside is None and usual is not None:
        inside, where = dict(usual), "config.json"
    if not isinstance(inside, dict):
        raise UsageError(f"{folder} has no {FILE}, which describes the audio preprocessing of this model",
                         "download that file from the model's repository into its folder")
    keys = Keys(inside, where)
    kind = keys.text("feature_extractor_type", known[0])
    if kind not in known:
        raise UsageError(f"{where}: audio preprocessor {show(kind)} is not supported for this model",
                         f"known: {', '.join(known)}; text-only works")
    if keys.integer("sampling_rate", SAMPLE_RATE) != SAMPLE_RATE:
        raise keys.fail("sampling_rate", f"{SAMPLE_RATE}")
    normalized = None if "image_processor_type" in inside else keys.raw.get("do_normalize")  # a joint file states it for images
    if keys.raw.get("dither") not in (None, 0) or normalized not in (None, False):
        raise ConfigError(f"{where}: dither and do_normalize are not supported", "remove them")
    return keys


def _json(path: Path) -> dict[str, object] | None:
    try:
        return read_json(path)
    except ModelNotFound:
        return None
