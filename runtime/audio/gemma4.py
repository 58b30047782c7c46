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
from .causal_conformer import HELD, KERNEL, NOW, USUAL, CausalConformer, CausalSizes, load_causal_conformer, subsampled
from .gemma_mel import GEMMA_4, GemmaLogMel

BEGIN, SOUND, END = "<|audio>", "<|audio|>", "<audio|>"


class Gemma4(AudioTower):
    """`SAYING`: defaults of the feature extractor."""

    KINDS = {"gemma4_audio": USUAL}
    EXTRACTORS, SAYING = ("Gemma4AudioFeatureExtractor",), GEMMA_4
    placeholder = SOUND
    max_seconds = 30.0

    def configure(self, keys: Keys) -> None:
        self.bands = GemmaLogMel.read(keys, self.SAYING)
        self.sizes = self.sized(self.tower_config, self.bands.bands)
        demand_padding(self.root_config, self.config)

    def sized(self, keys: Keys, bands: int) -> CausalSizes:
        return CausalSizes.read(keys, bands)

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.check_length(samples)
        return (self.token_id(BEGIN), *(ROW_PLACEHOLDER,) * subsampled(self.bands.frames(samples)), self.token_id(END))

    def values(self, taken: np.ndarray) -> np.ndarray:
        return self.bands(taken)

    def load(self, weights: Weights) -> Rows:
        tower, made = self.tower_of(weights), self.sizes.made
        plain = Norm(np.ones(made, np.float32), None, self.sizes.eps, centered=False)
        project = weights.matrix("embed_audio.embedding_projection", self.config.hidden_size, made, bias=False)
        return lambda frames, pool: matmul(plain(tower.rows(frames, pool)), project, pool)

    def tower_of(self, weights: Weights) -> CausalConformer:
        return load_causal_conformer(weights, self.sizes, "audio_tower.", NOW, lambda weight: Norm(weight, None, self.sizes.eps))

    def workspace_floats(self) -> int:
        """The largest matrices, the activations of a layer, its row blocks, and what the first convolutions read."""
        sizes, frames = self.sizes, self.bands.frames(int(self.max_seconds * SAMPLE_RATE))
        matrices = 8 * sizes.width**2
        layer = subsampled(frames) * (8 + 2 * sizes.context // sizes.block) * sizes.width
        pieces = 5 * ROWS * sizes.width + HELD * sizes.bands * sizes.channels[0] * KERNEL**2 // 4
        first = frames * sizes.bands * (1 + sizes.channels[0]) // 2
        return matrices + layer + pieces * self.workers + first


encoder = Gemma4
