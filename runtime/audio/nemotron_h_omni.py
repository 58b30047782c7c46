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
from .fast_conformer import CONFIG_DEFAULTS, TASK_ROWS, FastSizes, load_fast_conformer
from .normalized_mel import NormalizedMel
from .whisper_encoder import MAX_WIDTH

BEGIN_TOKEN, AUDIO_TOKEN, END_TOKEN = "<so_start>", "<so_embedding>", "<so_end>"


class NemotronHOmni(AudioTower):
    KINDS = dict.fromkeys(("parakeet_encoder", "parakeet"), {**CONFIG_DEFAULTS, "attention_bias": False, "scale_input": False})
    placeholder = AUDIO_TOKEN
    max_seconds = 600.0

    @property
    def SECTION(self) -> str:
        return next((name for name in AUDIO_SECTIONS if isinstance(self.source.config.get(name), dict)), AUDIO_SECTIONS[0])

    def read_preprocessor(self) -> Keys:
        """The extractor's config. Published folders state only the number of mel bands, in config.json; the rest are defaults."""
        self.sizes = FastSizes.read(self.tower_config)
        return self.source.extractor(("ParakeetFeatureExtractor",), {
            "feature_size": self.sizes.bands, "sampling_rate": self.tower_config.integer("sampling_rate", SAMPLE_RATE)})

    def configure(self, keys: Keys) -> None:
        self.mel = NormalizedMel.read(keys)
        if self.mel.bands != self.sizes.bands:
            raise self.shape_mismatch_error(f"frames of {self.mel.bands} bands", f"{self.sizes.bands}")

    def num_rows(self, samples: int) -> int:
        """Number of rows, including that of the frame that begins at the very end."""
        return self.sizes.rows(self.mel.frames(samples) + 1)

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.check_length(samples)
        return (self.token_id(BEGIN_TOKEN), *(ROW_PLACEHOLDER,) * self.num_rows(samples), self.token_id(END_TOKEN))

    def values(self, samples: np.ndarray) -> tuple[np.ndarray, int]:
        return self.mel(samples), self.num_rows(len(samples))

    def load(self, weights: Weights) -> Rows:
        encoder, width, name = load_fast_conformer(weights, self.sizes, "audio_tower."), self.sizes.width, "embed_audio."
        ffn_width = self.tower_config.integer("projection_hidden_size", 4096, high=MAX_WIDTH)
        norm, has_bias = weights.rms_norm(f"{name}layer_norm", width, PROJECTOR_EPS), self.tower_config.flag("projection_bias", False)
        project = weights.two_layers(name, (width, ffn_width, self.config.hidden_size), relu_squared, has_bias)
        return lambda frames, pool: project(norm(encoder.rows(*frames, pool)), pool)

    def workspace_floats(self) -> int:
        """The largest matrices, a layer's activations and row blocks, and the convolutions' inputs."""
        sizes, samples = self.sizes, int(self.max_seconds * SAMPLE_RATE)
        rows, width, subsampling = self.num_rows(samples), sizes.width, 1 << sizes.num_subsampling
        matrices = 3 * width * max(sizes.ffn_width, sizes.conv_channels * sizes.bands // subsampling)
        layer = rows * (10 * width + sizes.conv_channels * sizes.bands // subsampling)
        tasks = 3 * ROWS * sizes.ffn_width + 3 * QUERIES * rows + TASK_ROWS * subsampling * sizes.bands * sizes.conv_channels
        spectrogram = 2 * self.mel.frames(samples) * sizes.bands
        return matrices + layer + tasks * self.workers + spectrogram


encoder = NemotronHOmni
