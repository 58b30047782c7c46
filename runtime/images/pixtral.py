"""Pixtral's tower, and what Mistral Small 3, Ministral 3, Pixtral 12B and LightOnOCR make of it: a picture at nearly its own size, whose
patches are turned by row and column; squares of them become one row, and words end a line and the picture (of LightOnOCR none does)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ... import UsageError
from ..config_reader import ConfigError, Keys
from . import PLACE
from .preprocessor import BICUBIC, CLIP_MEAN, CLIP_STD, Scale, filter_of, resized, sides, square
from .tower_parts import CURVES, Block, Crew, Matrix, Rope, patches_of, product, two_layers
from .tower_sight import Rows, TowerSight
from .tower_weights import Weights
from .vision_transformer import layer_count, wanted_layers

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

EPS, THETA = 1e-5, 10_000.0
USUAL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 1024,
         "patch_size": 16, "hidden_act": "gelu"}


class Pixtral(TowerSight):
    """`merges`: a square of patches becomes one row, by a matrix of its own. `unit`: points of which a picture has whole multiples."""

    VISION = {"pixtral": USUAL}
    PROCESSORS = ("PixtralImageProcessor",)
    placeholder, line_end, picture_end = "[IMG]", "[IMG_BREAK]", "[IMG_END]"

    def __init__(self, source: TowerSource, config: ModelConfig, merges: bool) -> None:
        super().__init__(source, config)
        keys = self.processor
        self.merges = merges
        self.joined = self.outer.integer("spatial_merge_size", 2, high=16) if merges else 1
        self.unit = self.patch * self.joined
        self.scale, self.resample = Scale(keys, CLIP_MEAN, CLIP_STD), filter_of(keys, BICUBIC)
        size = sides(keys, "size", {"longest_edge": 1024})
        longest = size.get("longest_edge", 0)
        self.most = (longest, longest) if longest else (size.get("height", 0), size.get("width", 0))
        if min(self.most) < 1 or max(self.most) > 1 << 14 or not keys.flag("do_resize", True) or keys.flag("do_center_crop", False):
            raise keys.fail("size", "a longest_edge, to which pictures are made")
        if self.width % (4 * self.heads):
            raise ConfigError(f"config.json: vision_config: {self.heads} heads of {self.width} have no place for rows and columns")

    @property
    def most_patches(self) -> int:
        return (self.most[0] // self.patch) * (self.most[1] // self.patch)

    def sized(self, height: int, width: int) -> tuple[int, int]:
        """The size that a picture is given."""
        shrink, unit = max(height / self.most[0], width / self.most[1]), self.unit
        if shrink > 1:
            height, width = math.floor(height / shrink), math.floor(width / shrink)
        return max(1, -(-height // unit)) * unit, max(1, -(-width // unit)) * unit

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of what stands for a picture."""
        high, wide = self.sized(height, width)
        return high // (self.patch * self.joined), wide // (self.patch * self.joined)

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        (rows, columns), line, end = self.grid(height, width), self.word(self.line_end), self.word(self.picture_end)
        return ((PLACE,) * columns + (line,)) * (rows - 1) + (PLACE,) * columns + (end,)

    def values(self, picture: np.ndarray) -> np.ndarray:
        return self.scale(resized(picture, *self.sized(*picture.shape[:2]), self.resample))

    def load(self, weights: Weights) -> Rows:
        keys, width, hidden, patch = self.vision, self.width, self.config.hidden_size, self.patch
        inner = keys.integer("intermediate_size")
        wanted = wanted_layers(self, -1)
        curves = {key: key for key in CURVES}
        curve = CURVES[keys.choice("hidden_act", curves, "gelu")]
        embedding = weights.matrix("vision_tower.patch_conv", width, 3 * patch * patch, bias=False)
        before = weights.rms_norm("vision_tower.ln_pre", width, EPS)

        def block(number: int) -> Block:
            own = f"vision_tower.transformer.layers.{number}."
            return Block(
                (weights.rms_norm(f"{own}attention_norm", width, EPS), weights.rms_norm(f"{own}ffn_norm", width, EPS)),
                *(self.turned(weights, f"{own}attention.", which) for which in "qk"),
                *(weights.matrix(f"{own}attention.{which}_proj", width, width) for which in "vo"),
                weights.matrix(f"{own}feed_forward.up_proj", inner, width), weights.matrix(f"{own}feed_forward.down_proj", width, inner),
                curve, self.heads, gate=weights.matrix(f"{own}feed_forward.gate_proj", inner, width))

        blocks = [block(number) for number in range(layer_count(self))]
        through = width * len(wanted)
        norm = weights.rms_norm("multi_modal_projector.norm", through, self.config.norm_eps) if self.merges else None
        merging = weights.matrix("multi_modal_projector.patch_merger.merging_layer", through, through * self.joined**2) \
            if self.merges else None
        first = weights.matrix("multi_modal_projector.linear_1", hidden, through)
        second = weights.matrix("multi_modal_projector.linear_2", hidden, hidden)
        between = CURVES[self.outer.choice("projector_hidden_act", curves, "gelu")]

        def rows(values: np.ndarray, crew: Crew) -> np.ndarray:

            lines, columns = values.shape[0] // patch, values.shape[1] // patch
            x = before(product(patches_of(values, patch), embedding, crew))
            rope, made = self.rope(lines, columns), {0: x.copy()} if 0 in wanted else {}
            crew.work.total += max(wanted)
            for number, block in enumerate(blocks[: max(wanted)], start=1):
                block.run(x, [(0, len(x))], crew, rope)
                if number in wanted:
                    made[number] = x.copy() if number < max(wanted) else x
            x = np.concatenate([made[number] for number in wanted], axis=-1)
            if norm is not None:
                side = self.joined
                # rows and columns that make no whole square are left out
                high, wide = lines // side * side, columns // side * side
                whole = norm(x).reshape(lines, columns, through)[:high, :wide]
                # a square's channels lie one after the other, each with its patches row by row
                cut = whole.reshape(high // side, side, wide // side, side, through).transpose(0, 2, 4, 1, 3)
                x = product(np.ascontiguousarray(cut).reshape(-1, through * side**2), merging, crew)
            return two_layers(x, first, second, between, crew)

        return rows

    def turned(self, weights: Weights, own: str, which: str) -> Matrix:
        """What makes queries or keys; in Mistral's own code neighbours of theirs turn together, here halves of a head do."""
        if not weights.has(f"{own}w{which}.weight"):
            return weights.matrix(f"{own}{which}_proj", self.width, self.width)
        rows = np.arange(self.width).reshape(self.heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return Matrix(np.ascontiguousarray(weights.matrix(f"{own}w{which}", self.width, self.width, bias=False).stored[rows]))

    def rope(self, rows: int, columns: int) -> Rope:
        """Every other step turns by the row, those between by the column."""
        stated = Keys(self.vision.section("rope_parameters") or {}, "config.json: vision_config: rope_parameters")
        theta = stated.number("rope_theta", None) or self.vision.number("rope_theta", THETA)
        depth = self.width // self.heads
        steps = (1 / theta ** (np.arange(0, depth, 2, dtype=np.float32) / np.float32(depth))).astype(np.float32)
        row, column = np.divmod(np.arange(rows * columns), columns)
        half = np.concatenate([row[:, None] * steps[0::2], column[:, None] * steps[1::2]], axis=1).astype(np.float32)
        angles = np.concatenate([half, half], axis=1)
        return Rope(np.cos(angles), np.sin(angles))


class LightOnOcr(Pixtral):
    """Pictures are made of as many points as the preprocessor's own patches have, which may end amid a square."""

    placeholder = "<|image_pad|>"

    def __init__(self, source: TowerSource, config: ModelConfig) -> None:
        super().__init__(source, config, merges=True)
        self.unit = square(self.processor, "patch_size", 16)[0]
        if self.unit % self.patch:
            raise self.processor.fail("patch_size", f"a multiple of the {self.patch} of the tower's patches")

    def sized(self, height: int, width: int) -> tuple[int, int]:
        high, wide = super().sized(height, width)
        if min(high, wide) < (least := self.patch * self.joined):
            raise UsageError(f"a picture of {width} × {height} is too small for this model", f"it sees squares of {least} × {least} points")
        return high, wide

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        rows, columns = self.grid(height, width)
        return (PLACE,) * (rows * columns)


def sight(source: TowerSource, config: ModelConfig) -> Pixtral:
    return LightOnOcr(source, config) if source.config["model_type"] == "lighton_ocr" else Pixtral(source, config, merges=True)
