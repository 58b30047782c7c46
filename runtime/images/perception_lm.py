"""Perception LM: a thumbnail and tiles through Meta's Perception Encoder; outputs of two layers are average-pooled to rows."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from ... import UsageError
from ..config_reader import ConfigError, Keys, show
from . import ROW_PLACEHOLDER
from .perception_encoder import ARCHITECTURES, ARGUMENTS, load_encoder, side_of
from .preprocessor import BICUBIC, HALF, resized, tiles_of
from .tower_ops import BATCH_PATCHES, WorkerPool, gelu
from .tower_weights import Weights
from .vision_tower import MAX_WIDTH, Rows, VisionTower, check_aspect_ratio

BOTH = "thumb+tile"  # the whole picture, and tiles of it


class PerceptionLm(VisionTower):
    KINDS = {"timm_wrapper": {"architecture": "vit_pe_core_large_patch14_336"}}
    PROCESSORS = ("PerceptionLMImageProcessor",)
    LOOK = HALF, HALF, BICUBIC
    placeholder = "<|image|>"

    def configure(self, keys: Keys) -> None:
        named = self.tower_config.text("architecture")
        if named not in ARCHITECTURES:
            raise UsageError(f"its vision tower {show(named)} is not supported for this model",
                             f"known: {', '.join(ARCHITECTURES)}; text-only works")
        usual, self.first = ARCHITECTURES[named]
        own = {key: value for key, value in (self.tower_config.section("model_args") or {}).items() if value is not None}
        self.says = Keys({**usual, **own}, "config.json: vision_config: model_args")
        if unknown := sorted(own.keys() - {*ARGUMENTS}):
            raise ConfigError(f"{self.says.where}: {', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} not known for this tower",
                              f"known: {', '.join(ARGUMENTS)}; text-only works")
        self.stands_first = self.says.flag("class_token")
        if self.root_config.flag("vision_use_cls_token", True) != self.stands_first:
            raise self.root_config.fail("vision_use_cls_token", f"{str(self.stands_first).lower()}, as of this tower")
        if keys.integer("tile_size", 448, high=1 << 14) != self.side:
            raise keys.fail("tile_size", f"the {self.side} × {self.side} that the tower takes")
        self.most = keys.integer("max_num_tiles", 36, high=256)
        self.tiled = keys.text("vision_input_type", BOTH) == BOTH
        self.across, self.joined = self.side // self.patch, self.root_config.integer("projector_pooling_ratio", 1, high=1 << 10)
        if self.across % self.joined:
            raise self.root_config.fail("projector_pooling_ratio", f"a part of the {self.across} patches in a row of a tile")
        if self.width % (4 * self.heads):
            raise self.says.fail("num_heads", f"a divisor of {self.width} that leaves heads room for two-dimensional positions")
        self.most_patches = max(BATCH_PATCHES, self.length)
        self.whole_patches = ((self.most if self.tiled else 0) + 1) * self.length

    @cached_property
    def width(self) -> int:
        return self.says.integer("embed_dim", high=MAX_WIDTH)

    @cached_property
    def heads(self) -> int:
        return self.says.integer("num_heads", high=1024)

    def side_of(self, name: str, high: int) -> int:
        return side_of(self.says, {"image_size": "img_size"}.get(name, name), high)

    @property
    def length(self) -> int:
        """Rows of a tile in the tower."""
        return self.across**2 + self.stands_first

    @cached_property
    def shapes(self) -> dict[float, list[tuple[int, int]]]:
        """Columns and rows of tiles that a canvas may have, by what the former are of the latter, in the order in which they are tried."""
        found: dict[float, list[tuple[int, int]]] = {}
        for count in range(self.most, 0, -1):
            for columns in (each for each in range(1, count + 1) if count % each == 0):
                found.setdefault(columns / (count // columns), []).append((columns, count // columns))
        return found

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles: of the canvases in which the picture lies whole the last in which its shorter side grows most; of one
        that fits into none, the largest of the nearest shape that is not longer."""
        if self.most == 1:
            return 1, 1
        best, found = -1.0, None
        for columns, rows in (shape for alike in self.shapes.values() for shape in alike):
            if columns * self.side >= width and rows * self.side >= height:
                short = self.shorter(height, width, columns, rows)
                if short >= best:
                    best, found = short, (rows, columns)
        if found is not None:
            return found
        share = width / height
        if share >= 1:
            nearest = min((each for each in self.shapes if each <= share), key=lambda each: abs(each - share))
            columns, rows = max(self.shapes[nearest], key=lambda shape: shape[0])
        else:
            nearest = min((each for each in self.shapes if each > share), key=lambda each: abs(1 / each - 1 / share))
            columns, rows = max(self.shapes[nearest], key=lambda shape: shape[1])
        return rows, columns

    def shorter(self, height: int, width: int, columns: int, rows: int) -> float:
        """The shorter side of a picture that has grown to the borders of a canvas."""
        share, grown = width / height, min(columns * self.side / width, rows * self.side / height)
        if share > 1:
            return float(np.floor(grown * width / share))
        return float(np.floor(grown * height * share)) if share < 1 else grown * height

    def counted(self, height: int, width: int) -> int:
        """Tiles, the whole picture among them."""
        check_aspect_ratio(height, width)
        rows, columns = self.grid(height, width) if self.tiled else (0, 0)
        return 1 + rows * columns

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        return (ROW_PLACEHOLDER,) * (self.counted(height, width) * (self.across // self.joined) ** 2)

    def values(self, picture: np.ndarray) -> list[np.ndarray]:
        height, width = picture.shape[:2]
        check_aspect_ratio(height, width)
        side = self.side
        tiles = [resized(picture, side, side, self.resample)]
        if self.tiled:
            rows, columns = self.grid(height, width)
            tiles += tiles_of(resized(picture, rows * side, columns * side, self.resample), side, side)
        return [self.scale(each) for each in tiles]

    def load(self, weights: Weights) -> Rows:
        hidden, tower = self.config.hidden_size, load_encoder(weights, "vision_tower.timm_model.", self.says, self.first)
        project = weights.two_layers("multi_modal_projector.", (self.width, hidden, hidden), gelu, True)

        def rows(tiles: list[np.ndarray], pool: WorkerPool) -> np.ndarray:
            groups = pool.groups(tiles, tower.most, len(tower.blocks))
            return np.concatenate([self.pooled(project(tower.seen(each, pool), pool)) for each in groups])

        return rows

    def pooled(self, x: np.ndarray) -> np.ndarray:
        """Means of squares of patches, of tiles one behind the other [tiles * patches, D]."""
        side, wide = self.joined, self.across // self.joined
        if side == 1:
            return x
        return x.reshape(-1, wide, side, wide, side, x.shape[-1]).mean((2, 4), dtype=np.float32).reshape(-1, x.shape[-1])


encoder = PerceptionLm
