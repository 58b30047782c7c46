"""FastConformer (Rekesh et al. 2023, arXiv:2305.05084) of Parakeet: depthwise-separable subsampling convolutions over time and mel bands,
then layers of half an FFN, attention, a convolution over time, half an FFN, and a norm.

Attention is full, with relative positions (Dai et al. 2019, arXiv:1901.02860): query times all distances is one matmul, of which each row's
scores are a slice shifted by one. A task computes a few hundred queries of a head, so no full attention matrix exists.

There may be one padding row at the end: it is masked out as a key, and attends uniformly to all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config_reader import ConfigError, Keys
from ..images.tower_ops import QUERIES, Matrix, Norm, WorkerPool, matmul
from ..images.tower_weights import Weights
from .conformer import Convolution, HalfFfn
from .whisper_encoder import EPS, MAX_LAYERS, MAX_WIDTH

CONFIG_DEFAULTS = {
    "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8, "intermediate_size": 4096, "hidden_act": "silu",
    "attention_bias": True, "convolution_bias": True, "conv_kernel_size": 9, "subsampling_factor": 8, "subsampling_conv_channels": 256,
    "num_mel_bins": 80, "subsampling_conv_kernel_size": 3, "subsampling_conv_stride": 2, "scale_input": True}
KERNEL, STRIDE = 3, 2  # of the subsampling convolutions, in frames and bands
TASK_ROWS = 16  # output rows per subsampling task
MAX_WAVELENGTH = 1e4  # longest wavelength of the sinusoidal distance embeddings


@dataclass(frozen=True)
class FastSizes:
    """An encoder's config."""

    bands: int
    width: int
    layers: int
    heads: int
    ffn_width: int
    num_subsampling: int  # subsampling convolutions
    conv_channels: int  # of the subsampling convolutions
    kernel_size: int  # of a layer's convolution
    input_scale: float  # of the input of the first layer
    has_attention_bias: bool
    has_convolution_bias: bool

    @staticmethod
    def read(keys: Keys) -> FastSizes:
        width, heads = keys.integer("hidden_size", low=2, high=MAX_WIDTH), keys.integer("num_attention_heads", high=1024)
        if width % heads or width % 2:
            raise ConfigError(f"{keys.where}: hidden_size {width} is not an even multiple of {heads} heads")
        for name, value in (("subsampling_conv_kernel_size", KERNEL), ("subsampling_conv_stride", STRIDE)):
            if keys.integer(name) != value:
                raise keys.fail(name, f"{value}")
        factor, bands, kernel_size = (keys.integer(name, high=512) for name in ("subsampling_factor", "num_mel_bins", "conv_kernel_size"))
        num_subsampling = factor.bit_length() - 1
        if factor != STRIDE**num_subsampling or not num_subsampling or bands % factor:
            raise keys.fail("subsampling_factor", "a power of two of which num_mel_bins is a multiple")
        if kernel_size % 2 == 0:
            raise keys.fail("conv_kernel_size", "an odd number")
        keys.choice("hidden_act", {"silu": "silu", "swish": "silu"}, "silu")
        return FastSizes(bands, width, keys.integer("num_hidden_layers", high=MAX_LAYERS), heads,
                         keys.integer("intermediate_size", high=1 << 20), num_subsampling,
                         keys.integer("subsampling_conv_channels", high=1 << 14), kernel_size,
                         math.sqrt(width) if keys.flag("scale_input") else 1.0, keys.flag("attention_bias"), keys.flag("convolution_bias"))

    def rows(self, frames: int) -> int:
        """Number of rows for this number of frames."""
        for _ in range(self.num_subsampling):
            frames = (frames + 1) // 2
        return frames


