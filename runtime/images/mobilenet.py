"""MobileNet V5 (MobileNet V4 paper, as in timm): full convolutions, inverted residual blocks, and multi-query attention. The last two
stages' feature maps are fused at the end.

Feature maps are [rows, columns, channels]. The kind of each block follows from its tensors; the first of each stage halves the map.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..config_reader import ConfigError
from .tower_ops import ROWS, Activation, Matrix, Norm, WorkerPool, attend, gelu_tanh
from .tower_weights import Weights

EPS = 1e-6
Map = np.ndarray


def _framed(x: Map, side: int, stride: int) -> Map:
    """With nothing around it, as much that a map is divided by the stride, rounded up; of an odd amount more behind."""
    around = []
    for size in x.shape[:2]:
        total = max((-(-size // stride) - 1) * stride + side - size, 0)
        around.append((total // 2, total - total // 2))
    return np.pad(x, (*around, (0, 0)))


def _by_rows(pool: WorkerPool, do: Callable[[slice], None], rows: int, columns: int) -> None:
    few = max(1, ROWS // columns)
    pool.all([lambda begin=begin: do(slice(begin, min(begin + few, rows))) for begin in range(0, rows, few)])


def _ended(y: np.ndarray, norm: Norm | None, curve: Activation | None) -> np.ndarray:
    y = y if norm is None else norm(y)
    return y if curve is None else curve(y)


@dataclass(frozen=True)
class Whole:
    """A convolution each of whose outputs reads all channels: `matrix` [N, side * side * C]."""

    matrix: Matrix
    side: int
    stride: int
    norm: Norm

    def __call__(self, x: Map, pool: WorkerPool) -> Map:
        side, stride, wide = self.side, self.stride, self.matrix.to_float32()
        near = np.lib.stride_tricks.sliding_window_view(_framed(x, side, stride), (side, side), axis=(0, 1))[::stride, ::stride]
        rows, columns = near.shape[:2]
        out = np.empty((rows, columns, len(self.matrix.stored)), np.float32)

        def some(which: slice) -> None:
            read = near[which].transpose(0, 1, 3, 4, 2).reshape(-1, wide.weight.shape[0])
            out[which] = _ended(wide(read), self.norm, gelu_tanh).reshape(-1, columns, out.shape[-1])

        _by_rows(pool, some, rows, columns)
        return out


@dataclass(frozen=True)
class ByChannel:
    """A convolution each of whose outputs reads its own channel: `weight` float32 [side, side, C]."""

    weight: np.ndarray
    stride: int
    norm: Norm
    curve: Activation | None = None

    def __call__(self, x: Map, pool: WorkerPool) -> Map:
        side, stride = len(self.weight), self.stride
        framed, (rows, columns) = _framed(x, side, stride), (-(-size // stride) for size in x.shape[:2])
        out = np.empty((rows, columns, x.shape[-1]), np.float32)

        def some(which: slice) -> None:
            made = np.zeros((which.stop - which.start, columns, x.shape[-1]), np.float32)
            for down in range(side):
                first = which.start * stride + down
                for across in range(side):
                    made += framed[first : first + stride * len(made) : stride,
                                   across : across + stride * columns : stride][: len(made), :columns] * self.weight[down, across]
            out[which] = _ended(made, self.norm, self.curve)

        _by_rows(pool, some, rows, columns)
        return out


@dataclass(frozen=True)
class ByPlace:
    """What a matrix makes of the channels of each place."""

    matrix: Matrix
    norm: Norm | None = None
    curve: Activation | None = None

    def __call__(self, x: Map, pool: WorkerPool) -> Map:
        wide, flat = self.matrix.to_float32(), x.reshape(-1, x.shape[-1])
        out = np.empty((len(flat), len(self.matrix.stored)), np.float32)

        def some(which: slice) -> None:
            out[which] = _ended(wide(flat[which]), self.norm, self.curve)

        pool.each(some, len(flat))
        return out.reshape(*x.shape[:-1], -1)


Step = Whole | ByChannel | ByPlace


@dataclass(frozen=True)
class Block:
    """Steps one behind the other, times `scale` [C] where there is one, added to what goes in where it has the same shape."""

    steps: tuple[Step, ...]
    scale: np.ndarray | None = None
    added: bool = True

    def __call__(self, x: Map, pool: WorkerPool) -> Map:
        y = x
        for step in self.steps:
            y = step(y, pool)
        y = y if self.scale is None else y * self.scale
        return x + y if self.added and x.shape == y.shape else y


@dataclass(frozen=True)
class Attention:
    """Of all places to all, or to those of the maps that `closer` makes of them for keys and for values: heads have their own queries
    alone."""

    norm: Norm
    queries: Matrix
    keys: Matrix
    values: Matrix
    out: Matrix
    closer: tuple[ByChannel, ByChannel] | None
    scale: np.ndarray

    def __call__(self, x: Map, pool: WorkerPool) -> Map:
        depth, flat = len(self.keys.stored), x.reshape(-1, x.shape[-1])
        heads = len(self.queries.stored) // depth
        normed = np.empty_like(x)

        def configure(which: slice) -> None:
            normed.reshape(flat.shape)[which] = self.norm(flat[which])

        pool.each(configure, len(flat))
        seen = [normed if self.closer is None else self.closer[which](normed, pool) for which in (0, 1)]
        q = ByPlace(self.queries)(normed, pool).reshape(len(flat), heads, depth).swapaxes(0, 1)
        k, v = (np.broadcast_to(made.reshape(1, -1, depth), (heads, made.size // depth, depth))
                for made in (ByPlace(each)(own, pool) for each, own in zip((self.keys, self.values), seen, strict=True)))
        found = np.empty((len(flat), heads * depth), np.float32)
        attend(np.ascontiguousarray(q), k, v, found, [(0, len(flat))], pool, [(0, k.shape[1])])
        return x + (ByPlace(self.out)(found, pool) * self.scale).reshape(x.shape)


@dataclass(frozen=True)
class MobileNet:
    """`joined`: what is made of the last two stages' maps, side by side; `after`: of what is left of them."""

    stem: Whole
    stages: tuple[tuple[Block | Attention, ...], ...]
    joined: Block
    after: Norm

    @property
    def layers(self) -> int:
        return sum(map(len, self.stages))

    def __call__(self, x: Map, count: int, pool: WorkerPool) -> np.ndarray:
        """Of a picture [side, side, 3] rows [count * count, width]. Raises ConfigError where maps do not divide into so many."""
        x, maps = self.stem(x, pool), []
        for stage in self.stages:
            for block in stage:
                x = block(x, pool)
                pool.job.done += 1
            maps.append(x)
        high, low = maps[-2:]
        rows, columns, _ = high.shape
        if rows % count or columns % count:
            raise ConfigError(f"an image's map of {rows} × {columns} places does not divide into {count} × {count} rows")
        near = low[np.arange(rows) * low.shape[0] // rows][:, np.arange(columns) * low.shape[1] // columns]
        made = self.joined(np.concatenate([high, near], axis=-1), pool)
        made = made.reshape(count, rows // count, count, columns // count, -1).mean((1, 3), dtype=np.float32)
        return self.after(made.reshape(count * count, -1))


def load_mobilenet(weights: Weights, name: str) -> MobileNet:
    """The tower whose tensors begin with `name`."""
    def norm(own: str) -> Norm:
        return weights.rms_norm(own, weights.shape_of(f"{own}.weight", 1)[0], EPS)

    def whole(own: str, normed: str, bias: bool) -> Whole:
        wide, channels, side, _ = weights.shape_of(f"{own}.weight", 4)
        stored = weights.stored(f"{own}.weight", wide, channels, side, side).transpose(0, 2, 3, 1).reshape(wide, -1)
        return Whole(Matrix(np.ascontiguousarray(stored), weights.numbers(f"{own}.bias", wide) if bias else None), side, 2, norm(normed))

    def near(own: str, stride: int, normed: str, curve: Activation | None = None) -> ByChannel:
        channels, _, side, _ = weights.shape_of(f"{own}.weight", 4)
        return ByChannel(np.ascontiguousarray(weights.numbers(f"{own}.weight", channels, 1, side, side)[:, 0].transpose(1, 2, 0)), stride,
                         norm(normed), curve)

    def matrix(own: str) -> Matrix:
        return weights.matrix(own, *weights.shape_of(f"{own}.weight", 4)[:2], bias=False)

    def scale(own: str) -> np.ndarray:
        return weights.numbers(f"{own}layer_scale.gamma", weights.shape_of(f"{own}layer_scale.gamma", 1)[0])

    def edge(own: str, stride: int) -> Block:
        first = whole(f"{own}conv_exp", f"{own}bn1", bias=False)
        return Block((Whole(first.matrix, first.side, stride, first.norm), ByPlace(matrix(f"{own}conv_pwl"), norm(f"{own}bn2"))))

    def inverted(own: str, stride: int) -> Block:
        has = {part: weights.has(f"{own}{part}.conv.weight") for part in ("dw_start", "dw_mid")}
        steps: list[Step] = [near(f"{own}dw_start.conv", 1 if has["dw_mid"] else stride, f"{own}dw_start.bn")] if has["dw_start"] else []
        steps.append(ByPlace(matrix(f"{own}pw_exp.conv"), norm(f"{own}pw_exp.bn"), gelu_tanh))
        steps += [near(f"{own}dw_mid.conv", stride, f"{own}dw_mid.bn", gelu_tanh)] if has["dw_mid"] else []
        steps.append(ByPlace(matrix(f"{own}pw_proj.conv"), norm(f"{own}pw_proj.bn")))
        return Block(tuple(steps), scale(own) if weights.has(f"{own}layer_scale.gamma") else None)

    def attention(own: str) -> Attention:
        closer = tuple(near(f"{own}attn.{each}.down_conv", 2, f"{own}attn.{each}.norm") for each in ("key", "value")) \
            if weights.has(f"{own}attn.key.down_conv.weight") else None
        return Attention(norm(f"{own}norm"), *(matrix(f"{own}attn.{each}.proj") for each in ("query", "key", "value", "output")), closer,
                         scale(own))

    kinds = {"conv_exp.weight": edge, "pw_exp.conv.weight": inverted, "attn.query.proj.weight": lambda own, stride: attention(own)}
    stages: list[tuple[Block | Attention, ...]] = []
    while True:
        blocks: list[Block | Attention] = []
        while (kind := next((kind for kind in kinds if weights.has(
                f"{name}blocks.{len(stages)}.{len(blocks)}.{kind}")), None)) is not None:
            blocks.append(kinds[kind](f"{name}blocks.{len(stages)}.{len(blocks)}.", 1 if blocks else 2))
        if not blocks:
            break
        stages.append(tuple(blocks))
    if len(stages) < 2:
        raise ConfigError(f"the vision tower has {len(stages)} stages, and the maps of two are joined")
    return MobileNet(whole(f"{name}conv_stem.conv", f"{name}conv_stem.bn", bias=True), tuple(stages),
                     Block(inverted(f"{name}msfa.ffn.", 1).steps, added=False), norm(f"{name}msfa.norm"))
