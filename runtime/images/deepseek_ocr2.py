"""DeepSeek-OCR 2: tiles in the closest aspect ratio, and the page padded with gray; SAM's tower, then a language model as encoder: learned
queries attend to all patches and causally to each other, and their outputs are the rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..config_reader import ConfigError, Keys
from . import ROW_PLACEHOLDER
from .internvl import fitted
from .modality import IMAGE_INPUT
from .preprocessor import BICUBIC, FILE, HALF, IMAGENET_MEAN, IMAGENET_STD, MOST_SIDE, resized, square, squared, tiles_of
from .sam import USUAL, convolved, load_sam
from .tower_layers import LayerNames, LayerShape, load_blocks, qkv_names
from .tower_ops import ACTIVATIONS, BATCH_PATCHES, Block, Matrix, Norm, Rope, WorkerPool, inverse_frequencies, matmul
from .tower_source import FolderSource
from .tower_weights import Weights
from .vision_tower import MAX_LAYERS, MAX_WIDTH, Rows, VisionTower, check_aspect_ratio
from .vision_transformer import layer_count

if TYPE_CHECKING:
    from pathlib import Path

    from ..config import ModelConfig
    from .tower_source import TowerSource

TWICE = 2  # that a convolution makes one of two in a row and in a column
READERS = {144: "query_768_resolution", 256: "query_1024_resolution"}  # patches -> rows behind them, of which there are as many
ENCODER = {"hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_act": "silu",
           "rms_norm_eps": 1e-6}
# As it was published, where config.json says no more than a name of it.
FIRST_ENCODER = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
                 "num_key_value_heads": 2, "rope_theta": 1e6}
THETA = 10_000.0
FULL = "full_attention"
LAYER = LayerNames(("input_layernorm", "post_attention_layernorm"), (), "self_attn.o_proj",
                   qkv_names("mlp.{}_proj", ("up", "down", "gate")))


class TiledPages(VisionTower):
    """Pages that are larger than a tile in `least` to `most` tiles, and all of them whole, in the middle of a gray square; a row that
    separates views stands behind. `grid` says how many rows and columns of tiles, (0, 0) where there are none."""

    TILE, MOST, WIDTHS, ENCODER = 768, 6, [512, 896], ENCODER  # of files that do not say
    LOOK = IMAGENET_MEAN, IMAGENET_STD, BICUBIC
    crops_always = True  # None but such preprocessors are known

    def configure(self, keys: Keys) -> None:
        given = self.tower_config.section("sam_config") or {}
        ratio = Keys(given, "config.json: vision_config: sam_config").number("mlp_ratio", 4.0)
        width = given.get("hidden_size", USUAL["hidden_size"])
        own = {key: value for key, value in given.items() if value is not None}
        self.encoder = Keys(self.tower_config.section("encoder_config") or {}, "config.json: vision_config: encoder_config")
        self.tower_config = Keys({**USUAL, "mlp_dim": int(width * ratio) if type(width) is int else 0, **own},
                         "config.json: vision_config: sam_config")
        high, wide = square(keys, "size", {"height": 1024, "width": 1024})
        if high != wide:
            raise keys.fail("size", "as high as it is wide")
        self.whole, self.tile = high, keys.integer("tile_size", self.TILE, high=MOST_SIDE)
        self.least, self.most = keys.integer("min_patches", 2, high=256), keys.integer("max_patches", self.MOST, high=256)
        self.crops = keys.flag("crop_to_patches", True)
        if self.crops_always and not self.crops:
            raise keys.fail("crop_to_patches", "true")
        colour = keys.raw.get("background_color", [127, 127, 127])
        if not isinstance(colour, list) or len(colour) != 3 or not all(type(each) is int and 0 <= each <= 255 for each in colour):
            raise keys.fail("background_color", "three numbers from 0 to 255")
        self.colour = colour
        for name, side in (("tile_size", self.tile), ("size", self.whole)):
            if side % self.patch:
                raise keys.fail(name, f"a multiple of {self.patch}, the side of a patch")
        self.most_patches = (max(self.whole, self.tile) // self.patch) ** 2
        self.whole_patches = (self.whole // self.patch) ** 2 + self.most * (self.tile // self.patch) ** 2

    @cached_property
    def widths(self) -> list[int]:
        """Of what the two convolutions behind SAM make."""
        found = self.tower_config.raw.get("downsample_channels", self.WIDTHS)
        if not isinstance(found, list) or len(found) != TWICE or not all(type(each) is int and 0 < each <= MAX_WIDTH for each in found):
            raise self.tower_config.fail("downsample_channels", "two widths")
        return found

    def across(self, side: int) -> int:
        """Rows that stand for a line of a square of this side."""
        patches = side // self.patch
        for _ in range(TWICE):
            patches = -(-patches // 2)
        return patches

    def workspace_floats(self) -> int:
        """Of what comes behind SAM too: its largest matrices, and six rows for each of so many that go through it at once."""
        keys = Keys({**self.ENCODER, **self.encoder.raw}, self.encoder.where)
        width, inner = keys.integer("hidden_size", high=MAX_WIDTH), keys.integer("intermediate_size")
        at_once = max(BATCH_PATCHES, 2 * self.across(self.whole) ** 2)
        return super().workspace_floats() + 4 * width**2 + 3 * width * inner + 6 * at_once * width

    def grid(self, height: int, width: int) -> tuple[int, int]:
        check_aspect_ratio(height, width)
        if not self.crops or max(height, width) <= self.tile:
            return 0, 0
        return fitted(height, width, self.tile, (self.least, self.most), self.most)

    def values(self, picture: np.ndarray) -> list[np.ndarray]:
        """All tiles, row by row, then the whole page."""
        (rows, columns), side = self.grid(*picture.shape[:2]), self.tile
        parts = []
        if rows:
            parts = tiles_of(resized(picture, rows * side, columns * side, self.resample), side, side)
        return [self.scale(each) for each in (*parts, self.made_small(picture))]

    def made_small(self, picture: np.ndarray) -> np.ndarray:
        """The whole page in the middle of a gray square."""
        factor = self.whole / max(picture.shape[:2])
        return squared(resized(picture, *(round(side * factor) for side in picture.shape[:2]), self.resample), self.colour)


class DeepseekOcr2(TiledPages):
    KINDS = {"deepseek_ocr2_vision": {}, "vision": {"encoder_config": FIRST_ENCODER}}
    PROCESSORS = ("DeepseekOcr2ImageProcessor",)

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        for name, side in (("tile_size", self.tile), ("size", self.whole)):
            if self.across(side) ** 2 not in READERS:
                raise self.processor.fail(name, " or ".join(f"{4 * self.patch * round(count**0.5)}" for count in READERS))

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        rows, columns = self.grid(height, width)
        return (ROW_PLACEHOLDER,) * (rows * columns * self.across(self.tile) ** 2 + self.across(self.whole) ** 2 + 1)

    def load(self, weights: Weights) -> Rows:
        tower, reading = load_pages(weights, self), Reading.of(weights, self)
        project = weights.matrix("multi_modal_projector", self.config.hidden_size, reading.width, bias=True)
        separator = weights.numbers("view_separator", self.config.hidden_size)
        count = layer_count(self)

        def rows(parts: list[np.ndarray], pool: WorkerPool) -> np.ndarray:
            tiles, whole = parts[:-1], parts[-1:]
            few = max(1, BATCH_PATCHES // (2 * self.across(self.tile) ** 2))
            groups = [tiles[at : at + few] for at in range(0, len(tiles), few)] + [whole]
            pool.job.total += len(parts) * count + len(groups) * len(reading.blocks)
            made = [reading.read([tower(part, pool).reshape(-1, reading.width) for part in group], pool) for group in groups]
            return np.concatenate([matmul(np.concatenate(made), project, pool), separator[None]])

        return rows

    @cached_property
    def theta(self) -> float:
        section = self.encoder.section("rope_parameters") or {}
        if section.get("rope_type", "default") != "default":
            raise self.encoder.fail("rope_parameters", 'rotary positions of the type "default"')
        return Keys({**self.encoder.raw, **section}, self.encoder.where).number("rope_theta", THETA)


@dataclass(frozen=True)
class Reading:
    """Layers of Qwen 2 over patches, which see each other, and the rows behind them, of which there are as many. `queries`: number of
    patches -> those rows, float32 [n, D]."""

    blocks: Sequence[Block]
    queries: dict[int, np.ndarray]
    norm: Norm
    theta: float

    @property
    def width(self) -> int:
        return len(self.norm.weight)

    @classmethod
    def of(cls, weights: Weights, encoder: DeepseekOcr2) -> Reading:
        stated = {key: value for key, value in encoder.encoder.raw.items() if value is not None}
        keys, name = Keys({**ENCODER, **stated}, encoder.encoder.where), "vision_tower.vision_encoder."
        width, inner = keys.integer("hidden_size", high=MAX_WIDTH), keys.integer("intermediate_size")
        count, heads = keys.integer("num_hidden_layers", high=MAX_LAYERS), keys.integer("num_attention_heads", high=1024)
        groups, eps = keys.integer("num_key_value_heads", heads, high=1024), keys.number("rms_norm_eps")
        if width != encoder.widths[-1]:
            raise keys.fail("hidden_size", f"the {encoder.widths[-1]} of downsample_channels")
        if width % (2 * heads) or heads % groups:
            raise keys.fail("num_attention_heads", f"an even part of {width}, and a multiple of num_key_value_heads")
        if set(keys.strings("layer_types", count) or (FULL,)) != {FULL} or keys.flag("use_sliding_window", False):
            raise ConfigError(f"{keys.where}: a layer has a window, which is not known of this model")
        curve, depth = keys.choice("hidden_act", ACTIVATIONS, "silu"), width // heads

        def looked(own: str) -> list[Matrix]:
            return [weights.matrix(f"{own}self_attn.q_proj", width, width, bias=True), *(weights.matrix(
                f"{own}self_attn.{which}_proj", groups * depth, width, bias=True).shared(groups, heads) for which in "kv")]

        blocks = load_blocks(weights, f"{name}layers.", count, LAYER,
                             LayerShape(width, inner, heads, curve, eps, centered=False, bias=(False, False)), looked)
        return cls(blocks, {own: weights.numbers(f"vision_tower.{stored}.weight", own, width) for own, stored in READERS.items()},
                   weights.rms_norm(f"{name}norm", width, eps), encoder.theta)

    def read(self, parts: Sequence[np.ndarray], pool: WorkerPool) -> np.ndarray:
        """Patches [n, D] of some parts, as many of each -> what became of the rows behind them, [parts * n, D]."""
        count, width = parts[0].shape
        x = np.concatenate([row for part in parts for row in (part, self.queries[count])])
        begins = range(0, len(x), 2 * count)
        spans = [span for at in begins for span in ((at, at + count), (at + count, at + 2 * count))]
        seen = [span for at in begins for span in ((at, at + count), (at, at + 2 * count))]
        rope = turning(2 * count, len(parts), self.theta, width // self.blocks[0].heads)
        for block in self.blocks:
            block.run(x, spans, pool, rope, seen, [False, True] * len(parts))
        return self.norm(x.reshape(len(parts), 2, count, width)[:, 1].reshape(-1, width))


def turning(count: int, times: int, theta: float, depth: int) -> Rope:
    """By the places of so many tokens in order, several times."""
    return Rope.of(np.outer(np.arange(count, dtype=np.float32), inverse_frequencies(theta, depth // 2))).times(times)


def load_pages(weights: Weights, encoder: TiledPages) -> Callable[[np.ndarray, WorkerPool], np.ndarray]:
    """SAM's tower and the two convolutions behind it, of a square [side, side, 3] -> [rows, rows, channels]."""
    name, widths = "vision_tower.sam_encoder.", [encoder.tower_config.integer("output_channels"), *encoder.widths]
    tower = load_sam(weights, encoder, name)
    steps: list[Matrix] = [weights.matrix(f"{name}proj.conv{number + 1}", widths[number + 1], 9 * widths[number], bias=False)
                           for number in range(TWICE)]

    def seen(part: np.ndarray, pool: WorkerPool) -> np.ndarray:
        x = tower.seen(part, pool)
        for step in steps:
            x = convolved(x, step, 2, pool)
        return x

    return seen


class Published(FolderSource):
    """A folder as its makers published it, whose own code says how pages are made ready; a file that says it is read where there is one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, IMAGE_INPUT)

    def processor(self, known: Sequence[str]) -> tuple[Keys, Keys]:
        if (self.model / FILE).is_file():
            return super().processor(known)
        return Keys({"image_mean": HALF, "image_std": HALF}, "the code of this model"), Keys({})


def of_folder(source: TowerSource) -> TowerSource:
    """The source, as of `Published` where it says of its tower what published folders do."""
    vision: Mapping[str, object] = Keys(source.config).section("vision_config") or {}
    return Published(source.model) if isinstance(source, FolderSource) and vision.get("model_type") == "vision" else source


def encoder(source: TowerSource, config: ModelConfig) -> VisionTower:
    return DeepseekOcr2(of_folder(source), config)
