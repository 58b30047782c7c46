"""Voxtral: zero-padded windows of 30 s through Whisper's encoder; four rows are concatenated and projected by an MLP.

The maximum to clip the spectrogram at is that of the whole clip.
"""

from __future__ import annotations

import numpy as np

from ..config_reader import ConfigError, Keys
from ..images import ROW_PLACEHOLDER
from ..images.tower import Rows
from ..images.tower_ops import WorkerPool
from ..images.tower_weights import Weights
from .audio_tower import WhisperTower, Windows
from .whisper_encoder import LARGE_DEFAULTS, load_encoder


class Voxtral(WhisperTower):
    KINDS = {"voxtral_encoder": LARGE_DEFAULTS}
    placeholder, written = "[AUDIO]", "[BEGIN_AUDIO][AUDIO]"
    transcribe_token = "[TRANSCRIBE]"
    max_seconds = 2400.0  # the most that fits its context of 32,768 tokens

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        self.stacked_rows, remainder = divmod(self.sizes.ffn_width, self.sizes.width)
        if remainder or self.sizes.max_positions % self.stacked_rows:
            raise ConfigError(f"{self.tower_config.where}: intermediate_size {self.sizes.ffn_width} is not a multiple of "
                              f"{self.sizes.width}")

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.check_length(samples)
        return (ROW_PLACEHOLDER,) * (-(-samples // self.log_mel.samples) * self.sizes.max_positions // self.stacked_rows)

    def values(self, samples: np.ndarray) -> Windows:
        length, frames = self.log_mel.samples, self.log_mel.frames
        spectrogram = self.log_mel(np.pad(samples, (0, -len(samples) % length)))
        return [(spectrogram[begin : begin + frames], frames) for begin in range(0, len(spectrogram), frames)]

    def load(self, weights: Weights) -> Rows:
        encoder, project = load_encoder(weights, self.sizes, "audio_tower."), self.to_text(weights, self.sizes.ffn_width)

        def rows(windows: Windows, pool: WorkerPool) -> np.ndarray:
            encoded = encoder.output_norm(np.concatenate(encoder.rows(windows, pool)))
            return project(encoded.reshape(-1, self.sizes.ffn_width), pool)

        return rows


encoder = Voxtral
