"""Aya Vision: SigLIP over tiles in the shape that is nearest to a picture's, and over the whole; of every tile squares of patches become
one row by a gated FFN. Words tell tiles apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..config_reader import ConfigError
from . import PLACE
from .idefics3 import joined
from .internvl import FittedTiles
from .tower_parts import Crew, Matrix, product, silu
from .tower_sight import Rows
from .tower_weights import Weights
from .vision_transformer import SIGLIP, load_transformer, wanted_layers

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

BEGIN, PATCH, END = "<|START_OF_IMG|>", "<|IMG_PATCH|>", "<|END_OF_IMG|>"


class AyaVision(FittedTiles):
    VISION = {"siglip_vision_model": SIGLIP}

    def __init__(self, source: TowerSource, config: ModelConfig) -> None:
        super().__init__(source, config)
        self.joined = self.outer.integer("downsample_factor", 2, high=16)
        self.demand_squares()
        if self.outer.choice("vision_feature_select_strategy", {"default": "default", "full": "full"}, "full") == "default":
            raise ConfigError("config.json: vision_feature_select_strategy is 'default', with which patches are not a square")
        self.wanted = wanted_layers(self, -1)
        self._known: dict[int, tuple[int, ...]] = {}

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        rows, columns = self.grid(height, width)
        tiles = rows * columns if rows * columns > 1 else 0
        if tiles not in self._known:
            self._known[tiles] = self._tokens(tiles)
        return self._known[tiles]

    def _tokens(self, tiles: int) -> tuple[int, ...]:
        number, inside = self.word(PATCH), PATCH * (self.across // self.joined) ** 2
        text = BEGIN + "".join(f"TILE_{tile}{inside}" for tile in range(1, tiles + 1)) + f"TILE_GLOBAL{inside}{END}"
        return tuple(PLACE if token == number else token for token in self.words.encode(text, add_special_tokens=False))

    def load(self, weights: Weights) -> Rows:
        tower = load_transformer(weights, self, "vision_tower.", finished=False)
        together, hidden = self.width * len(self.wanted) * self.joined**2, self.config.hidden_size
        inner = self.outer.integer("alignment_intermediate_size", hidden)
        if inner % 2:
            raise self.outer.fail("alignment_intermediate_size", "an even number")
        norm = weights.layer_norm("multi_modal_projector.layernorm", together, self.outer.number("adapter_layer_norm_eps", 1e-6))
        both: list[Matrix] = weights.matrix("multi_modal_projector.linear_1", inner, together, bias=True).parts(2)
        down = weights.matrix("multi_modal_projector.linear_2", hidden, inner // 2, bias=True)

        def rows(tiles: list[np.ndarray], crew: Crew) -> np.ndarray:
            x = norm(joined(tower.layers(tiles, self.wanted, crew), self.joined).reshape(-1, together))
            return product(product(x, both[0], crew) * silu(product(x, both[1], crew)), down, crew)

        return rows


def sight(source: TowerSource, config: ModelConfig) -> AyaVision:
    return AyaVision(source, config)
