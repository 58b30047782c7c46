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

WHISPER_EXTRACTORS = ("WhisperFeatureExtractor",)
PREPROCESSOR_FILE, PROCESSOR_FILE = "preprocessor_config.json", "processor_config.json"
# Slaney's scale: linear up to EDGE_HZ, then logarithmic.
EDGE_HZ, EDGE_MEL, HZ_PER_MEL, MELS_PER_E_FOLD = 1000.0, 15.0, 200 / 3, 27 / np.log(6.4)
MAX_HZ = 8000.0
BATCH_FRAMES = 4096  # frames transformed at once


@dataclass(frozen=True)
class LogMel:
    """Settings of the spectrogram. Call it with samples."""

    bands: int  # mel bands
    window: int  # samples of a frame
    hop: int  # samples between frames
    samples: int  # length of the encoder's input

    @property
    def frames(self) -> int:
        """Frames of the encoder's input."""
        return self.samples // self.hop

    @cached_property
    def filters(self) -> np.ndarray:
        """Triangular mel filters, float32 [1 + window // 2, bands]."""
        edges = _mel_to_hertz(np.linspace(0, _hertz_to_mel(MAX_HZ), self.bands + 2))
        return (triangular_filters(edges, self.window) * (2 / (edges[2:] - edges[:-2]))).astype(np.float32)

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """Samples float32 [n], at least a window -> float32 [n // hop, bands]."""
        return log_mel_power(samples, hann(self.window), self.hop, len(samples) // self.hop, self.filters)


def hann(window: int) -> np.ndarray:
    """Periodic Hann window, float32 [window]."""
    return np.hanning(window + 1)[:-1].astype(np.float32)


def triangular_filters(edges: np.ndarray, window: int) -> np.ndarray:
    """Triangular filters between `edges` in hertz [bands + 2], over the FFT bins of a window [1 + window // 2, bands]."""
    slopes = edges[None] - np.linspace(0, SAMPLE_RATE // 2, 1 + window // 2)[:, None]
    widths = np.diff(edges)
    return np.maximum(0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))


def log_mel_power(samples: np.ndarray, window: np.ndarray, hop: int, frames: int, filters: np.ndarray) -> np.ndarray:
    """Log-mel power of the first `frames` frames of samples float32 [n], clipped and scaled as Whisper's: float32 [frames, bands].

    window: float32 [window]
    filters: float32 [1 + window // 2, bands]
    """
    padded = np.pad(samples.astype(np.float32, copy=False), len(window) // 2, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, len(window))[::hop][:frames]
    power = np.empty((len(windows), filters.shape[1]), np.float32)
    for begin in range(0, len(windows), BATCH_FRAMES):
        batch = slice(begin, begin + BATCH_FRAMES)
        spectrum = np.fft.rfft(windows[batch] * window)
        power[batch] = (spectrum.real**2 + spectrum.imag**2).astype(np.float32) @ filters
    np.log10(np.maximum(power, 1e-10, out=power), out=power)
    np.maximum(power, power.max(initial=-10) - 8, out=power)
    return (power + 4) / 4


def _hertz_to_mel(hertz: float) -> float:
    return hertz / HZ_PER_MEL if hertz < EDGE_HZ else EDGE_MEL + MELS_PER_E_FOLD * np.log(hertz / EDGE_HZ)


def _mel_to_hertz(mels: np.ndarray) -> np.ndarray:
    return np.where(mels < EDGE_MEL, mels * HZ_PER_MEL, EDGE_HZ * np.exp((mels - EDGE_MEL) / MELS_PER_E_FOLD))


def log_mel_of(keys: Keys) -> LogMel:
    """The spectrogram of a Whisper feature extractor's config. Raises ConfigError."""
    log_mel = LogMel(keys.integer("feature_size", 80, high=512), keys.integer("n_fft", 400, low=16, high=4096),
                     keys.integer("hop_length", 160, high=4096), SAMPLE_RATE * keys.integer("chunk_length", 30, high=600))
    if log_mel.samples % log_mel.hop:
        raise keys.fail("hop_length", "a divisor of the encoder's input length")
    return log_mel


def read_extractor(folder: Path, known: Sequence[str], defaults: Mapping[str, object] | None = None) -> Keys:
    """The config of the feature extractor in `folder`. Raises UsageError if it is missing or of another type.

    known: supported types; the first is assumed if the config names none
    defaults: the config for families whose folders may have none
    """
    settings, where = _read_json(folder / PREPROCESSOR_FILE), PREPROCESSOR_FILE
    if settings is None or "feature_extractor_type" not in settings and "image_processor_type" in settings:  # images only
        processor, where = _read_json(folder / PROCESSOR_FILE) or {}, PROCESSOR_FILE
        settings = processor.get("feature_extractor", processor.get("audio_processor"))
    if settings is None and defaults is not None:
        settings, where = dict(defaults), "config.json"
    if not isinstance(settings, dict):
        raise UsageError(f"{folder} has no {PREPROCESSOR_FILE}, which describes the audio preprocessing of this model",
                         "download that file from the model's repository into its folder")
    keys = Keys(settings, where)
    extractor_type = keys.text("feature_extractor_type", known[0])
    if extractor_type not in known:
        raise UsageError(f"{where}: audio preprocessor {show(extractor_type)} is not supported for this model",
                         f"known: {', '.join(known)}; text-only works")
    if keys.integer("sampling_rate", SAMPLE_RATE) != SAMPLE_RATE:
        raise keys.fail("sampling_rate", f"{SAMPLE_RATE}")
    normalized = None if "image_processor_type" in settings else keys.raw.get("do_normalize")  # a shared file means the images
    if keys.raw.get("dither") not in (None, 0) or normalized not in (None, False):
        raise ConfigError(f"{where}: dither and do_normalize are not supported", "remove them")
    return keys


def _read_json(path: Path) -> dict[str, object] | None:
    try:
        return read_json(path)
    except ModelNotFound:
        return None
