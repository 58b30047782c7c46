"""Qwen 3 Omni: chunks of a second through three subsampling convolutions, then Whisper-like layers with attention within eight chunks.

A row is 80 ms; the last of a chunk may be shorter.
"""

from __future__ import annotations

import numpy as np

from ..config_reader import Keys
from ..images import ROW_PLACEHOLDER
from ..images.modality import SAMPLE_RATE
from ..images.tower import Rows
from ..images.tower_layers import run_blocks
from ..images.tower_ops import ROWS, Matrix, WorkerPool, gelu, matmul
from ..images.tower_weights import Weights
from .audio_tower import AudioTower
from .causal_conformer import KERNEL, TASK_ROWS, SubsamplingConv
from .log_mel import WHISPER_EXTRACTORS, log_mel_of
from .qwen2_5_omni import sinusoids
from .whisper_encoder import EPS, LARGE_DEFAULTS, WhisperSizes, load_layers

SUBSAMPLING = 8  # factor by which the convolutions reduce frames and bands
BATCH_WINDOWS = 32  # attention windows that run through the layers together


class Qwen3Omni(AudioTower):
    """The tower of Qwen 3 Omni; Qwen3-ASR's derives from it.

    chunk_frames: frames of a chunk
    chunks_per_window: chunks that attend to each other
    """

    KINDS = {"qwen3_omni_moe_audio_encoder": {**LARGE_DEFAULTS, "n_window": 50, "n_window_infer": 800, "downsample_hidden_size": 480}}
    placeholder, written = "<|audio_pad|>", "<|audio_start|><|audio_pad|><|audio_end|>"
    EXTRACTORS = WHISPER_EXTRACTORS
    PADS_CHUNKS = False  # whether a partial chunk is padded even if it is the only one
    max_seconds = 2400.0

    def configure(self, keys: Keys) -> None:
        self.sizes, self.log_mel = WhisperSizes.read(self.tower_config), log_mel_of(keys)
        self.chunk_frames = 2 * self.tower_config.integer("n_window", high=1 << 12)
        self.chunks_per_window = self.tower_config.integer("n_window_infer", high=1 << 16) // self.chunk_frames
        self.channels = self.tower_config.integer("downsample_hidden_size", high=1 << 14)
        if self.log_mel.bands != self.sizes.bands or subsampled(self.chunk_frames) > self.sizes.max_positions or self.sizes.width % 2 \
                or not self.chunks_per_window:
            produced = f"pieces of {self.chunk_frames} frames of {self.log_mel.bands} bands, {self.chunks_per_window} together"
            expected = f"{SUBSAMPLING * self.sizes.max_positions} of {self.sizes.bands} at most, one at least"
            raise self.shape_mismatch_error(produced, expected)

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.check_length(samples)
        whole, remainder = divmod(samples // self.log_mel.hop, self.chunk_frames)
        return (ROW_PLACEHOLDER,) * (whole * subsampled(self.chunk_frames) + subsampled(remainder))

    def values(self, samples: np.ndarray) -> np.ndarray:
        """float32 [frames, bands]; the maximum for clipping is that of the whole clip."""
        return self.log_mel(samples)

    def load(self, weights: Weights) -> Rows:
        sizes, width, channels, name = self.sizes, self.sizes.width, self.channels, "audio_tower."

        def load_conv(number: int) -> SubsamplingConv:
            in_channels = 1 if number == 1 else channels
            stored = weights.stored(f"{name}conv2d{number}.weight", channels, in_channels * KERNEL**2)  # stored with bands before frames
            kernel = stored.reshape(channels, in_channels, KERNEL, KERNEL).swapaxes(2, 3).reshape(channels, -1)
            return SubsamplingConv(Matrix(np.ascontiguousarray(kernel), weights.numbers(f"{name}conv2d{number}.bias", channels)), gelu)

        subsampling, blocks = [load_conv(number) for number in (1, 2, 3)], load_layers(weights, sizes, name)
        input_projection = weights.matrix(f"{name}conv_out", width, channels * subsampled(sizes.bands), bias=False)
        positions, output_norm = sinusoids(sizes.max_positions, width), weights.layer_norm(f"{name}ln_post", width, EPS)
        project = weights.two_layers("", (width, width, self.config.hidden_size), sizes.activation, parts=self.projector(weights))

        def embed_chunk(frames: np.ndarray, pads: bool, pool: WorkerPool) -> np.ndarray:
            """Rows of a chunk, with position embeddings. `pads`: a partial chunk is zero-padded, as it would be in a batch."""
            x = np.pad(frames, ((0, self.chunk_frames - len(frames) if pads else 0), (0, 0)))[..., None]
            for convolution in subsampling:
                x = convolution(x, pool)
            x = matmul(x.swapaxes(1, 2).reshape(len(x), -1)[: subsampled(len(frames))], input_projection, pool)
            return x + positions[: len(x)]

        def rows(frames: np.ndarray, pool: WorkerPool) -> np.ndarray:
            starts = range(0, len(frames), self.chunk_frames)
            pool.job.total += len(blocks) * -(-len(starts) // (self.chunks_per_window * BATCH_WINDOWS))
            pads, outputs = self.PADS_CHUNKS or len(starts) > 1, []
            for batch in range(0, len(starts), self.chunks_per_window * BATCH_WINDOWS):
                chunks = [embed_chunk(frames[begin : begin + self.chunk_frames], pads, pool)
                          for begin in starts[batch : batch + self.chunks_per_window * BATCH_WINDOWS]]
                ends = [*np.cumsum([0, *map(len, chunks)])[:: self.chunks_per_window].tolist(), sum(map(len, chunks))]
                x, spans = np.concatenate(chunks), [span for span in zip(ends, ends[1:], strict=False) if span[0] < span[1]]
                outputs.append(project(output_norm(run_blocks(blocks, x, pool, spans=spans)), pool))
            return np.concatenate(outputs)

        return rows

    def projector(self, weights: Weights) -> tuple[str, str]:
        """Names of the projector's two matrices."""
        return "audio_tower.proj1", "audio_tower.proj2"

    def workspace_floats(self) -> int:
        """The largest matrices, a layer's activations and row blocks, and the convolutions' inputs."""
        width, frames = self.sizes.width, int(self.max_seconds * SAMPLE_RATE) // self.log_mel.hop
        matrices, layer = 12 * width**2, 8 * BATCH_WINDOWS * self.chunks_per_window * subsampled(self.chunk_frames) * width
        tasks = 16 * width * ROWS * self.workers
        conv_inputs = self.sizes.bands * self.channels * (self.chunk_frames // 2 + self.workers * TASK_ROWS * KERNEL**2 // 4)
        spectrogram = frames * self.sizes.bands + subsampled(frames) * (width + self.config.hidden_size)
        return matrices + layer + tasks + conv_inputs + spectrogram


def subsampled(count: int) -> int:
    """Length after the subsampling convolutions."""
    return -(-count // SUBSAMPLING)


encoder = Qwen3Omni
