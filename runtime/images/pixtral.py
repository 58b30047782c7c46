"""Pixtral's tower, as in Mistral Small 3, Ministral 3, Pixtral 12B and LightOnOCR: native resolution, 2D rotary embeddings; patches are
merged, and tokens end lines and the image (except in LightOnOCR)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ... import UsageError
from ..config_reader import Keys
from . import ROW_PLACEHOLDER
from .preprocessor import resized, sides, square
from .tower_layers import LayerNames, LayerShape, load_blocks, qkv_names
from .tower_ops import ACTIVATIONS, Matrix, Rope, WorkerPool, inverse_frequencies, matmul, patches_of
from .tower_weights import Weights
from .vision_tower import Rows, VisionTower
from .vision_transformer import layer_count, wanted_layers

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

EPS, THETA = 1e-5, 10_000.0
USUAL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 1024,
         "patch_size": 16, "hidden_act": "gelu"}
LAYER = LayerNames(("attention_norm", "ffn_norm"), (), "attention.o_proj", qkv_names("feed_forward.{}_proj", ("up", "down", "gate")))


class Pixtral(VisionTower):
    """`merges`: a square of patches becomes one row, by a matrix of its own. `unit`: points of which a picture has whole multiples."""

    KINDS = {"pixtral": USUAL}
    PROCESSORS = ("PixtralImageProcessor",)
    TURNED = 4
    placeholder, line_end, picture_end = "[IMG]", "[IMG_BREAK]", "[IMG_END]"

    def configure(self, keys: Keys) -> None:
        self.merges = self.source.config["model_type"] != "llava"  # as of Pixtral 12B
        self.joined = self.root_config.integer("spatial_merge_size", 2, high=16) if self.merges else 1
        self.unit = self.patch * self.joined
        size = sides(keys, "size", {"longest_edge": 1024})
        longest = size.get("longest_edge", 0)
        self.most = (longest, longest) if longest else (size.get("height", 0), size.get("width", 0))
        if min(self.most) < 1 or max(self.most) > 1 << 14 or keys.flag("do_center_crop", False):
            raise keys.fail("size", "a longest_edge, to which images are made")
        self.depth = self.width // self.heads
        self.most_patches = (self.most[0] // self.patch) * (self.most[1] // self.patch)

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
        (rows, columns), line, end = self.grid(height, width), self.token_id(self.line_end), self.token_id(self.picture_end)
        return ((ROW_PLACEHOLDER,) * columns + (line,)) * (rows - 1) + (ROW_PLACEHOLDER,) * columns + (end,)

    def values(self, picture: np.ndarray) -> np.ndarray:
        return self.scale(resized(picture, *self.sized(*picture.shape[:2]), self.resample))

    def load(self, weights: Weights) -> Rows:
        keys, width, patch = self.tower_config, self.width, self.patch
        inner = keys.integer("intermediate_size")
        wanted = wanted_layers(self, -1)
        curve = keys.choice("hidden_act", ACTIVATIONS, "gelu")
        embedding = weights.matrix("vision_tower.patch_conv", width, 3 * patch * patch, bias=False)
        before = weights.rms_norm("vision_tower.ln_pre", width, EPS)

        def looked(own: str) -> list[Matrix]:
            """In Mistral's own code neighbours of queries and keys turn together."""
            return [weights.matrix(f"{own}attention.w{which}", width, width, bias=False).halved(self.heads)
                    if weights.has(f"{own}attention.w{which}.weight") else weights.matrix(f"{own}attention.{which}_proj", width, width)
                    for which in "qkv"]

        blocks = load_blocks(weights, "vision_tower.transformer.layers.", layer_count(self), LAYER,
                             LayerShape(width, inner, self.heads, curve, EPS, centered=False), looked)
        inside = width * len(wanted)
        norm = weights.rms_norm("multi_modal_projector.norm", inside, self.config.norm_eps) if self.merges else None
        merging = weights.matrix("multi_modal_projector.patch_merger.merging_layer", inside, inside * self.joined**2) \
            if self.merges else None
        project = self.to_text(weights, inside)

        def rows(values: np.ndarray, pool: WorkerPool) -> np.ndarray:
            lines, columns = values.shape[0] // patch, values.shape[1] // patch
            x = before(matmul(patches_of(values, patch), embedding, pool))
            rope, made = self.rope(lines, columns), {0: x.copy()} if 0 in wanted else {}
            pool.job.total += max(wanted)
            for number, block in enumerate(blocks[: max(wanted)], start=1):
                block.run(x, [(0, len(x))], pool, rope)
                if number in wanted:
                    made[number] = x.copy() if number < max(wanted) else x
            x = np.concatenate([made[number] for number in wanted], axis=-1)
            if norm is not None:
                side = self.joined
                # rows and columns that make no whole square are left out
                high, wide = lines // side * side, columns // side * side
                whole = norm(x).reshape(lines, columns, inside)[:high, :wide]
                # a square's channels lie one after the other, each with its patches row by row
                cut = whole.reshape(high // side, side, wide // side, side, inside).transpose(0, 2, 4, 1, 3)
                x = matmul(np.ascontiguousarray(cut).reshape(-1, inside * side**2), merging, pool)
            return project(x, pool)

        return rows

    def rope(self, rows: int, columns: int) -> Rope:
        """Every other step turns by the row, those between by the column."""
        steps = inverse_frequencies(self.theta(THETA), self.depth // 2)
        row, column = np.divmod(np.arange(rows * columns), columns)
        return Rope.of(np.concatenate([row[:, None] * steps[0::2], column[:, None] * steps[1::2]], axis=1).astype(np.float32))


class LightOnOcr(Pixtral):
    """Pictures are made of as many points as the preprocessor's own patches have, which may end amid a square."""

    placeholder = "<|image_pad|>"

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        self.unit = square(keys, "patch_size", 16)[0]
        if self.unit % self.patch:
            raise keys.fail("patch_size", f"a multiple of the {self.patch} of the tower's patches")

    def sized(self, height: int, width: int) -> tuple[int, int]:
        high, wide = super().sized(height, width)
        if min(high, wide) < (least := self.patch * self.joined):
            raise UsageError(f"an image of {width} × {height} is too small for this model",
                             f"it takes squares of {least} × {least} pixels")
        return high, wide

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        rows, columns = self.grid(height, width)
        return (ROW_PLACEHOLDER,) * (rows * columns)


def encoder(source: TowerSource, config: ModelConfig) -> Pixtral:
    return (LightOnOcr if source.config["model_type"] == "lighton_ocr" else Pixtral)(source, config)
