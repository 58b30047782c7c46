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
from .whisper_encoder import EPS, MOST_LAYERS, MOST_WIDTH

USUAL = {"input_dim": 160, "num_layers": 10, "hidden_dim": 1024, "feedforward_mult": 4, "num_heads": 8, "output_dim": 42,
         "context_size": 200, "max_pos_emb": 512, "conv_kernel_size": 15, "conv_expansion_factor": 2}


@dataclass(frozen=True)
class ConformerSizes:
    """`inputs`: width of a frame; `outputs`: CTC vocabulary of the middle layer; `block`: rows that attend to each other; `reach`: the
    farthest relative position; `taps`: convolution kernel size; `channels`: its width."""

    inputs: int
    width: int
    layers: int
    heads: int
    depth: int
    inner: int
    outputs: int
    block: int
    reach: int
    taps: int
    channels: int

    @staticmethod
    def read(keys: Keys) -> ConformerSizes:
        keys = Keys({**USUAL, **keys.raw}, keys.where)
        width, heads = keys.integer("hidden_dim", high=MOST_WIDTH), keys.integer("num_heads", high=1024)
        block, reach = keys.integer("context_size", high=1 << 14), keys.integer("max_pos_emb", high=1 << 14)
        if block > reach:
            raise ConfigError(f"{keys.where}: context_size {block} is more than max_pos_emb {reach}, the range of relative positions")
        return ConformerSizes(
            keys.integer("input_dim", high=1024), width, keys.integer("num_layers", high=MOST_LAYERS), heads,
            keys.integer("dim_head", max(1, width // heads), high=MOST_WIDTH), width * keys.integer("feedforward_mult", high=64),
            keys.integer("output_dim", high=1 << 20), block, reach, keys.integer("conv_kernel_size", high=256),
            width * keys.integer("conv_expansion_factor", high=64))


@dataclass(frozen=True)
class HalfFfn:
    norm: Norm
    up: Matrix
    down: Matrix

    def run(self, x: np.ndarray, pool: WorkerPool) -> None:
        """In place on x float32 [T, D]."""
        up, down = self.up.to_float32(), self.down.to_float32()

        def some(rows: slice) -> None:
            x[rows] += 0.5 * down(silu(up(self.norm(x[rows]))))

        pool.each(some, len(x))


@dataclass(frozen=True)
class BlockAttention:
    """Attention within blocks. `distances` float32 [2 * reach + 1, d]: relative position embeddings, the middle for distance 0, later keys
    below it."""

    norm: Norm
    queries: Matrix
    both: Matrix  # keys, then values
    out: Matrix
    distances: np.ndarray
    heads: int
    block: int

    def run(self, x: np.ndarray, pool: WorkerPool) -> None:
        """In place on x float32 [T, D]."""
        queries, both, out = self.queries.to_float32(), self.both.to_float32(), self.out.to_float32()
        depth, middle = self.distances.shape[1], len(self.distances) // 2

        def heads_of(y: np.ndarray) -> np.ndarray:
            return y.reshape(len(y), -1, depth).swapaxes(0, 1)

        def look(begin: int) -> None:
            own = x[begin : begin + self.block]
            count, normed = len(own), self.norm(own)
            q, (k, v) = heads_of(queries(normed) * np.float32(depth**-0.5)), np.split(heads_of(both(normed)), 2)
            # From the key that comes last to the first: query i finds key 0 at count - 1 - i, and the others behind it.
            apart = np.ascontiguousarray(q @ self.distances[middle - count + 1 : middle + count][::-1].T)  # [H, count, 2 * count - 1]
            head, row, each = apart.strides
            near = np.lib.stride_tricks.as_strided(apart[:, :, count - 1 :], (len(q), count, count), (head, row - each, each))
            scores = q @ k.swapaxes(1, 2) + near
            scores -= scores.max(-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(-1, keepdims=True)
            own += out((scores @ v).swapaxes(0, 1).reshape(count, -1))

        pool.all([lambda begin=begin: look(begin) for begin in range(0, len(x), self.block)])


@dataclass(frozen=True)
class Convolution:
    """`taps` float32 [taps, channels] with the batch norm folded in; `shift`: its bias."""

    norm: Norm
    up: Matrix
    taps: np.ndarray
    shift: np.ndarray
    down: Matrix

    def run(self, x: np.ndarray, pool: WorkerPool, heard: int | None = None) -> None:
        """In place on x float32 [T, D], of which only the first `heard` rows are read by others."""
        before, channels = len(self.taps) // 2, self.taps.shape[1]
        gated = np.zeros((len(x) + len(self.taps) - 1, channels), np.float32)
        up, down = self.up.to_float32(), self.down.to_float32()

        def gate(rows: slice) -> None:
            y = up(self.norm(x[rows]))
            with np.errstate(over="ignore"):
                gated[rows.start + before : rows.stop + before] = y[:, :channels] / (1 + np.exp(-y[:, channels:]))

        def mix(rows: slice) -> None:
            y = np.tile(self.shift, (rows.stop - rows.start, 1))
            for place, weights in enumerate(self.taps):
                y += gated[rows.start + place : rows.stop + place] * weights
            x[rows] += down(silu(y))

        pool.each(gate, len(x) if heard is None else heard)
        pool.each(mix, len(x))


@dataclass(frozen=True)
class ConformerBlock:
    parts: tuple[HalfFfn, BlockAttention, Convolution, HalfFfn]
    after: Norm

    def run(self, x: np.ndarray, pool: WorkerPool) -> None:
        """In place on x float32 [T, D]."""
        for part in self.parts:
            part.run(x, pool)
        self.after.over(x, pool)
        pool.job.done += 1


@dataclass(frozen=True)
class Conformer:
    """`guess` and `told`: CTC output of the middle layer, and its projection back into the rows (self-conditioning)."""

    enter: Matrix
    blocks: Sequence[ConformerBlock]
    guess: Matrix
    told: Matrix

    def rows(self, frames: np.ndarray, pool: WorkerPool) -> np.ndarray:
        """Frames float32 [T, inputs] -> [T, D]."""
        pool.job.total += len(self.blocks)
        x = matmul(frames, self.enter, pool)
        for number, block in enumerate(self.blocks, 1):
            block.run(x, pool)
            if number == len(self.blocks) // 2:
                letters = matmul(x, self.guess, pool)
                letters -= letters.max(-1, keepdims=True)
                np.exp(letters, out=letters)
                letters /= letters.sum(-1, keepdims=True)
                x += matmul(letters, self.told, pool)
        return x


def load_conformer(weights: Weights, sizes: ConformerSizes, name: str) -> Conformer:
    """The encoder whose tensor names begin with `name`."""
    width, heads = sizes.width, sizes.heads * sizes.depth

    def ffn(own: str) -> HalfFfn:
        return HalfFfn(weights.layer_norm(f"{own}.pre_norm", width, EPS), weights.matrix(f"{own}.up_proj", sizes.inner, width),
                       weights.matrix(f"{own}.down_proj", width, sizes.inner))

    def attention(own: str) -> BlockAttention:
        return BlockAttention(
            weights.layer_norm(f"{own}.pre_norm", width, EPS), weights.matrix(f"{own}.to_q", heads, width),
            weights.matrix(f"{own}.to_kv", 2 * heads, width), weights.matrix(f"{own}.to_out", width, heads),
            weights.numbers(f"{own}.rel_pos_emb.weight", 2 * sizes.reach + 1, sizes.depth), sizes.heads, sizes.block)

    def convolution(own: str) -> Convolution:
        scale, shift = (weights.numbers(f"{own}.batch_norm.{each}", sizes.channels) for each in ("weight", "bias"))
        if weights.has(f"{own}.batch_norm.running_mean"):  # GGUF files have both in scale and shift
            mean, variance = (weights.numbers(f"{own}.batch_norm.running_{each}", sizes.channels) for each in ("mean", "var"))
            scale = scale / np.sqrt(np.maximum(variance, 0) + np.float32(EPS))
            shift = shift - mean * scale
        taps = weights.numbers(f"{own}.depth_conv.conv.weight", sizes.channels, sizes.taps).T * scale
        return Convolution(weights.layer_norm(f"{own}.norm", width, EPS), weights.matrix(f"{own}.up_conv", 2 * sizes.channels, width), taps,
                           shift, weights.matrix(f"{own}.down_conv", width, sizes.channels))

    def block(own: str) -> ConformerBlock:
        return ConformerBlock((ffn(f"{own}ff1"), attention(f"{own}attn"), convolution(f"{own}conv"), ffn(f"{own}ff2")),
                              weights.layer_norm(f"{own}post_norm", width, EPS))

    return Conformer(weights.matrix(f"{name}input_linear", width, sizes.inputs),
                     [block(f"{name}layers.{number}.") for number in range(sizes.layers)],
                     weights.matrix(f"{name}out", sizes.outputs, width), weights.matrix(f"{name}out_mid", width, sizes.outputs))
