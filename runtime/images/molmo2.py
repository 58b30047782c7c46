"""Molmo 2: SigLIP on a thumbnail and on overlapping crops. Attention pooling with the window mean as query makes one row per window.
Special tokens between rows are rows too, since all tokens of an image attend to each other, and rows are added to their token's
embedding."""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ..config_reader import ConfigError, Keys
from . import ROW_PLACEHOLDER
from .position_embeddings import taps
from .preprocessor import BILINEAR, HALF
from .tower_layers import LayerNames, LayerShape, load_blocks, qkv_names
from .tower_ops import ACTIVATIONS, BATCH_PATCHES, Matrix, WorkerPool
from .tower_weights import Weights
from .vision_tower import MAX_LAYERS, MAX_WIDTH, Rows, VisionTower, check_aspect_ratio
from .vision_transformer import VisionTransformer

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

USUAL = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 25, "num_attention_heads": 16, "num_key_value_heads": 16,
         "head_dim": 72, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "image_size": [378, 378], "patch_size": 14}
ADAPTER = {"vision_feature_layer": [24, 18], "hidden_size": 1152, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72,
           "hidden_act": "silu", "intermediate_size": 18_944, "pooling_attention_mask": True}
# What the first configs call things; the kinds of the two parts are those of the model there.
FIRST_NAMES = {"image_default_input_size": "image_size", "image_patch_size": "patch_size", "vit_layers": "vision_feature_layer"}
PATCH, COLUMN, BEGIN, SMALL, END = "<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>", "<im_end>"
BESIDE = "transformer.wte.new_embedding"  # of the words that are never written
VIT, POOL, PROJECT = "vision_backbone.image_vit.", "vision_backbone.image_pooling_2d.", "vision_backbone.image_projector."
LAYER = LayerNames(("attention_norm", "ffn_norm"), qkv_names("attention.w{}"), "attention.wo", ("feed_forward.w1", "feed_forward.w2"))
FAR = 10e9  # more than any growth
Windows = np.ndarray  # of patches: their numbers int64 [n, size], -1 for none


