"""Nemotron 3 Nano Omni, which sees as well: Parakeet's conformer over a whole sound, and two layers behind. A row is 80 ms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..config_reader import ConfigError
from ..images import PLACE
from ..images.nemotron_h_omni import PROJECTOR_EPS, relu_squared
from ..images.senses import RATE
from ..images.tower import Rows
from ..images.tower_parts import QUERIES, ROWS, Crew, two_layers
from ..images.tower_weights import Weights
from . import SECTIONS
from .fast_conformer import HELD, USUAL, FastSizes, load_fast_conformer
from .normed_mel import NormedMel
from .tower_hearing import Hearing
from .whisper_encoder import MOST_WIDTH

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..images.tower_source import TowerSource

BEGIN, SOUND, END = "<so_start>", "<so_embedding>", "<so_end>"


class NemotronHOmni(Hearing):
    AUDIO = dict.fromkeys(("parakeet_encoder", "parakeet"), {**USUAL, "attention_bias": False, "scale_input": False})
    placeholder = SOUND
    most_seconds = 600.0

    def __init__(self, source: TowerSource, config: ModelConfig) -> None:
        self.SECTION = next((name for name in SECTIONS if isinstance(source.config.get(name), dict)), SECTIONS[0])
        super().__init__(source, config)
        self.sizes = FastSizes.read(self.said)
        # Published folders say of a spectrogram how many bands it has, in the config; all else of it is as the encoder's family has it.
        self.mel = NormedMel.read(source.extractor(("ParakeetFeatureExtractor",), {
            "feature_size": self.sizes.bands, "sampling_rate": self.said.integer("sampling_rate", RATE)}))
        if self.mel.bands != self.sizes.bands:
            raise ConfigError(f"{source.model}: sounds become frames of {self.mel.bands} bands, but the tower takes {self.sizes.bands}")

    def count(self, samples: int) -> int:
        """Rows, of a frame that begins at the very end too."""
        return self.sizes.rows(self.mel.frames(samples) + 1)

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.demand_length(samples)
        return (self.word(BEGIN), *(PLACE,) * self.count(samples), self.word(END))

    def values(self, taken: np.ndarray) -> tuple[np.ndarray, int]:
        return self.mel(taken), self.count(len(taken))

    def load(self, weights: Weights) -> Rows:
        encoder, width, name = load_fast_conformer(weights, self.sizes, "audio_tower."), self.sizes.width, "embed_audio."
        middle = self.said.integer("projection_hidden_size", 4096, high=MOST_WIDTH)
        norm, biased = weights.rms_norm(f"{name}layer_norm", width, PROJECTOR_EPS), self.said.flag("projection_bias", False)
        first = weights.matrix(f"{name}linear_1", middle, width, bias=biased)
        second = weights.matrix(f"{name}linear_2", self.config.hidden_size, middle, bias=biased)

        def rows(heard: tuple[np.ndarray, int], crew: Crew) -> np.ndarray:
            return two_layers(norm(encoder.rows(*heard, crew)), first, second, relu_squared, crew)

        return rows

    def bytes_needed(self) -> int:
        """Weights, the largest matrices in float32, what goes through a layer, pieces of it, and what the convolutions read."""
        sizes, samples = self.sizes, int(self.most_seconds * RATE)
        with self.source.saying(), self.source.weights() as weights:
            rows, width, share = self.count(samples), sizes.width, 1 << sizes.halvings
            matrices = 3 * width * max(sizes.inner, sizes.channels * sizes.bands // share)
            layer = rows * (10 * width + sizes.channels * sizes.bands // share)
            pieces = 3 * ROWS * sizes.inner + 3 * QUERIES * rows + HELD * share * sizes.bands * sizes.channels
            whole = 2 * self.mel.frames(samples) * sizes.bands
            return weights.nbytes + 4 * (matrices + layer + pieces * self.workers + whole)


def sight(source: TowerSource, config: ModelConfig) -> Hearing:
    return NemotronHOmni(source, config)
