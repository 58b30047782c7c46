"""Llama 4: a picture on a black canvas of whole tiles, and once whole; patches are turned by row and column, and squares of them become one
row by an FFN. Words end tiles and lines of them."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..config_reader import Keys
from . import PLACE
from .idefics3 import joined
from .preprocessor import BILINEAR, HALF, Scale, filter_of, resized, square
from .tower_parts import Block, Crew, Matrix, Rope, gelu, patches_of, product, two_layers
from .tower_sight import MOST_WIDTH, Rows, TowerSight, demand_shape
from .tower_weights import Weights
from .vision_transformer import TOGETHER, layer_count

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

EPS, THETA = 1e-5, 10_000.0
USUAL = {"hidden_size": 768, "num_hidden_layers": 34, "num_attention_heads": 16, "intermediate_size": 5632, "vision_output_dim": 7680,
         "image_size": 448, "patch_size": 14, "projector_input_dim": 4096, "projector_output_dim": 4096}
WORDS = ("<|image_start|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>", "<|image_end|>")


class Llama4(TowerSight):
    VISION = {"llama4_vision_model": USUAL}
    PROCESSORS = ("Llama4ImageProcessor",)
    placeholder = "<|image|>"

    def __init__(self, source: TowerSource, config: ModelConfig) -> None:
        super().__init__(source, config)
        keys = self.processor
        self.scale, self.resample = Scale(keys, HALF, HALF), filter_of(keys, BILINEAR)
        if keys.flag("do_rescale", True) and keys.flag("do_normalize", True):
            self.scale.table = coarse(keys.number("rescale_factor", 1 / 255), self.scale.mean, keys)
        if not keys.flag("do_resize", True) or square(keys, "size", {"height": 336, "width": 336}) != (self.side, self.side):
            raise keys.fail("size", f"the {self.side} × {self.side} that the tower takes")
        self.most, self.grows = keys.integer("max_patches", 16, high=256), keys.flag("resize_to_max_canvas", False)
        self.joined, self.across = round(1 / self.vision.number("pixel_shuffle_ratio", 0.5)), self.side // self.patch
        if self.joined < 1 or self.across % self.joined or self.width // self.heads % 4:
            raise self.vision.fail("pixel_shuffle_ratio", f"a share of which {self.across} patches in a row make whole squares")

    @property
    def most_patches(self) -> int:
        return max(TOGETHER, self.across**2 + 1)

    @property
    def whole_patches(self) -> int:
        return (self.most + 1) * (self.across**2 + 1)

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
        demand_shape(height, width)
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
        (begin, beside, below, whole, end), (rows, columns) = map(self.word, WORDS), self.grid(height, width)
        tile = (PLACE,) * (self.across // self.joined) ** 2
        line = (*(tile + (beside,)) * (columns - 1), *tile, below)
        return (begin, *(line * rows if rows * columns > 1 else ()), whole, *tile, end)

    def values(self, picture: np.ndarray) -> list[np.ndarray]:
        height, width = picture.shape[:2]
        (rows, columns), side = self.grid(height, width), self.side
        high, wide = self.fitted(height, width)
        canvas = np.zeros((rows * side, columns * side, 3), np.uint8)
        canvas[:high, :wide] = resized(picture, high, wide, self.resample)
        tiles = [canvas[row : row + side, column : column + side] for row in range(0, len(canvas), side)
                 for column in range(0, columns * side, side)]
        if len(tiles) > 1:
            tiles.append(resized(picture, side, side, self.resample))
        return [self.scale(each) for each in tiles]

    def load(self, weights: Weights) -> Rows:
        keys, width, patch, name = self.vision, self.width, self.patch, "vision_model."
        inner, count, head = keys.integer("intermediate_size", high=MOST_WIDTH), self.across**2, width // self.heads
        embedding = weights.matrix(f"{name}patch_embedding.linear", width, 3 * patch * patch, bias=False)
        last = weights.numbers(f"{name}class_embedding", width)
        places = weights.numbers(f"{name}positional_embedding_vlm", count + 1, width)
        order = np.arange(head).reshape(-1, 2).T.reshape(-1)  # neighbours turn together: here they are halves apart

        def turned(own: str) -> Matrix:
            stored = weights.matrix(own, width, width, bias=True)
            return Matrix(np.ascontiguousarray(stored.stored.reshape(self.heads, head, width)[:, order]).reshape(width, width),
                          np.ascontiguousarray(stored.bias.reshape(self.heads, head)[:, order]).reshape(width))

        def block(number: int) -> Block:
            own = f"{name}model.layers.{number}."
            return Block((weights.layer_norm(f"{own}input_layernorm", width, EPS),
                          weights.layer_norm(f"{own}post_attention_layernorm", width, EPS)),
                         turned(f"{own}self_attn.q_proj"), turned(f"{own}self_attn.k_proj"),
                         weights.matrix(f"{own}self_attn.v_proj", width, width, bias=True),
                         weights.matrix(f"{own}self_attn.o_proj", width, width, bias=True),
                         weights.matrix(f"{own}mlp.fc1", inner, width, bias=True),
                         weights.matrix(f"{own}mlp.fc2", width, inner, bias=True), gelu, self.heads)

        blocks = [block(number) for number in range(layer_count(self))]
        before, after = (weights.layer_norm(f"{name}layernorm_{each}", width, EPS) for each in ("pre", "post"))
        together, first, second = width * self.joined**2, keys.integer("projector_input_dim"), keys.integer("projector_output_dim")
        one = weights.matrix(f"{name}vision_adapter.mlp.fc1", first, together, bias=False)
        two = weights.matrix(f"{name}vision_adapter.mlp.fc2", second, first, bias=False)
        project = weights.matrix("multi_modal_projector.linear_1", self.config.hidden_size, keys.integer("vision_output_dim"), bias=False)
        cos, sin = self.angles(head)

        def seen(tiles: list[np.ndarray], crew: Crew) -> np.ndarray:
            x = product(np.concatenate([patches_of(each, patch) for each in tiles]), embedding, crew).reshape(len(tiles), count, width)
            x = np.concatenate([x, np.broadcast_to(last, (len(tiles), 1, width))], axis=1) + places
            x = before(x.reshape(-1, width))
            rope = Rope(np.tile(cos, (len(tiles), 1)), np.tile(sin, (len(tiles), 1)))
            spans = [(begin, begin + count + 1) for begin in range(0, len(x), count + 1)]
            for block in blocks:
                block.run(x, spans, crew, rope)
            return joined(after(x).reshape(len(tiles), count + 1, width)[:, :count], self.joined).reshape(-1, together)

        def rows(tiles: list[np.ndarray], crew: Crew) -> np.ndarray:
            few = max(1, TOGETHER // (count + 1))
            groups = [tiles[at : at + few] for at in range(0, len(tiles), few)]
            crew.work.total += len(groups) * len(blocks)
            x = np.concatenate([seen(each, crew) for each in groups])
            return product(gelu(two_layers(x, one, two, gelu, crew)), project, crew)

        return rows

    def angles(self, head: int) -> tuple[np.ndarray, np.ndarray]:
        """Cosines and sines of a tile's patches, columns first and both counted from 1, and of what stands behind them, which is not
        turned: float32 [patches + 1, head]."""
        stated = Keys(self.vision.section("rope_parameters") or {}, "config.json: vision_config: rope_parameters")
        theta = stated.number("rope_theta", None) or self.vision.number("rope_theta", THETA)
        steps = (1 / theta ** (np.arange(0, head // 2, 2, dtype=np.float32) / np.float32(head // 2))).astype(np.float32)
        row, column = np.divmod(np.arange(self.across**2), self.across)
        half = np.concatenate([(column + 1)[:, None] * steps, (row + 1)[:, None] * steps], axis=1)
        half = np.concatenate([half, np.zeros((1, half.shape[1]))]).astype(np.float32)
        angles = np.concatenate([half, half], axis=1)
        return np.cos(angles), np.sin(angles)


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


def sight(source: TowerSource, config: ModelConfig) -> Llama4:
    return Llama4(source, config)
