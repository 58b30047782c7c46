"""Granite Speech: pairs of frames through a conformer, of whose rows a Q-Former makes three per fifteen. The text model reads them through
a LoRA adapter in the model's folder, unless its weights are merged."""

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
from .log_mel import HIGHEST_HZ, hann, log_powers, triangular_filters
from .q_former import QFormerSizes, load_q_former


@dataclass(frozen=True)
class PairedMel:
    """HTK log-mel spectrogram with stacked pairs of frames. `window`: FFT size, `heard`: samples of the analysis window, centered."""

    bands: int
    window: int
    heard: int
    hop: int

    @staticmethod
    def read(keys: Keys) -> PairedMel:
        inner = keys.section("melspec_kwargs")
        own = Keys(inner, f"{keys.where}: melspec_kwargs") if inner is not None else keys
        window = own.integer("n_fft", 512, low=16, high=4096)
        return PairedMel(own.integer("n_mels", 80, high=512), window, own.integer("win_length", 400, low=16, high=window),
                         own.integer("hop_length", 160, high=4096))

    @cached_property
    def filters(self) -> np.ndarray:
        """float32 [1 + window // 2, bands]."""
        mels = np.linspace(0, 2595 * np.log10(1 + HIGHEST_HZ / 700), self.bands + 2)
        return triangular_filters(700 * (10 ** (mels / 2595) - 1), self.window).astype(np.float32)

    def frames(self, samples: int) -> int:
        """Number of frame pairs."""
        return (samples // self.hop + 1) // 2

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        """float32 [n] -> float32 [pairs, 2 * bands]. The maximum for clipping is taken over all frames, also an odd last one."""
        left = (self.window - self.heard) // 2
        shape = np.pad(hann(self.heard), (left, self.window - self.heard - left))
        made = log_powers(samples, shape, self.hop, len(samples) // self.hop + 1, self.filters)
        return made[: len(made) // 2 * 2].reshape(-1, 2 * self.bands)


class GraniteSpeech(AudioTower):
    KINDS = {"granite_speech_encoder": {}}
    EXTRACTORS = ("GraniteSpeechFeatureExtractor",)
    SECTION = "encoder_config"
    placeholder = "<|audio|>"
    transcription_prompt = "can you transcribe the speech into a written format?"
    max_seconds = 600.0

    def configure(self, keys: Keys) -> None:
        self.sizes, self.mel = ConformerSizes.read(self.tower_config), PairedMel.read(keys)
        self.asks = QFormerSizes.read(Keys(self.root_config.section("projector_config") or {}, "config.json: projector_config"))
        self.window = self.root_config.integer("window_size", 15, high=4096)
        every = self.root_config.integer("downsample_rate", 5, high=4096)
        self.made, rest = divmod(self.window, every)
        if rest:
            raise ConfigError(f"config.json: window_size {self.window} is not a multiple of downsample_rate {every}")
        if 2 * self.mel.bands != self.sizes.inputs or self.asks.seen != self.sizes.width:
            raise ConfigError(f"{self.source.model}: audio becomes {2 * self.mel.bands} numbers a row, of which the encoder takes "
                              f"{self.sizes.inputs} and makes {self.sizes.width}, of which its projector takes {self.asks.seen}")
        self.needs_adapter = self.root_config.flag("has_lora_adapter", True)

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.check_length(samples)
        return (ROW_PLACEHOLDER,) * (-(-self.mel.frames(samples) // self.window) * self.made)

    def values(self, taken: np.ndarray) -> np.ndarray:
        return self.mel(taken)

    def load(self, weights: Weights) -> Rows:
        encoder = load_conformer(weights, self.sizes, "encoder.")
        former = load_q_former(weights, self.asks, "projector.", self.made)
        last = weights.matrix("projector.linear", self.config.hidden_size, self.asks.width)

        def rows(frames: np.ndarray, pool: WorkerPool) -> np.ndarray:
            heard = encoder.rows(frames, pool)
            windows = np.pad(heard, ((0, -len(heard) % self.window), (0, 0))).reshape(-1, self.window, self.sizes.width)
            return matmul(former(windows, pool).reshape(-1, self.asks.width), last, pool)

        return rows

    def workspace_floats(self) -> int:
        """The largest matrices, the activations of a layer, and its row blocks."""
        sizes, frames = self.sizes, self.mel.frames(int(self.max_seconds * SAMPLE_RATE))
        matrices = 3 * sizes.width * max(sizes.inner, sizes.channels)
        layer = frames * (2 * sizes.inputs + 3 * sizes.width + sizes.channels)
        pieces = (3 * ROWS * max(sizes.inner, 2 * sizes.channels) + 4 * sizes.heads * sizes.block**2) * self.workers
        return matrices + layer + pieces


encoder = GraniteSpeech
