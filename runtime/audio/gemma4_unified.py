"""Gemma 4 without a tower: one matrix projects 40 ms of samples to a row."""

from __future__ import annotations

import numpy as np

from ..config_reader import Keys
from ..images import ROW_PLACEHOLDER
from ..images.modality import SAMPLE_RATE
from ..images.tower import Rows
from ..images.tower_ops import Norm, matmul
from ..images.tower_weights import Weights
from .audio_tower import AudioTower
from .gemma4 import AUDIO_TOKEN, BEGIN_TOKEN, END_TOKEN


class Gemma4Unified(AudioTower):
    KINDS = {"gemma4_unified_audio": {"audio_embed_dim": 640, "rms_norm_eps": 1e-6}}
    EXTRACTORS = ("Gemma4UnifiedAudioFeatureExtractor",)
    placeholder = AUDIO_TOKEN
    max_seconds = 30.0

    def configure(self, keys: Keys) -> None:
        self.samples_per_row = self.tower_config.integer("audio_embed_dim", high=1 << 14)
        if keys.integer("audio_samples_per_token", 640) != self.samples_per_row:
            raise keys.fail("audio_samples_per_token", f"{self.samples_per_row}, as in config.json")

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.check_length(samples)
        return (self.token_id(BEGIN_TOKEN), *(ROW_PLACEHOLDER,) * -(-samples // self.samples_per_row), self.token_id(END_TOKEN))

    def values(self, samples: np.ndarray) -> np.ndarray:
        """float32 [rows, samples per row], zero-padded."""
        return np.pad(samples, (0, -len(samples) % self.samples_per_row)).reshape(-1, self.samples_per_row)

    def load(self, weights: Weights) -> Rows:
        norm = Norm(np.ones(self.samples_per_row, np.float32), None, self.tower_config.number("rms_norm_eps"), centered=False)
        project = weights.matrix("embed_audio.embedding_projection", self.config.hidden_size, self.samples_per_row, bias=False)
        return lambda values, pool: matmul(norm(values), project, pool)

    def workspace_floats(self) -> int:
        """Weights as float32, inputs and outputs."""
        return self.samples_per_row * self.config.hidden_size + 3 * int(self.max_seconds * SAMPLE_RATE)


encoder = Gemma4Unified
