"""Voxtral: zero-padded windows of 30 s through Whisper's encoder; four rows are concatenated and projected by an MLP. The maximum for
clipping is that of the whole clip."""

from __future__ import annotations

import numpy as np

from ..config_reader import ConfigError, Keys
from ..images import ROW_PLACEHOLDER
from ..images.tower import Rows
from ..images.tower_ops import WorkerPool
from ..images.tower_weights import Weights
from .audio_tower import WhisperTower, Windows
from .whisper_encoder import LARGE, load_encoder


class Voxtral(WhisperTower):
    KINDS = {"voxtral_encoder": LARGE}
    placeholder, written = "[AUDIO]", "[BEGIN_AUDIO][AUDIO]"
    transcribe_token = "[TRANSCRIBE]"
    max_seconds = 2400.0  # as many as its context of 32,768 tokens was made for

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        self.beside, rest = divmod(self.sizes.inner, self.sizes.width)
        if rest or self.sizes.places % self.beside:
            raise ConfigError(f"{self.tower_config.where}: intermediate_size {self.sizes.inner} is not a multiple of {self.sizes.width}")

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.check_length(samples)
        return (ROW_PLACEHOLDER,) * (-(-samples // self.log_mel.samples) * self.sizes.places // self.beside)

    def values(self, taken: np.ndarray) -> Windows:
        length, frames = self.log_mel.samples, self.log_mel.frames
        whole = self.log_mel(np.pad(taken, (0, -len(taken) % length)))
        return [(whole[begin : begin + frames], frames) for begin in range(0, len(whole), frames)]

    def load(self, weights: Weights) -> Rows:
        encoder, project = load_encoder(weights, self.sizes, "audio_tower."), self.to_text(weights, self.sizes.inner)

        def rows(windows: Windows, pool: WorkerPool) -> np.ndarray:
            made = encoder.after(np.concatenate(encoder.rows(windows, pool)))
            return project(made.reshape(-1, self.sizes.inner), pool)

        return rows


encoder = Voxtral
