"""InternVL: tiles in the aspect ratio that fits best, and a thumbnail; patches are merged (pixel shuffle). The tower uses LayerScale."""

from __future__ import annotations

import numpy as np

from ..config_reader import ConfigError, Keys
from . import ROW_PLACEHOLDER
from .preprocessor import resized, tiles_of
from .tower_layers import LayerNames, LayerShape, load_blocks, qkv_names
from .tower_ops import ACTIVATIONS, BATCH_PATCHES, WorkerPool, matmul, merge_tile_patches, silu
from .tower_weights import Weights
from .vision_tower import Rows, VisionTower
from .vision_transformer import VisionTransformer, drops_first, layer_count, wanted_layers

BEGIN, IMAGE, END = "<img>", "<IMG_CONTEXT>", "</img>"
HEAD_EPS, PROJECTOR_EPS = 1e-6, 1e-5
USUAL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 448,
         "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6}


class FittedTiles(VisionTower):
    """Pictures in tiles of the tower's size, `least` to `most` of them; `joined` patches in a row and in a column become one row."""

    PROCESSORS = ("GotOcr2ImageProcessor", "InternVLImageProcessor")
    SIDE, MOST, LONGEST = 384, 12, 256  # of preprocessors that do not say: a tile's side, and how many there are; how many are in a row
    CROPS: bool | None = None  # default of crop_to_patches; None for families without that key
    joined: int

    def configure(self, keys: Keys) -> None:
        self.demand_side(keys, self.SIDE)
        self.least, self.most = keys.integer("min_patches", 1, high=256), keys.integer("max_patches", self.MOST, high=256)
        if self.CROPS is not None and not keys.flag("crop_to_patches", self.CROPS):
            self.most = 1
        self.across = self.side // self.patch
        self.most_patches = max(BATCH_PATCHES, self.across**2)
        self.whole_patches = (self.most + 1) * self.across**2

    def demand_squares(self) -> None:
        """Raises ConfigError where patches do not become whole rows."""
        if self.joined < 1 or self.across % self.joined:
            raise ConfigError(f"config.json: {self.across} patches in a row are not a multiple of {self.joined}, which become one")

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles: of the shapes with as many as are allowed the one nearest to the picture's, of shapes alike the one
        with more tiles as long as the picture has half as many points as they have."""
        return self.nearest(height, width, self.most)

    def nearest(self, height: int, width: int, most: int) -> tuple[int, int]:
        """The grid with so many tiles at most."""
        return fitted(height, width, self.side, (self.least, most), self.LONGEST)

    def values(self, picture: np.ndarray) -> list[np.ndarray]:
        rows, columns = self.grid(*picture.shape[:2])
        side = self.side
        tiles = tiles_of(resized(picture, rows * side, columns * side, self.resample), side, side)
        if len(tiles) > 1:
            tiles.append(resized(picture, side, side, self.resample))
        return [self.scale(each) for each in tiles]


class GatedTiles(FittedTiles):
    """Cohere's: of squares of patches, side by side, an FFN with a gate makes rows."""

    INNER = 0  # default inner width of the projector; 0 for hidden_size

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        self.joined = self.root_config.integer("downsample_factor", 2, high=16)
        self.demand_squares()

    def gated(self, weights: Weights, together: int) -> Rows:
        """From so many numbers of a square."""
        hidden = self.config.hidden_size
        inner = self.root_config.integer("alignment_intermediate_size", self.INNER or hidden)
        if inner % 2:
            raise self.root_config.fail("alignment_intermediate_size", "an even number")
        beside, gate = weights.matrix("multi_modal_projector.linear_1", inner, together, bias=True).parts(2)
        down = weights.matrix("multi_modal_projector.linear_2", hidden, inner // 2, bias=True)
        return lambda x, pool: matmul(matmul(x, beside, pool) * silu(matmul(x, gate, pool)), down, pool)


def fitted(height: int, width: int, side: int, counts: tuple[int, int], longest: int) -> tuple[int, int]:
    """Rows and columns of tiles of this side: as of `FittedTiles.grid`, of shapes with so many tiles at least and at most, and so many in
    a row or a column at most."""
    least, most = counts
    if most == 1:
        return 1, 1
    longest = min(most, longest)
    shapes = sorted(((columns, rows) for columns in range(1, longest + 1) for rows in range(1, min(longest, most // columns) + 1)
                     if columns * rows >= least), key=lambda shape: shape[0] * shape[1])
    best, off = (1, 1), float("inf")
    for columns, rows in shapes:
        own = abs(width / height - columns / rows)
        if own < off or own == off and height * width > 0.5 * side**2 * columns * rows:
            best, off = (columns, rows), own
    return best[1], best[0]


class InternVl(FittedTiles):
    """`NAMES`: of the tower, its patches, places and first row, its layers and their scales; `PROJECTOR`: of its norm and its matrices."""

    KINDS = {"internvl_vision": USUAL}
    NAMES = ("vision_tower.", "embeddings.patch_embeddings.projection", "embeddings.position_embeddings", "embeddings.cls_token",
             "encoder.layer.", "lambda_")
    LAYER = LayerNames(("layernorm_before", "layernorm_after"), qkv_names("attention.{}_proj"), "attention.projection_layer",
                   ("mlp.fc1", "mlp.fc2"))
    PROJECTOR = ("multi_modal_projector.layer_norm", "multi_modal_projector.", ("linear_1", "linear_2"))
    placeholder = IMAGE

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        self.joined = round(1 / self.root_config.number("downsample_ratio", 0.5))
        self.demand_squares()
        if not drops_first(self, "default"):
            raise ConfigError("config.json: vision_feature_select_strategy is 'full', which leaves no square grid of patches")
        self.wanted = wanted_layers(self, -1)

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        rows, columns = self.grid(height, width)
        tiles = rows * columns + (rows * columns > 1)
        return (self.token_id(BEGIN), *(ROW_PLACEHOLDER,) * (tiles * (self.across // self.joined) ** 2), self.token_id(END))

    def load(self, weights: Weights) -> Rows:
        tower, together, hidden = self.tower_of(weights), self.width * len(self.wanted) * self.joined**2, self.config.hidden_size
        normed, name, parts = self.PROJECTOR
        norm = weights.layer_norm(normed, together, PROJECTOR_EPS)
        curve = self.root_config.choice("projector_hidden_act", ACTIVATIONS, "gelu")
        project = weights.two_layers(name, (together, hidden, hidden), curve, parts=parts)

        def rows(tiles: list[np.ndarray], pool: WorkerPool) -> np.ndarray:
            x = merge_tile_patches(tower.layers(tiles, self.wanted, pool)[:, 1:], self.joined)
            return project(norm(x.reshape(-1, together)), pool)

        return rows

    def tower_of(self, weights: Weights) -> VisionTransformer:
        keys, width, (name, patches, places, first, layers, scale) = self.tower_config, self.width, self.NAMES
        inner, eps, count = keys.integer("intermediate_size"), keys.number("layer_norm_eps"), layer_count(self)
        curve = keys.choice("hidden_act", ACTIVATIONS, "gelu")
        centered = keys.choice("norm_type", {"layer_norm": True, "rms_norm": False}, "layer_norm")
        head_norms = keys.flag("use_qk_norm", False)

        def more(own: str) -> dict[str, object]:
            return {"scales": tuple(weights.numbers(f"{own}{scale}{which}", width) for which in (1, 2)), "head_norms": tuple(
                weights.rms_norm(f"{own}attention.{which}_norm", width, HEAD_EPS) for which in "qk") if head_norms else None}

        finished, positions = not keys.flag("use_mean_pooling", True) and count in self.wanted, self.across**2 + 1
        return VisionTransformer(
            patches=weights.matrix(name + patches, width, 3 * self.patch**2), places=weights.numbers(name + places, 1, positions, width)[0]
            if keys.flag("use_absolute_position_embeddings", True) else np.zeros((positions, width), np.float32),
            first=weights.numbers(name + first, 1, 1, width)[0, 0], before=None,
            blocks=load_blocks(weights, name + layers, count, self.LAYER, LayerShape(width, inner, self.heads, curve, eps, centered),
                               more=more),
            after=weights.layer_norm(f"{name}layernorm", width, eps) if finished else None, patch=self.patch)


encoder = InternVl
