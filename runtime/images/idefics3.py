"""Idefics 3 and SmolVLM: tiles row by row and a thumbnail; patches are merged (pixel shuffle), and text tokens say where a tile was."""

from __future__ import annotations

import math

import numpy as np

from ..config_reader import ConfigError, Keys
from .position_embeddings import float32_fractions, nearest_indices
from .preprocessor import HALF, LANCZOS, resized, sides, tiles_of
from .tower_ops import BATCH_PATCHES, WorkerPool, matmul, merge_tile_patches
from .tower_weights import Weights
from .vision_tower import Rows, VisionTower, check_aspect_ratio
from .vision_transformer import IDEFICS, layer_count, load_transformer

MOST_SIDE = 4096  # of a picture that is cut into tiles
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"


class Idefics3(VisionTower):
    KINDS = {"idefics3_vision": IDEFICS, "idefics3": IDEFICS, "smolvlm_vision": IDEFICS, "smolvlm": IDEFICS}
    PROCESSORS = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
    LOOK = HALF, HALF, LANCZOS

    def configure(self, keys: Keys) -> None:
        self.splits = keys.flag("do_image_splitting", True)
        self.tile = sides(keys, "max_image_size", {"longest_edge": 364}).get("longest_edge", 0)
        size = sides(keys, "size", {"longest_edge": 4 * 364})
        self.longest = size.get("longest_edge", 0)
        if not self.longest:
            raise keys.fail("size", "a longest_edge")
        if not self.patch <= self.tile <= MOST_SIDE:
            raise keys.fail("max_image_size", f"a longest_edge from {self.patch} to {MOST_SIDE}")
        self.joined = self.root_config.integer("scale_factor", 2, high=16)
        if (self.tile // self.patch) % self.joined:
            raise ConfigError(f"config.json: {self.tile // self.patch} patches in a row are not a multiple of scale_factor {self.joined}")
        self.most_patches = max(BATCH_PATCHES, (self.tile // self.patch) ** 2)
        self.whole_patches = (math.ceil(self.longest / self.tile) ** 2 + 1) * (self.tile // self.patch) ** 2

    def sized(self, height: int, width: int) -> list[tuple[int, int]]:
        """The sizes that a picture is given, one after the other; the last is one of whole tiles."""
        check_aspect_ratio(height, width)
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

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        (rows, columns), tile = self.grid(height, width), self.placeholder * (self.tile // self.patch // self.joined) ** 2
        text = lines_of(tile, rows, columns) + ("\n" if rows else "") + AROUND + WHOLE + tile + AROUND
        return self.spelled(text, self.placeholder)

    def values(self, picture: np.ndarray) -> list[np.ndarray]:
        tiled, side = any(self.grid(*picture.shape[:2])), self.tile
        for height, width in self.sized(*picture.shape[:2]):
            picture = resized(picture, height, width, self.resample)
        parts = [*tiles_of(picture, side, side), resized(picture, side, side, self.resample)] if tiled else [picture]
        return [self.scale(each) for each in parts]

    def load(self, weights: Weights) -> Rows:
        tower = load_transformer(weights, self, "vision_model.", finished=True)
        together, hidden = self.width * self.joined**2, self.config.hidden_size
        project = weights.matrix("connector.modality_projection.proj", hidden, together, bias=False)
        own, made = self.tile // self.patch, self.side // self.patch
        places = nearest_indices(made, *[float32_fractions(own)] * 2)  # a tile need not have as many patches as the tower was made for
        last = layer_count(self)

        def rows(tiles: list[np.ndarray], pool: WorkerPool) -> np.ndarray:
            x = merge_tile_patches(tower.layers(tiles, [last], pool, places), self.joined)
            return matmul(x.reshape(-1, together), project, pool)

        return rows


def lines_of(tile: str, rows: int, columns: int) -> str:
    """Tiles behind words that tell where each was."""
    return "".join("".join(f"{AROUND}<row_{row + 1}_col_{column + 1}>{tile}" for column in range(columns)) + "\n" for row in range(rows))


def _even(side: int) -> int:
    return side + side % 2


encoder = Idefics3
