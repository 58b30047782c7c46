"""Granite Docling: Idefics 3's tiles and thumbnail; merged patches get a position embedding in their tile, and outputs of middle tower
layers are added after early text layers (DeepStack)."""

from __future__ import annotations

import numpy as np

from ..config_reader import ConfigError, Keys
from .idefics3 import AROUND, WHOLE, lines_of
from .internvl import FittedTiles
from .tower_ops import WorkerPool, gelu, matmul, merge_tile_patches
from .tower_weights import Weights
from .vision_tower import Rows
from .vision_transformer import IDEFICS, layer_count, load_transformer

CONNECTOR = "vision_model.connector."
CONNECTOR_EPS = 1e-5
TURNS = 10_000.0  # the longest wave of places in a tile


class GraniteDocling(FittedTiles):
    """A preprocessor that says `fine_route` has four times as many rows of a tile. Which pages would profit a model's router may say to
    whoever asks; a page is not looked at twice here."""

    KINDS = {"granite_docling_vision": {**IDEFICS, "hidden_size": 768, "num_attention_heads": 12, "image_size": 512, "patch_size": 16,
                                         "scale_factor": 4, "deepstack_visual_indexes": [3, 7, 10], "use_fine_route": True}}
    PROCESSORS = ("GraniteDoclingImageProcessor",)
    CROPS = True
    SIDE, MOST, LONGEST = 512, 32, 16

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        self.is_fine = keys.flag("fine_route", False)
        if self.is_fine and not self.tower_config.flag("use_fine_route", True):
            raise keys.fail("fine_route", "false, as the model has no weights for finer rows")
        self.joined = self.tower_config.integer("scale_factor", high=16) // (2 if self.is_fine else 1)
        self.demand_squares()
        self.dense = keys.integer("dense_max_patches", 0, low=0, high=256)
        self.scale_bound, self.least_aspect, self.most_aspect = (
            keys.number(name) if keys.raw.get(name) else 0.0 for name in ("dense_max_scale", "dense_min_aspect", "dense_max_aspect"))
        if self.config.hidden_size % 4:
            raise ConfigError(f"config.json: hidden_size {self.config.hidden_size} is not a multiple of 4, as places in a tile ask for")
        self.whole_patches = (max(self.most, self.dense) + 1) * self.across**2

    def grid(self, height: int, width: int) -> tuple[int, int]:
        return self.nearest(height, width, self.dense if self.is_dense(height, width) else self.most)

    def is_dense(self, height: int, width: int) -> bool:
        """Whether a page may have more tiles than others: one that is wide, or that would be made much smaller."""
        if self.most == 1 or not self.dense or not (self.scale_bound or self.least_aspect):
            return False
        aspect = width / height
        if self.least_aspect and aspect <= self.least_aspect or self.most_aspect and aspect > self.most_aspect:
            return False
        return not self.scale_bound or self.nearest(height, width, self.most)[1] * self.side / width < self.scale_bound

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        (rows, columns), tile = self.grid(height, width), self.placeholder * (self.across // self.joined) ** 2
        whole = f"\n{AROUND}{WHOLE}{tile}{AROUND}" if rows * columns > 1 else ""
        return self.spelled(lines_of(tile, rows, columns) + whole, self.placeholder)

    def load(self, weights: Weights) -> Rows:
        tower = load_transformer(weights, self, "vision_model.", finished=False)
        width, hidden, count = self.width, self.config.hidden_size, layer_count(self)
        together, path = width * self.joined**2, f"{CONNECTOR}{'fine' if self.is_fine else 'coarse'}."
        finish = weights.layer_norm("vision_model.post_layernorm", width, self.tower_config.number("layer_norm_eps"))
        wanted = [number + 1 for number in sorted(self.tower_config.layers("deepstack_visual_indexes", count))] + [count]
        into = weights.layer_norm(f"{CONNECTOR}ln_in", width, CONNECTOR_EPS)
        amid, out = (weights.layer_norm(f"{CONNECTOR}{name}", hidden, CONNECTOR_EPS) for name in ("ln_mid", "ln_out"))
        first = weights.matrix(f"{path}projection", hidden, together, bias=False)
        second = weights.matrix(f"{CONNECTOR}mlp_fc2", hidden, hidden, bias=False)
        places = waves(self.across // self.joined, hidden)

        def merger(name: str) -> Rows:
            norm = weights.layer_norm(f"{name}layer_norm", together, CONNECTOR_EPS)
            layers = weights.two_layers(name, (together, hidden, hidden), gelu)
            return lambda x, pool: layers(norm(x.reshape(-1, together)), pool)

        mergers = [merger(f"{path}deepstack_mergers.{index}.") for index in range(len(wanted) - 1)]

        def rows(tiles: list[np.ndarray], pool: WorkerPool) -> np.ndarray:
            *middle, last = np.split(tower.layers(tiles, wanted, pool), len(wanted), axis=-1)
            x = merge_tile_patches(into(finish(last)), self.joined).reshape(-1, together)
            x = matmul(x, first, pool).reshape(len(tiles), -1, hidden) + places
            made = out(matmul(gelu(amid(x.reshape(-1, hidden))), second, pool))
            deep = [merge(merge_tile_patches(each, self.joined), pool) for merge, each in zip(mergers, middle, strict=True)]
            return np.stack([made, *deep]) if deep else made

        return rows


def waves(side: int, width: int) -> np.ndarray:
    """Places in a square, row by row, float32 [side², width]: sines and cosines of the column, then of the row."""
    turns = np.outer(np.arange(side), TURNS ** -(np.arange(width // 4) / (width // 4)))
    one = np.concatenate([np.sin(turns), np.cos(turns)], axis=1)
    both = np.concatenate([np.broadcast_to(one[None], (side, side, width // 2)), np.broadcast_to(one[:, None], (side, side, width // 2))],
                          axis=-1)
    return both.reshape(side * side, width).astype(np.float32)


encoder = GraniteDocling
