"""PaliGemma: SigLIP on one square image, one row per patch; image and prompt tokens attend to each other (prefix LM)."""

from __future__ import annotations

import numpy as np

from ..config_reader import Keys
from . import ROW_PLACEHOLDER
from .preprocessor import BICUBIC, HALF, resized
from .tower_ops import WorkerPool, matmul
from .tower_weights import Weights
from .vision_tower import Rows, VisionTower
from .vision_transformer import SIGLIP, layer_count, load_transformer


class PaliGemma(VisionTower):
    KINDS = {"siglip_vision_model": {**SIGLIP, "hidden_size": 1152, "intermediate_size": 4096, "num_hidden_layers": 27,
                                      "num_attention_heads": 16, "patch_size": 14}}
    PROCESSORS = ("SiglipImageProcessor",)
    LOOK = HALF, HALF, BICUBIC
    bidirectional = True

    def configure(self, keys: Keys) -> None:
        self.demand_side(keys, 224)
        self.most_patches = (self.side // self.patch) ** 2

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        return (ROW_PLACEHOLDER,) * self.most_patches

    def values(self, picture: np.ndarray) -> np.ndarray:
        return self.scale(resized(picture, self.side, self.side, self.resample))

    def load(self, weights: Weights) -> Rows:
        tower = load_transformer(weights, self, "vision_tower.", finished=True)
        project = weights.matrix("multi_modal_projector.linear", self.config.hidden_size, self.width, bias=True)
        last = layer_count(self)

        def rows(values: np.ndarray, pool: WorkerPool) -> np.ndarray:
            return matmul(tower.layers([values], [last], pool)[0], project, pool)

        return rows


encoder = PaliGemma
