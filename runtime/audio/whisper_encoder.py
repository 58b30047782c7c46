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

# Two spellings of configs -> the one that is read here.
SPELLED = {"d_model": "hidden_size", "encoder_layers": "num_hidden_layers", "encoder_attention_heads": "num_attention_heads",
           "encoder_ffn_dim": "intermediate_size"}
LARGE: Mapping[str, object] = {"hidden_size": 1280, "num_hidden_layers": 32, "num_attention_heads": 20, "intermediate_size": 5120,
                               "num_mel_bins": 128, "max_source_positions": 1500, "activation_function": "gelu"}
EPS = 1e-5
LAYER = LayerNames(("self_attn_layer_norm", "final_layer_norm"), SEPARATE_QKV.looked, SEPARATE_QKV.out, ("fc1", "fc2"))
KERNEL = 3  # frames that a convolution reads
MOST_LAYERS, MOST_WIDTH, MOST_PLACES = 512, 1 << 16, 1 << 14


@dataclass(frozen=True)
class WhisperSizes:
    """An encoder's config."""

    width: int
    layers: int
    heads: int
    inner: int
    bands: int
    places: int
    curve: Activation

    @staticmethod
    def read(keys: Keys) -> WhisperSizes:
        keys = Keys({**keys.raw, **{own: keys.raw[key] for key, own in SPELLED.items() if key in keys.raw}}, keys.where)
        width, heads = keys.integer("hidden_size", high=MOST_WIDTH), keys.integer("num_attention_heads", high=1024)
        if width % heads:
            raise ConfigError(f"{keys.where}: hidden_size {width} is not a multiple of {heads} heads")
        return WhisperSizes(width, keys.integer("num_hidden_layers", high=MOST_LAYERS), heads,
                            keys.integer("intermediate_size", high=1 << 20),
                     keys.integer("num_mel_bins", high=512), keys.integer("max_source_positions", high=MOST_PLACES),
                     keys.choice("activation_function", ACTIVATIONS, "gelu"))


def encoder_rows(frames: int) -> int:
    """Rows after the convolutions for so many frames."""
    return (frames - 1) // 2 + 1


@dataclass(frozen=True)
class WhisperEncoder:
    """`places` float32 [rows of a window, D]: position embeddings; `rope`: rotary ones, or None."""

    first: Matrix
    second: Matrix
    places: np.ndarray
    blocks: Sequence[Block]
    after: Norm
    rope: Rope | None = None

    def rows(self, windows: Sequence[tuple[np.ndarray, int]], pool: WorkerPool) -> list[np.ndarray]:
        """Windows (spectrogram float32 [frames, bands], frames that hold audio) -> hidden states of each, [rows, D], without the final
        norm."""
        pool.job.total += len(self.blocks) * len(windows)
        made = []
        for window, frames in windows:
            made.append(run_blocks(self.blocks, self._convolved(window, frames, pool), pool, self.rope))
        return made

    def rows_apart(self, windows: Sequence[tuple[np.ndarray, int]], pool: WorkerPool) -> np.ndarray:
        """As `rows`, for many small windows in one batch with separate attention: [total rows, D]."""
        pool.job.total += len(self.blocks)
        parts = [self._convolved(window, frames, pool) for window, frames in windows]
        ends = np.cumsum([0, *map(len, parts)]).tolist()
        return run_blocks(self.blocks, np.concatenate(parts), pool, spans=list(zip(ends, ends[1:], strict=False)))

    def _convolved(self, window: np.ndarray, frames: int, pool: WorkerPool) -> np.ndarray:
        """Only rows that overlap audio; the padding they read is present."""
        count = encoder_rows(frames)
        made = gelu(matmul(_reads(window[: frames + 2], 1), self.first, pool))
        made = gelu(matmul(_reads(made, 2)[:count], self.second, pool))
        return made + self.places[:count]


def _reads(x: np.ndarray, step: int) -> np.ndarray:
    """Receptive fields of a zero-padded convolution over x [T, C] with stride `step` -> [T / step, C * KERNEL]."""
    around = np.pad(x, ((1, 1), (0, 0)))
    return np.lib.stride_tricks.sliding_window_view(around, KERNEL, axis=0)[::step].reshape(-1, x.shape[1] * KERNEL)


def load_encoder(weights: Weights, sizes: WhisperSizes, name: str, after: str = "layer_norm",
                 places: np.ndarray | None = None, layer: LayerNames = LAYER, rope: Rope | None = None) -> WhisperEncoder:
    """The encoder whose tensor names begin with `name`; `after`: its final norm. Position embeddings are loaded unless `places` are
    given."""
    width = sizes.width
    return WhisperEncoder(
        first=weights.matrix(f"{name}conv1", width, sizes.bands * KERNEL), second=weights.matrix(f"{name}conv2", width, width * KERNEL),
        places=weights.numbers(f"{name}embed_positions.weight", sizes.places, width) if places is None else places,
        blocks=load_layers(weights, sizes, name, layer), after=weights.layer_norm(f"{name}{after}", width, EPS), rope=rope)


def load_layers(weights: Weights, sizes: WhisperSizes, name: str, layer: LayerNames = LAYER) -> list[Block]:
    """The layers of an encoder whose tensor names begin with `name`."""
    return load_blocks(weights, f"{name}layers.", sizes.layers, layer, LayerShape(sizes.width, sizes.inner, sizes.heads, sizes.curve, EPS))
