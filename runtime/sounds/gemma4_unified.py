"""The Gemma 4 without a tower: 40 ms of samples become a row by one matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..images import PLACE
from ..images.senses import RATE
from ..images.tower import Rows
from ..images.tower_parts import Norm, product
from ..images.tower_weights import Weights
from .gemma4 import BEGIN, END, SOUND
from .tower_hearing import Hearing

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..images.tower_source import TowerSource

KIND = "Gemma4UnifiedAudioFeatureExtractor"


class Gemma4Unified(Hearing):
    AUDIO = {"gemma4_unified_audio": {"audio_embed_dim": 640, "rms_norm_eps": 1e-6}}
    placeholder = SOUND
    most_seconds = 30.0

    def __init__(self, source: TowerSource, config: ModelConfig) -> None:
        super().__init__(source, config)
        keys = source.extractor((KIND,))
        self.each = self.said.integer("audio_embed_dim", high=1 << 14)
        if keys.integer("audio_samples_per_token", 640) != self.each:
            raise keys.fail("audio_samples_per_token", f"{self.each}, as config.json says of what hears")

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.demand_length(samples)
        return (self.word(BEGIN), *(PLACE,) * -(-samples // self.each), self.word(END))

    def values(self, taken: np.ndarray) -> np.ndarray:
        """float32 [rows, samples of each]; behind the sound there is nothing."""
        return np.pad(taken, (0, -len(taken) % self.each)).reshape(-1, self.each)

    def load(self, weights: Weights) -> Rows:
        plain = Norm(np.ones(self.each, np.float32), None, self.said.number("rms_norm_eps"), centered=False)
        project = weights.matrix("embed_audio.embedding_projection", self.config.hidden_size, self.each, bias=False)
        return lambda values, crew: product(plain(values), project, crew)

    def bytes_needed(self) -> int:
        """Weights, in float32 too, and what goes in and comes out."""
        with self.source.saying(), self.source.weights() as weights:
            return weights.nbytes + 4 * (self.each * self.config.hidden_size + 3 * int(self.most_seconds * RATE))


def sight(source: TowerSource, config: ModelConfig) -> Hearing:
    return Gemma4Unified(source, config)
