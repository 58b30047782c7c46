"""GLM 5.3 Flash (GLM 5 Next): GLM-OCR's tower with clamped FFN inputs. Images keep their aspect ratio: scaled down above a pixel limit and
padded with black to whole squares. The text model uses plain RoPE, or none."""

from __future__ import annotations

import math

import numpy as np

from ..config_reader import Keys
from .glm4v import OCR, GlmOcr
from .preprocessor import resized
from .tower_ops import Matrix
from .tower_weights import Weights
from .vision_tower import check_aspect_ratio

BOUNDED = {**OCR, "projection_intermediate_size": 10_240, "swiglu_limit": 10.0}


class Glm5Next(GlmOcr):
    KINDS = {"glm5_next_vision": BOUNDED, "glm5_next": BOUNDED}
    PROCESSORS = ("Glm5NextImageProcessor",)
    BY_PLACE = False

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        if self.processor.integer("patch_expand_factor", 1) != 1:
            raise self.processor.fail("patch_expand_factor", "1")

    def bounds(self, keys: Keys) -> tuple[int, int]:
        self.unit = self.patch * self.joined
        return tuple(self.frames * keys.integer(f"{bound}_image_tokens", usual, high=1 << 20) * self.unit**2
                     for bound, usual in (("min", 16), ("max", 8000)))

    def sized(self, height: int, width: int) -> tuple[int, int]:
        """Of the canvas that a picture lies on."""
        check_aspect_ratio(height, width)
        high, wide = self.in_squares(height), self.in_squares(width)
        if high * wide < self.least:
            grow = math.sqrt(self.least / (height * width))
            high, wide = (self.in_squares(max(1, math.ceil(side * grow))) for side in (height, width))
        if high * wide <= self.most:
            return high, wide
        low, best, top = 1, (self.unit, self.unit), height
        while low <= top:
            middle = (low + top) // 2
            high, wide = self.in_squares(middle), self.in_squares(max(1, math.floor(width * middle / height)))
            if high * wide <= self.most:
                low, best = middle + 1, (high, wide)
            else:
                top = middle - 1
        return best

    def in_squares(self, side: int) -> int:
        return math.ceil(side / self.unit) * self.unit

    def made(self, picture: np.ndarray, high: int, wide: int) -> np.ndarray:
        height, width = picture.shape[:2]
        scale = min(high / height, wide / width)
        if height * width >= self.least:
            scale = min(1.0, scale)
        own = [max(1, min(most, math.floor(side * scale))) for most, side in ((high, height), (wide, width))]
        canvas = np.zeros((high, wide, 3), np.uint8)
        canvas[: own[0], : own[1]] = resized(picture, *own, self.resample)
        return canvas

    def inner_widths(self) -> tuple[int, int]:
        return self.tower_config.integer("intermediate_size"), self.tower_config.integer("projection_intermediate_size")

    def gated(self, weights: Weights, name: str, inner: int, width: int, bias: bool) -> tuple[Matrix, Matrix]:
        most, gate_up = self.tower_config.number("swiglu_limit"), super().gated(weights, name, inner, width, bias)
        return tuple(Matrix(each.stored, each.bias, (-math.inf, math.inf, least, most))
                     for each, least in zip(gate_up, (-math.inf, -most), strict=True))


encoder = Glm5Next
