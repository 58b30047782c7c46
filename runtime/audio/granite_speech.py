"""Granite Speech: pairs of frames through a conformer; a Q-Former turns every fifteen of its rows into three.

The text model reads them with a LoRA adapter in the model's folder, unless its weights are merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..config_reader import ConfigError, Keys
from ..images import ROW_PLACEHOLDER
from ..images.modality import SAMPLE_RATE
from ..images.tower import Rows
from ..images.tower_ops import ROWS, WorkerPool, matmul
from ..images.tower_weights import Weights
from .audio_tower import AudioTower
from .conformer import ConformerSizes, load_conformer
from .log_mel import MAX_HZ, hann, log_mel_power, triangular_filters
from .q_former import QFormerSizes, load_q_former


@dataclass(frozen=True)
class PairedMel:
    """HTK log-mel spectrogram whose frames are concatenated in pairs. Call it with samples."""

    bands: int
    n_fft: int
    win_length: int  # samples of the analysis window, centered in the FFT's
    hop: int  # samples between frames

    @staticmethod
    def read(keys: Keys) -> PairedMel:
        section = keys.section("melspec_kwargs")
        settings = Keys(section, f"{keys.where}: melspec_kwargs") if section is not None else keys
        n_fft = settings.integer("n_fft", 512, low=16, high=4096)
        return PairedMel(settings.integer("n_mels", 80, high=512), n_fft, settings.integer("win_length", 400, low=16, high=n_fft),
                         settings.integer("hop_length", 160, high=4096))

    @cached_property
    def filters(self) -> np.ndarray:
        """Triangular HTK mel filters, float32 [1 + n_fft // 2, bands]."""
        mels = np.linspace(0, 2595 * np.log10(1 + MAX_HZ / 700), self.bands + 2)
        return triangular_filters(700 * (10 ** (mels / 2595) - 1), self.n_fft).astype(np.float32)

    def frames(self, samples: int) -> int:
        """Number of frame pairs."""
        return (samples // self.hop + 1) // 2

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """Samples float32 [n] -> float32 [pairs, 2 * bands]. An odd last frame is dropped, but counts for the maximum to clip at."""
        left = (self.n_fft - self.win_length) // 2
        window = np.pad(hann(self.win_length), (left, self.n_fft - self.win_length - left))
        frames = log_mel_power(samples, window, self.hop, len(samples) // self.hop + 1, self.filters)
        return frames[: len(frames) // 2 * 2].reshape(-1, 2 * self.bands)


class GraniteSpeech(AudioTower):
    KINDS = {"granite_speech_encoder": {}}
    EXTRACTORS = ("GraniteSpeechFeatureExtractor",)
    SECTION = "encoder_config"
    placeholder = "<|audio|>"
    transcription_prompt = "can you transcribe the speech into a written format?"
    max_seconds = 600.0

    def configure(self, keys: Keys) -> None:
        self.sizes, self.mel = ConformerSizes.read(self.tower_config), PairedMel.read(keys)
        self.q_former_sizes = QFormerSizes.read(Keys(self.root_config.section("projector_config") or {}, "config.json: projector_config"))
        self.window = self.root_config.integer("window_size", 15, high=4096)
        downsampling = self.root_config.integer("downsample_rate", 5, high=4096)
        self.rows_per_window, remainder = divmod(self.window, downsampling)
        if remainder:
            raise ConfigError(f"config.json: window_size {self.window} is not a multiple of downsample_rate {downsampling}")
        if 2 * self.mel.bands != self.sizes.input_width or self.q_former_sizes.encoder_width != self.sizes.width:
            raise ConfigError(f"{self.source.model}: audio becomes {2 * self.mel.bands} numbers a row, of which the encoder takes "
                              f"{self.sizes.input_width} and makes {self.sizes.width}, of which its projector takes "
                              f"{self.q_former_sizes.encoder_width}")
        self.needs_adapter = self.root_config.flag("has_lora_adapter", True)

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.check_length(samples)
        return (ROW_PLACEHOLDER,) * (-(-self.mel.frames(samples) // self.window) * self.rows_per_window)

    def values(self, samples: np.ndarray) -> np.ndarray:
        return self.mel(samples)

    def load(self, weights: Weights) -> Rows:
        encoder = load_conformer(weights, self.sizes, "encoder.")
        q_former = load_q_former(weights, self.q_former_sizes, "projector.", self.rows_per_window)
        output_projection = weights.matrix("projector.linear", self.config.hidden_size, self.q_former_sizes.width)

        def rows(frames: np.ndarray, pool: WorkerPool) -> np.ndarray:
            encoded = encoder.rows(frames, pool)
            windows = np.pad(encoded, ((0, -len(encoded) % self.window), (0, 0))).reshape(-1, self.window, self.sizes.width)
            return matmul(q_former(windows, pool).reshape(-1, self.q_former_sizes.width), output_projection, pool)

        return rows

    def workspace_floats(self) -> int:
        """The largest matrices, a layer's activations and row blocks."""
        sizes, frames = self.sizes, self.mel.frames(int(self.max_seconds * SAMPLE_RATE))
        matrices = 3 * sizes.width * max(sizes.ffn_width, sizes.conv_width)
        layer = frames * (2 * sizes.input_width + 3 * sizes.width + sizes.conv_width)
        tasks = (3 * ROWS * max(sizes.ffn_width, 2 * sizes.conv_width) + 4 * sizes.heads * sizes.block**2) * self.workers
        return matrices + layer + tasks


encoder = GraniteSpeech
