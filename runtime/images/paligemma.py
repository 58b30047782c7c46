"""PaliGemma: SigLIP over one square picture, a row for every patch; its tokens and those of what is asked see each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import PLACE
from .preprocessor import BICUBIC, HALF, Scale, filter_of, resized, square
from .tower_parts import Crew, product
from .tower_sight import Rows, TowerSight
from .tower_weights import Weights
from .vision_transformer import SIGLIP, layer_count, load_transformer

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource


class PaliGemma(TowerSight):
    VISION = {"siglip_vision_model": {**SIGLIP, "hidden_size": 1152, "intermediate_size": 4096, "num_hidden_layers": 27,
                                      "num_attention_heads": 16, "patch_size": 14}}
    PROCESSORS = ("SiglipImageProcessor",)
    both_ways = True

    def __init__(self, source: TowerSource, config: ModelConfig) -> None:
        super().__init__(source, config)
        keys = self.processor
        self.scale, self.resample = Scale(keys, HALF, HALF), filter_of(keys, BICUBIC)
        if not keys.flag("do_resize", True) or square(keys, "size", {"height": 224, "width": 224}) != (self.side, self.side):
            raise keys.fail("size", f"the {self.side} × {self.side} that the tower takes")

    @property
    def most_patches(self) -> int:
        return (self.side // self.patch) ** 2

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        return (PLACE,) * self.most_patches

    def values(self, picture: np.ndarray) -> np.ndarray:
        return self.scale(resized(picture, self.side, self.side, self.resample))

    def load(self, weights: Weights) -> Rows:
        tower = load_transformer(weights, self, "vision_tower.", finished=True)
        project = weights.matrix("multi_modal_projector.linear", self.config.hidden_size, self.width, bias=True)
        last = layer_count(self)

        def rows(values: np.ndarray, crew: Crew) -> np.ndarray:
            return product(tower.layers([values], [last], crew)[0], project, crew)

        return rows


def sight(source: TowerSource, config: ModelConfig) -> PaliGemma:
    return PaliGemma(source, config)
