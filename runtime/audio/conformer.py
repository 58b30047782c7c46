"""Conformer (Gulati et al. 2020, arXiv:2005.08100) of Granite Speech: half an FFN, attention, a convolution over time, half an FFN, and a
norm.

Attention is within blocks, with relative position embeddings (Shaw et al. 2018, arXiv:1803.02155): query times all distances is one matmul,
of which each row of scores is a slice shifted by one. Only the convolution crosses block borders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..config_reader import ConfigError, Keys
from ..images.tower_ops import Matrix, Norm, WorkerPool, matmul, silu
from ..images.tower_weights import Weights
from .whisper_encoder import EPS, MAX_LAYERS, MAX_WIDTH

CONFIG_DEFAULTS = {
    "input_dim": 160, "num_layers": 10, "hidden_dim": 1024, "feedforward_mult": 4, "num_heads": 8, "output_dim": 42, "context_size": 200,
    "max_pos_emb": 512, "conv_kernel_size": 15, "conv_expansion_factor": 2}


@dataclass(frozen=True)
class ConformerSizes:
    """An encoder's config."""

    input_width: int  # of a frame
    width: int
    layers: int
    heads: int
    head_dim: int
    ffn_width: int
    ctc_vocab_size: int  # of the middle layer's CTC output
    block: int  # rows that attend to each other
    max_distance: int  # between positions that have an embedding
    kernel_size: int  # of a layer's convolution
    conv_width: int  # channels of a layer's convolution

    @staticmethod
    def read(keys: Keys) -> ConformerSizes:
        keys = Keys({**CONFIG_DEFAULTS, **keys.raw}, keys.where)
        width, heads = keys.integer("hidden_dim", high=MAX_WIDTH), keys.integer("num_heads", high=1024)
        block, max_distance = keys.integer("context_size", high=1 << 14), keys.integer("max_pos_emb", high=1 << 14)
        if block > max_distance:
            raise ConfigError(f"{keys.where}: context_size {block} is more than max_pos_emb {max_distance}, "
                              "the range of relative positions")
        return ConformerSizes(
            keys.integer("input_dim", high=1024), width, keys.integer("num_layers", high=MAX_LAYERS), heads,
            keys.integer("dim_head", max(1, width // heads), high=MAX_WIDTH), width * keys.integer("feedforward_mult", high=64),
            keys.integer("output_dim", high=1 << 20), block, max_distance, keys.integer("conv_kernel_size", high=256),
            width * keys.integer("conv_expansion_factor", high=64))


@dataclass(frozen=True)
class HalfFfn:
    """An FFN whose output is added by half."""

    norm: Norm
    up: Matrix
    down: Matrix

    def run(self, x: np.ndarray, pool: WorkerPool) -> None:
        """In place on x float32 [T, D]."""
        up, down = self.up.to_float32(), self.down.to_float32()

        def run_rows(rows: slice) -> None:
            x[rows] += 0.5 * down(silu(up(self.norm(x[rows]))))

        pool.each(run_rows, len(x))


@dataclass(frozen=True)
class BlockAttention:
    """Attention within blocks, with relative positions."""

    norm: Norm
    queries: Matrix
    keys_values: Matrix  # keys, then values
    out: Matrix
    distances: np.ndarray  # embeddings float32 [2 * max_distance + 1, d]: distance 0 in the middle, later keys before it
    heads: int
    block: int

    def run(self, x: np.ndarray, pool: WorkerPool) -> None:
        """In place on x float32 [T, D]."""
        queries, keys_values, out = self.queries.to_float32(), self.keys_values.to_float32(), self.out.to_float32()
        head_dim, middle = self.distances.shape[1], len(self.distances) // 2

        def split_heads(y: np.ndarray) -> np.ndarray:
            return y.reshape(len(y), -1, head_dim).swapaxes(0, 1)

        def attend(begin: int) -> None:
            rows = x[begin : begin + self.block]
            count, normed = len(rows), self.norm(rows)
            q = split_heads(queries(normed) * np.float32(head_dim**-0.5))
            k, v = np.split(split_heads(keys_values(normed)), 2)
            # [H, count, 2 * count - 1], from the farthest earlier key to the farthest later one: row i has key 0 at count - 1 - i.
            by_distance = np.ascontiguousarray(q @ self.distances[middle - count + 1 : middle + count][::-1].T)
            head, row, column = by_distance.strides
            by_key = np.lib.stride_tricks.as_strided(by_distance[:, :, count - 1 :], (len(q), count, count), (head, row - column, column))
            scores = q @ k.swapaxes(1, 2) + by_key
            scores -= scores.max(-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(-1, keepdims=True)
            rows += out((scores @ v).swapaxes(0, 1).reshape(count, -1))

        pool.all([lambda begin=begin: attend(begin) for begin in range(0, len(x), self.block)])


@dataclass(frozen=True)
class Convolution:
    """A gated depthwise convolution over rows, with its batch norm folded into kernel and bias."""

    norm: Norm
    up: Matrix
    kernel: np.ndarray  # float32 [taps, channels]
    bias: np.ndarray  # float32 [channels]
    down: Matrix

    def run(self, x: np.ndarray, pool: WorkerPool, num_valid: int | None = None) -> None:
        """In place on x float32 [T, D], of which only the first `num_valid` rows, by default all, are inputs of others."""
        before, channels = len(self.kernel) // 2, self.kernel.shape[1]
        gated = np.zeros((len(x) + len(self.kernel) - 1, channels), np.float32)
        up, down = self.up.to_float32(), self.down.to_float32()

        def run_gate(rows: slice) -> None:
            y = up(self.norm(x[rows]))
            with np.errstate(over="ignore"):
                gated[rows.start + before : rows.stop + before] = y[:, :channels] / (1 + np.exp(-y[:, channels:]))

        def run_convolution(rows: slice) -> None:
            y = np.tile(self.bias, (rows.stop - rows.start, 1))
            for offset, weights in enumerate(self.kernel):
                y += gated[rows.start + offset : rows.stop + offset] * weights
            x[rows] += down(silu(y))

        pool.each(run_gate, len(x) if num_valid is None else num_valid)
        pool.each(run_convolution, len(x))


@dataclass(frozen=True)
class ConformerBlock:
    parts: tuple[HalfFfn, BlockAttention, Convolution, HalfFfn]
    output_norm: Norm

    def run(self, x: np.ndarray, pool: WorkerPool) -> None:
        """In place on x float32 [T, D]."""
        for part in self.parts:
            part.run(x, pool)
        self.output_norm.over(x, pool)
        pool.job.done += 1


@dataclass(frozen=True)
class Conformer:
    """The encoder. The CTC output of its middle layer is projected back into the rows (self-conditioning)."""

    input_projection: Matrix
    blocks: Sequence[ConformerBlock]
    ctc_projection: Matrix  # to CTC logits
    ctc_feedback: Matrix  # from CTC probabilities to rows

    def rows(self, frames: np.ndarray, pool: WorkerPool) -> np.ndarray:
        """Frames float32 [T, input_width] -> [T, D]."""
        pool.job.total += len(self.blocks)
        x = matmul(frames, self.input_projection, pool)
        for number, block in enumerate(self.blocks, 1):
            block.run(x, pool)
            if number == len(self.blocks) // 2:
                ctc = matmul(x, self.ctc_projection, pool)
                ctc -= ctc.max(-1, keepdims=True)
                np.exp(ctc, out=ctc)
                ctc /= ctc.sum(-1, keepdims=True)
                x += matmul(ctc, self.ctc_feedback, pool)
        return x


def load_conformer(weights: Weights, sizes: ConformerSizes, name: str) -> Conformer:
    """The encoder whose tensor names begin with `name`."""
    width, heads_width = sizes.width, sizes.heads * sizes.head_dim

    def ffn(prefix: str) -> HalfFfn:
        return HalfFfn(weights.layer_norm(f"{prefix}.pre_norm", width, EPS), weights.matrix(f"{prefix}.up_proj", sizes.ffn_width, width),
                       weights.matrix(f"{prefix}.down_proj", width, sizes.ffn_width))

    def attention(prefix: str) -> BlockAttention:
        return BlockAttention(
            weights.layer_norm(f"{prefix}.pre_norm", width, EPS), weights.matrix(f"{prefix}.to_q", heads_width, width),
            weights.matrix(f"{prefix}.to_kv", 2 * heads_width, width), weights.matrix(f"{prefix}.to_out", width, heads_width),
            weights.numbers(f"{prefix}.rel_pos_emb.weight", 2 * sizes.max_distance + 1, sizes.head_dim), sizes.heads, sizes.block)

    def convolution(prefix: str) -> Convolution:
        scale, shift = (weights.numbers(f"{prefix}.batch_norm.{part}", sizes.conv_width) for part in ("weight", "bias"))
        if weights.has(f"{prefix}.batch_norm.running_mean"):  # GGUF files have them folded into scale and shift
            mean, variance = (weights.numbers(f"{prefix}.batch_norm.running_{part}", sizes.conv_width) for part in ("mean", "var"))
            scale = scale / np.sqrt(np.maximum(variance, 0) + np.float32(EPS))
            shift = shift - mean * scale
        kernel = weights.numbers(f"{prefix}.depth_conv.conv.weight", sizes.conv_width, sizes.kernel_size).T * scale
        return Convolution(weights.layer_norm(f"{prefix}.norm", width, EPS),
                           weights.matrix(f"{prefix}.up_conv", 2 * sizes.conv_width, width), kernel, shift,
                           weights.matrix(f"{prefix}.down_conv", width, sizes.conv_width))

    def block(prefix: str) -> ConformerBlock:
        return ConformerBlock((ffn(f"{prefix}ff1"), attention(f"{prefix}attn"), convolution(f"{prefix}conv"), ffn(f"{prefix}ff2")),
                              weights.layer_norm(f"{prefix}post_norm", width, EPS))

    return Conformer(weights.matrix(f"{name}input_linear", width, sizes.input_width),
                     [block(f"{name}layers.{number}.") for number in range(sizes.layers)],
                     weights.matrix(f"{name}out", sizes.ctc_vocab_size, width),
                     weights.matrix(f"{name}out_mid", width, sizes.ctc_vocab_size))
