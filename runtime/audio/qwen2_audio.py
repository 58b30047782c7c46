"""Qwen2-Audio: 30 s through Whisper's encoder; pairs of rows are averaged and projected. Padding is masked, so it is not computed."""

from __future__ import annotations

import numpy as np

from ..images import ROW_PLACEHOLDER
from ..images.modality import SAMPLE_RATE
from ..images.tower import Rows
from ..images.tower_ops import WorkerPool, matmul
from ..images.tower_weights import Weights
from .audio_tower import WhisperTower, Windows
from .whisper_encoder import LARGE_DEFAULTS, encoder_rows, load_encoder


class Qwen2Audio(WhisperTower):
    KINDS = {"qwen2_audio_encoder": LARGE_DEFAULTS}
    placeholder, written = "<|AUDIO|>", "<|audio_bos|><|AUDIO|><|audio_eos|>"

    @property
    def max_seconds(self) -> float:
        return self.log_mel.samples / SAMPLE_RATE

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.check_length(samples)
        whole, remainder = divmod(samples, self.log_mel.samples)
        return (ROW_PLACEHOLDER,) * (whole * (self.sizes.max_positions // 2) + encoder_rows(self.num_frames(remainder)) // 2)

    def load(self, weights: Weights) -> Rows:
        encoder, project = load_encoder(weights, self.sizes, "audio_tower."), self.projector(weights)

        def rows(windows: Windows, pool: WorkerPool) -> np.ndarray:
            pooled = [encoded[: len(encoded) // 2 * 2].reshape(-1, 2, self.sizes.width).mean(1) for encoded in encoder.rows(windows, pool)]
            return project(encoder.output_norm(np.concatenate(pooled)), pool)

        return rows

    def projector(self, weights: Weights) -> Rows:
        matrix = weights.matrix("multi_modal_projector.linear", self.config.hidden_size, self.sizes.width)
        return lambda x, pool: matmul(x, matrix, pool)


encoder = Qwen2Audio
