"""Qwen 3 Omni: chunks of a second through three subsampling convolutions, then Whisper-like layers with attention within eight chunks. A
row is 80 ms; the last of a chunk may be shorter."""

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
from .causal_conformer import HELD, KERNEL, SubsamplingConv
from .log_mel import WHISPER, log_mel_of
from .qwen2_5_omni import sinusoids
from .whisper_encoder import EPS, LARGE, WhisperSizes, load_layers

SHARE = 8  # frames, or bands, of which the convolutions make one
AT_ONCE = 32  # windows that go through the layers together


class Qwen3Omni(AudioTower):
    """`piece`: frames of a chunk; `in_sight`: chunks that attend to each other. `FILLED`: a partial chunk is padded even if it is the only
    one."""

    KINDS = {"qwen3_omni_moe_audio_encoder": {**LARGE, "n_window": 50, "n_window_infer": 800, "downsample_hidden_size": 480}}
    placeholder, written = "<|audio_pad|>", "<|audio_start|><|audio_pad|><|audio_end|>"
    EXTRACTORS, FILLED = WHISPER, False
    max_seconds = 2400.0

    def configure(self, keys: Keys) -> None:
        self.sizes, self.log_mel = WhisperSizes.read(self.tower_config), log_mel_of(keys)
        self.piece = 2 * self.tower_config.integer("n_window", high=1 << 12)
        self.in_sight = self.tower_config.integer("n_window_infer", high=1 << 16) // self.piece
        self.channels = self.tower_config.integer("downsample_hidden_size", high=1 << 14)
        if self.log_mel.bands != self.sizes.bands or subsampled(self.piece) > self.sizes.places or self.sizes.width % 2 \
                or not self.in_sight:
            raise self.shape_mismatch_error(f"pieces of {self.piece} frames of {self.log_mel.bands} bands, {self.in_sight} together",
                              f"{SHARE * self.sizes.places} of {self.sizes.bands} at most, one at least")

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.check_length(samples)
        whole, rest = divmod(samples // self.log_mel.hop, self.piece)
        return (ROW_PLACEHOLDER,) * (whole * subsampled(self.piece) + subsampled(rest))

    def values(self, taken: np.ndarray) -> np.ndarray:
        """float32 [frames, bands]; the maximum for clipping is that of the whole clip."""
        return self.log_mel(taken)

    def load(self, weights: Weights) -> Rows:
        sizes, width, channels, name = self.sizes, self.sizes.width, self.channels, "audio_tower."

        def halving(number: int) -> SubsamplingConv:
            inside = 1 if number == 1 else channels
            stored = weights.stored(f"{name}conv2d{number}.weight", channels, inside * KERNEL**2)  # bands before frames
            turned = stored.reshape(channels, inside, KERNEL, KERNEL).swapaxes(2, 3).reshape(channels, -1)
            return SubsamplingConv(Matrix(np.ascontiguousarray(turned), weights.numbers(f"{name}conv2d{number}.bias", channels)), gelu)

        halvings, blocks = [halving(number) for number in (1, 2, 3)], load_layers(weights, sizes, name)
        enter = weights.matrix(f"{name}conv_out", width, channels * subsampled(sizes.bands), bias=False)
        places, after = sinusoids(sizes.places, width), weights.layer_norm(f"{name}ln_post", width, EPS)
        project = weights.two_layers("", (width, width, self.config.hidden_size), sizes.curve, parts=self.projector(weights))

        def entered(frames: np.ndarray, fills: bool, pool: WorkerPool) -> np.ndarray:
            """Of a piece; one that is not whole is filled with nothing where there are others, as if all were in one batch."""
            x = np.pad(frames, ((0, self.piece - len(frames) if fills else 0), (0, 0)))[..., None]
            for halving in halvings:
                x = halving(x, pool)
            x = matmul(x.swapaxes(1, 2).reshape(len(x), -1)[: subsampled(len(frames))], enter, pool)
            return x + places[: len(x)]

        def rows(frames: np.ndarray, pool: WorkerPool) -> np.ndarray:
            begins = range(0, len(frames), self.piece)
            pool.job.total += len(blocks) * -(-len(begins) // (self.in_sight * AT_ONCE))
            made = []
            for group in range(0, len(begins), self.in_sight * AT_ONCE):
                pieces = [entered(frames[begin : begin + self.piece], self.FILLED or len(begins) > 1, pool)
                          for begin in begins[group : group + self.in_sight * AT_ONCE]]
                ends = [*np.cumsum([0, *map(len, pieces)])[:: self.in_sight].tolist(), sum(map(len, pieces))]
                x, spans = np.concatenate(pieces), [span for span in zip(ends, ends[1:], strict=False) if span[0] < span[1]]
                made.append(project(after(run_blocks(blocks, x, pool, spans=spans)), pool))
            return np.concatenate(made)

        return rows

    def projector(self, weights: Weights) -> tuple[str, str]:
        """Names of the projector's two matrices."""
        return "audio_tower.proj1", "audio_tower.proj2"

    def workspace_floats(self) -> int:
        """The largest matrices, the activations of a layer, its row blocks, and what the convolutions read."""
        width, frames = self.sizes.width, int(self.max_seconds * SAMPLE_RATE) // self.log_mel.hop
        matrices, layer = 12 * width**2, 8 * AT_ONCE * self.in_sight * subsampled(self.piece) * width
        pieces = 16 * width * ROWS * self.workers
        read = self.sizes.bands * self.channels * (self.piece // 2 + self.workers * HELD * KERNEL**2 // 4)
        whole = frames * self.sizes.bands + subsampled(frames) * (width + self.config.hidden_size)
        return matrices + layer + pieces + read + whole


def subsampled(count: int) -> int:
    """Length after the subsampling convolutions."""
    return -(-count // SHARE)


encoder = Qwen3Omni
