"""Gemma 4 (small models): a causal conformer, one row per four frames."""

from __future__ import annotations

import numpy as np

from ..config_reader import Keys
from ..images import ROW_PLACEHOLDER
from ..images.gemma4 import demand_padding
from ..images.modality import SAMPLE_RATE
from ..images.tower import Rows
from ..images.tower_ops import ROWS, Norm, matmul
from ..images.tower_weights import Weights
from .audio_tower import AudioTower
from .causal_conformer import (
    CONFIG_DEFAULTS,
    GEMMA_4_NAMES,
    KERNEL,
    TASK_ROWS,
    CausalConformer,
    CausalSizes,
    load_causal_conformer,
    subsampled,
)
from .gemma_mel import GEMMA_4, GemmaLogMel

BEGIN_TOKEN, AUDIO_TOKEN, END_TOKEN = "<|audio>", "<|audio|>", "<audio|>"


class Gemma4(AudioTower):
    """The tower of Gemma 4; Gemma 3n's derives from it."""

    KINDS = {"gemma4_audio": CONFIG_DEFAULTS}
    EXTRACTORS = ("Gemma4AudioFeatureExtractor",)
    EXTRACTOR_DEFAULTS = GEMMA_4
    placeholder = AUDIO_TOKEN
    max_seconds = 30.0

    def configure(self, keys: Keys) -> None:
        self.mel = GemmaLogMel.read(keys, self.EXTRACTOR_DEFAULTS)
        self.sizes = self.read_sizes(self.tower_config, self.mel.bands)
        demand_padding(self.root_config, self.config)

    def read_sizes(self, keys: Keys, bands: int) -> CausalSizes:
        return CausalSizes.read(keys, bands)

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.check_length(samples)
        return (self.token_id(BEGIN_TOKEN), *(ROW_PLACEHOLDER,) * subsampled(self.mel.frames(samples)), self.token_id(END_TOKEN))

    def values(self, samples: np.ndarray) -> np.ndarray:
        return self.mel(samples)

    def load(self, weights: Weights) -> Rows:
        tower, width = self.load_tower(weights), self.sizes.output_width
        norm = Norm(np.ones(width, np.float32), None, self.sizes.eps, centered=False)
        project = weights.matrix("embed_audio.embedding_projection", self.config.hidden_size, width, bias=False)
        return lambda frames, pool: matmul(norm(tower.rows(frames, pool)), project, pool)

    def load_tower(self, weights: Weights) -> CausalConformer:
        return load_causal_conformer(weights, self.sizes, "audio_tower.", GEMMA_4_NAMES, lambda weight: Norm(weight, None, self.sizes.eps))

    def workspace_floats(self) -> int:
        """The largest matrices, a layer's activations and row blocks, and the convolutions' inputs."""
        sizes, frames = self.sizes, self.mel.frames(int(self.max_seconds * SAMPLE_RATE))
        matrices = 8 * sizes.width**2
        layer = subsampled(frames) * (8 + 2 * sizes.context // sizes.chunk) * sizes.width
        tasks = 5 * ROWS * sizes.width + TASK_ROWS * sizes.bands * sizes.conv_channels[0] * KERNEL**2 // 4
        subsampling = frames * sizes.bands * (1 + sizes.conv_channels[0]) // 2
        return matrices + layer + tasks * self.workers + subsampling


encoder = Gemma4
