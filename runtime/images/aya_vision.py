"""Aya Vision: SigLIP over tiles in the closest aspect ratio and a thumbnail; patches are merged and projected by a gated MLP. Text tokens
label tiles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..config_reader import ConfigError, Keys
from .internvl import GatedTiles
from .tower_ops import WorkerPool, merge_tile_patches
from .tower_weights import Weights
from .vision_tower import Rows
from .vision_transformer import SIGLIP, drops_first, load_transformer, wanted_layers

BEGIN, PATCH, END = "<|START_OF_IMG|>", "<|IMG_PATCH|>", "<|END_OF_IMG|>"


class AyaVision(GatedTiles):
    KINDS = {"siglip_vision_model": SIGLIP}

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        if drops_first(self, "full"):
            raise ConfigError("config.json: vision_feature_select_strategy is 'default', which leaves no square grid of patches")
        self.wanted = wanted_layers(self, -1)

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        rows, columns = self.grid(height, width)
        tiles = rows * columns if rows * columns > 1 else 0
        inside = PATCH * (self.across // self.joined) ** 2
        return self.spelled(BEGIN + "".join(f"TILE_{tile}{inside}" for tile in range(1, tiles + 1)) + f"TILE_GLOBAL{inside}{END}", PATCH)

    def load(self, weights: Weights) -> Rows:
        tower = load_transformer(weights, self, "vision_tower.", finished=False)
        together = self.width * len(self.wanted) * self.joined**2
        norm = weights.layer_norm("multi_modal_projector.layernorm", together, self.root_config.number("adapter_layer_norm_eps", 1e-6))
        project = self.gated(weights, together)

        def rows(tiles: Sequence[np.ndarray], pool: WorkerPool) -> np.ndarray:
            merged = merge_tile_patches(tower.layers(tiles, self.wanted, pool), self.joined)
            return project(norm(merged.reshape(-1, together)), pool)

        return rows


encoder = AyaVision