@dataclass(frozen=True)
class Subsampling:
    """Subsampling convolutions: a full one, then depthwise-separable ones."""

    full_conv: Matrix
    separable_convs: Sequence[tuple[np.ndarray, np.ndarray, Matrix]]  # depthwise kernel float32 [9, C], its bias [C], pointwise matrix

    def rows(self, frames: np.ndarray, pool: WorkerPool) -> np.ndarray:
        """Frames float32 [T, bands] -> [T / 2^n, C * bands / 2^n], computed in blocks of rows with the frames around them."""
        count, lengths = len(self.separable_convs) + 1, [len(frames)]
        for _ in range(count):
            lengths.append((lengths[-1] + 1) // 2)
        first, pointwise = self.full_conv.to_float32(), [conv[2].to_float32() for conv in self.separable_convs]
        out = np.empty((lengths[-1], len(self.full_conv.stored) * (frames.shape[1] >> count)), np.float32)

        def run_rows(begin: int) -> None:
            end = min(begin + TASK_ROWS, len(out))
            spans = [(begin, end)]  # rows needed of each stage, from the last to the first; may reach beyond either end
            for _ in range(count):
                spans.insert(0, (2 * spans[0][0] - 1, 2 * spans[0][1]))
            low, high = spans[0]
            inside = slice(max(low, 0), min(high, lengths[0]))
            x = np.pad(frames[inside], ((inside.start - low, high - inside.stop), (0, 0)))[..., None]
            for stage in range(count):
                if stage:
                    x = pointwise[stage - 1](_depthwise(x, *self.separable_convs[stage - 1][:2]))
                else:
                    x = first(_receptive_fields(x).reshape(-1, KERNEL**2)).reshape(len(x) // 2, -1, len(self.full_conv.stored))
                np.maximum(x, 0, out=x)
                low, high = spans[stage + 1]
                x[: max(0, -low)] = 0
                x[max(0, lengths[stage + 1] - low) :] = 0
            out[begin:end] = x.swapaxes(1, 2).reshape(end - begin, -1)

        pool.all([lambda begin=begin: run_rows(begin) for begin in range(0, len(out), TASK_ROWS)])
        return out


def _receptive_fields(x: np.ndarray) -> np.ndarray:
    """Receptive fields of a stride-2 convolution over x [2n + 1, F, C]: [n, F / 2, C, 3, 3], zero-padded along bands."""
    padded = np.pad(x, ((0, 0), (1, 1), (0, 0)))
    return np.lib.stride_tricks.sliding_window_view(padded, (KERNEL, KERNEL), axis=(0, 1))[::STRIDE, ::STRIDE]


def _depthwise(x: np.ndarray, kernel: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """A stride-2 depthwise convolution of x [2n + 1, F, C] with kernel [9, C] -> [n, F / 2, C]."""
    windows = _receptive_fields(x)
    y = np.broadcast_to(bias, windows.shape[:3]).copy()
    for tap, weights in enumerate(kernel):
        y += windows[..., tap // KERNEL, tap % KERNEL] * weights
    return y


@dataclass(frozen=True)
class RelativeAttention:
    """Full attention with relative positions."""

    norm: Norm
    queries: Matrix
    keys: Matrix
    values: Matrix
    out: Matrix
    relative_keys: Matrix  # projects distance embeddings to keys
    content_bias: np.ndarray  # added to queries for content scores, float32 [H, 1, d]
    position_bias: np.ndarray  # added to queries for position scores, float32 [H, 1, d]

    def run(self, x: np.ndarray, num_keys: int, distances: np.ndarray, pool: WorkerPool) -> None:
        """In place on x float32 [T, D], of which the first `num_keys` are keys.

        distances: embeddings of all distances, the largest first, float32 [2 * num_keys - 1, D]
        """
        normed, heads, scale = np.empty_like(x), len(self.content_bias), np.float32(self.content_bias.shape[-1] ** -0.5)

        def norm(rows: slice) -> None:
            normed[rows] = self.norm(x[rows])

        pool.each(norm, len(x))

        def projected(rows: np.ndarray, matrix: Matrix) -> np.ndarray:
            return np.ascontiguousarray(matmul(rows, matrix, pool).reshape(len(rows), heads, -1).swapaxes(0, 1))

        q, k, v = (projected(normed, matrix) for matrix in (self.queries, self.keys, self.values))
        relative_keys = projected(distances, self.relative_keys)
        outputs = np.empty((len(x), heads, q.shape[-1]), np.float32)

        def attend(head: int, begin: int) -> None:
            end = min(begin + QUERIES, num_keys)
            queries, count = q[head, begin:end], end - begin
            by_distance = (queries + self.position_bias[head]) @ relative_keys[head, num_keys - end : 2 * num_keys - 1 - begin].T
            row, column = by_distance.strides  # [count, num_keys + count - 1]
            by_key = np.lib.stride_tricks.as_strided(by_distance[:, count - 1 :], (count, num_keys), (row - column, column))
            scores = ((queries + self.content_bias[head]) @ k[head, :num_keys].T + by_key) * scale
            scores -= scores.max(-1, keepdims=True)
            np.exp(scores, out=scores)
            outputs[begin:end, head] = (scores @ v[head, :num_keys]) / scores.sum(-1, keepdims=True)

        pool.all([lambda head=head, begin=begin: attend(head, begin) for head in range(heads) for begin in range(0, num_keys, QUERIES)])
        outputs[num_keys:] = v.mean(1)
        x += matmul(outputs.reshape(len(x), -1), self.out, pool)


@dataclass(frozen=True)
class FastBlock:
    first_ffn: HalfFfn
    attention: RelativeAttention
    convolution: Convolution
    second_ffn: HalfFfn
    output_norm: Norm

    def run(self, x: np.ndarray, num_keys: int, distances: np.ndarray, pool: WorkerPool) -> None:
        """As `RelativeAttention.run`."""
        self.first_ffn.run(x, pool)
        self.attention.run(x, num_keys, distances, pool)
        self.convolution.run(x, pool, num_keys)
        self.second_ffn.run(x, pool)
        self.output_norm.over(x, pool)
        pool.job.done += 1


@dataclass(frozen=True)
class FastConformer:
    subsampling: Subsampling
    input_projection: Matrix
    blocks: Sequence[FastBlock]
    input_scale: np.float32

    def rows(self, frames: np.ndarray, count: int, pool: WorkerPool) -> np.ndarray:
        """Frames float32 [T, bands] -> [count, D]; `count` is the number of subsampled frames, or one more for a padding row."""
        pool.job.total += len(self.blocks)
        subsampled = self.subsampling.rows(frames, pool)
        num_keys = len(subsampled)
        x = matmul(np.pad(subsampled, ((0, count - num_keys), (0, 0))), self.input_projection, pool) * self.input_scale
        distances = _distance_embeddings(num_keys, x.shape[1])
        for block in self.blocks:
            block.run(x, num_keys, distances, pool)
        return x


def _distance_embeddings(rows: int, width: int) -> np.ndarray:
    """Interleaved sinusoidal embeddings of distances rows - 1 to 1 - rows, float32 [2 * rows - 1, D]."""
    frequencies = (1 / MAX_WAVELENGTH ** (np.arange(0, width, 2, dtype=np.float32) / width)).astype(np.float32)
    angles = np.arange(rows - 1, -rows, -1, dtype=np.float32)[:, None] * frequencies
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(len(angles), width)


def load_fast_conformer(weights: Weights, sizes: FastSizes, name: str) -> FastConformer:
    """The encoder whose tensor names begin with `name`."""
    width, channels, subsampling = sizes.width, sizes.conv_channels, f"{name}subsampling.layers."
    head_dim = width // sizes.heads

    def separable_conv(number: int) -> tuple[np.ndarray, np.ndarray, Matrix]:
        prefix, pointwise = f"{subsampling}{3 * number - 1}", f"{subsampling}{3 * number}"  # every third layer is an activation
        kernel = np.ascontiguousarray(weights.numbers(f"{prefix}.weight", channels, KERNEL**2).T)
        return kernel, weights.numbers(f"{prefix}.bias", channels), weights.matrix(pointwise, channels, channels, bias=True)

    def norm(prefix: str) -> Norm:
        return weights.layer_norm(prefix, width, EPS)

    def ffn(prefix: str, number: int) -> HalfFfn:
        return HalfFfn(norm(f"{prefix}norm_feed_forward{number}"),
                       weights.matrix(f"{prefix}feed_forward{number}.linear1", sizes.ffn_width, width, bias=sizes.has_attention_bias),
                       weights.matrix(f"{prefix}feed_forward{number}.linear2", width, sizes.ffn_width, bias=sizes.has_attention_bias))

    def attention(prefix: str) -> RelativeAttention:
        base, bias = f"{prefix}self_attn.", sizes.has_attention_bias
        return RelativeAttention(
            norm(f"{prefix}norm_self_att"), *(weights.matrix(f"{base}{part}_proj", width, width, bias=bias) for part in "qkvo"),
            weights.matrix(f"{base}relative_k_proj", width, width, bias=False),
            *(weights.numbers(f"{base}bias_{part}", sizes.heads, head_dim)[:, None] for part in "uv"))

    def convolution(prefix: str) -> Convolution:
        base, has_bias = f"{prefix}conv.", sizes.has_convolution_bias
        scale, shift, mean, variance = (weights.numbers(f"{base}norm.{part}", width) for part in
                                        ("weight", "bias", "running_mean", "running_var"))
        scale = scale / np.sqrt(np.maximum(variance, 0) + np.float32(EPS))
        bias = weights.numbers(f"{base}depthwise_conv.bias", width) if has_bias else np.float32(0)
        kernel = weights.numbers(f"{base}depthwise_conv.weight", width, sizes.kernel_size).T * scale
        return Convolution(norm(f"{prefix}norm_conv"), weights.matrix(f"{base}pointwise_conv1", 2 * width, width, bias=has_bias), kernel,
                           shift + (bias - mean) * scale, weights.matrix(f"{base}pointwise_conv2", width, width, bias=has_bias))

    def block(prefix: str) -> FastBlock:
        return FastBlock(ffn(prefix, 1), attention(prefix), convolution(prefix), ffn(prefix, 2), norm(f"{prefix}norm_out"))

    return FastConformer(
        Subsampling(weights.matrix(f"{subsampling}0", channels, KERNEL**2, bias=True),
                    [separable_conv(number) for number in range(1, sizes.num_subsampling)]),
        weights.matrix(f"{name}subsampling.linear", width, channels * (sizes.bands >> sizes.num_subsampling), bias=True),
        [block(f"{name}layers.{number}.") for number in range(sizes.layers)], np.float32(sizes.input_scale))
