"""Command A Vision: SigLIP over tiles of the aspect ratio closest to the image's size, and a thumbnail; patches are merged and projected by
a gated MLP; a token ends each tile."""

from __future__ import annotations

import numpy as np

from . import ROW_PLACEHOLDER
from .internvl import GatedTiles
from .tower_ops import merge_tile_patches
from .tower_weights import Weights
from .vision_tower import Rows
from .vision_transformer import SIGLIP, layer_count, load_transformer

BEGIN, PATCH, BREAK, END = "<|START_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "<|END_OF_IMG|>"
USUAL = {**SIGLIP, "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 27, "image_size": 512}


class Cohere2Vision(GatedTiles):
    KINDS = {"siglip_vision_model": USUAL}
    PROCESSORS = ("Cohere2VisionImageProcessor",)
    CROPS = True
    SIDE, INNER = 512, 36_864
    placeholder = PATCH

    def nearest(self, height: int, width: int, most: int) -> tuple[int, int]:
        """The shape that makes a picture larger by least; where each makes it smaller, the one that does by least."""
        shapes = sorted(((columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)),
                        key=lambda shape: shape[0] * shape[1])
        scales = (np.array(shapes) * self.side / np.array([width, height])).min(1)
        best = scales.argmax() if (scales < 1).all() else np.where(scales < 1, np.inf, scales).argmin()
        return shapes[best][1], shapes[best][0]

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        rows, columns = self.grid(height, width)
        tiles = rows * columns + (rows * columns > 1)
        return (self.token_id(BEGIN), *(*(ROW_PLACEHOLDER,) * (self.across // self.joined) ** 2, self.token_id(BREAK)) * tiles,
                self.token_id(END))

    def load(self, weights: Weights) -> Rows:
        tower = load_transformer(weights, self, "vision_tower.", finished=True)
        together, last = self.width * self.joined**2, layer_count(self)
        project = self.gated(weights, together)
        return lambda tiles, pool: project(merge_tile_patches(tower.layers(tiles, [last], pool), self.joined).reshape(-1, together), pool)


encoder = Cohere2Vision
