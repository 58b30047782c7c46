"""Unlimited OCR: tiles in the closest aspect ratio, and the page padded with gray; SAM's tower, whose features a CLIP reads, both
concatenated; lines of tiles are joined, each ended by a learned row."""

from __future__ import annotations

import numpy as np

from ..config_reader import Keys
from . import ROW_PLACEHOLDER
from .deepseek_ocr2 import TiledPages, load_pages
from .position_embeddings import cubic_weights, resample
from .preprocessor import resized
from .tower_layers import SEPARATE_QKV, LayerShape, load_blocks, run_blocks
from .tower_ops import ACTIVATIONS, BATCH_PATCHES, Matrix, WorkerPool, matmul
from .tower_weights import Weights
from .vision_tower import MAX_LAYERS, MAX_WIDTH, Rows
from .vision_transformer import CLIP, layer_count

NAMES = ("vision_tower.vision_encoder.", "encoder.layers"), ("vision_model.", "transformer.layers")  # the second as it was published
LARGE = {**CLIP, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "patch_size": 14}


class UnlimitedOcr(TiledPages):
    KINDS = {"unlimited_ocr_vision": {}, "vision": {}}
    PROCESSORS = ("UnlimitedOcrImageProcessor",)
    TILE, MOST, WIDTHS, ENCODER, crops_always = 640, 32, [512, 1024], LARGE, False

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        self.squeezed = self.processor.integer("maximum_pad_value", 640, high=1 << 14)

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        (rows, columns), tile, whole = self.grid(height, width), self.across(self.tile), self.across(self.whole)
        return (ROW_PLACEHOLDER,) * (rows * tile * (columns * tile + 1) + whole * (whole + 1) + 1)

    def made_small(self, picture: np.ndarray) -> np.ndarray:
        if not self.crops and self.whole <= self.squeezed:
            return resized(picture, self.whole, self.whole, self.resample)
        return super().made_small(picture)

    def load(self, weights: Weights) -> Rows:
        tower, reading, hidden = load_pages(weights, self), Clip(weights, self), self.config.hidden_size
        project = weights.matrix("multi_modal_projector", hidden, reading.width + self.widths[-1], bias=True)
        newline, separator = (weights.numbers(name, hidden) for name in ("image_newline", "view_separator"))
        count = layer_count(self)

        def lined(made: np.ndarray) -> np.ndarray:
            """A grid [lines, columns, hidden] as rows."""
            return np.concatenate([made, np.broadcast_to(newline, (len(made), 1, hidden))], axis=1).reshape(-1, hidden)

        def rows(values: tuple[list[np.ndarray], tuple[int, int]], pool: WorkerPool) -> np.ndarray:
            parts, (down, across) = values
            tiles, whole = parts[:-1], parts[-1:]
            few = max(1, BATCH_PATCHES // (self.across(self.tile) ** 2 + 1))
            groups = [tiles[at : at + few] for at in range(0, len(tiles), few)] + [whole]
            pool.job.total += len(parts) * count + len(groups) * len(reading.blocks)
            made = [matmul(reading.read([tower(part, pool) for part in group], pool), project, pool) for group in groups]
            side = self.across(self.whole)
            found = [lined(made.pop().reshape(side, side, hidden)), separator[None]]
            if tiles:
                side = self.across(self.tile)
                grid = np.concatenate(made).reshape(down, across, side, side, hidden).swapaxes(1, 2)
                found.insert(0, lined(grid.reshape(down * side, across * side, hidden)))
            return np.concatenate(found)

        return rows

    def values(self, picture: np.ndarray) -> tuple[list[np.ndarray], tuple[int, int]]:
        """As of `TiledPages`, and the rows and columns of tiles."""
        return super().values(picture), self.grid(*picture.shape[:2])


class Clip:
    """CLIP's layers over what SAM made of patches, behind a row of their own."""

    def __init__(self, weights: Weights, encoder: UnlimitedOcr) -> None:
        stated = {key: value for key, value in encoder.encoder.raw.items() if value is not None}
        keys = Keys({**LARGE, **stated}, encoder.encoder.where)
        name, layers = next((each for each in NAMES if weights.has(f"{each[0]}pre_layrnorm.weight")), NAMES[0])
        self.width, inner = keys.integer("hidden_size", high=MAX_WIDTH), keys.integer("intermediate_size")
        count, heads, eps = keys.integer("num_hidden_layers", high=MAX_LAYERS), keys.integer("num_attention_heads", high=1024), \
            keys.number("layer_norm_eps")
        if self.width != encoder.widths[-1] or self.width % heads:
            raise keys.fail("hidden_size", f"the {encoder.widths[-1]} of downsample_channels, and a multiple of {heads} heads")
        self.side = keys.integer("image_size", high=1 << 14) // keys.integer("patch_size", high=1 << 10)
        curve, width = keys.choice("hidden_act", ACTIVATIONS, "quick_gelu"), self.width

        def looked(own: str) -> list[Matrix]:
            if weights.has(f"{own}qkv_proj.weight"):
                return weights.matrix(f"{own}qkv_proj", 3 * width, width, bias=True).parts(3)
            return [weights.matrix(f"{own}{which}_proj", width, width, bias=True) for which in "qkv"]

        self.blocks = load_blocks(weights, f"{name}{layers}.", count, SEPARATE_QKV,
                                  LayerShape(width, inner, heads, curve, eps, bias=(True, True)), lambda own: looked(f"{own}self_attn."))
        self.first = weights.numbers(f"{name}embeddings.class_embedding", width)
        self.places = weights.numbers(f"{name}embeddings.position_embedding.weight", self.side**2 + 1, width)
        self.before = weights.layer_norm(f"{name}pre_layrnorm", width, eps)  # so it is written

    def read(self, parts: list[np.ndarray], pool: WorkerPool) -> np.ndarray:
        """What SAM made of some parts, [rows, rows, D] each -> what both made, [parts * rows², 2 * D]."""
        rows, count = len(parts[0]), len(parts[0]) ** 2 + 1
        table = self.places[1:].reshape(self.side, self.side, -1)
        spread = self.places[1:] if rows == self.side else resample(table, rows, rows, cubic_weights)
        given = np.stack(parts).reshape(len(parts), count - 1, self.width)
        x = np.concatenate([np.broadcast_to(self.first, (len(parts), 1, self.width)), given], axis=1)
        x += np.concatenate([self.places[:1], spread])
        x = run_blocks(self.blocks, self.before(x.reshape(-1, self.width)), pool,
                    spans=[(at, at + count) for at in range(0, len(parts) * count, count)])
        return np.concatenate([x.reshape(len(parts), count, -1)[:, 1:], given], axis=-1).reshape(-1, 2 * self.width)


encoder = UnlimitedOcr
