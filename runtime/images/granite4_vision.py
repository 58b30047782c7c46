"""Granite Vision 4: LLaVA-NeXT's tiles; a window Q-Former reads the patches of several tower layers, and its outputs are added before the
text layers that the config names (DeepStack)."""

from __future__ import annotations

from itertools import product as pairs
from typing import Any

import numpy as np

from ..audio.q_former import QFormer, QFormerSizes, load_q_former
from ..config_reader import ConfigError, Keys
from . import ROW_PLACEHOLDER
from .llava_next import LlavaNext
from .tower_ops import Matrix, Norm, WorkerPool, matmul
from .tower_weights import Weights
from .vision_tower import Rows
from .vision_transformer import layer_count, load_transformer

HEAD = 64  # numbers of a head of those that ask
ASKING = {"num_hidden_layers": 1, "intermediate_size": 3072, "cross_attention_frequency": 1}
NORM_EPS = 1e-6
USUAL_TARGETS = [12, 15, 18, 21]
CORNERS = tuple(pairs((0, 1), repeat=2))  # of each square of four patches, the one that a reading takes


class Granite4Vision(LlavaNext):
    scales_rows = False  # rows are inserted after the embeddings were scaled

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        self.layers = layer_count(self)
        rate = self.root_config.text("downsample_rate", "").split("/")
        if len(rate) != 2 or not all(each.isdecimal() and 0 < int(each) <= 64 for each in rate):
            raise self.root_config.fail("downsample_rate", "the sides of two windows, as \"4/8\"")
        self.asked, self.window = map(int, rate)
        self.patched = self.side // self.patch
        if self.patched % self.window or self.patched // self.window * self.asked * 2 != self.patched:
            raise ConfigError(f"config.json: downsample_rate is {'/'.join(rate)}, which does not halve {self.patched} patches in a row")
        stated = self.root_config.raw.get("deepstack_layer_map") or []
        targets = self.root_config.raw.get("spatial_target_layers") or USUAL_TARGETS
        good = isinstance(stated, list) and all(isinstance(each, list) and len(each) == 2 for each in stated) \
            and isinstance(targets, list) and 0 < len(targets) <= len(CORNERS)
        spatial = self.root_config.raw.get("spatial_vision_layer", -1)
        self.pairs = [*map(tuple, stated), *((spatial, target) for target in targets)] if good else []
        if not self.pairs or not all(type(layer) is int and -self.layers <= layer + 1 <= self.layers + 1 and type(target) is int
                                     and 0 <= target < self.config.num_hidden_layers for layer, target in self.pairs):
            raise ConfigError("config.json: deepstack_layer_map and spatial_target_layers name no layers of the tower and of the text part")
        self.mapped = len(stated)

    @property
    def across(self) -> int:
        """Rows that stand for a line of a tile."""
        return self.patched * self.asked // self.window

    @property
    def deepstack_layers(self) -> tuple[int, ...]:
        """Layers of the text model after which rows are added."""
        return tuple(sorted({target - 1 for _, target in self.pairs if target}))

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        rows, columns = self.lines(height, width)
        return (ROW_PLACEHOLDER,) * (self.across**2 + rows * (columns + 1))

    def load(self, weights: Weights) -> Rows:
        tower = load_transformer(weights, self, "vision_tower.", finished=False)
        hidden, newline = self.config.hidden_size, weights.numbers("image_newline", self.config.hidden_size)
        numbers = [layer + self.layers + 1 if layer < 0 else layer for layer, _ in self.pairs]
        windows = [Windows.of(weights, self, index, self.mapped) for index in range(len(self.pairs))]
        wanted = sorted(set(numbers))

        def rows(values: tuple[list[np.ndarray], tuple[int, int]], pool: WorkerPool) -> np.ndarray:
            tiles, size = values
            seen = dict(zip(wanted, np.split(tower.layers(tiles, wanted, pool)[:, int(self.drops_first) :], len(wanted), axis=-1),
                            strict=True))
            made: dict[int, np.ndarray] = {}
            for number, (_, target), ask in zip(numbers, self.pairs, windows, strict=True):  # of two for one layer the later counts
                made[target - 1] = self.packed(ask(seen[number], pool), size, newline)
            nothing = np.zeros_like(next(iter(made.values())))
            layers = [made.get(-1, nothing), *(made[layer] for layer in self.deepstack_layers)]
            return np.stack(layers).reshape(len(layers), -1, hidden)

        return rows


class Windows:
    """Patches of tiles, window by window, to the fewer rows that ask what is in theirs."""

    def __init__(self, encoder: Granite4Vision, corner: tuple[int, int] | None, norm: Norm, former: QFormer, places: np.ndarray,
                 out: Matrix) -> None:
        self.encoder, self.corner, self.norm, self.former, self.places, self.out = encoder, corner, norm, former, places, out

    @classmethod
    def of(cls, weights: Weights, encoder: Granite4Vision, index: int, mapped: int) -> Windows:
        corner = None if index < mapped else CORNERS[index - mapped]
        name = f"layerwise_projectors.{index}." if corner is None else f"spatial_projectors.{index - mapped}."
        width = encoder.width
        own: dict[str, Any] = {**ASKING, **(encoder.root_config.section("qformer_config") or {}), "hidden_size": width,
                               "encoder_hidden_size": width, "num_attention_heads": max(1, width // HEAD)}
        former = load_q_former(weights, QFormerSizes.read(Keys(own, "config.json: qformer_config")), name, encoder.asked**2)
        return cls(encoder, corner, weights.layer_norm(f"{name}norm", width, NORM_EPS), former,
                   weights.numbers(f"{name}image_positions", 1, encoder.window**2, width)[0],
                   weights.matrix(f"{name}out_linear", encoder.config.hidden_size, width, bias=True))

    def __call__(self, x: np.ndarray, pool: WorkerPool) -> np.ndarray:
        """Of x float32 [tiles, patches, D] -> [tiles, rows, hidden]."""
        encoder, tiles, width = self.encoder, len(x), x.shape[-1]
        grid = self.norm(x).reshape(tiles, encoder.patched, encoder.patched, width)
        if self.corner is None:
            share = encoder.patched // encoder.across
            fewer = grid.reshape(tiles, encoder.across, share, encoder.across, share, width).mean((2, 4), dtype=np.float32)
        else:
            fewer = grid[:, self.corner[0] :: 2, self.corner[1] :: 2]
        queries, seen = _windows(fewer, encoder.asked) + self.former.learned, _windows(grid, encoder.window) + self.places
        made = matmul(self.former.with_queries(queries, seen, pool).reshape(-1, width), self.out, pool)
        count, side = encoder.across // encoder.asked, encoder.asked
        return made.reshape(tiles, count, count, side, side, -1).swapaxes(2, 3).reshape(tiles, encoder.across**2, -1)


def _windows(grid: np.ndarray, side: int) -> np.ndarray:
    """[tiles, n, n, D] -> [tiles * windows, side², D]."""
    tiles, count, _, width = grid.shape
    cut = grid.reshape(tiles, count // side, side, count // side, side, width).swapaxes(2, 3)
    return np.ascontiguousarray(cut).reshape(-1, side * side, width)


encoder = Granite4Vision
