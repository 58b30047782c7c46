"""FastViT (FastViT, MobileCLIP and FastViTHD papers) in its reparameterized inference form: depthwise convolutions, pointwise convolutions,
and attention in the last stages.

Feature maps are [channels, rows, columns]. A depthwise convolution sums shifted copies: with padded lines laid out in one long row, a
neighbour is a constant offset, for all channels of a block at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .tower_ops import Activation, Matrix, Norm, WorkerPool, attend, gelu, matmul, to_float32
from .tower_weights import Weights

PIECE = 1 << 16  # numbers of a map that are in hand at once, about: what a processor keeps near
HEAD, EPS = 32, 1e-5  # the width of a head; of all norms
STEM, MIXER, WIDE, LAST = 3, 3, 7, 3  # sides of what convolutions read
WIDER, SQUEEZED = 4, 16  # an FFN's inner layer, and what the last map's channels are weighed by
ATTENDING = (3, 4)  # numbers of the stages that attend
SCALE = 64  # pixels per row, in each direction


@dataclass(frozen=True)
class ByChannel:
    """A convolution each of whose outputs reads one channel: `weight` float32 [N, side, side], neighbours of which read the same one where
    there are more outputs than channels. `bias` float32 [N]. `stride`: 1 or 2."""

    weight: np.ndarray
    bias: np.ndarray
    stride: int = 1
    curve: Activation | None = None

    def __call__(self, x: np.ndarray, pool: WorkerPool) -> np.ndarray:
        """[C, rows, columns] -> [N, rows / stride, columns / stride], rounded up; nothing is beyond the borders."""
        channels, height, width = x.shape
        rows, columns = -(-height // self.stride), -(-width // self.stride)
        side, times = self.weight.shape[-1], len(self.weight) // channels
        reach, before = (side - 1) // self.stride, side // 2
        long = columns + reach
        weight = self.weight.reshape(channels, times, side, side, 1)
        out = np.empty((len(self.weight), rows, columns), np.float32)

        def some(which: slice) -> None:
            own = x[which]
            framed = np.zeros((len(own), self.stride * (rows + reach + 1), self.stride * long), np.float32)
            framed[:, before : before + height, before : before + width] = own
            # what a stride passes over is in a map of its own, so in each of them neighbours are beside one another
            maps = [[framed[:, down :: self.stride, across :: self.stride].reshape(len(own), -1) for across in range(self.stride)]
                    for down in range(self.stride)]
            worth = np.empty((len(own), rows * long), np.float32)
            for kind in range(times):
                made = np.repeat(self.bias.reshape(channels, times)[which, kind, None], rows * long, axis=1)
                for down in range(side):
                    for across in range(side):
                        at = down // self.stride * long + across // self.stride
                        near = maps[down % self.stride][across % self.stride][:, at : at + rows * long]
                        made += np.multiply(near, weight[which, kind, down, across], out=worth)
                made = made.reshape(len(own), rows, long)[..., :columns]
                out[which.start * times + kind : which.stop * times : times] = made if self.curve is None else self.curve(made)

        few = max(1, PIECE // (rows * long))
        pool.all([lambda begin=begin: some(slice(begin, min(begin + few, channels))) for begin in range(0, channels, few)])
        return out


def mixed(x: np.ndarray, matrix: Matrix, pool: WorkerPool, curve: Activation) -> np.ndarray:
    """What a matrix and a curve make of the channels of every place: [K, ...] -> [N, ...]."""
    flat, weight = x.reshape(len(x), -1), to_float32(matrix.stored)
    out = np.empty((len(weight), flat.shape[1]), np.float32)

    def some(places: slice) -> None:
        out[:, places] = curve(weight @ flat[:, places] + matrix.bias[:, None])

    pool.each(some, flat.shape[1])
    return out.reshape(-1, *x.shape[1:])


@dataclass(frozen=True)
class ConvFfn:
    """An FFN over what channels are among their neighbours, times `scale` [C]."""

    near: ByChannel
    up: Matrix
    down: Matrix
    scale: np.ndarray

    def add(self, x: np.ndarray, pool: WorkerPool) -> None:
        """To x, in place."""
        flat, near = x.reshape(len(x), -1), self.near(x, pool).reshape(len(x), -1)
        up, down = to_float32(self.up.stored), to_float32(self.down.stored)

        def some(places: slice) -> None:
            made = down @ gelu(up @ near[:, places] + self.up.bias[:, None])
            made += self.down.bias[:, None]
            made *= self.scale[:, None]
            flat[:, places] += made

        pool.each(some, flat.shape[1])


@dataclass(frozen=True)
class Attention:
    """Among all places of a map, times `scale` [C]."""

    norm: Norm
    qkv: Matrix
    out: Matrix
    scale: np.ndarray

    def add(self, x: np.ndarray, pool: WorkerPool) -> None:
        """To x, in place."""
        flat = x.reshape(len(x), -1)
        made = matmul(self.norm(np.ascontiguousarray(flat.T)), self.qkv, pool)
        queries, keys, values = np.ascontiguousarray(made.reshape(len(made), 3, -1, HEAD).transpose(1, 2, 0, 3))
        found = np.empty((len(made), len(x)), np.float32)
        attend(queries, keys, values, found, [(0, len(made))], pool)
        flat += (matmul(found, self.out, pool) * self.scale).T


@dataclass(frozen=True)
class Stage:
    """`smaller`: two steps that halve a map, of all stages but the first. `places`: what tells places apart, of those that attend.
    `blocks`: what mixes places, and an FFN."""

    smaller: tuple[ByChannel, Matrix] | None
    places: ByChannel | None
    blocks: Sequence[tuple[ByChannel | Attention, ConvFfn]]

    def __call__(self, x: np.ndarray, pool: WorkerPool) -> np.ndarray:
        if self.smaller is not None:
            x = mixed(self.smaller[0](x, pool), self.smaller[1], pool, gelu)
        if self.places is not None:
            x = self.places(x, pool)
        for mixer, ffn in self.blocks:
            if isinstance(mixer, Attention):
                mixer.add(x, pool)
            else:
                x = mixer(x, pool)
            ffn.add(x, pool)
            pool.job.done += 1
        return x


@dataclass(frozen=True)
class FastVit:
    """`stem`: a convolution over the three colours, one by channel, and a matrix. `last`: a convolution by channel, whose channels are
    weighed by what two matrices make of their means."""

    stem: tuple[Matrix, ByChannel, Matrix]
    stages: Sequence[Stage]
    last: tuple[ByChannel, Matrix, Matrix]

    def seen(self, values: np.ndarray, pool: WorkerPool) -> np.ndarray:
        """Of a picture float32 [side, side, 3] -> float32 [rows * columns, channels]."""
        pool.job.total += sum(len(stage.blocks) for stage in self.stages)
        first, second, third = self.stem
        x = mixed(second(mixed(_neighbours(values), first, pool, gelu), pool), third, pool, gelu)
        for stage in self.stages:
            x = stage(x, pool)
        near, narrow, wide = self.last
        x = near(x, pool)
        weighed = np.maximum(narrow.to_float32()(x.mean((1, 2), dtype=np.float32)), 0)
        weighed = 1 / (1 + np.exp(-wide.to_float32()(weighed)))
        return np.ascontiguousarray(gelu(x * weighed[:, None, None]).reshape(len(x), -1).T)


def _neighbours(values: np.ndarray) -> np.ndarray:
    """What the stem's first convolution reads, every second place: [rows, columns, 3] -> [27, rows / 2, columns / 2], colours outermost."""
    rows, columns, _ = values.shape
    framed = np.pad(values, ((1, 1), (1, 1), (0, 0))).transpose(2, 0, 1)
    near = [framed[:, down : down + rows : 2, across : across + columns : 2] for down in range(STEM) for across in range(STEM)]
    return np.stack(near, axis=1).reshape(3 * STEM * STEM, *near[0].shape[1:])


