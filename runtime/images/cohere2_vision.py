"""Command A Vision: SigLIP over tiles in the shape that keeps a picture nearest to its own size, and over the whole; of every tile squares
of patches become one row by a gated FFN, and a word ends each tile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import PLACE
from .idefics3 import joined
from .internvl import FittedTiles
from .tower_parts import Crew, Matrix, product, silu
from .tower_sight import Rows
from .tower_weights import Weights
from .vision_transformer import SIGLIP, layer_count, load_transformer

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

BEGIN, PATCH, BREAK, END = "<|START_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "<|END_OF_IMG|>"
USUAL = {**SIGLIP, "hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 27, "image_size": 512}


class Cohere2Vision(FittedTiles):
    VISION = {"siglip_vision_model": USUAL}
    PROCESSORS = ("Cohere2VisionImageProcessor",)
    SIDE = 512
    placeholder = PATCH

    def __init__(self, source: TowerSource, config: ModelConfig) -> None:
        super().__init__(source, config)
        self.joined = self.outer.integer("downsample_factor", 2, high=16)
        self.demand_squares()
        if not self.processor.flag("crop_to_patches", True):
            self.most = 1

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
        return (self.word(BEGIN), *(*(PLACE,) * (self.across // self.joined) ** 2, self.word(BREAK)) * tiles, self.word(END))

    def load(self, weights: Weights) -> Rows:
        tower = load_transformer(weights, self, "vision_tower.", finished=True)
        together, hidden, last = self.width * self.joined**2, self.config.hidden_size, layer_count(self)
        inner = self.outer.integer("alignment_intermediate_size", 36_864)
        if inner % 2:
            raise self.outer.fail("alignment_intermediate_size", "an even number")
        both: list[Matrix] = weights.matrix("multi_modal_projector.linear_1", inner, together, bias=True).parts(2)
        down = weights.matrix("multi_modal_projector.linear_2", hidden, inner // 2, bias=True)

        def rows(tiles: list[np.ndarray], crew: Crew) -> np.ndarray:
            x = joined(tower.layers(tiles, [last], crew), self.joined).reshape(-1, together)
            return product(product(x, both[0], crew) * silu(product(x, both[1], crew)), down, crew)

        return rows


def sight(source: TowerSource, config: ModelConfig) -> Cohere2Vision:
    return Cohere2Vision(source, config)
