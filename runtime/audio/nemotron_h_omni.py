"""Nemotron 3 Nano Omni: Parakeet's FastConformer over the whole clip and an MLP projector. A row is 80 ms."""

from __future__ import annotations

import numpy as np

from ..config_reader import Keys
from ..images import ROW_PLACEHOLDER
from ..images.modality import SAMPLE_RATE
from ..images.nemotron_h_omni import PROJECTOR_EPS, relu_squared
from ..images.tower import Rows
from ..images.tower_ops import QUERIES, ROWS
from ..images.tower_weights import Weights
from . import AUDIO_SECTIONS
from .audio_tower import AudioTower
from .fast_conformer import HELD, USUAL, FastSizes, load_fast_conformer
from .normalized_mel import NormalizedMel
from .whisper_encoder import MOST_WIDTH

BEGIN, SOUND, END = "<so_start>", "<so_embedding>", "<so_end>"


class NemotronHOmni(AudioTower):
    KINDS = dict.fromkeys(("parakeet_encoder", "parakeet"), {**USUAL, "attention_bias": False, "scale_input": False})
    placeholder = SOUND
    max_seconds = 600.0

    @property
    def SECTION(self) -> str:
        return next((name for name in AUDIO_SECTIONS if isinstance(self.source.config.get(name), dict)), AUDIO_SECTIONS[0])

    def read_preprocessor(self) -> Keys:
        """Published folders state only the number of mel bands, in config.json; the rest are the encoder family's defaults."""
        self.sizes = FastSizes.read(self.tower_config)
        return self.source.extractor(("ParakeetFeatureExtractor",), {
            "feature_size": self.sizes.bands, "sampling_rate": self.tower_config.integer("sampling_rate", SAMPLE_RATE)})

    def configure(self, keys: Keys) -> None:
        self.mel = NormalizedMel.read(keys)
        if self.mel.bands != self.sizes.bands:
            raise self.shape_mismatch_error(f"frames of {self.mel.bands} bands", f"{self.sizes.bands}")

    def count(self, samples: int) -> int:
        """Rows, with the frame that begins at the very end."""
        return self.sizes.rows(self.mel.frames(samples) + 1)

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.check_length(samples)
        return (self.token_id(BEGIN), *(ROW_PLACEHOLDER,) * self.count(samples), self.token_id(END))

    def values(self, taken: np.ndarray) -> tuple[np.ndarray, int]:
        return self.mel(taken), self.count(len(taken))

    def load(self, weights: Weights) -> Rows:
        encoder, width, name = load_fast_conformer(weights, self.sizes, "audio_tower."), self.sizes.width, "embed_audio."
        middle = self.tower_config.integer("projection_hidden_size", 4096, high=MOST_WIDTH)
        norm, biased = weights.rms_norm(f"{name}layer_norm", width, PROJECTOR_EPS), self.tower_config.flag("projection_bias", False)
        project = weights.two_layers(name, (width, middle, self.config.hidden_size), relu_squared, biased)
        return lambda heard, pool: project(norm(encoder.rows(*heard, pool)), pool)

    def workspace_floats(self) -> int:
        """The largest matrices, the activations of a layer, its row blocks, and what the convolutions read."""
        sizes, samples = self.sizes, int(self.max_seconds * SAMPLE_RATE)
        rows, width, share = self.count(samples), sizes.width, 1 << sizes.halvings
        matrices = 3 * width * max(sizes.inner, sizes.channels * sizes.bands // share)
        layer = rows * (10 * width + sizes.channels * sizes.bands // share)
        pieces = 3 * ROWS * sizes.inner + 3 * QUERIES * rows + HELD * share * sizes.bands * sizes.channels
        whole = 2 * self.mel.frames(samples) * sizes.bands
        return matrices + layer + pieces * self.workers + whole


encoder = NemotronHOmni