def load_fastvit(weights: Weights, name: str, layers: Sequence[int], widths: Sequence[int]) -> FastVit:
    """The tower whose tensors begin with `name`, of stages with so many layers of such widths."""

    def by_channel(own: str, count: int, side: int, stride: int = 1, curve: Activation | None = None) -> ByChannel:
        weight = weights.numbers(f"{name}{own}.weight", count, side * side)
        return ByChannel(weight.reshape(count, side, side), weights.numbers(f"{name}{own}.bias", count), stride, curve)

    def normed(own: str, count: int) -> ByChannel:
        """A convolution and the norm of a batch behind it, whose numbers no longer change."""
        weight = weights.numbers(f"{name}{own}.conv.weight", count, WIDE * WIDE).reshape(count, WIDE, WIDE)
        scale, shift, mean, spread = (weights.numbers(f"{name}{own}.bn.{part}", count)
                                      for part in ("weight", "bias", "running_mean", "running_var"))
        scale = scale / np.sqrt(spread + np.float32(EPS))
        return ByChannel(weight * scale[:, None, None], shift - mean * scale)

    def matrix(own: str, rows: int, depth: int, bias: bool = True) -> Matrix:
        return weights.matrix(f"{name}{own}", rows, depth, bias)

    def scale(own: str, count: int) -> np.ndarray:
        return weights.numbers(f"{name}{own}.gamma", count)

    def ffn(own: str, width: int, gamma: str) -> ConvFfn:
        return ConvFfn(normed(f"{own}mlp.conv", width), matrix(f"{own}mlp.fc1", WIDER * width, width),
                       matrix(f"{own}mlp.fc2", width, WIDER * width), scale(f"{own}{gamma}", width))

    def block(own: str, width: int, attends: bool) -> tuple[ByChannel | Attention, ConvFfn]:
        if not attends:
            return by_channel(f"{own}token_mixer.reparam_conv", width, MIXER), ffn(own, width, "layer_scale")
        return Attention(weights.layer_norm(f"{name}{own}norm", width, EPS), matrix(f"{own}token_mixer.qkv", 3 * width, width, bias=False),
                         matrix(f"{own}token_mixer.proj", width, width), scale(f"{own}layer_scale_1", width)), \
            ffn(own, width, "layer_scale_2")

    def stage(number: int) -> Stage:
        own, width, attends = f"stages.{number}.", widths[number], number in ATTENDING
        smaller = None if not number else (by_channel(f"{own}downsample.proj.0.reparam_conv", width, WIDE, 2, gelu),
                                           matrix(f"{own}downsample.proj.1.reparam_conv", width, width))
        return Stage(smaller, by_channel(f"{own}pos_emb.reparam_conv", width, WIDE) if attends else None,
                     [block(f"{own}blocks.{which}.", width, attends) for which in range(layers[number])])

    first, last = widths[0], 2 * widths[-1]
    narrow = max(1, (last + SQUEEZED // 2) // SQUEEZED)
    return FastVit(
        (matrix("stem.0.reparam_conv", first, 3 * STEM * STEM), by_channel("stem.1.reparam_conv", first, STEM, 2, gelu),
         matrix("stem.2.reparam_conv", first, first)),
        [stage(number) for number in range(len(widths))],
        (by_channel("final_conv.reparam_conv", last, LAST), matrix("final_conv.se.fc1", narrow, last),
         matrix("final_conv.se.fc2", last, narrow)))
