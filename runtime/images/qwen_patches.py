"""How Qwen's models cut pictures: at nearly the size that they have, to whole squares of patches, whose patches follow one another, so
that what is put together later lies together. Patches are turned by their row and column."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from . import PLACE
from .preprocessor import BICUBIC, CLIP_MEAN, CLIP_STD, Scale, filter_of, resized, sides
from .tower_parts import Matrix, Rope, patches_of
from .tower_sight import TowerSight, demand_shape
from .tower_weights import Weights

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

MOST_PLANNED = 16_384  # patches: some allow four times as many, which takes a picture of 13 million points
THETA = 10_000.0


class QwenPatches(TowerSight):
    """`most` and `least`: points of a picture that is made ready; `SIZE`: where nothing says them, the least first."""

    PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor", "Qwen3VLImageProcessor")
    SIZE = (56 * 56, 28 * 28 * 1280)
    placeholder = "<|image_pad|>"
    written = "<|vision_start|><|image_pad|><|vision_end|>"

    def __init__(self, source: TowerSource, config: ModelConfig) -> None:
        super().__init__(source, config)
        keys = self.processor
        self.scale, self.resample = Scale(keys, CLIP_MEAN, CLIP_STD), filter_of(keys, BICUBIC)
        least, most = self.SIZE
        size = sides(keys, "size", {"shortest_edge": least, "longest_edge": most})
        self.least = keys.integer("min_pixels", size.get("shortest_edge", least))
        self.most = keys.integer("max_pixels", size.get("longest_edge", most))
        self.joined = self.vision.integer("spatial_merge_size", 2, high=16)
        self.frames = self.vision.integer("temporal_patch_size", 2, high=16)
        for name, value in (("patch_size", self.patch), ("merge_size", self.joined)):
            if keys.integer(name, value) != value:
                raise keys.fail(name, f"{value}, as config.json says of the tower")
        if not keys.flag("do_resize", True) or self.most < (self.patch * self.joined) ** 2:
            raise keys.fail("max_pixels", "room for a patch, and pictures that are made to fit")

    @cached_property
    def heads(self) -> int:
        heads = self.vision.integer("num_heads", high=1024)
        if self.width % (4 * heads):
            raise self.vision.fail("num_heads", f"a part of {self.width} in which rows and columns have a place")
        return heads

    @property
    def most_patches(self) -> int:
        return min(MOST_PLANNED, int(self.most) // self.patch**2)

    def sized(self, height: int, width: int) -> tuple[int, int]:
        """The size that a picture is given."""
        demand_shape(height, width)
        unit = self.patch * self.joined
        high, wide = round(height / unit) * unit, round(width / unit) * unit
        if high * wide > self.most:
            shrink = math.sqrt(height * width / self.most)
            return tuple(max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width))
        if high * wide < self.least:
            grow = math.sqrt(self.least / (height * width))
            return tuple(math.ceil(side * grow / unit) * unit for side in (height, width))
        return high, wide

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches."""
        high, wide = self.sized(height, width)
        return high // self.patch, wide // self.patch

    def rope_grid(self, height: int, width: int) -> tuple[int, int]:
        rows, columns = self.grid(height, width)
        return rows // self.joined, columns // self.joined

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        rows, columns = self.rope_grid(height, width)
        return (PLACE,) * (rows * columns)

    def values(self, picture: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Patches float32 [n, 3 * patch * patch], and where each is, int64 [n, 2]; squares of them one behind the other."""
        high, wide = self.sized(*picture.shape[:2])
        rows, columns, side = high // self.patch, wide // self.patch, self.joined
        order = np.arange(rows * columns).reshape(rows // side, side, columns // side, side).swapaxes(1, 2).reshape(-1)
        ready = self.scale(resized(picture, high, wide, self.resample))
        return patches_of(ready, self.patch)[order], np.stack(np.divmod(order, columns), axis=1)

    def embedding(self, weights: Weights, bias: bool) -> Matrix:
        """Of a patch."""
        stored = weights.numbers("visual.patch_embed.proj.weight", self.width, 3 * self.frames * self.patch**2)
        return Matrix(self.once(stored), weights.numbers("visual.patch_embed.proj.bias", self.width) if bias else None)

    def once(self, stored: np.ndarray) -> np.ndarray:
        """What multiplies a patch, float32 [D, 3 * patch * patch]. Films are cut into pieces of several frames: a picture is a frame as
        often as they ask for, so their weights add."""
        frames = stored.reshape(self.width, 3, self.frames, self.patch**2)
        return np.ascontiguousarray(frames.sum(2).reshape(self.width, -1))

    def rope(self, places: np.ndarray, theta: float = THETA) -> Rope:
        """Of patches at these rows and columns, int64 [n, 2]."""
        quarter = self.width // self.heads // 4
        steps = (1 / theta ** (np.arange(quarter, dtype=np.float32) / np.float32(quarter))).astype(np.float32)
        angles = (places[:, :, None].astype(np.float32) * steps).reshape(len(places), -1)
        angles = np.concatenate([angles, angles], axis=1)
        return Rope(np.cos(angles), np.sin(angles))
