"""SAM's ViT, as document models use it: window attention in most layers, decomposed relative position biases by row and column, and two
convolutions at the end (neck).

Windows that reach beyond the image are padded with zeros, and what biased projections make of them is attended to, as in training. For
other image sizes, position embeddings and relative positions are interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .position_embeddings import cubic_weights, resample, taps
from .tower_ops import ACTIVATIONS, QUERIES, SHORT, Activation, Matrix, Norm, WorkerPool, matmul, mlp, patches_of
from .tower_weights import Weights
from .vision_tower import VisionTower
from .vision_transformer import layer_count

USUAL: Mapping[str, object] = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "image_size": 1024, "patch_size": 16, "hidden_act": "gelu",
    "layer_norm_eps": 1e-6, "qkv_bias": True, "use_abs_pos": True, "use_rel_pos": True, "window_size": 14,
    "global_attn_indexes": [2, 5, 8, 11], "mlp_dim": 3072, "output_channels": 256}
NECK_EPS = 1e-6


@dataclass(frozen=True)
class SamLayer:
    """`side`: of its windows in patches, None where a patch sees all. `tables`: what queries are multiplied with by the distance in rows,
    and in columns, to a key, from the farthest before it to the farthest behind, float32 [2 * side - 1, depth] each, or None."""

    norms: tuple[Norm, Norm]
    qkv: Matrix
    out: Matrix
    up: Matrix
    down: Matrix
    curve: Activation
    heads: int
    side: int | None
    tables: tuple[np.ndarray, np.ndarray] | None

    def run(self, x: np.ndarray, pool: WorkerPool) -> np.ndarray:
        """Of patches float32 [rows, columns, D]."""
        rows, columns, width = x.shape
        side = self.side or rows
        windows = _windows(self.norms[0](x), side)
        made = matmul(windows.reshape(-1, width), self.qkv, pool).reshape(len(windows), side**2, 3, self.heads, -1)
        seen = np.empty((len(windows), side**2, self.heads, width // self.heads), np.float32)
        queries, keys, values = made.transpose(2, 0, 3, 1, 4)  # [windows, heads, patches, depth]
        is_short = side**2 <= SHORT
        few = side if is_short else max(1, QUERIES // side)
        lines = [slice(first, min(first + few, side)) for first in range(0, side, few)]
        heads = [slice(0, self.heads)] if is_short else [slice(head, head + 1) for head in range(self.heads)]
        far = None if self.tables is None else tuple(_distances(table, side) for table in self.tables)
        pool.all([_look(queries[window, which], keys[window, which], values[window, which], seen[window, :, which], some, far)
                  for window in range(len(windows)) for which in heads for some in lines])
        x = x + _whole(matmul(seen.reshape(-1, width), self.out, pool).reshape(windows.shape), rows, columns)
        pool.job.done += 1
        return x + mlp(self.norms[1](x), self.up, self.down, self.curve, pool)


@dataclass(frozen=True)
class Sam:
    """`neck`: a matrix, a norm, a convolution and a norm."""

    patches: Matrix
    places: np.ndarray | None
    blocks: Sequence[SamLayer]
    neck: tuple[Matrix, Norm, Matrix, Norm]
    patch: int

    def seen(self, values: np.ndarray, pool: WorkerPool) -> np.ndarray:
        """Of a picture float32 [side, side, 3] -> float32 [rows, columns, channels]."""
        rows = values.shape[0] // self.patch
        x = matmul(patches_of(values, self.patch), self.patches, pool).reshape(rows, rows, -1)
        if self.places is not None:
            x += self.places if len(self.places) == rows else resample(self.places, rows, rows, cubic_weights).reshape(x.shape)
        for block in self.blocks:
            x = block.run(x, pool)
        narrow, first, near, second = self.neck
        x = first(matmul(x.reshape(-1, x.shape[-1]), narrow, pool)).reshape(rows, rows, -1)
        return second(convolved(x, near, 1, pool))


def convolved(x: np.ndarray, matrix: Matrix, stride: int, pool: WorkerPool) -> np.ndarray:
    """Of 3 × 3 neighbours, nothing beyond the borders: [rows, columns, C] -> [rows / stride, columns / stride, N], rounded up."""
    rows, columns, _ = x.shape
    wide = np.pad(x, ((1, 1), (1, 1), (0, 0)))
    near = [wide[down : down + rows : stride, across : across + columns : stride] for down in range(3) for across in range(3)]
    made = matmul(np.stack(near, axis=-1).reshape(near[0].shape[0] * near[0].shape[1], -1), matrix, pool)
    return made.reshape(*near[0].shape[:2], -1)


def _look(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, out: np.ndarray, lines: slice,
          far: tuple[np.ndarray, ...] | None) -> Callable[[], None]:
    """What some lines of a window see of it: queries, keys and values [heads, patches, depth] -> `out` [patches, heads, depth]. `far`: as
    of `_distances`, in rows and in columns."""
    def look() -> None:
        side = math.isqrt(keys.shape[1])
        which = slice(lines.start * side, lines.stop * side)
        own = queries[:, which]
        scores = (own @ keys.swapaxes(1, 2)) * np.float32(own.shape[-1] ** -0.5)
        if far is not None:
            grid = own.reshape(len(own), -1, side, own.shape[-1])
            down = grid @ far[0][lines].swapaxes(1, 2)
            across = (grid.swapaxes(1, 2) @ far[1].swapaxes(1, 2)).swapaxes(1, 2)
            scores = scores.reshape(len(own), -1, side, side, side)
            scores += down[..., None]
            scores += across[..., None, :]
            scores = scores.reshape(len(own), -1, side * side)
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        mixed = scores @ values
        mixed /= scores.sum(-1, keepdims=True)
        out[which] = mixed.swapaxes(0, 1)

    return look


def _distances(table: np.ndarray, side: int) -> np.ndarray:
    """Of queries at each of `side` places, what their table has for keys at each: float32 [side, side, depth]."""
    count = 2 * side - 1
    if len(table) != count:
        low, high, share = taps(len(table), count)
        table = table[low] * (1 - share) + table[high] * share
    return table[np.arange(side)[:, None] - np.arange(side) + side - 1]


def load_sam(weights: Weights, encoder: VisionTower, name: str) -> Sam:
    keys, width, across = encoder.tower_config, encoder.width, encoder.side // encoder.patch
    eps, inner, channels = keys.number("layer_norm_eps"), keys.integer("mlp_dim"), keys.integer("output_channels")
    curve = keys.choice("hidden_act", ACTIVATIONS, "gelu")
    count = layer_count(encoder)
    whole, window = keys.layers("global_attn_indexes", count), keys.integer("window_size", low=0, high=1 << 10)

    def block(number: int) -> SamLayer:
        own, side = f"{name}layers.{number}.", None if number in whole or not window else window
        apart = 2 * (side or across) - 1
        return SamLayer(
            (weights.layer_norm(f"{own}layer_norm1", width, eps), weights.layer_norm(f"{own}layer_norm2", width, eps)),
            weights.matrix(f"{own}attn.qkv", 3 * width, width, bias=keys.flag("qkv_bias")),
            weights.matrix(f"{own}attn.proj", width, width, bias=True), weights.matrix(f"{own}mlp.lin1", inner, width, bias=True),
            weights.matrix(f"{own}mlp.lin2", width, inner, bias=True), curve, encoder.heads, side,
            tuple(weights.numbers(f"{own}attn.rel_pos_{axis}", apart, width // encoder.heads) for axis in "hw")
            if keys.flag("use_rel_pos") else None)

    return Sam(weights.matrix(f"{name}patch_embed.projection", width, 3 * encoder.patch**2),
               weights.numbers(f"{name}pos_embed", 1, across, across, width)[0] if keys.flag("use_abs_pos") else None,
               [block(number) for number in range(count)],
               (weights.matrix(f"{name}neck.conv1", channels, width, bias=False),
                weights.layer_norm(f"{name}neck.layer_norm1", channels, NECK_EPS),
                weights.matrix(f"{name}neck.conv2", channels, 9 * channels, bias=False),
                weights.layer_norm(f"{name}neck.layer_norm2", channels, NECK_EPS)), encoder.patch)


def _windows(x: np.ndarray, side: int) -> np.ndarray:
    """[rows, columns, D] -> [windows, side, side, D], zeros beyond the borders."""
    rows, columns, width = x.shape
    down, across = -(-rows // side), -(-columns // side)
    whole = np.pad(x, ((0, down * side - rows), (0, across * side - columns), (0, 0)))
    return np.ascontiguousarray(whole.reshape(down, side, across, side, width).swapaxes(1, 2)).reshape(-1, side, side, width)


def _whole(windows: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The way back."""
    side, width = windows.shape[1], windows.shape[-1]
    down, across = -(-rows // side), -(-columns // side)
    return windows.reshape(down, across, side, side, width).swapaxes(1, 2).reshape(down * side, across * side, width)[:rows, :columns]
