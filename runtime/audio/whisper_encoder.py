"""Whisper's encoder, which most audio families adopted: two convolutions over a log-mel spectrogram, the second with stride 2, position
embeddings, and pre-norm layers. Its input has a fixed length, mostly 30 s, so longer clips are split into windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..config_reader import ConfigError, Keys
from ..images.tower_layers import SEPARATE_QKV, LayerNames, LayerShape, load_blocks, run_blocks
from ..images.tower_ops import ACTIVATIONS, Activation, Block, Matrix, Norm, Rope, WorkerPool, gelu, matmul
from ..images.tower_weights import Weights

# Key names of Whisper's own configs -> those of the families that adopted its encoder.
WHISPER_KEYS = {
    "d_model": "hidden_size", "encoder_layers": "num_hidden_layers", "encoder_attention_heads": "num_attention_heads",
    "encoder_ffn_dim": "intermediate_size"}
LARGE_DEFAULTS: Mapping[str, object] = {
    "hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 20, "intermediate_size": 5120, "num_mel_bins": 128,
    "max_source_positions": 1500, "activation_function": "gelu"}
EPS = 1e-5
LAYER_NAMES = LayerNames(
    ("self_attn_layer_norm", "final_layer_norm"), SEPARATE_QKV.looked, SEPARATE_QKV.out, ("fc1", "fc2"))
KERNEL = 3  # kernel size of the convolutions, in frames
MAX_LAYERS, MAX_WIDTH, MAX_POSITIONS = 512, 1 << 16, 1 << 14


@dataclass(frozen=True)
class WhisperSizes:
    """An encoder's config."""

    width: int
    layers: int
    heads: int
    ffn_width: int
    bands: int  # mel bands of the spectrogram
    max_positions: int  # rows of a window
    activation: Activation

    @staticmethod
    def read(keys: Keys) -> WhisperSizes:
        renamed = {name: keys.raw[whisper_name] for whisper_name, name in WHISPER_KEYS.items() if whisper_name in keys.raw}
        keys = Keys({**keys.raw, **renamed}, keys.where)
        width, heads = keys.integer("hidden_size", high=MAX_WIDTH), keys.integer("num_attention_heads", high=1024)
        if width % heads:
            raise ConfigError(f"{keys.where}: hidden_size {width} is not a multiple of {heads} heads")
        return WhisperSizes(width, keys.integer("num_hidden_layers", high=MAX_LAYERS), heads,
                            keys.integer("intermediate_size", high=1 << 20), keys.integer("num_mel_bins", high=512),
                            keys.integer("max_source_positions", high=MAX_POSITIONS),
                            keys.choice("activation_function", ACTIVATIONS, "gelu"))


def encoder_rows(frames: int) -> int:
    """Number of rows that the convolutions make of this number of frames."""
    return (frames - 1) // 2 + 1


@dataclass(frozen=True)
class WhisperEncoder:
    """Two convolutions and layers. Callers apply `output_norm`, since some families pool rows before it."""

    conv1: Matrix
    conv2: Matrix
    positions: np.ndarray  # absolute position embeddings, float32 [rows of a window, D]
    blocks: Sequence[Block]
    output_norm: Norm
    rope: Rope | None = None  # rotary position embeddings

    def rows(self, windows: Sequence[tuple[np.ndarray, int]], pool: WorkerPool) -> list[np.ndarray]:
        """Hidden states of each window, [rows, D], without the final norm.

        windows: (spectrogram float32 [frames, bands], number of frames that hold audio)
        """
        pool.job.total += len(self.blocks) * len(windows)
        return [run_blocks(self.blocks, self._convolved(window, frames, pool), pool, self.rope) for window, frames in windows]

    def rows_batched(self, windows: Sequence[tuple[np.ndarray, int]], pool: WorkerPool) -> np.ndarray:
        """As `rows`, for many small windows in one batch; attention stays within a window. Returns [total rows, D]."""
        pool.job.total += len(self.blocks)
        parts = [self._convolved(window, frames, pool) for window, frames in windows]
        ends = np.cumsum([0, *map(len, parts)]).tolist()
        return run_blocks(self.blocks, np.concatenate(parts), pool, spans=list(zip(ends, ends[1:], strict=False)))

    def _convolved(self, window: np.ndarray, frames: int, pool: WorkerPool) -> np.ndarray:
        """The rows that overlap audio, after both convolutions; `window` includes the padding that they read."""
        count = encoder_rows(frames)
        rows = gelu(matmul(_receptive_fields(window[: frames + 2], 1), self.conv1, pool))
        rows = gelu(matmul(_receptive_fields(rows, 2)[:count], self.conv2, pool))
        return rows + self.positions[:count]


def _receptive_fields(x: np.ndarray, stride: int) -> np.ndarray:
    """Receptive fields of a zero-padded convolution over x [T, C] with stride `stride` -> [T / stride, C * KERNEL]."""
    padded = np.pad(x, ((1, 1), (0, 0)))
    return np.lib.stride_tricks.sliding_window_view(padded, KERNEL, axis=0)[::stride].reshape(-1, x.shape[1] * KERNEL)


def load_encoder(weights: Weights, sizes: WhisperSizes, name: str, norm_name: str = "layer_norm",
                 positions: np.ndarray | None = None, layer_names: LayerNames = LAYER_NAMES, rope: Rope | None = None) -> WhisperEncoder:
    """The encoder whose tensor names begin with `name`.

    norm_name: name of the final norm
    positions: absolute position embeddings, None to load them
    rope: rotary position embeddings
    """
    width = sizes.width
    return WhisperEncoder(
        conv1=weights.matrix(f"{name}conv1", width, sizes.bands * KERNEL), conv2=weights.matrix(f"{name}conv2", width, width * KERNEL),
        positions=weights.numbers(f"{name}embed_positions.weight", sizes.max_positions, width) if positions is None else positions,
        blocks=load_layers(weights, sizes, name, layer_names), output_norm=weights.layer_norm(f"{name}{norm_name}", width, EPS), rope=rope)


def load_layers(weights: Weights, sizes: WhisperSizes, name: str, layer_names: LayerNames = LAYER_NAMES) -> list[Block]:
    """The layers of an encoder whose tensor names begin with `name`."""
    shape = LayerShape(sizes.width, sizes.ffn_width, sizes.heads, sizes.activation, EPS)
    return load_blocks(weights, f"{name}layers.", sizes.layers, layer_names, shape)
