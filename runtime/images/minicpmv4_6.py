"""MiniCPM-V 4.6: a thumbnail, and for large images slices in the closest aspect ratio; SigLIP merges windows of four patches midway, and
squares of those at the end. A token numbers the images. MiniCPM-OCR has four times as many rows and may keep small pages small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..config_reader import ConfigError, Keys
from . import EncodedMedia, EncodingJob
from .canvas import row_tags
from .position_embeddings import nearest_indices
from .preprocessor import BICUBIC, HALF, resized, tiles_of
from .tower_ops import BATCH_PATCHES, Matrix, Norm, WorkerPool, gelu, gelu_tanh, matmul, merge_patches, patches_of
from .tower_weights import Weights
from .vision_tower import Rows, VisionTower, check_aspect_ratio
from .vision_transformer import SIGLIP, VisionTransformer, load_transformer

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

PAIR = 2  # patches in a row and in a column that become one, once in the tower and once behind it
PROJECTOR_EPS = 1e-6
USUAL = {**SIGLIP, "image_size": 224, "patch_size": 16}
Grid = tuple[int, int]


class MiniCpmV(VisionTower):
    KINDS = {"minicpmv4_6_vision": USUAL}
    PROCESSORS = ("MiniCPMV4_6ImageProcessor",)
    LOOK = HALF, HALF, BICUBIC
    MODE = "16x"  # default
    grows = True  # a picture that is small for a slice

    def configure(self, keys: Keys) -> None:
        self.most, self.resolution = keys.integer("max_slice_nums", 9, high=256), keys.integer("scale_resolution", 448, high=4096)
        self.slices, self.with_numbers = keys.flag("slice_mode", True), keys.flag("use_image_id", True)
        modes = {"16x": "16x", "4x": "4x"}
        mode = self.root_config.choice("downsample_mode", modes, self.MODE)
        if keys.choice("downsample_mode", modes, mode) != mode or keys.integer("patch_size", self.patch) != self.patch:
            raise keys.fail("downsample_mode and patch_size", f"{mode!r} and {self.patch}, as config.json says")
        for name, value in (("merge_kernel_size", [PAIR, PAIR]), ("merger_times", 1), ("drop_vision_last_layer", False)):
            if self.root_config.raw.get(name, value) != value:
                raise ConfigError(f"config.json: {name} is {self.root_config.raw[name]!r:.60}, and only {value} is known")
        if self.tower_config.raw.get("window_kernel_size", [PAIR, PAIR]) != [PAIR, PAIR]:
            raise self.tower_config.fail("window_kernel_size", f"{[PAIR, PAIR]}")
        self.merges = mode == "16x"
        self.insert = self.root_config.integer("insert_layer_id", 6, low=0)
        self.unit = self.patch * PAIR * (PAIR if self.merges else 1)
        self.part_patches = ((self.resolution + self.unit) // self.patch) ** 2
        self.most_patches = max(BATCH_PATCHES, self.part_patches)
        self.whole_patches = (self.most + 1) * self.part_patches

    @cached_property
    def placeholder(self) -> str:
        """The word that config.json names by its number."""
        number = self.root_config.raw.get("image_token_id")
        return next((word for word, own in self.tokenizer.added.items() if own == number), "<|image_pad|>")

    def fitted(self, height: float, width: float, grows: bool) -> Grid:
        """The (height, width) in whole squares of a picture, which becomes of so many points if it has more, or `grows`."""
        side = self.resolution
        if height * width > side * side or grows:
            ratio = width / height
            height = int(side / math.sqrt(ratio))
            width = int(height * ratio)
        return _near(height, self.unit), _near(width, self.unit)

    def grid(self, height: int, width: int) -> Grid | None:
        """Rows and columns of slices; None where the picture made small is all."""
        check_aspect_ratio(height, width)
        count = min(math.ceil(height * width / self.resolution**2), self.most)
        if not self.slices or count <= 1:
            return None
        shape, best, off = math.log(width / height), (1, 1), float("inf")
        for slices in (count - 1, count, count + 1):
            for rows in range(1, slices + 1) if 1 < slices <= self.most else ():
                own = abs(shape - math.log(slices // rows / rows))
                if slices % rows == 0 and (own < off or own == off and rows > best[0]):
                    best, off = (rows, slices // rows), own
        return best

    def sizes(self, height: int, width: int) -> list[Grid]:
        """Of all parts: the picture made small, then its slices row by row."""
        grid = self.grid(height, width)
        small = self.fitted(height, width, grid is None and self.grows)
        if grid is None:
            return [small]
        rows, columns = grid
        slice_ = self.fitted(_near(height, rows) / rows, _near(width, columns) / columns, True)
        return [small, *[slice_] * (rows * columns)]

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        image, (rows, columns) = self.placeholder, self.grid(height, width) or (0, 0)
        whole, part = (image * (high * wide // self.unit**2) for high, wide in [*self.sizes(height, width)[:2], (0, 0)][:2])
        text = f"<image>{whole}</image>" + "\n".join([f"<slice>{part}</slice>" * columns] * rows)
        for word in ("<image>", "</image>", *(("<slice>", "</slice>") if rows else ())):
            self.token_id(word)
        return self.spelled(text, image)

    def encode(self, picture: np.ndarray, job: EncodingJob) -> EncodedMedia:
        return replace(super().encode(picture, job), prefix_tokens=self.prefix_tokens if self.with_numbers else None)

    def prefix_tokens(self, before: int) -> tuple[int, ...]:
        """What says of a picture how many are before it."""
        for word in ("<image_id>", "</image_id>"):
            self.token_id(word)
        return tuple(self.tokenizer.encode(f"<image_id>{before}</image_id>", add_special_tokens=False))

    def token_count(self, *size: int) -> int:
        return super().token_count(*size) + (len(self.prefix_tokens(0)) if self.with_numbers else 0)

    def values(self, picture: np.ndarray) -> list[np.ndarray]:
        grid, (small, *slices) = self.grid(*picture.shape[:2]), self.sizes(*picture.shape[:2])
        parts = [resized(picture, *small, self.resample)]
        if grid is not None:
            (rows, columns), (high, wide) = grid, slices[0]
            parts += tiles_of(resized(picture, rows * high, columns * wide, self.resample), high, wide)
        return [self.scale(each) for each in parts]

    def load(self, weights: Weights) -> Rows:
        tower, width, side = load_transformer(weights, self, "vision_tower.", finished=True), self.width, self.side // self.patch
        count = len(tower.blocks)
        merger = Merger.of(weights, self) if self.merges else None
        if merger is not None and self.insert >= count:
            raise ConfigError(f"config.json: insert_layer_id is {self.insert}, of a tower with {count} layers")
        together, own = width * PAIR**2, "merger.mlp.0."
        norm = weights.layer_norm(f"{own}pre_norm", together, PROJECTOR_EPS)
        project = weights.two_layers(own, (together, together, self.config.hidden_size), gelu)

        def seen(parts: list[np.ndarray], pool: WorkerPool) -> list[np.ndarray]:
            grids = [(part.shape[0] // self.patch, part.shape[1] // self.patch) for part in parts]
            x = embedded(tower, parts, grids, side, pool)
            for number, block in enumerate(tower.blocks):
                block.run(x, _spans(grids), pool)
                if merger is not None and number == self.insert:
                    x, grids = merger(x, grids, pool), [(rows // PAIR, columns // PAIR) for rows, columns in grids]
            x = tower.after(x)
            return [merge_patches(x[begin:end], columns, PAIR) for (begin, end), (_, columns) in zip(_spans(grids), grids, strict=True)]

        def rows(parts: list[np.ndarray], pool: WorkerPool) -> np.ndarray:
            groups = pool.groups(parts, BATCH_PATCHES // self.part_patches, count)
            x = np.concatenate([each for group in groups for each in seen(group, pool)])
            return project(norm(x), pool)

        return rows


class OnCanvas(MiniCpmV):
    """MiniCPM-V 4.7, whose rows have places on a canvas."""

    KINDS = {"minicpmv4_7_vision": USUAL}

    def encode(self, picture: np.ndarray, job: EncodingJob) -> EncodedMedia:
        return replace(super().encode(picture, job), layout_tags=self.layout_tags(*picture.shape[:2]))

    def layout_tags(self, height: int, width: int) -> tuple[int, ...]:
        """`EncodedMedia.layout_tags` of a picture of this size."""
        small, *slices = ((high // self.unit, wide // self.unit) for high, wide in self.sizes(height, width)[:2])
        return row_tags(small, self.grid(height, width) or (0, 0), *(slices or [(0, 0)]))

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        self.layout_tags(height, width)  # before it is looked at
        return super().tokens(height, width)


class MiniCpmOcr(MiniCpmV):
    KINDS = {"minicpm_ocr_vision": USUAL}
    PROCESSORS = ("MiniCPMOcrImageProcessor",)
    MODE = "4x"

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        upsize = self.processor.text("small_image_upsize", "always")
        if upsize not in ("always", "never"):  # the other way measures letters
            raise self.processor.fail("small_image_upsize", '"always" or "never"')
        self.grows = upsize == "always"


@dataclass(frozen=True)
class Merger:
    """Windows of patches see each other, and become one row: [n, D] -> [n / 4, D]."""

    norm: Norm
    parts: Sequence[Matrix]  # queries, keys, values, and what follows
    before: Norm
    layers: Rows
    heads: int

    @classmethod
    def of(cls, weights: Weights, encoder: MiniCpmV) -> Merger:
        own, width, eps = "vision_tower.vit_merger.", encoder.width, encoder.tower_config.number("layer_norm_eps")
        together, inner = width * PAIR**2, encoder.tower_config.integer("intermediate_size") * PAIR**2
        return cls(weights.layer_norm(f"{own}layer_norm1", width, eps),
                   [weights.matrix(f"{own}self_attn.{name}_proj", width, width) for name in ("q", "k", "v", "out")],
                   weights.layer_norm(f"{own}pre_norm", together, eps),
                   weights.two_layers(own, (together, inner, width), gelu_tanh), encoder.heads)

    def __call__(self, x: np.ndarray, grids: Sequence[Grid], pool: WorkerPool) -> np.ndarray:
        width, size = x.shape[1], PAIR**2
        windows = np.concatenate([merge_patches(x[begin:end], columns, PAIR) for (begin, end), (_, columns) in
                                  zip(_spans(grids), grids, strict=True)]).reshape(-1, size, width)
        queries, keys, values, out = (each.to_float32() for each in self.parts)

        def look(which: slice) -> None:
            own = windows[which]
            q, k, v = (each(self.norm(own)).reshape(len(own), size, self.heads, -1).swapaxes(1, 2) for each in (queries, keys, values))
            scores = q @ k.swapaxes(2, 3) * np.float32(q.shape[-1] ** -0.5)
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = (scores / scores.sum(-1, keepdims=True)) @ v
            windows[which] = own + out(mixed.swapaxes(1, 2).reshape(len(own), size, width))

        pool.each(look, len(windows))
        return self.layers(self.before(windows.reshape(-1, size * width)), pool) + windows.mean(1, dtype=np.float32)


def embedded(tower: VisionTransformer, parts: Sequence[np.ndarray], grids: Sequence[Grid], side: int, pool: WorkerPool) -> np.ndarray:
    """Patches [n, D] of all parts, each at the place in a square of `side` learned ones that is nearest in proportion."""
    x = matmul(np.concatenate([patches_of(part, tower.patch) for part in parts]), tower.patches, pool)
    for (begin, end), grid in zip(_spans(grids), grids, strict=True):
        x[begin:end] += tower.places[nearest_indices(side, *(np.arange(count, dtype=np.float32) / np.float32(count) for count in grid))]
    return x


def _spans(grids: Sequence[Grid]) -> list[tuple[int, int]]:
    ends = np.cumsum([rows * columns for rows, columns in grids]).tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _near(length: float, unit: int) -> int:
    """The multiple of a unit that is nearest, at least one."""
    return max(round(length / unit) * unit, unit)


def encoder(source: TowerSource, config: ModelConfig) -> MiniCpmV:
    own = {"minicpm_ocr": MiniCpmOcr, "minicpmv4_7": OnCanvas}
    return own.get(str(source.config["model_type"]), MiniCpmV)(source, config)
