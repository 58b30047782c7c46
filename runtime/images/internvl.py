"""InternVL: a picture in tiles of one size, as many as fit its shape best, and once whole; of every tile squares of patches become one
row. Its tower scales what each half of a layer adds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..config_reader import ConfigError
from . import PLACE
from .idefics3 import joined
from .preprocessor import BICUBIC, CLIP_MEAN, CLIP_STD, Scale, filter_of, resized, square
from .tower_parts import CURVES, Block, Crew, Matrix, Norm, two_layers
from .tower_sight import Rows, TowerSight
from .tower_weights import Weights
from .vision_transformer import TOGETHER, VisionTransformer, layer_count, wanted_layers

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

BEGIN, IMAGE, END = "<img>", "<IMG_CONTEXT>", "</img>"
HEAD_EPS, PROJECTOR_EPS = 1e-6, 1e-5
USUAL = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 448,
         "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6}


class FittedTiles(TowerSight):
    """Pictures in tiles of the tower's size, `least` to `most` of them; `joined` patches in a row and in a column become one row."""

    PROCESSORS = ("GotOcr2ImageProcessor", "InternVLImageProcessor")
    SIDE, MOST, LONGEST = 384, 12, 256  # of preprocessors that do not say: a tile's side, and how many there are; how many are in a row
    joined: int

    def __init__(self, source: TowerSource, config: ModelConfig) -> None:
        super().__init__(source, config)
        keys = self.processor
        self.scale, self.resample = Scale(keys, CLIP_MEAN, CLIP_STD), filter_of(keys, BICUBIC)
        if not keys.flag("do_resize", True) or square(keys, "size", {"height": self.SIDE, "width": self.SIDE}) != (self.side, self.side):
            raise keys.fail("size", f"the {self.side} × {self.side} that the tower takes")
        self.least, self.most = keys.integer("min_patches", 1, high=256), keys.integer("max_patches", self.MOST, high=256)
        self.across = self.side // self.patch

    def demand_squares(self) -> None:
        """Raises ConfigError where patches do not become whole rows."""
        if self.joined < 1 or self.across % self.joined:
            raise ConfigError(f"config.json: {self.across} patches in a row are not a multiple of {self.joined}, which become one")

    @property
    def most_patches(self) -> int:
        return max(TOGETHER, self.across**2)

    @property
    def whole_patches(self) -> int:
        return (self.most + 1) * self.across**2

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
        whole = resized(picture, rows * side, columns * side, self.resample)
        tiles = [whole[row * side : (row + 1) * side, column * side : (column + 1) * side]
                 for row in range(rows) for column in range(columns)]
        if len(tiles) > 1:
            tiles.append(resized(picture, side, side, self.resample))
        return [self.scale(each) for each in tiles]


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
    VISION = {"internvl_vision": USUAL}
    placeholder = IMAGE

    def __init__(self, source: TowerSource, config: ModelConfig) -> None:
        super().__init__(source, config)
        self.joined = round(1 / self.outer.number("downsample_ratio", 0.5))
        self.demand_squares()
        self.drops_first = self.outer.choice("vision_feature_select_strategy", {"default": "default", "full": "full"},
                                             "default") == "default"
        if not self.drops_first:
            raise ConfigError("config.json: vision_feature_select_strategy is 'full', with which patches are not a square")
        self.wanted = wanted_layers(self, -1)

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        rows, columns = self.grid(height, width)
        tiles = rows * columns + (rows * columns > 1)
        return (self.word(BEGIN), *(PLACE,) * (tiles * (self.across // self.joined) ** 2), self.word(END))

    def load(self, weights: Weights) -> Rows:
        tower = self.tower_of(weights)
        together = self.width * len(self.wanted) * self.joined**2
        norm, first, second = self.projector_of(weights, together)
        curve = CURVES[self.outer.choice("projector_hidden_act", {key: key for key in CURVES}, "gelu")]

        def rows(tiles: list[np.ndarray], crew: Crew) -> np.ndarray:
            x = joined(tower.layers(tiles, self.wanted, crew)[:, 1:], self.joined)
            return two_layers(norm(x.reshape(-1, together)), first, second, curve, crew)

        return rows

    def projector_of(self, weights: Weights, together: int) -> tuple[Norm, Matrix, Matrix]:
        """Of what so many numbers of a square become."""
        hidden, own = self.config.hidden_size, "multi_modal_projector."
        return (weights.layer_norm(f"{own}layer_norm", together, PROJECTOR_EPS), weights.matrix(f"{own}linear_1", hidden, together),
                weights.matrix(f"{own}linear_2", hidden, hidden))

    def tower_of(self, weights: Weights) -> VisionTransformer:
        keys, width, patch = self.vision, self.width, self.patch
        inner, eps, name = keys.integer("intermediate_size"), keys.number("layer_norm_eps"), "vision_tower."
        curve = CURVES[keys.choice("hidden_act", {key: key for key in CURVES}, "gelu")]
        centered = keys.choice("norm_type", {"layer_norm": "layer_norm", "rms_norm": "rms_norm"}, "layer_norm") == "layer_norm"
        head_norms = keys.flag("use_qk_norm", False)
        count = layer_count(self)

        def norm(own: str) -> Norm:
            return weights.layer_norm(own, width, eps) if centered else weights.rms_norm(own, width, eps)

        def block(number: int) -> Block:
            own = f"{name}encoder.layer.{number}."
            return Block(
                (norm(f"{own}layernorm_before"), norm(f"{own}layernorm_after")),
                *(weights.matrix(f"{own}attention.{which}_proj", width, width) for which in "qkv"),
                weights.matrix(f"{own}attention.projection_layer", width, width),
                weights.matrix(f"{own}mlp.fc1", inner, width), weights.matrix(f"{own}mlp.fc2", width, inner), curve, self.heads,
                scales=(weights.numbers(f"{own}lambda_1", width), weights.numbers(f"{own}lambda_2", width)),
                head_norms=tuple(weights.rms_norm(f"{own}attention.{which}_norm", width, HEAD_EPS) for which in "qk")
                if head_norms else None)

        finished = not keys.flag("use_mean_pooling", True) and count in self.wanted
        positions = self.across**2 + 1
        places = weights.numbers(f"{name}embeddings.position_embeddings", 1, positions, width)[0] \
            if keys.flag("use_absolute_position_embeddings", True) else np.zeros((positions, width), np.float32)
        return VisionTransformer(
            patches=weights.matrix(f"{name}embeddings.patch_embeddings.projection", width, 3 * patch * patch), places=places,
            first=weights.numbers(f"{name}embeddings.cls_token", 1, 1, width)[0, 0], before=None,
            blocks=[block(number) for number in range(count)],
            after=weights.layer_norm(f"{name}layernorm", width, eps) if finished else None, patch=patch)


def sight(source: TowerSource, config: ModelConfig) -> InternVl:
    return InternVl(source, config)
