"""Idefics 3 and SmolVLM: a picture in tiles of one size, row by row, and once whole; of every tile patches are put together (a square of
them becomes one row), and words between say where a tile was."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ..config_reader import ConfigError
from . import PLACE
from .preprocessor import HALF, LANCZOS, Scale, filter_of, resized, sides
from .tower_parts import Crew, product
from .tower_sight import Rows, TowerSight, demand_shape
from .tower_weights import Weights
from .vision_transformer import IDEFICS, TOGETHER, layer_count, load_transformer

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

MOST_SIDE = 4096  # of a picture that is cut into tiles
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"


class Idefics3(TowerSight):
    VISION = {"idefics3_vision": IDEFICS, "idefics3": IDEFICS, "smolvlm_vision": IDEFICS, "smolvlm": IDEFICS}
    PROCESSORS = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")

    def __init__(self, source: TowerSource, config: ModelConfig) -> None:
        super().__init__(source, config)
        keys = self.processor
        self.scale, self.resample = Scale(keys, HALF, HALF), filter_of(keys, LANCZOS)
        self.splits = keys.flag("do_image_splitting", True)
        self.tile = sides(keys, "max_image_size", {"longest_edge": 364}).get("longest_edge", 0)
        size = sides(keys, "size", {"longest_edge": 4 * 364})
        self.longest = size.get("longest_edge", 0)
        if not self.longest or not keys.flag("do_resize", True):
            raise keys.fail("size", "a longest_edge")
        if not self.patch <= self.tile <= MOST_SIDE:
            raise keys.fail("max_image_size", f"a longest_edge from {self.patch} to {MOST_SIDE}")
        self._known: dict[tuple[int, int], tuple[int, ...]] = {}
        self.joined = self.outer.integer("scale_factor", 2, high=16)
        if (self.tile // self.patch) % self.joined:
            raise ConfigError(f"config.json: {self.tile // self.patch} patches in a row are not a multiple of scale_factor {self.joined}")

    @property
    def most_patches(self) -> int:
        return max(TOGETHER, (self.tile // self.patch) ** 2)

    @property
    def whole_patches(self) -> int:
        return (math.ceil(self.longest / self.tile) ** 2 + 1) * (self.tile // self.patch) ** 2

    def sized(self, height: int, width: int) -> list[tuple[int, int]]:
        """The sizes that a picture is given, one after the other; the last is one of whole tiles."""
        demand_shape(height, width)
        long = self.longest
        ratio = width / height
        first = (_even(int(long / ratio)), long) if width >= height else (long, _even(int(long * ratio)))
        first = tuple(max(1, each) for each in first)
        if max(first) > MOST_SIDE:
            ratio = first[1] / first[0]
            first = (int(MOST_SIDE / ratio), MOST_SIDE) if first[1] >= first[0] else (MOST_SIDE, int(MOST_SIDE * ratio))
            first = tuple(max(1, each) for each in first)
        if not self.splits:
            return [first, (self.tile, self.tile)]
        height, width = first
        ratio = width / height
        if width >= height:
            width = math.ceil(width / self.tile) * self.tile
            height = math.ceil(int(width / ratio) / self.tile) * self.tile
        else:
            height = math.ceil(height / self.tile) * self.tile
            width = math.ceil(int(height * ratio) / self.tile) * self.tile
        return [first, (height, width)]

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles beside the whole picture; (0, 0) where that is all."""
        rows, columns = (side // self.tile for side in self.sized(height, width)[-1])
        return (rows, columns) if rows * columns > 1 else (0, 0)

    def _tokens(self, rows: int, columns: int) -> tuple[int, ...]:
        image = self.placeholder
        tile = image * ((self.tile // self.patch // self.joined) ** 2)
        text = "".join("".join(f"{AROUND}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n"
                       for row in range(rows))
        text += ("\n" if rows else "") + AROUND + WHOLE + tile + AROUND
        number = self.word(image)
        return tuple(PLACE if token == number else token for token in self.words.encode(text, add_special_tokens=False))

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        grid = self.grid(height, width)
        if grid not in self._known:
            self._known[grid] = self._tokens(*grid)
        return self._known[grid]

    def values(self, picture: np.ndarray) -> list[np.ndarray]:
        rows, columns = self.grid(*picture.shape[:2])
        for height, width in self.sized(*picture.shape[:2]):
            picture = resized(picture, height, width, self.resample)
        side = self.tile
        tiles = [picture[row * side : (row + 1) * side, column * side : (column + 1) * side]
                 for row in range(rows) for column in range(columns)]
        return [self.scale(each) for each in [*tiles, resized(picture, side, side, self.resample) if tiles else picture]]

    def load(self, weights: Weights) -> Rows:
        tower = load_transformer(weights, self, "vision_model.", finished=True)
        together, hidden = self.width * self.joined**2, self.config.hidden_size
        project = weights.matrix("connector.modality_projection.proj", hidden, together, bias=False)
        own, made = self.tile // self.patch, self.side // self.patch
        # Where in the table of places each row of patches lies: a tile need not have as many as the tower was made for. Rounded as the
        # model was trained: some places are met by two rows, since i * (1 / n) may be less than i / n.
        borders = (1 / made + np.arange(made - 1) * (1 / made)).astype(np.float32)
        shares = np.arange(own, dtype=np.float32) * (np.float32(1) / np.float32(own))
        at = np.searchsorted(borders, np.minimum(shares, np.float32(1 - 1e-6)), side="right")
        places = (at[:, None] * made + at).reshape(-1)
        last = layer_count(self)

        def rows(tiles: list[np.ndarray], crew: Crew) -> np.ndarray:
            x = joined(tower.layers(tiles, [last], crew, places), self.joined)
            return product(x.reshape(-1, together), project, crew)

        return rows


def joined(x: np.ndarray, factor: int) -> np.ndarray:
    """Squares of patches put side by side: [tiles, n, D] -> [tiles, n / factor², D * factor²]."""
    tiles, count, width = x.shape
    side = math.isqrt(count)
    cut = x.reshape(tiles, side // factor, factor, side // factor, factor, width)
    return np.ascontiguousarray(cut.transpose(0, 1, 3, 2, 4, 5)).reshape(tiles, count // factor**2, width * factor**2)


def _even(side: int) -> int:
    return side + side % 2


def sight(source: TowerSource, config: ModelConfig) -> Idefics3:
    return Idefics3(source, config)
