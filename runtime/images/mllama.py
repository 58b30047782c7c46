"""Llama 3.2 Vision: tiles on a black canvas. All tiles, with padding up to the maximum count, run through the tower together; padding
patches do not attend to each other. The last layer's output and those of some others become rows for the text model's cross-attention
layers, so an image is one token of the prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..config_reader import Keys
from . import ROW_PLACEHOLDER
from .preprocessor import BILINEAR, HALF, resized
from .tower_layers import LayerNames, LayerShape, load_blocks, qkv_names
from .tower_ops import ACTIVATIONS, WorkerPool, matmul, patches_of, to_float32
from .tower_weights import Weights
from .vision_tower import MAX_LAYERS, MAX_WIDTH, Rows, VisionTower, check_aspect_ratio

EPS = 1e-5  # of the norms around the layers
LAYER = LayerNames(("input_layernorm", "post_attention_layernorm"), qkv_names("self_attn.{}_proj"), "self_attn.o_proj",
                   ("mlp.fc1", "mlp.fc2"))
WHOLE = 8  # of a tile's patches there are whole multiples, the last of which stand for nothing
USUAL = {"hidden_size": 1280, "hidden_act": "gelu", "num_hidden_layers": 32, "num_global_layers": 8, "attention_heads": 16,
         "intermediate_size": 5120, "vision_output_dim": 7680, "image_size": 448, "patch_size": 14, "norm_eps": 1e-5, "max_num_tiles": 4,
         "intermediate_layers_indices": [3, 7, 15, 23, 30]}


@dataclass(frozen=True)
class Tiles:
    """What the tower is given: `values` float32 [tiles, side, side, 3], and the number of the shape in which they lie."""

    values: np.ndarray
    shape: int


class Mllama(VisionTower):
    KINDS = {"mllama_vision_model": USUAL}
    PROCESSORS = ("MllamaImageProcessor",)
    LOOK = HALF, HALF, BILINEAR
    HEADS = "attention_heads"
    placeholder = "<|image|>"

    def configure(self, keys: Keys) -> None:
        if not keys.flag("do_pad", True):
            raise keys.fail("do_pad", "true")
        self.demand_side(keys, 224)
        self.most = self.tower_config.integer("max_num_tiles", high=256)
        if keys.integer("max_image_tiles", 4, high=256) != self.most:
            raise keys.fail("max_image_tiles", f"the {self.most} that the tower takes")
        stated = self.tower_config.raw.get("supported_aspect_ratios")
        if stated is not None and stated != [list(each) for each in self.shapes]:
            raise self.tower_config.fail("supported_aspect_ratios", f"all shapes of {self.most} tiles, in their order")
        self.layers, self.last = (self.tower_config.integer(name, high=MAX_LAYERS) for name in ("num_hidden_layers", "num_global_layers"))
        found = self.tower_config.raw.get("intermediate_layers_indices")
        if not isinstance(found, list) or not all(type(each) is int and 0 <= each < self.layers for each in found):
            raise self.tower_config.fail("intermediate_layers_indices", f"some of {self.layers} layers")
        self.taken: list[int] = found
        if self.tower_config.integer("vision_output_dim", high=MAX_WIDTH) != (1 + len(found)) * self.width:
            raise self.tower_config.fail("vision_output_dim", f"{1 + len(found)} times {self.width}")
        self.most_patches = self.most * self.filled

    @property
    def count(self) -> int:
        """Rows that a tile becomes: its patches, behind one of its own."""
        return (self.side // self.patch) ** 2 + 1

    @property
    def filled(self) -> int:
        """And with those that stand for nothing."""
        return -(-self.count // WHOLE) * WHOLE

    def workspace_floats(self) -> int:
        """As of others, with what is taken of several layers, and the rows that come of it."""
        return super().workspace_floats() + self.most * self.count * ((1 + len(self.taken)) * self.width + self.config.hidden_size)

    @cached_property
    def placeholder_id(self) -> int:
        return self.token_id(self.placeholder)

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and columns in which tiles may lie, in the order in which they are numbered from 1."""
        counts = range(1, self.most + 1)
        return [(rows, columns) for rows in counts for columns in counts if rows * columns <= self.most]

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles: on which the picture grows least, else shrinks least, and of those alike the one with fewest."""
        check_aspect_ratio(height, width)
        scales = [min(rows * self.side / height, columns * self.side / width) for rows, columns in self.shapes]
        larger = [scale for scale in scales if scale >= 1]
        best = min(larger) if larger else max(scales)
        return min((shape for shape, scale in zip(self.shapes, scales, strict=True) if scale == best), key=math.prod)

    def fitted(self, height: int, width: int) -> tuple[int, int]:
        """The size that a picture has on its canvas: not larger than a tile where it need not be."""
        high, wide = (min(max(own, self.side), count * self.side) for own, count in zip((height, width), self.grid(height, width)))
        down, across = high / height, wide / width
        if across < down:
            return min(math.floor(height * across) or 1, high), wide
        return high, min(math.floor(width * down) or 1, wide)

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        check_aspect_ratio(height, width)
        return (ROW_PLACEHOLDER,)

    def row_count(self, tokens: tuple[int, ...], taken: np.ndarray) -> int:
        return math.prod(self.grid(*taken.shape[:2])) * self.count

    def values(self, picture: np.ndarray) -> Tiles:
        height, width = picture.shape[:2]
        (rows, columns), side = self.grid(height, width), self.side
        high, wide = self.fitted(height, width)
        canvas = np.zeros((rows * side, columns * side, 3), np.uint8)
        canvas[:high, :wide] = resized(picture, high, wide, self.resample)
        scaled = self.scale(canvas).reshape(rows, side, columns, side, 3).swapaxes(1, 2)
        return Tiles(np.ascontiguousarray(scaled).reshape(-1, side, side, 3), self.shapes.index((rows, columns)) + 1)

    def load(self, weights: Weights) -> Rows:
        keys, width, patch, count, most, name = self.tower_config, self.width, self.patch, self.count, self.most, "vision_model."
        inner, eps = keys.integer("intermediate_size", high=MAX_WIDTH), keys.number("norm_eps")
        curve = keys.choice("hidden_act", ACTIVATIONS, "gelu")
        shapes = len(self.shapes) + 1
        embedding = weights.matrix(f"{name}patch_embedding", width, 3 * patch * patch, bias=False)
        first = weights.numbers(f"{name}class_embedding", width)
        own = f"{name}gated_positional_embedding."
        gate = share(weights, f"{own}gate")
        places = (1 - gate) * weights.numbers(f"{own}embedding", count, width)
        by_tile = weights.stored(f"{own}tile_embedding.weight", shapes, most * count * width)
        first_tiles, last_tiles = ((share(weights, f"{name}{each}_tile_positional_embedding.gate"), weights.stored(
            f"{name}{each}_tile_positional_embedding.embedding.weight", shapes, most * width)) for each in ("pre", "post"))
        norms = [weights.layer_norm(f"{name}layernorm_{each}", width, EPS) for each in ("pre", "post")]

        def shares(own: str) -> dict[str, object]:
            return {"scales": tuple(share(weights, f"{own}gate_{each}") for each in ("attn", "ffn"))}

        shape = LayerShape(width, inner, self.heads, curve, eps, bias=(False, True))
        blocks = load_blocks(weights, f"{name}transformer.layers.", self.layers, LAYER, shape)
        blocks += load_blocks(weights, f"{name}global_transformer.layers.", self.last, LAYER, shape, more=shares)
        project = weights.matrix("multi_modal_projector", self.config.hidden_size, (1 + len(self.taken)) * width, bias=True)

        def of_tiles(table: tuple[np.ndarray, np.ndarray], shape: int) -> np.ndarray:
            """What is added to all patches of each tile, float32 [tiles, 1, width]."""
            return table[0] * to_float32(table[1][shape]).reshape(most, 1, width)

        def rows(given: Tiles, pool: WorkerPool) -> np.ndarray:
            pool.job.total += len(blocks)
            tiles, shape, nothing = len(given.values), given.shape, self.filled - count
            x = np.zeros((most, count, width), np.float32)
            x[:tiles, 1:] = matmul(np.concatenate([patches_of(each, patch) for each in given.values]), embedding,
                                    pool).reshape(tiles, count - 1, width)
            x[:, 1:] += of_tiles(first_tiles, shape)
            x[:, 0] = first
            x += places
            x += gate * to_float32(by_tile[shape]).reshape(most, count, width)
            x = norms[0](x)
            # Rows that stand for something first: they see all, the others them alone.
            real, whole = tiles * count, most * self.filled
            x = np.concatenate([x.reshape(-1, width), np.zeros((most * nothing, width), np.float32)])
            spans, seen, taken = [(0, real), (real, whole)], [(0, whole), (0, real)], {}
            for number, each in enumerate(blocks[: self.layers]):
                each.run(x, spans, pool, seen=seen)
                if number in self.taken:
                    taken[number] = x[:real].copy()
            x = norms[1](x)
            more = of_tiles(last_tiles, shape)
            x[: most * count] += np.broadcast_to(more, (most, count, width)).reshape(-1, width)
            x[most * count :] += np.broadcast_to(more, (most, nothing, width)).reshape(-1, width)
            for each in blocks[self.layers :]:
                each.run(x, spans, pool, seen=seen)
            beside = np.stack([taken[number] for number in self.taken], axis=-1).reshape(real, -1) if taken else x[:real, :0]
            return matmul(np.concatenate([x[:real], beside], axis=1), project, pool)

        return rows


def share(weights: Weights, name: str) -> np.ndarray:
    """How much of something counts, float32 [1], of the number from which it is made."""
    return np.tanh(weights.numbers(name, 1))


encoder = Mllama
