"""PaddleOCR-VL: Qwen's way of cutting pictures before SigLIP's layers, with learned places read between those of a square and with patches
turned by row and column as well; squares of patches become one row."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..config_reader import ConfigError
from .qwen3_vl import mixed
from .qwen_patches import QwenPatches
from .tower_parts import Crew, gelu, product, two_layers
from .tower_sight import Rows, TowerSight, demand_shape
from .tower_weights import Weights
from .vision_transformer import SIGLIP, load_transformer

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

NORM_EPS = 1e-5
USUAL = {**SIGLIP, "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 384,
         "patch_size": 14, "spatial_merge_size": 2}


class PaddleOcrVl(QwenPatches):
    VISION = {"paddleocr_vl_vision": USUAL, "paddleocr_vl": USUAL}
    PROCESSORS = ("PaddleOCRVLImageProcessor",)
    SIZE = (384 * 384, 1536 * 1536)
    placeholder = "<|IMAGE_PLACEHOLDER|>"
    written = "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"

    @cached_property
    def heads(self) -> int:
        heads = TowerSight.heads.func(self)
        if self.width % (4 * heads):
            raise ConfigError(f"config.json: vision_config: {heads} heads of {self.width} have no place for rows and columns")
        return heads

    def sized(self, height: int, width: int) -> tuple[int, int]:
        unit = self.patch * self.joined
        demand_shape(height, width)
        if height < unit:
            height, width = unit, round(width * unit / height)
        if width < unit:
            height, width = round(height * unit / width), unit
        return super().sized(height, width)

    def load(self, weights: Weights) -> Rows:
        tower = load_transformer(weights, self, "visual.vision_model.", finished=True)
        side, together, hidden = self.side // self.patch, self.width * self.joined**2, self.config.hidden_size
        table = tower.places.reshape(side, side, self.width)
        norm = weights.layer_norm("projector.pre_norm", self.width, NORM_EPS)
        first, second = weights.matrix("projector.linear_1", together, together), weights.matrix("projector.linear_2", hidden, together)

        def rows(values: tuple[np.ndarray, np.ndarray], crew: Crew) -> np.ndarray:
            patches, places = values
            x = product(patches, tower.patches, crew)
            x += within(table, places)
            rope = self.rope(places)
            crew.work.total += len(tower.blocks)
            for block in tower.blocks:
                block.run(x, [(0, len(x))], crew, rope)
            return two_layers(norm(tower.after(x)).reshape(-1, together), first, second, gelu, crew)

        return rows


def within(table: np.ndarray, places: np.ndarray, across: int | None = None) -> np.ndarray:
    """Places learned for a square [side, side, D] -> [n, D] for patches at rows and columns int64 [n, 2] of a picture, whose borders are
    those of the square, or those of a corner of one with so many patches `across`: in proportion to the two that lie nearest, beyond a
    border by what lies on it."""
    side, taps = len(table), []
    for axis in (0, 1):
        count = np.float32(across or places[:, axis].max() + 1)
        at = (places[:, axis].astype(np.float32) + np.float32(0.5)) * np.float32(side) / count - np.float32(0.5)
        low = np.floor(at)
        near = low.astype(np.int64)
        taps.append((np.clip(near, 0, side - 1), np.clip(near + 1, 0, side - 1), (at - low)[:, None]))
    return mixed(table, *taps)


def sight(source: TowerSource, config: ModelConfig) -> PaddleOcrVl:
    return PaddleOcrVl(source, config)
