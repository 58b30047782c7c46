"""LFM2-VL: SigLIP 2 over a picture in its own shape, or, of one with many points, over tiles in the shape that is nearest and the picture
made small; places learned for a square are made to a picture's; squares of patches become one row."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from . import PLACE
from .preprocessor import BILINEAR, HALF, Scale, filter_of, resized
from .tower_parts import CURVES, Crew, product, two_layers
from .tower_sight import Rows, TowerSight, demand_shape
from .tower_weights import Weights
from .vision_transformer import SIGLIP, TOGETHER, load_transformer

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

BEGIN, SMALL, END = "<|image_start|>", "<|img_thumbnail|>", "<|image_end|>"
PROJECTOR_EPS = 1e-5


class Lfm2Vl(TowerSight):
    VISION = {"siglip2_vision_model": {**SIGLIP, "num_patches": 256}}
    PROCESSORS = ("Lfm2VlImageProcessor",)

    def __init__(self, source: TowerSource, config: ModelConfig) -> None:
        super().__init__(source, config)
        keys = self.processor
        self.scale, self.resample = Scale(keys, HALF, HALF), filter_of(keys, BILINEAR)
        self.joined = self.outer.integer("downsample_factor", 2, high=16)
        for name, value in (("encoder_patch_size", self.patch), ("downsample_factor", self.joined)):
            if keys.integer(name, value) != value:
                raise keys.fail(name, f"{value}, as config.json says")
        self.unit = self.patch * self.joined
        self.tile = keys.integer("tile_size", 512, high=4096)
        if self.tile % self.unit:
            raise keys.fail("tile_size", f"a multiple of {self.unit}")
        self.least, self.most = keys.integer("min_image_tokens", 64, high=1 << 14), keys.integer("max_image_tokens", 256, high=1 << 14)
        splits = keys.flag("do_image_splitting", True)
        self.tiles = (keys.integer("min_tiles", 2, high=256), keys.integer("max_tiles", 10, high=256)) if splits else (1, 1)
        if self.tiles[0] > self.tiles[1]:
            raise keys.fail("min_tiles", "at most max_tiles")
        self.with_small, self.tolerance = keys.flag("use_thumbnail", True), keys.number("max_pixels_tolerance", 2.0)
        self.with_words = self.around.flag("use_image_special_tokens", True)

    @cached_property
    def side(self) -> int:
        """Of the square for which places were learned."""
        count = self.vision.integer("num_patches", high=1 << 20)
        if math.isqrt(count) ** 2 != count:
            raise self.vision.fail("num_patches", "a square")
        return math.isqrt(count) * self.patch

    @property
    def most_patches(self) -> int:
        return max(TOGETHER, (self.tile // self.patch) ** 2, self.most * self.joined**2)

    @property
    def whole_patches(self) -> int:
        return self.tiles[1] * (self.tile // self.patch) ** 2 + self.most * self.joined**2

    def sized(self, height: int, width: int) -> tuple[int, int]:
        """The size that the whole picture is given."""
        demand_shape(height, width)
        unit, least, most = self.unit, self.least * self.unit**2, self.most * self.unit**2
        high, wide = (max(unit, round(side / unit) * unit) for side in (height, width))
        if high * wide > most:
            shrink = math.sqrt(height * width / most)
            return tuple(max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width))
        if high * wide < least:
            grow = math.sqrt(least / (height * width))
            return tuple(math.ceil(side * grow / unit) * unit for side in (height, width))
        return high, wide

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles; (1, 1) where the whole picture is all. Of shapes that are as near as each other the one
        counts that has most tiles, if the picture has half of its points."""
        unit = self.unit
        high, wide = (max(self.patch, round(side / unit) * unit) for side in (height, width))
        if self.tiles == (1, 1) or high * wide <= self.most * unit**2 * self.tolerance:
            return 1, 1
        least, most = self.tiles
        shapes = {(columns, rows) for count in range(least, most + 1) for columns in range(1, count + 1) for rows in range(1, count + 1)
                  if least <= columns * rows <= most}
        best, off = (1, 1), float("inf")
        for columns, rows in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
            own = abs(width / height - columns / rows)
            if own < off or own == off and height * width > 0.5 * self.tile**2 * columns * rows:
                best, off = (columns, rows), own
        return best[1], best[0]

    def beside(self, text: str) -> tuple[int, ...]:
        """A word that stands beside pictures; none where they have none."""
        return (self.word(text),) if self.with_words else ()

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        high, wide = self.sized(height, width)
        rows, columns = self.grid(height, width)
        whole, tile = (PLACE,) * (high * wide // self.unit**2), (PLACE,) * (self.tile // self.unit) ** 2
        if (rows, columns) == (1, 1):
            return (*self.beside(BEGIN), *whole, *self.beside(END))
        tiles = [token for row in range(rows) for column in range(columns)
                 for token in (*self.beside(f"<|img_row_{row + 1}_col_{column + 1}|>"), *tile)]
        return (*self.beside(BEGIN), *tiles, *((*self.beside(SMALL), *whole) if self.with_small else ()), *self.beside(END))

    def values(self, picture: np.ndarray) -> list[np.ndarray]:
        rows, columns = self.grid(*picture.shape[:2])
        parts, side = [], self.tile
        if (rows, columns) != (1, 1):
            cut = resized(picture, rows * side, columns * side, self.resample)
            parts = [cut[row * side : (row + 1) * side, column * side : (column + 1) * side]
                     for row in range(rows) for column in range(columns)]
        if not parts or self.with_small:
            parts.append(resized(picture, *self.sized(*picture.shape[:2]), self.resample))
        return [self.scale(each) for each in parts]

    def load(self, weights: Weights) -> Rows:
        tower = load_transformer(weights, self, "vision_tower.", finished=True)
        width, hidden, patch, side = self.width, self.config.hidden_size, self.patch, self.side // self.patch
        together, inner = width * self.joined**2, self.outer.integer("projector_hidden_size", 2560)
        biased = self.outer.flag("projector_bias", True)
        norm = weights.layer_norm("multi_modal_projector.layer_norm", together, PROJECTOR_EPS) \
            if self.outer.flag("projector_use_layernorm", True) else None
        first = weights.matrix("multi_modal_projector.linear_1", inner, together, bias=biased)
        second = weights.matrix("multi_modal_projector.linear_2", hidden, inner, bias=biased)
        curve = CURVES[self.outer.choice("projector_hidden_act", {key: key for key in CURVES}, "gelu")]
        table = tower.places.reshape(side, side, width)

        def seen(parts: list[np.ndarray], crew: Crew) -> list[np.ndarray]:
            """Of some parts what is projected."""
            grids = [(part.shape[0] // patch, part.shape[1] // patch) for part in parts]
            cut = [part.reshape(rows, patch, columns, patch, 3).swapaxes(1, 2).reshape(rows * columns, -1)
                   for part, (rows, columns) in zip(parts, grids, strict=True)]
            x = product(np.concatenate(cut), tower.patches, crew)
            ends = np.cumsum([len(each) for each in cut]).tolist()
            spans = list(zip([0, *ends[:-1]], ends, strict=True))
            for (begin, end), (rows, columns) in zip(spans, grids, strict=True):
                x[begin:end] += placed(table, rows, columns)
            for block in tower.blocks:
                block.run(x, spans, crew)
            x = tower.after(x)
            return [squares(x[begin:end], columns, self.joined) for (begin, end), (_, columns) in zip(spans, grids, strict=True)]

        def rows(values: list[np.ndarray], crew: Crew) -> np.ndarray:
            groups = [[values[0]]]
            for part in values[1:]:
                if sum(each.size for each in (*groups[-1], part)) <= TOGETHER * 3 * patch**2:
                    groups[-1].append(part)
                else:
                    groups.append([part])
            crew.work.total += len(groups) * len(tower.blocks)
            x = np.concatenate([each for group in groups for each in seen(group, crew)])
            return two_layers(x if norm is None else norm(x), first, second, curve, crew)

        return rows


def squares(x: np.ndarray, columns: int, factor: int) -> np.ndarray:
    """Of patches [n, D] in so many columns, squares side by side: [n / factor², D * factor²]."""
    cut = x.reshape(len(x) // columns // factor, factor, columns // factor, factor, -1).swapaxes(1, 2)
    return np.ascontiguousarray(cut).reshape(len(x) // factor**2, -1)


def placed(table: np.ndarray, rows: int, columns: int, weigh: Callable[[int, int], np.ndarray] | None = None) -> np.ndarray:
    """Places learned for a square [side, side, D] -> [rows * columns, D]: in proportion where there are more, means where there
    are fewer. `weigh`: as `weighed`, which it is by default."""
    down, across = ((weigh or weighed)(len(table), count) for count in (rows, columns))
    return np.einsum("rs,scd->rcd", down, np.einsum("ct,std->scd", across, table)).reshape(rows * columns, -1)


def weighed(side: int, count: int) -> np.ndarray:
    """How much each of `side` numbers has of each of `count` that take their place, float32 [count, side]: a triangle around each, as wide
    as what it stands for and at least as a neighbour is away."""
    step = side / count
    far = np.abs(np.arange(side)[None] + 0.5 - (np.arange(count)[:, None] + 0.5) * step) / max(1.0, step)
    weights = np.maximum(0, 1 - far)
    return (weights / weights.sum(1, keepdims=True)).astype(np.float32)


def sight(source: TowerSource, config: ModelConfig) -> Lfm2Vl:
    return Lfm2Vl(source, config)
