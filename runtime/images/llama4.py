"""Llama 4: tiles on a black canvas and a thumbnail; 2D rotary embeddings; patches are merged by an MLP (pixel shuffle). Tokens end tiles
and lines of tiles."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from ..config_reader import Keys
from . import ROW_PLACEHOLDER
from .preprocessor import BILINEAR, HALF, resized, tiles_of
from .tower_layers import LayerNames, LayerShape, load_blocks, qkv_names, run_blocks
from .tower_ops import BATCH_PATCHES, Rope, WorkerPool, gelu, inverse_frequencies, matmul, merge_tile_patches, patches_of
from .tower_weights import Weights
from .vision_tower import MAX_WIDTH, Rows, VisionTower, check_aspect_ratio
from .vision_transformer import layer_count

EPS, THETA = 1e-5, 10_000.0
USUAL = {"hidden_size": 768, "num_hidden_layers": 34, "num_attention_heads": 16, "intermediate_size": 5632, "vision_output_dim": 7680,
         "image_size": 448, "patch_size": 14, "projector_input_dim": 4096, "projector_output_dim": 4096}
LAYER = LayerNames(("input_layernorm", "post_attention_layernorm"), qkv_names("self_attn.{}_proj"), "self_attn.o_proj",
                   ("mlp.fc1", "mlp.fc2"))
WORDS = ("<|image_start|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>", "<|image_end|>")


class Llama4(VisionTower):
    KINDS = {"llama4_vision_model": USUAL}
    PROCESSORS = ("Llama4ImageProcessor",)
    LOOK = HALF, HALF, BILINEAR
    TURNED = 4
    placeholder = "<|image|>"

    def configure(self, keys: Keys) -> None:
        if keys.flag("do_rescale", True) and keys.flag("do_normalize", True):
            self.scale.table = coarse(keys.number("rescale_factor", 1 / 255), self.scale.mean, keys)
        self.demand_side(keys, 336)
        self.most, self.grows = keys.integer("max_patches", 16, high=256), keys.flag("resize_to_max_canvas", False)
        self.joined, self.across = round(1 / self.tower_config.number("pixel_shuffle_ratio", 0.5)), self.side // self.patch
        if self.joined < 1 or self.across % self.joined:
            raise self.tower_config.fail("pixel_shuffle_ratio", f"a share of which {self.across} patches in a row make whole squares")
        self.depth = self.width // self.heads
        self.most_patches = max(BATCH_PATCHES, self.across**2 + 1)
        self.whole_patches = (self.most + 1) * (self.across**2 + 1)

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and columns of tiles that a canvas may have, those of one ratio together, the largest first."""
        by_ratio: dict[float, list[tuple[int, int]]] = {}
        for count in range(self.most, 0, -1):
            for rows in range(1, count + 1):
                if count % rows == 0:
                    by_ratio.setdefault(rows / (count // rows), []).append((rows, count // rows))
        return [shape for alike in by_ratio.values() for shape in alike]

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles: on which the picture grows least, else shrinks least, and of those alike the one with fewest."""
        check_aspect_ratio(height, width)
        side = np.float32(self.side)
        scales = [min(np.float32(rows) * side / np.float32(height), np.float32(columns) * side / np.float32(width))
                  for rows, columns in self.shapes]
        larger = [scale for scale in scales if scale >= 1]
        best = (max(larger) if self.grows else min(larger)) if larger else max(scales)
        return min((shape for shape, scale in zip(self.shapes, scales, strict=True) if scale == best), key=math.prod)

    def fitted(self, height: int, width: int) -> tuple[int, int]:
        """The size that a picture has on its canvas: not larger than a tile where it need not be."""
        high, wide = (count * self.side for count in self.grid(height, width))
        if not self.grows:
            high, wide = min(max(height, self.side), high), min(max(width, self.side), wide)
        across, down = wide / width, high / height
        if across < down:
            return max(1, min(math.floor(height * across), high)), wide
        return high, max(1, min(math.floor(width * down), wide))

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        (begin, beside, below, whole, end), (rows, columns) = map(self.token_id, WORDS), self.grid(height, width)
        tile = (ROW_PLACEHOLDER,) * (self.across // self.joined) ** 2
        line = (*(tile + (beside,)) * (columns - 1), *tile, below)
        return (begin, *(line * rows if rows * columns > 1 else ()), whole, *tile, end)

    def values(self, picture: np.ndarray) -> list[np.ndarray]:
        height, width = picture.shape[:2]
        (rows, columns), side = self.grid(height, width), self.side
        high, wide = self.fitted(height, width)
        canvas = np.zeros((rows * side, columns * side, 3), np.uint8)
        canvas[:high, :wide] = resized(picture, high, wide, self.resample)
        tiles = tiles_of(canvas, side, side)
        if len(tiles) > 1:
            tiles.append(resized(picture, side, side, self.resample))
        return [self.scale(each) for each in tiles]

    def load(self, weights: Weights) -> Rows:
        keys, width, patch, name = self.tower_config, self.width, self.patch, "vision_model."
        inner, count = keys.integer("intermediate_size", high=MAX_WIDTH), self.across**2
        embedding = weights.matrix(f"{name}patch_embedding.linear", width, 3 * patch * patch, bias=False)
        last = weights.numbers(f"{name}class_embedding", width)
        places = weights.numbers(f"{name}positional_embedding_vlm", count + 1, width)
        blocks = load_blocks(weights, f"{name}model.layers.", layer_count(self), LAYER,
                             LayerShape(width, inner, self.heads, gelu, EPS, bias=(True, True), interleaved=True))
        before, after = (weights.layer_norm(f"{name}layernorm_{each}", width, EPS) for each in ("pre", "post"))
        together, first, second = width * self.joined**2, keys.integer("projector_input_dim"), keys.integer("projector_output_dim")
        adapt = weights.two_layers(f"{name}vision_adapter.mlp.", (together, first, second), gelu, False, ("fc1", "fc2"))
        project = weights.matrix("multi_modal_projector.linear_1", self.config.hidden_size, keys.integer("vision_output_dim"), bias=False)
        rope = self.rope()

        def seen(tiles: list[np.ndarray], pool: WorkerPool) -> np.ndarray:
            x = matmul(np.concatenate([patches_of(each, patch) for each in tiles]), embedding, pool).reshape(len(tiles), count, width)
            x = np.concatenate([x, np.broadcast_to(last, (len(tiles), 1, width))], axis=1) + places
            x = before(x.reshape(-1, width))
            spans = [(begin, begin + count + 1) for begin in range(0, len(x), count + 1)]
            x = after(run_blocks(blocks, x, pool, rope.times(len(tiles)), spans)).reshape(len(tiles), count + 1, width)
            return merge_tile_patches(x[:, :count], self.joined).reshape(-1, together)

        def rows(tiles: list[np.ndarray], pool: WorkerPool) -> np.ndarray:
            x = np.concatenate([seen(each, pool) for each in pool.groups(tiles, BATCH_PATCHES // (count + 1), len(blocks))])
            return matmul(gelu(adapt(x, pool)), project, pool)

        return rows

    def rope(self) -> Rope:
        """Of a tile's patches, columns first and both counted from 1, and of what stands behind them, which is not turned."""
        steps = inverse_frequencies(self.theta(THETA), self.depth // 4)
        row, column = np.divmod(np.arange(self.across**2), self.across)
        half = np.concatenate([(column + 1)[:, None] * steps, (row + 1)[:, None] * steps], axis=1)
        return Rope.of(np.concatenate([half, np.zeros((1, half.shape[1]))]).astype(np.float32))


def coarse(factor: float, mean: tuple[float, ...], keys: Keys) -> np.ndarray:
    """`Scale.table`, every step rounded to bfloat16, as the model was trained with."""
    std = HALF if keys.raw.get("image_std") is None else keys.numbers("image_std", 3)
    middle, away = (bfloat16(np.array(each, np.float32)) for each in (mean, std))
    values = bfloat16(np.arange(256, dtype=np.float32) * np.float32(factor))[:, None]
    return bfloat16(bfloat16(values - middle) / away)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """The nearest of its values, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


encoder = Llama4
