"""LFM2-VL: SigLIP 2 at native aspect ratio, or for large images tiles and a thumbnail; position embeddings are resampled; patches are
merged."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from ..config_reader import Keys
from . import ROW_PLACEHOLDER
from .position_embeddings import resample
from .preprocessor import BILINEAR, HALF, resized, tiles_of
from .tower_layers import run_blocks
from .tower_ops import BATCH_PATCHES, WorkerPool, matmul, merge_patches
from .tower_weights import Weights
from .vision_tower import Rows, VisionTower, check_aspect_ratio
from .vision_transformer import SIGLIP, load_transformer

BEGIN, SMALL, END = "<|image_start|>", "<|img_thumbnail|>", "<|image_end|>"
PROJECTOR_EPS = 1e-5


class Lfm2Vl(VisionTower):
    KINDS = {"siglip2_vision_model": {**SIGLIP, "num_patches": 256}}
    PROCESSORS = ("Lfm2VlImageProcessor",)
    LOOK = HALF, HALF, BILINEAR

    def configure(self, keys: Keys) -> None:
        self.joined = self.root_config.integer("downsample_factor", 2, high=16)
        self.demand_same(keys, encoder_patch_size=self.patch, downsample_factor=self.joined)
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
        self.most_patches = max(BATCH_PATCHES, (self.tile // self.patch) ** 2, self.most * self.joined**2)
        self.whole_patches = self.tiles[1] * (self.tile // self.patch) ** 2 + self.most * self.joined**2

    @cached_property
    def side(self) -> int:
        """Of the square for which places were learned."""
        count = self.tower_config.integer("num_patches", high=1 << 20)
        if math.isqrt(count) ** 2 != count:
            raise self.tower_config.fail("num_patches", "a square")
        return math.isqrt(count) * self.patch

    def sized(self, height: int, width: int) -> tuple[int, int]:
        """The size that the whole picture is given."""
        check_aspect_ratio(height, width)
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
        return (self.token_id(text),) if self.with_words else ()

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        high, wide = self.sized(height, width)
        rows, columns = self.grid(height, width)
        whole, tile = (ROW_PLACEHOLDER,) * (high * wide // self.unit**2), (ROW_PLACEHOLDER,) * (self.tile // self.unit) ** 2
        if (rows, columns) == (1, 1):
            return (*self.beside(BEGIN), *whole, *self.beside(END))
        tiles = [token for row in range(rows) for column in range(columns)
                 for token in (*self.beside(f"<|img_row_{row + 1}_col_{column + 1}|>"), *tile)]
        return (*self.beside(BEGIN), *tiles, *((*self.beside(SMALL), *whole) if self.with_small else ()), *self.beside(END))

    def values(self, picture: np.ndarray) -> list[np.ndarray]:
        rows, columns = self.grid(*picture.shape[:2])
        parts, side = [], self.tile
        if (rows, columns) != (1, 1):
            parts = tiles_of(resized(picture, rows * side, columns * side, self.resample), side, side)
        if not parts or self.with_small:
            parts.append(resized(picture, *self.sized(*picture.shape[:2]), self.resample))
        return [self.scale(each) for each in parts]

    def load(self, weights: Weights) -> Rows:
        tower = load_transformer(weights, self, "vision_tower.", finished=True)
        width, patch, side = self.width, self.patch, self.side // self.patch
        together, inner = width * self.joined**2, self.root_config.integer("projector_hidden_size", 2560)
        norm = weights.layer_norm("multi_modal_projector.layer_norm", together, PROJECTOR_EPS) \
            if self.root_config.flag("projector_use_layernorm", True) else None
        project = self.to_text(weights, together, inner, self.root_config.flag("projector_bias", True))
        table = tower.places.reshape(side, side, width)

        def seen(parts: list[np.ndarray], pool: WorkerPool) -> list[np.ndarray]:
            """Of some parts what is projected."""
            grids = [(part.shape[0] // patch, part.shape[1] // patch) for part in parts]
            cut = [part.reshape(rows, patch, columns, patch, 3).swapaxes(1, 2).reshape(rows * columns, -1)
                   for part, (rows, columns) in zip(parts, grids, strict=True)]
            x = matmul(np.concatenate(cut), tower.patches, pool)
            ends = np.cumsum([len(each) for each in cut]).tolist()
            spans = list(zip([0, *ends[:-1]], ends, strict=True))
            for (begin, end), (rows, columns) in zip(spans, grids, strict=True):
                x[begin:end] += resample(table, rows, columns)
            x = tower.after(run_blocks(tower.blocks, x, pool, spans=spans))
            return [merge_patches(x[begin:end], columns, self.joined) for (begin, end), (_, columns) in zip(spans, grids, strict=True)]

        def rows(values: list[np.ndarray], pool: WorkerPool) -> np.ndarray:
            groups = [[values[0]]]
            for part in values[1:]:
                if sum(each.size for each in (*groups[-1], part)) <= BATCH_PATCHES * 3 * patch**2:
                    groups[-1].append(part)
                else:
                    groups.append([part])
            pool.job.total += len(groups) * len(tower.blocks)
            x = np.concatenate([each for group in groups for each in seen(group, pool)])
            return project(x if norm is None else norm(x), pool)

        return rows


encoder = Lfm2Vl
