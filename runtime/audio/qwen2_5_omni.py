"""Qwen 2.5 Omni: Whisper's encoder over independent chunks of two seconds; pairs of rows are averaged and projected.

A row is 40 ms and one position, so positions are a measure of time.
"""

from __future__ import annotations

import math

import numpy as np

from ..config_reader import Keys
from ..images import ROW_PLACEHOLDER
from ..images.modality import SAMPLE_RATE
from ..images.tower import Rows
from ..images.tower_ops import ROWS, WorkerPool, matmul
from ..images.tower_weights import Weights
from .audio_tower import AudioTower, Windows
from .log_mel import log_mel_of
from .whisper_encoder import KERNEL, LARGE_DEFAULTS, WhisperSizes, encoder_rows, load_encoder

MAX_WAVELENGTH = 1e4  # longest wavelength of the sinusoidal position embeddings


class Qwen25Omni(AudioTower):
    KINDS = {"qwen2_5_omni_audio_encoder": {**LARGE_DEFAULTS, "n_window": 100}}
    placeholder, written = "<|AUDIO|>", "<|audio_bos|><|AUDIO|><|audio_eos|>"

    def configure(self, keys: Keys) -> None:
        self.sizes, self.log_mel = WhisperSizes.read(self.tower_config), log_mel_of(keys)
        self.chunk_frames = 2 * self.tower_config.integer("n_window", high=1 << 12)
        if self.log_mel.bands != self.sizes.bands or self.chunk_frames > 2 * self.sizes.max_positions or self.sizes.width % 2:
            raise self.shape_mismatch_error(f"pieces of {self.chunk_frames} frames of {self.log_mel.bands} bands",
                                            f"{2 * self.sizes.max_positions} of {self.sizes.bands} at most, "
                                            "and makes an even number of each")

    @property
    def max_seconds(self) -> float:
        return self.log_mel.samples / SAMPLE_RATE

    def frames(self, samples: int) -> int:
        return -(-samples // self.log_mel.hop)

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.check_length(samples)
        return (ROW_PLACEHOLDER,) * (encoder_rows(self.frames(samples)) // 2)

    def values(self, samples: np.ndarray) -> Windows:
        """Spectrograms of the chunks. The maximum to clip at is that of the whole clip."""
        # Padding beyond the window that the clip's last frame reads.
        length = min(self.log_mel.samples, len(samples) + 2 * self.log_mel.window)
        frames = self.log_mel(np.pad(samples, (0, length - len(samples))))[: self.frames(len(samples))]
        chunks = (frames[begin : begin + self.chunk_frames] for begin in range(0, len(frames), self.chunk_frames))
        return [(chunk, len(chunk)) for chunk in chunks]

    def load(self, weights: Weights) -> Rows:
        sizes = self.sizes
        encoder = load_encoder(weights, sizes, "audio_tower.", "ln_post", sinusoids(sizes.max_positions, sizes.width))
        project = weights.matrix("audio_tower.proj", self.config.hidden_size, sizes.width)

        def rows(chunks: Windows, pool: WorkerPool) -> np.ndarray:
            encoded = encoder.rows_batched(chunks, pool)
            averaged = encoded[: len(encoded) // 2 * 2].reshape(-1, 2, sizes.width).mean(1)
            return matmul(encoder.output_norm(averaged), project, pool)

        return rows

    def workspace_floats(self) -> int:
        """The largest matrices, a layer's activations and row blocks, and the convolutions' inputs."""
        width, frames = self.sizes.width, self.log_mel.frames
        matrices, layer = 12 * width**2, 6 * encoder_rows(frames) * width
        tasks = 16 * width * ROWS * self.workers
        conv_inputs = frames * (2 * self.sizes.bands + width) + KERNEL * self.chunk_frames * (width + self.sizes.bands)
        return matrices + layer + tasks + conv_inputs


def sinusoids(count: int, width: int) -> np.ndarray:
    """Sinusoidal position embeddings, float32 [count, D]."""
    half = width // 2
    frequencies = np.exp(np.float32(-math.log(MAX_WAVELENGTH) / max(half - 1, 1)) * np.arange(half, dtype=np.float32))
    angles = np.arange(count, dtype=np.float32)[:, None] * frequencies
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


encoder = Qwen25Omni
