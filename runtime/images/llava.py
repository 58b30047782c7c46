"""LLaVA 1.5: CLIP or SigLIP on one square image, an MLP projector, one row per patch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ... import UsageError
from ..config_reader import ConfigError, Keys
from . import ROW_PLACEHOLDER
from .pixtral import Pixtral
from .preprocessor import HALF, Scale, cropped, resized, shorter_to, sides, square, squared
from .tower_weights import Weights
from .vision_tower import Rows, VisionTower, check_aspect_ratio
from .vision_transformer import CLIP, SIGLIP, drops_first, load_transformer, wanted_layers

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

MOST_SQUARE = 1 << 27  # points of a picture with a border that makes it a square


class OfOneSize(VisionTower):
    """Pictures that all become a square of one size: their middle, or with a border."""

    PROCESSORS = ("CLIPImageProcessor", "SiglipImageProcessor", "LlavaImageProcessor")
    CROPS = True  # cuts the middle out where its preprocessor does not say; SigLIP's do not

    def configure(self, keys: Keys) -> None:
        siglip = keys.text("image_processor_type", "").startswith("Siglip")
        crops = self.CROPS and not siglip
        if siglip:
            self.scale = Scale(keys, HALF, HALF)
        self.crop = keys.flag("do_center_crop", crops)
        size = sides(keys, "size", {"shortest_edge": 224} if crops else {"height": 224, "width": 224})
        if not ({"height", "width"} <= size.keys() or "shortest_edge" in size and self.crop):
            raise keys.fail("size", "a size that all images have then")
        self.size = size
        self.final = square(keys, "crop_size", 224) if self.crop else square(keys, "size", size)
        self.placeholder = self.around.text("image_token", "<image>")

    def made_ready(self, picture: np.ndarray) -> np.ndarray:
        """One tile: uint8 [height, width, 3] -> float32 of the final size."""
        height, width = picture.shape[:2]
        if "shortest_edge" in self.size:
            height, width = shorter_to(height, width, self.size["shortest_edge"])
        else:
            height, width = self.size["height"], self.size["width"]
        picture = resized(picture, height, width, self.resample)
        return self.scale(cropped(picture, *self.final) if self.crop else picture)

    def values(self, picture: np.ndarray) -> list[np.ndarray]:
        check_aspect_ratio(*picture.shape[:2])
        if self.processor.flag("do_pad", False):
            if max(picture.shape[:2]) ** 2 > MOST_SQUARE:
                raise UsageError(f"an image of {picture.shape[1]} × {picture.shape[0]} is too large for this model", "make it smaller")
            picture = squared(picture, [int(255 * each) for each in self.scale.mean])
        return [self.made_ready(picture)]


class Llava(OfOneSize):
    KINDS = {"clip_vision_model": CLIP, "siglip_vision_model": SIGLIP}
    LAYER, STRATEGY = -2, "default"

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        if self.final != (self.side, self.side):
            raise ConfigError(f"{self.processor.where}: images become {self.final[0]} × {self.final[1]}, but the tower takes "
                              f"{self.side} × {self.side}")
        if self.side % self.patch and self.side < self.patch:
            raise ConfigError(f"config.json: vision_config: patch_size {self.patch} is more than image_size {self.side}")
        self.drops_first = drops_first(self, self.STRATEGY)
        self.wanted = wanted_layers(self, self.LAYER)
        self.most_patches = self.patches

    @property
    def patches(self) -> int:
        """Rows of one tile, with the first that CLIP has before its patches."""
        return (self.side // self.patch) ** 2 + self.tower.startswith("clip")

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        return (ROW_PLACEHOLDER,) * (self.patches - self.drops_first)

    def load(self, weights: Weights) -> Rows:
        project = self.projector(weights)
        return lambda tiles, pool: project(tiles, pool)[0]

    def projector(self, weights: Weights) -> Rows:
        """Tiles -> float32 [tiles, rows, hidden]."""
        tower = load_transformer(weights, self, "vision_tower.", finished=False)
        project = self.to_text(weights, self.width * len(self.wanted))
        return lambda tiles, pool: project(tower.layers(tiles, self.wanted, pool)[:, int(self.drops_first) :], pool)


def encoder(source: TowerSource, config: ModelConfig) -> VisionTower:
    vision = Keys(source.config).section("vision_config") or {}
    return (Pixtral if vision.get("model_type") in Pixtral.KINDS else Llava)(source, config)
