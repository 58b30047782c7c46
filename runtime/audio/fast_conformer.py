"""FastConformer (Rekesh et al. 2023, arXiv:2305.05084) of Parakeet: depthwise-separable subsampling convolutions over time and mel bands,
then layers of half an FFN, attention, a convolution over time, half an FFN, and a norm.

Attention is full, with relative positions (Dai et al. 2019, arXiv:1901.02860): query times all distances is one matmul, of which each row's
scores are a slice shifted by one. A few hundred queries of a head at once, so that no full attention matrix exists.

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
from .whisper_encoder import EPS, MOST_LAYERS, MOST_WIDTH

USUAL = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8, "intermediate_size": 4096, "hidden_act": "silu",
         "attention_bias": True, "convolution_bias": True, "conv_kernel_size": 9, "subsampling_factor": 8, "subsampling_conv_channels": 256,
         "num_mel_bins": 80, "subsampling_conv_kernel_size": 3, "subsampling_conv_stride": 2, "scale_input": True}
KERNEL, STEP = 3, 2  # frames, and bands, that one of the first convolutions reads, and from one to the next
HELD = 16  # output rows per subsampling task
LONGEST = 1e4  # longest wavelength of the sinusoidal distance embeddings


@dataclass(frozen=True)
class FastSizes:
    """`halvings`: number of subsampling convolutions, with `channels`; `taps`: a layer's convolution kernel size; `scale`: of the input of
    the first layer."""

    bands: int
    width: int
    layers: int
    heads: int
    inner: int
    halvings: int
    channels: int
    taps: int
    scale: float
    biased: bool
    convolved_biased: bool

    @staticmethod
    def read(keys: Keys) -> FastSizes:
        width, heads = keys.integer("hidden_size", low=2, high=MOST_WIDTH), keys.integer("num_attention_heads", high=1024)
        if width % heads or width % 2:
            raise ConfigError(f"{keys.where}: hidden_size {width} is not an even multiple of {heads} heads")
        for name, read in (("subsampling_conv_kernel_size", KERNEL), ("subsampling_conv_stride", STEP)):
            if keys.integer(name) != read:
                raise keys.fail(name, f"{read}")
        factor, bands, taps = (keys.integer(name, high=512) for name in ("subsampling_factor", "num_mel_bins", "conv_kernel_size"))
        halvings = factor.bit_length() - 1
        if factor != STEP**halvings or not halvings or bands % factor:
            raise keys.fail("subsampling_factor", "a power of two of which num_mel_bins is a multiple")
        if taps % 2 == 0:
            raise keys.fail("conv_kernel_size", "an odd number")
        keys.choice("hidden_act", {"silu": "silu", "swish": "silu"}, "silu")
        return FastSizes(bands, width, keys.integer("num_hidden_layers", high=MOST_LAYERS), heads,
                         keys.integer("intermediate_size", high=1 << 20), halvings,
                         keys.integer("subsampling_conv_channels", high=1 << 14), taps,
                         math.sqrt(width) if keys.flag("scale_input") else 1.0, keys.flag("attention_bias"), keys.flag("convolution_bias"))

    def rows(self, frames: int) -> int:
        """Rows for so many frames."""
        for _ in range(self.halvings):
            frames = (frames + 1) // 2
        return frames


@dataclass(frozen=True)
class Subsampling:
    """Subsampling convolutions: a full one, then depthwise (`taps` float32 [9, C], `shifts` [C]) and pointwise ones."""

    first: Matrix
    others: Sequence[tuple[np.ndarray, np.ndarray, Matrix]]

    def rows(self, frames: np.ndarray, pool: WorkerPool) -> np.ndarray:
        """Frames float32 [T, bands] -> [T / 2^n, C * bands / 2^n], computed in blocks of rows with the frames around them."""
        count, lengths = len(self.others) + 1, [len(frames)]
        for _ in range(count):
            lengths.append((lengths[-1] + 1) // 2)
        first, mixing = self.first.to_float32(), [each[2].to_float32() for each in self.others]
        out = np.empty((lengths[-1], len(self.first.stored) * (frames.shape[1] >> count)), np.float32)

        def some(begin: int) -> None:
            end = min(begin + HELD, len(out))
            spans = [(begin, end)]  # rows of each stage that are needed, from the last to the first, also beyond either end
            for _ in range(count):
                spans.insert(0, (2 * spans[0][0] - 1, 2 * spans[0][1]))
            low, high = spans[0]
            inside = slice(max(low, 0), min(high, lengths[0]))
            x = np.pad(frames[inside], ((inside.start - low, high - inside.stop), (0, 0)))[..., None]
            for stage in range(count):
                if stage:
                    x = mixing[stage - 1](_by_channel(x, *self.others[stage - 1][:2]))
                else:
                    x = first(_reads(x).reshape(-1, KERNEL**2)).reshape(len(x) // 2, -1, len(self.first.stored))
                np.maximum(x, 0, out=x)
                low, high = spans[stage + 1]
                x[: max(0, -low)] = 0
                x[max(0, lengths[stage + 1] - low) :] = 0
            out[begin:end] = x.swapaxes(1, 2).reshape(end - begin, -1)

        pool.all([lambda begin=begin: some(begin) for begin in range(0, len(out), HELD)])
        return out


def _reads(x: np.ndarray) -> np.ndarray:
    """Receptive fields of a stride-2 convolution over x [2n + 1, F, C]: [n, F / 2, C, 3, 3], zero-padded along bands."""
    around = np.pad(x, ((0, 0), (1, 1), (0, 0)))
    return np.lib.stride_tricks.sliding_window_view(around, (KERNEL, KERNEL), axis=(0, 1))[::STEP, ::STEP]


def _by_channel(x: np.ndarray, taps: np.ndarray, shifts: np.ndarray) -> np.ndarray:
    reads = _reads(x)
    y = np.broadcast_to(shifts, reads.shape[:3]).copy()
    for place, weights in enumerate(taps):
        y += reads[..., place // KERNEL, place % KERNEL] * weights
    return y


@dataclass(frozen=True)
class RelativeAttention:
    """`to_words` and `to_places` float32 [H, 1, d]: content and position biases of queries; `near`: projects distance embeddings to
    keys."""

    norm: Norm
    queries: Matrix
    keys: Matrix
    values: Matrix
    out: Matrix
    near: Matrix
    to_words: np.ndarray
    to_places: np.ndarray

    def run(self, x: np.ndarray, heard: int, waves: np.ndarray, pool: WorkerPool) -> None:
        """In place on x float32 [T, D], of which the first `heard` are keys; `waves` [2 * heard - 1, D]: distance embeddings, the largest
        first."""
        normed, heads, scale = np.empty_like(x), len(self.to_words), np.float32(self.to_words.shape[-1] ** -0.5)

        def norm(rows: slice) -> None:
            normed[rows] = self.norm(x[rows])

        pool.each(norm, len(x))
        q, k, v, apart = (np.ascontiguousarray(matmul(given, each, pool).reshape(len(given), heads, -1).swapaxes(0, 1)) for given, each in
                          ((normed, self.queries), (normed, self.keys), (normed, self.values), (waves, self.near)))
        mixed = np.empty((len(x), heads, q.shape[-1]), np.float32)

        def look(head: int, begin: int) -> None:
            end = min(begin + QUERIES, heard)
            own, count = q[head, begin:end], end - begin
            places = (own + self.to_places[head]) @ apart[head, heard - end : 2 * heard - 1 - begin].T  # [count, heard + count - 1]
            row, each = places.strides
            near = np.lib.stride_tricks.as_strided(places[:, count - 1 :], (count, heard), (row - each, each))
            scores = ((own + self.to_words[head]) @ k[head, :heard].T + near) * scale
            scores -= scores.max(-1, keepdims=True)
            np.exp(scores, out=scores)
            mixed[begin:end, head] = (scores @ v[head, :heard]) / scores.sum(-1, keepdims=True)

        pool.all([lambda head=head, begin=begin: look(head, begin) for head in range(heads) for begin in range(0, heard, QUERIES)])
        mixed[heard:] = v.mean(1)
        x += matmul(mixed.reshape(len(x), -1), self.out, pool)


@dataclass(frozen=True)
class FastBlock:
    before: HalfFfn
    attention: RelativeAttention
    convolution: Convolution
    behind: HalfFfn
    after: Norm

    def run(self, x: np.ndarray, heard: int, waves: np.ndarray, pool: WorkerPool) -> None:
        """As `RelativeAttention.run`."""
        self.before.run(x, pool)
        self.attention.run(x, heard, waves, pool)
        self.convolution.run(x, pool, heard)
        self.behind.run(x, pool)
        self.after.over(x, pool)
        pool.job.done += 1


@dataclass(frozen=True)
class FastConformer:
    halvings: Subsampling
    enter: Matrix
    blocks: Sequence[FastBlock]
    scale: np.float32

    def rows(self, frames: np.ndarray, count: int, pool: WorkerPool) -> np.ndarray:
        """So many rows of frames float32 [T, bands], those that they become or one more -> [count, D]."""
        pool.job.total += len(self.blocks)
        made = self.halvings.rows(frames, pool)
        heard = len(made)
        x = matmul(np.pad(made, ((0, count - heard), (0, 0))), self.enter, pool) * self.scale
        waves = _waves(heard, x.shape[1])
        for block in self.blocks:
            block.run(x, heard, waves, pool)
        return x


def _waves(rows: int, width: int) -> np.ndarray:
    """Interleaved sinusoidal embeddings of distances rows - 1 to 1 - rows, float32 [2 * rows - 1, D]."""
    lengths = (1 / LONGEST ** (np.arange(0, width, 2, dtype=np.float32) / width)).astype(np.float32)
    angles = np.arange(rows - 1, -rows, -1, dtype=np.float32)[:, None] * lengths
    return np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(len(angles), width)


def load_fast_conformer(weights: Weights, sizes: FastSizes, name: str) -> FastConformer:
    """The encoder whose tensor names begin with `name`."""
    width, channels, first = sizes.width, sizes.channels, f"{name}subsampling.layers."
    depth = width // sizes.heads

    def halving(number: int) -> tuple[np.ndarray, np.ndarray, Matrix]:
        own, mixing = f"{first}{3 * number - 1}", f"{first}{3 * number}"  # with a curve behind each mixture
        return (np.ascontiguousarray(weights.numbers(f"{own}.weight", channels, KERNEL**2).T), weights.numbers(f"{own}.bias", channels),
                weights.matrix(mixing, channels, channels, bias=True))

    def norm(own: str) -> Norm:
        return weights.layer_norm(own, width, EPS)

    def ffn(own: str, number: int) -> HalfFfn:
        return HalfFfn(norm(f"{own}norm_feed_forward{number}"),
                       weights.matrix(f"{own}feed_forward{number}.linear1", sizes.inner, width, bias=sizes.biased),
                       weights.matrix(f"{own}feed_forward{number}.linear2", width, sizes.inner, bias=sizes.biased))

    def attention(own: str) -> RelativeAttention:
        inside = f"{own}self_attn."
        return RelativeAttention(
            norm(f"{own}norm_self_att"), *(weights.matrix(f"{inside}{each}_proj", width, width, bias=sizes.biased) for each in "qkvo"),
            weights.matrix(f"{inside}relative_k_proj", width, width, bias=False),
            *(weights.numbers(f"{inside}bias_{each}", sizes.heads, depth)[:, None] for each in "uv"))

    def convolution(own: str) -> Convolution:
        inside, biased = f"{own}conv.", sizes.convolved_biased
        scale, shift, mean, variance = (weights.numbers(f"{inside}norm.{each}", width) for each in
                                        ("weight", "bias", "running_mean", "running_var"))
        scale = scale / np.sqrt(np.maximum(variance, 0) + np.float32(EPS))
        added = weights.numbers(f"{inside}depthwise_conv.bias", width) if biased else np.float32(0)
        taps = weights.numbers(f"{inside}depthwise_conv.weight", width, sizes.taps).T * scale
        return Convolution(norm(f"{own}norm_conv"), weights.matrix(f"{inside}pointwise_conv1", 2 * width, width, bias=biased), taps,
                           shift + (added - mean) * scale, weights.matrix(f"{inside}pointwise_conv2", width, width, bias=biased))

    def block(own: str) -> FastBlock:
        return FastBlock(ffn(own, 1), attention(own), convolution(own), ffn(own, 2), norm(f"{own}norm_out"))

    return FastConformer(
        Subsampling(weights.matrix(f"{first}0", channels, KERNEL**2, bias=True), [halving(number) for number in range(1, sizes.halvings)]),
        weights.matrix(f"{name}subsampling.linear", width, channels * (sizes.bands >> sizes.halvings), bias=True),
        [block(f"{name}layers.{number}.") for number in range(sizes.layers)], np.float32(sizes.scale))