class Molmo2(VisionTower):
    KINDS = {"molmo2_vision": USUAL, "molmo2": USUAL}
    PROCESSORS = ("Molmo2ImageProcessor",)
    LOOK = HALF, HALF, BILINEAR
    placeholder = "<|image|>"
    bidirectional = joint_attention = True

    def configure(self, keys: Keys) -> None:
        stated = {FIRST_NAMES.get(key, key): value for key, value in (self.root_config.section("adapter_config") or {}).items()}
        self.adapter = Keys({**ADAPTER, **stated}, "config.json: adapter_config")
        self.most = keys.integer("max_crops", 8, high=256)
        self.demand_side(keys, self.side)
        self.demand_same(keys, patch_size=self.patch)
        self.across = self.side // self.patch
        self.margins, self.pool = _two(keys, "overlap_margins", [4, 4], 0), _two(keys, "pooling_size", [2, 2], 1)
        if self.side % self.patch or sum(self.margins) >= self.across or max(self.pool) > self.across:
            raise keys.fail("overlap_margins and pooling_size", f"fewer than the {self.across} patches of a square's side, whole ones")
        if self.resample != BILINEAR:
            raise keys.fail("resample", "2 (bilinear)")
        if not self.adapter.flag("pooling_attention_mask", True):
            raise self.adapter.fail("pooling_attention_mask", "true")
        around = self.around
        self.ends_lines = around.flag("image_use_col_tokens", True)
        self.ends_small = around.flag("use_single_crop_col_tokens", self.ends_lines)
        self.begins_small = SMALL if around.flag("use_single_crop_start_token", True) else BEGIN
        self.most_patches = max(BATCH_PATCHES, self.across**2)
        self.whole_patches = (self.most + 1) * self.across**2 * len(self.layers)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Which layers' results are put together: numbers of them, 0 is what goes in."""
        count, found = self.tower_config.integer("num_hidden_layers", high=MAX_LAYERS), self.adapter.raw["vision_feature_layer"]
        if not isinstance(found, list) or not 1 <= len(found) <= 16 or any(
                type(each) is not int or not -count <= each < count for each in found):
            raise self.adapter.fail("vision_feature_layer", f"a list of layers, each less than {count}")
        return tuple(each + 1 if each >= 0 else count + 1 + each for each in found)

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of squares on the canvas of a picture: of so many at most the ones for which it has to grow least, or else to
        be made smaller least."""
        check_aspect_ratio(height, width)
        margin = sum(self.margins) * self.patch
        step, counts = self.side - margin, range(1, self.most + 1)
        shapes = sorted(((rows, columns) for rows in counts for columns in counts if rows * columns <= self.most),
                        key=lambda shape: (shape[0] * shape[1], shape[0]))
        with np.errstate(divide="ignore"):
            own = (np.array(shapes, np.float32) * np.float32(step)) / np.array([height - margin, width - margin], np.float32)
        growth = own.min(1)
        return shapes[growth.argmax() if (growth < 1).all() else np.where(growth < 1, np.float32(FAR), growth).argmin()]

    def windows(self, height: int, width: int) -> tuple[Windows, Windows]:
        """Patches that become one row: of the picture made small, in its order, and of the canvas, each of its patches in the square in
        which it is farthest from the border. Both [rows, columns, size]."""
        rows, columns = self.canvas(height, width)
        before, behind = self.margins
        grid = np.arange(1, rows * columns + 1)[:, None, None] * self.across**2 + np.arange(self.across**2).reshape(
            self.across, self.across)
        lines = []
        for row in range(rows):
            top, end = before if row else 0, self.across - (behind if row < rows - 1 else 0)
            lines.append(np.concatenate([grid[row * columns + column, top:end, before if column else 0 : self.across - (
                behind if column < columns - 1 else 0)] for column in range(columns)], axis=1))
        return _pooled(np.arange(self.across**2).reshape(self.across, self.across), self.pool), _pooled(np.concatenate(lines), self.pool)

    def parts(self, height: int, width: int) -> list[str]:
        """The words that a picture is, a row of its own in the place of each PATCH."""
        def lines(windows: Windows, ended: bool) -> list[str]:
            return ([PATCH] * windows.shape[1] + [COLUMN] * ended) * windows.shape[0]

        small, whole = self.windows(height, width)
        return [self.begins_small, *lines(small, self.ends_small), END, BEGIN, *lines(whole, self.ends_lines), END]

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        return (ROW_PLACEHOLDER,) * len(self.parts(height, width))

    def values(self, picture: np.ndarray) -> tuple[list[np.ndarray], Windows, list[str]]:
        """Squares, the picture made small first, the patches that become rows, and the words that it is."""
        high, wide = picture.shape[:2]
        rows, columns = self.canvas(high, wide)
        margin = sum(self.margins) * self.patch
        step = self.side - margin
        canvas = between(picture, rows * step + margin, columns * step + margin)
        squares = [canvas[row : row + self.side, column : column + self.side]
                   for row in range(0, rows * step, step) for column in range(0, columns * step, step)]
        windows = np.concatenate([each.reshape(-1, each.shape[-1]) for each in self.windows(high, wide)])
        return [self.scale(each) for each in (between(picture, self.side, self.side), *squares)], windows, self.parts(high, wide)

    def load(self, weights: Weights) -> Rows:
        tower, hidden = self.transformer(weights), self.config.hidden_size
        keys, wide = self.adapter, self.width * len(self.layers)
        inner, inside = keys.integer("intermediate_size", high=MAX_WIDTH), keys.integer("hidden_size", high=MAX_WIDTH)
        heads, depth = _heads(keys)
        queries, keys_, values, out = (weights.matrix(f"{POOL}w{name}", *shape).to_float32() for name, shape in (
            *((name, (heads * depth, wide)) for name in "qkv"), ("o", (inside, heads * depth))))
        gate, up, down = (weights.matrix(f"{PROJECT}w{name}", *shape) for name, shape in ((1, (inner, inside)), (3, (inner, inside)),
                                                                                          (2, (hidden, inner))))
        curve, words = keys.choice("hidden_act", ACTIVATIONS, "silu"), self.table(weights)

        def pooled(x: np.ndarray, own: Windows) -> np.ndarray:
            """Of some windows: rows of the width of the adapter."""
            there = own >= 0
            parts = np.where(there[..., None], x[own], 0)
            asked = queries((parts.sum(1) / there.sum(1, keepdims=True)).astype(np.float32)).reshape(len(own), heads, 1, depth)
            k, v = (each(parts).reshape(*own.shape, heads, depth).swapaxes(1, 2) for each in (keys_, values))
            scores = asked @ k.swapaxes(2, 3) * np.float32(depth**-0.5)
            scores[np.broadcast_to(~there[:, None, None], scores.shape)] = -np.inf
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            return out(((scores / scores.sum(-1, keepdims=True)) @ v).reshape(len(own), heads * depth))

        def rows(taken: tuple[list[np.ndarray], Windows, list[str]], pool: WorkerPool) -> np.ndarray:
            squares, windows, parts = taken
            x = tower.layers(squares, self.layers, pool).reshape(-1, wide)
            made, (opened, raised, lowered) = np.empty((len(windows), hidden), np.float32), (each.to_float32() for each in (gate, up, down))

            def some(which: slice) -> None:
                y = pooled(x, windows[which])
                made[which] = lowered(curve(opened(y)) * raised(y))

            pool.each(some, len(windows))
            found = np.stack([words[word] for word in parts])
            found[[word == PATCH for word in parts]] += made
            return found

        return rows

    def table(self, weights: Weights) -> dict[str, np.ndarray]:
        """What each word of a picture is before its rows are added."""
        count, hidden = self.config.vocab_size + self.config.extra_embeddings, self.config.hidden_size
        height = weights.shape_of(BESIDE, 2)[0]
        found, first = weights.numbers(BESIDE, height, hidden), count - height
        numbers = {word: self.token_id(word) for word in (PATCH, COLUMN, BEGIN, SMALL, END)}
        if stray := next((word for word, number in numbers.items() if not first <= number < count), None):
            raise ConfigError(f"{self.source.model}: {stray} is word {numbers[stray]}, which has no row in {BESIDE}",
                              "the vocabulary and the weights are of different models")
        return {word: found[number - first] for word, number in numbers.items()}

    def transformer(self, weights: Weights) -> VisionTransformer:
        """Patches lie there point by point, colours innermost."""
        keys, width, patch = self.tower_config, self.width, self.patch
        inner = keys.integer("intermediate_size", high=MAX_WIDTH)
        heads, depth = _heads(keys)
        eps, curve = keys.number("layer_norm_eps"), keys.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh")
        embedding = weights.matrix(f"{VIT}patch_embedding", width, 3 * patch**2)
        stored = embedding.stored.reshape(width, patch, patch, 3).transpose(0, 3, 1, 2).reshape(width, -1)

        blocks = load_blocks(weights, f"{VIT}transformer.resblocks.", max(self.layers), LAYER,
                             LayerShape(width, inner, heads, curve, eps, through=heads * depth))
        return VisionTransformer(Matrix(np.ascontiguousarray(stored), embedding.bias),
                                 weights.numbers(f"{VIT}positional_embedding", self.across**2, width), None, None,
                                 blocks, None, patch)


def between(picture: np.ndarray, height: int, width: int) -> np.ndarray:
    """A picture uint8 of another size, each of whose points lies between four: points that are passed over when it is made smaller do not
    count, as torch does it without its filter against that."""
    (top, below, down), (left, right, across) = taps(picture.shape[0], height), taps(picture.shape[1], width)
    down = down[:, None]

    def line(which: np.ndarray) -> np.ndarray:
        own = picture[which]
        return own[:, left] * (1 - across) + own[:, right] * across

    return (line(top) * (1 - down) + line(below) * down).round().clip(0, 255).astype(np.uint8)


def _pooled(grid: np.ndarray, pool: tuple[int, int]) -> Windows:
    """Numbers of patches [rows, columns] in windows [rows, columns, size], with as much nothing around all on either side."""
    around = [(short // 2, (short + 1) // 2) for short in (-side % size for side, size in zip(grid.shape, pool, strict=True))]
    grid = np.pad(grid, around, constant_values=-1)
    (high, wide), (rows, columns) = pool, grid.shape
    return grid.reshape(rows // high, high, columns // wide, wide).swapaxes(1, 2).reshape(rows // high, columns // wide, high * wide)


def _heads(keys: Keys) -> tuple[int, int]:
    """How many, and how wide each is."""
    heads = keys.integer("num_attention_heads", high=1024)
    if keys.integer("num_key_value_heads", heads) != heads:
        raise keys.fail("num_key_value_heads", f"{heads}, as many as of queries")
    return heads, keys.integer("head_dim", high=1024)


def _two(keys: Keys, name: str, default: list[int], least: int) -> tuple[int, int]:
    found = keys.raw.get(name, default)
    if not isinstance(found, list) or len(found) != 2 or any(type(each) is not int or not least <= each <= 1 << 10 for each in found):
        raise keys.fail(name, f"two whole numbers from {least} on")
    return found[0], found[1]


def encoder(source: TowerSource, config: ModelConfig) -> Molmo2:
    """Of a folder whose config has the names of the first ones too, which say more layers of the tower than there are."""
    if "vision_config" not in source.config and (stated := Keys(source.config).section("vit_config")) is not None:
        source = copy(source)
        source.config = {**source.config, "vision_config": {FIRST_NAMES.get(key, key): value for key, value in stated.items()}}
    return Molmo2(source, config)
