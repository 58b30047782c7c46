"""LLaVA-OneVision: LLaVA-NeXT with SigLIP, many more resolutions, and a limit on rows."""

from __future__ import annotations

import math
import re

import numpy as np

from ..config_reader import ConfigError, Keys
from .llava_next import LlavaNext
from .position_embeddings import taps
from .vision_transformer import CLIP, SIGLIP

SLACK = 1.1  # times as many patches in a row as are allowed are left


class LlavaOnevision(LlavaNext):
    KINDS = {"siglip_vision_model": SIGLIP, "clip_vision_model": CLIP}
    PROCESSORS = ("LlavaOnevisionImageProcessor",)
    PINPOINTS = [[384 * high, 384 * wide] for high in range(1, 7) for wide in range(1, 7)]
    LAYER, STRATEGY, CROPS = -1, "full", False

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        stated = self.root_config.text("vision_aspect_ratio", "anyres_max_9")
        found = re.fullmatch(r"anyres_max_([1-9][0-9]{0,3})", stated)
        if found is None:
            raise ConfigError(f"config.json: vision_aspect_ratio is {stated!r}, expected anyres_max_ and a number")
        self.most_tiles = int(found[1])

    def lines(self, height: int, width: int) -> tuple[int, int]:
        lines, columns = super().lines(height, width)
        ratio = math.sqrt(lines * columns / (self.most_tiles * self.across**2))
        return (int(lines // ratio), int(columns // ratio)) if ratio > SLACK else (lines, columns)

    def fewer(self, grid: np.ndarray, lines: int, columns: int) -> np.ndarray:
        """Read between the rows that there are."""
        if grid.shape[:2] == (lines, columns):
            return grid
        low, high, share = taps(grid.shape[0], lines)
        grid = grid[low] * (1 - share)[:, None] + grid[high] * share[:, None]
        low, high, share = taps(grid.shape[1], columns)
        return grid[:, low] * (1 - share) + grid[:, high] * share


encoder = LlavaOnevision
