"""Preprocessing of Qwen VL models: native resolution, rounded to whole squares of patches; patches that are merged later are adjacent.
Rotary embeddings by row and column.

Qwen's own models take two video frames per patch (temporal patches). Patches attend only within their frames.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ... import UsageError
from ..config_reader import Keys
from . import ROW_PLACEHOLDER
from .mrope import FRAME_STEP
from .preprocessor import resized, sides
from .tower_ops import Matrix, Rope, Span, inverse_frequencies, matmul, patches_of
from .tower_weights import Weights
from .video_file import MOST_POINTS
from .vision_tower import Rows, VisionTower, check_aspect_ratio

if TYPE_CHECKING:
    from .video_file import Frame

EMBEDDING = "visual.patch_embed.proj"
MOST_PLANNED = 16_384  # patches: some allow four times as many, which takes a picture of 13 million points
THETA = 10_000.0


class QwenPatches(VisionTower):
    """`least` and `most`: pixel bounds of a resized image; `SIZE`: their defaults. `FILMS`: takes temporal patches. `BY_PLACE`: the text
    model uses M-RoPE."""

    PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor", "Qwen3VLImageProcessor")
    SIZE = (56 * 56, 28 * 28 * 1280)
    FILMS, BY_PLACE = False, True
    HEADS, TURNED = "num_heads", 4
    placeholder = "<|image_pad|>"
    placeholder_text = "<|vision_start|><|image_pad|><|vision_end|>"

    def configure(self, keys: Keys) -> None:
        self.joined = self.tower_config.integer("spatial_merge_size", 2, high=16)
        self.frames = self.tower_config.integer("temporal_patch_size", 2, high=16)
        self.least, self.most = self.bounds(keys)
        self.demand_same(keys, patch_size=self.patch, merge_size=self.joined)
        if self.most < self.size_multiple**2:
            raise keys.fail("max_pixels", "room for a patch, and images that are made to fit")

    @property
    def size_multiple(self) -> int:
        """The sides of a resized image are multiples of so many pixels."""
        return self.patch * self.joined

    def bounds(self, keys: Keys) -> tuple[float, float]:
        """Pixel bounds by the preprocessor config."""
        least, most = self.SIZE
        size = sides(keys, "size", {"shortest_edge": least, "longest_edge": most})
        return keys.integer("min_pixels", size.get("shortest_edge", least)), keys.integer("max_pixels", size.get("longest_edge", most))

    @property
    def most_patches(self) -> int:
        return min(MOST_PLANNED, max(int(self.most), MOST_POINTS // self.frames if self.FILMS else 0) // self.patch**2)

    def sized(self, height: int, width: int) -> tuple[int, int]:
        """The size that an image is resized to."""
        return self.fitted(height, width, self.least, self.most)

    def fitted(self, height: int, width: int, least: float, most: float, frames: int = 1) -> tuple[int, int]:
        """A size in whole squares, within bounds for the pixels of `frames` frames together."""
        check_aspect_ratio(height, width)
        unit = self.size_multiple
        high, wide = round(height / unit) * unit, round(width / unit) * unit
        together = high * wide * (frames if frames == 1 else round(frames / self.frames) * self.frames)
        if together > most:
            shrink = math.sqrt(frames * height * width / most)
            return tuple(max(unit, math.floor(side / shrink / unit) * unit) for side in (height, width))
        if together < least:
            grow = math.sqrt(least / (frames * height * width))
            return tuple(math.ceil(side * grow / unit) * unit for side in (height, width))
        return high, wide

    def grid(self, *size: int) -> tuple[int, int]:
        """Rows and columns of patches of an image, or of each frame of a video that is resized already."""
        high, wide = self.sized(*size) if len(size) == 2 else size[1:]
        return high // self.patch, wide // self.patch

    def squares(self, *size: int) -> tuple[int, int]:
        """Rows and columns of merged patches."""
        rows, columns = self.grid(*size)
        return rows // self.joined, columns // self.joined

    def rope_grid(self, *size: int) -> tuple[int, int] | None:
        return self.squares(*size) if self.BY_PLACE else None

    def tokens(self, *size: int) -> tuple[int, ...]:
        rows, columns = self.squares(*size)
        return (ROW_PLACEHOLDER,) * (rows * columns * (size[0] // self.frames if len(size) == 3 else 1))

    def video_inputs(self, frames: Sequence[Frame]) -> list[tuple[str, np.ndarray, float]]:
        """The whole video as one clip: time is told by positions, not captions."""
        if not self.FILMS:
            return super().video_inputs(frames)
        whole = self.film_of(frames)
        return [("", whole, self.frames * (frames[-1].second - frames[0].second) / max(len(frames) - 1, 1))]

    def film_of(self, frames: Sequence[Frame]) -> np.ndarray:
        """Frames resized and padded to a multiple of the temporal patch size by repeating the last."""
        high, wide = self.film_sized(max(len(frames), self.frames), *frames[0].pixels.shape[:2])
        if wide // (self.patch * self.joined) >= FRAME_STEP:
            raise UsageError(f"a video of {wide} × {high} is too wide for this model", "cut it into narrower ones")
        made = [resized(each.pixels, high, wide, self.resample) for each in frames]
        return np.stack([*made, *made[-1:] * (-len(made) % self.frames)])

    def film_sized(self, count: int, height: int, width: int) -> tuple[int, int]:
        """The size that each of `count` frames is resized to."""
        least, most = self.film_bounds(self.least, self.most)
        return self.fitted(height, width, least, most)

    def film_bounds(self, least: float, most: float) -> tuple[float, float]:
        """Pixel bounds by the video preprocessor's config, else these."""
        keys = self.source.films()
        size = sides(keys, "size", {"shortest_edge": int(least), "longest_edge": int(most)})
        return (keys.integer("min_pixels", size.get("shortest_edge", int(least))),
                keys.integer("max_pixels", size.get("longest_edge", int(most))))

    def values(self, picture: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Patches float32 [n, 3 * patch * patch] and their (row, column) int64 [n, 2], square by square. For a video, temporal patches [n,
        3 * frames * patch * patch]."""
        rows, columns = self.grid(*picture.shape[:-1])
        side = self.joined
        order = np.arange(rows * columns).reshape(rows // side, side, columns // side, side).swapaxes(1, 2).reshape(-1)
        places = np.stack(np.divmod(order, columns), axis=1)
        if picture.ndim == 3:
            read_preprocessor = self.scale(self.made(picture, rows * self.patch, columns * self.patch))
            return patches_of(read_preprocessor, self.patch)[order], places
        cut = np.stack([patches_of(self.scale(frame), self.patch)[order] for frame in picture])
        cut = cut.reshape(-1, self.frames, len(order), 3, self.patch**2).transpose(0, 2, 3, 1, 4)  # of each colour one frame after another
        return cut.reshape(len(cut) * len(order), -1), np.tile(places, (len(cut), 1))

    def made(self, picture: np.ndarray, high: int, wide: int) -> np.ndarray:
        """Resize an image."""
        return resized(picture, high, wide, self.resample)

    def embedded(self, weights: Weights, bias: bool) -> Rows:
        """The patch embedding, for images and videos."""
        once, whole = self.embedding(weights, bias), None
        if self.FILMS:
            whole = Matrix(weights.stored(f"{EMBEDDING}.weight", self.width, 3 * self.frames * self.patch**2), once.bias)
        return lambda patches, pool: matmul(patches, once if patches.shape[1] == once.stored.shape[1] or whole is None else whole, pool)

    def embedding(self, weights: Weights, bias: bool) -> Matrix:
        """The patch embedding for images."""
        stored = weights.numbers(f"{EMBEDDING}.weight", self.width, 3 * self.frames * self.patch**2)
        return Matrix(self.once(stored), weights.numbers(f"{EMBEDDING}.bias", self.width) if bias else None)

    def once(self, stored: np.ndarray) -> np.ndarray:
        """Patch embedding of a still image, float32 [D, 3 * patch * patch]: a still image repeats over the temporal patch, so weights are
        summed over frames."""
        frames = stored.reshape(self.width, 3, self.frames, self.patch**2)
        return np.ascontiguousarray(frames.sum(2).reshape(self.width, -1))

    def rope(self, places: np.ndarray, theta: float = THETA) -> Rope:
        """Rotary embedding of patches at (row, column) int64 [n, 2]."""
        quarter = self.width // self.heads // 4
        return Rope.of((places[:, :, None].astype(np.float32) * inverse_frequencies(theta, quarter)).reshape(len(places), -1))


def frames_at(places: np.ndarray) -> list[Span]:
    """Spans of patches that belong to the same frames, from their (row, column) int64 [n, 2]: each begins at (0, 0)."""
    begins = np.flatnonzero(~places.any(1)).tolist()
    return list(zip(begins, [*begins[1:], len(places)], strict=True))
