"""Qwen 2.5 Omni: Whisper's encoder over independent chunks of two seconds; pairs of rows are averaged and projected. A row is 40 ms and one
position, so positions tell time."""

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
from .whisper_encoder import KERNEL, LARGE, WhisperSizes, encoder_rows, load_encoder

LONGEST = 1e4  # longest wavelength of the sinusoidal position embeddings


class Qwen25Omni(AudioTower):
    KINDS = {"qwen2_5_omni_audio_encoder": {**LARGE, "n_window": 100}}
    placeholder, written = "<|AUDIO|>", "<|audio_bos|><|AUDIO|><|audio_eos|>"

    def configure(self, keys: Keys) -> None:
        self.sizes, self.log_mel = WhisperSizes.read(self.tower_config), log_mel_of(keys)
        self.piece = 2 * self.tower_config.integer("n_window", high=1 << 12)
        if self.log_mel.bands != self.sizes.bands or self.piece > 2 * self.sizes.places or self.sizes.width % 2:
            raise self.shape_mismatch_error(f"pieces of {self.piece} frames of {self.log_mel.bands} bands",
                              f"{2 * self.sizes.places} of {self.sizes.bands} at most, and makes an even number of each")

    @property
    def max_seconds(self) -> float:
        return self.log_mel.samples / SAMPLE_RATE

    def frames(self, samples: int) -> int:
        return -(-samples // self.log_mel.hop)

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.check_length(samples)
        return (ROW_PLACEHOLDER,) * (encoder_rows(self.frames(samples)) // 2)

    def values(self, taken: np.ndarray) -> Windows:
        """The maximum for clipping is that of the whole clip; padding reaches into its last frame."""
        length = min(self.log_mel.samples, len(taken) + 2 * self.log_mel.window)
        made = self.log_mel(np.pad(taken, (0, length - len(taken))))[: self.frames(len(taken))]
        return [(part, len(part)) for part in (made[begin : begin + self.piece] for begin in range(0, len(made), self.piece))]

    def load(self, weights: Weights) -> Rows:
        sizes = self.sizes
        encoder = load_encoder(weights, sizes, "audio_tower.", "ln_post", sinusoids(sizes.places, sizes.width))
        project = weights.matrix("audio_tower.proj", self.config.hidden_size, sizes.width)

        def rows(pieces: Windows, pool: WorkerPool) -> np.ndarray:
            made = encoder.rows_apart(pieces, pool)
            return matmul(encoder.after(made[: len(made) // 2 * 2].reshape(-1, 2, sizes.width).mean(1)), project, pool)

        return rows

    def workspace_floats(self) -> int:
        """The largest matrices, the activations of a layer, its row blocks, and what the convolutions read."""
        width, frames = self.sizes.width, self.log_mel.frames
        matrices, layer = 12 * width**2, 6 * encoder_rows(frames) * width
        pieces = 16 * width * ROWS * self.workers
        read = frames * (2 * self.sizes.bands + width) + KERNEL * self.piece * (width + self.sizes.bands)
        return matrices + layer + pieces + read


def sinusoids(places: int, width: int) -> np.ndarray:
    """Sinusoidal position embeddings, float32 [places, D]."""
    half = width // 2
    lengths = np.exp(np.float32(-math.log(LONGEST) / max(half - 1, 1)) * np.arange(half, dtype=np.float32))
    angles = np.arange(places, dtype=np.float32)[:, None] * lengths
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


encoder = Qwen25Omni
