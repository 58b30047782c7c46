"""LLaVA-NeXT (1.6, AnyRes): a thumbnail, and tiles at the resolution that preserves most of the image; rows of padding are removed, and a
learned row ends every line."""

from __future__ import annotations

import math

import numpy as np

from ..config_reader import ConfigError, Keys
from . import ROW_PLACEHOLDER
from .llava import Llava
from .preprocessor import resized, tiles_of
from .tower_ops import BATCH_PATCHES, WorkerPool
from .tower_weights import Weights
from .vision_tower import Rows

MOST_TILES = 256


class LlavaNext(Llava):
    PROCESSORS = ("LlavaNextImageProcessor",)
    PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        stated = self.processor.raw.get("image_grid_pinpoints") or self.root_config.raw.get("image_grid_pinpoints") or self.PINPOINTS
        side = self.side
        good = isinstance(stated, list) and all(
            isinstance(each, list) and len(each) == 2 and all(type(part) is int and part >= side and part % side == 0 for part in each)
            and each[0] * each[1] <= MOST_TILES * side * side for each in stated)
        if not good:
            raise ConfigError(f"{self.processor.where}: image_grid_pinpoints holds no list of heights and widths of whole tiles of {side}")
        self.pinpoints = [tuple(each) for each in stated]
        if self.tower.startswith("clip") and not self.drops_first:
            raise ConfigError("config.json: vision_feature_select_strategy is 'full', which leaves no square grid of patches")
        self.most_patches = max(BATCH_PATCHES, self.patches)
        self.whole_patches = (max(high * wide for high, wide in self.pinpoints) // self.side**2 + 1) * self.patches

    @property
    def across(self) -> int:
        return self.side // self.patch

    def resolution(self, height: int, width: int) -> tuple[int, int]:
        """The (height, width) that keeps most points of a picture, and of those alike the one that wastes least."""
        def kept(each: tuple[int, int]) -> tuple[int, int]:
            scale = min(each[1] / width, each[0] / height)
            points = min(int(width * scale) * int(height * scale), width * height)
            return points, points - each[0] * each[1]

        return max(self.pinpoints, key=kept)

    def shown(self, height: int, width: int) -> tuple[slice, slice]:
        """Rows and columns of patches of all tiles that are not border alone."""
        rows, columns = (side // self.side * self.across for side in self.resolution(height, width))
        if width / height > columns / rows:
            border = (rows - int(round(height * (columns / width), 7))) // 2
            return slice(border, rows - border), slice(0, columns)
        border = (columns - int(round(width * (rows / height), 7))) // 2
        return slice(0, rows), slice(border, columns - border)

    def lines(self, height: int, width: int) -> tuple[int, int]:
        """Lines and columns of rows that stand for the tiles, without those that end lines."""
        rows, columns = self.shown(height, width)
        return rows.stop - rows.start, columns.stop - columns.start

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        rows, columns = self.lines(height, width)
        return (ROW_PLACEHOLDER,) * (self.patches - self.drops_first + rows * (columns + 1))

    def values(self, picture: np.ndarray) -> tuple[list[np.ndarray], tuple[int, int]]:
        """Tiles, of which the first is the whole, and the picture's size."""
        height, width = picture.shape[:2]
        high, wide = self.resolution(height, width)
        across, down = wide / width, high / height
        fitted = (min(math.ceil(height * across), high), wide) if across < down else (high, min(math.ceil(width * down), wide))
        canvas = np.zeros((high, wide, 3), np.uint8)
        top, left = (high - fitted[0]) // 2, (wide - fitted[1]) // 2
        canvas[top : top + fitted[0], left : left + fitted[1]] = resized(picture, *fitted, self.resample)
        tiles = [resized(picture, self.side, self.side, self.resample), *tiles_of(canvas, self.side, self.side)]
        return [self.made_ready(each) for each in tiles], (height, width)

    def load(self, weights: Weights) -> Rows:
        project, newline = self.projector(weights), weights.numbers("image_newline", self.config.hidden_size)

        def rows(values: tuple[list[np.ndarray], tuple[int, int]], pool: WorkerPool) -> np.ndarray:
            tiles, size = values
            return self.packed(project(tiles, pool), size, newline)

        return rows

    def packed(self, made: np.ndarray, size: tuple[int, int], newline: np.ndarray) -> np.ndarray:
        """Of tiles [tiles, rows, hidden] of a picture of this size: the first, and the lines of the others."""
        down, across = (side // self.side for side in self.resolution(*size))
        hidden = made.shape[-1]
        grid = made[1:].reshape(down, across, self.across, self.across, hidden).swapaxes(1, 2)
        grid = grid.reshape(down * self.across, across * self.across, hidden)[self.shown(*size)]
        grid = self.fewer(grid, *self.lines(*size))
        lined = np.concatenate([grid, np.broadcast_to(newline, (len(grid), 1, hidden))], axis=1)
        return np.concatenate([made[0], lined.reshape(-1, hidden)])

    def fewer(self, grid: np.ndarray, lines: int, columns: int) -> np.ndarray:
        """A grid of rows [lines, columns, hidden], of which there may be too many."""
        return grid


encoder = LlavaNext
