"""Gemma 4 without a tower: 40 ms of samples become a row by one matrix."""

from __future__ import annotations

import numpy as np

from ..config_reader import Keys
from ..images import ROW_PLACEHOLDER
from ..images.modality import SAMPLE_RATE
from ..images.tower import Rows
from ..images.tower_ops import Norm, matmul
from ..images.tower_weights import Weights
from .audio_tower import AudioTower
from .gemma4 import BEGIN, END, SOUND


class Gemma4Unified(AudioTower):
    KINDS = {"gemma4_unified_audio": {"audio_embed_dim": 640, "rms_norm_eps": 1e-6}}
    EXTRACTORS = ("Gemma4UnifiedAudioFeatureExtractor",)
    placeholder = SOUND
    max_seconds = 30.0

    def configure(self, keys: Keys) -> None:
        self.each = self.tower_config.integer("audio_embed_dim", high=1 << 14)
        if keys.integer("audio_samples_per_token", 640) != self.each:
            raise keys.fail("audio_samples_per_token", f"{self.each}, as in config.json")

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.check_length(samples)
        return (self.token_id(BEGIN), *(ROW_PLACEHOLDER,) * -(-samples // self.each), self.token_id(END))

    def values(self, taken: np.ndarray) -> np.ndarray:
        """float32 [rows, samples per row], zero-padded."""
        return np.pad(taken, (0, -len(taken) % self.each)).reshape(-1, self.each)

    def load(self, weights: Weights) -> Rows:
        plain = Norm(np.ones(self.each, np.float32), None, self.tower_config.number("rms_norm_eps"), centered=False)
        project = weights.matrix("embed_audio.embedding_projection", self.config.hidden_size, self.each, bias=False)
        return lambda values, pool: matmul(plain(values), project, pool)

    def workspace_floats(self) -> int:
        """Weights as float32, and inputs and outputs."""
        return self.each * self.config.hidden_size + 3 * int(self.max_seconds * SAMPLE_RATE)


encoder = Gemma4Unified
