"""GLM 4.1V, 4.5V and 4.6V: Qwen's patches with places learned for a square, of which four rows and columns around a patch's are weighed;
squares of patches become one row by a matrix, then by a gated FFN."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .qwen_patches import QwenPatches
from .tower_parts import CURVES, Block, Crew, gelu, product
from .tower_sight import MOST_LAYERS, Rows, demand_shape
from .tower_weights import Weights

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

NORM_EPS, SHARPNESS = 1e-5, -0.75  # of the cubic that weighs places
USUAL = {"depth": 24, "hidden_size": 1536, "hidden_act": "silu", "num_heads": 12, "image_size": 336, "patch_size": 14,
         "rms_norm_eps": 1e-5, "out_hidden_size": 4096, "intermediate_size": 13_696, "attention_bias": False}


class Glm4v(QwenPatches):
    """A picture's points are counted as often as it has frames."""

    VISION = {kind + end: USUAL for kind in ("glm4v", "glm4v_moe", "glm46v") for end in ("_vision", "")}
    PROCESSORS = ("Glm4vImageProcessor", "Glm46VImageProcessor")
    SIZE = (112 * 112, 28 * 28 * 15_000)
    placeholder = "<|image|>"

    def __init__(self, source: TowerSource, config: ModelConfig) -> None:
        super().__init__(source, config)
        self.least, self.most = self.least / self.frames, self.most / self.frames

    def sized(self, height: int, width: int) -> tuple[int, int]:
        demand_shape(height, width)
        unit = self.patch * self.joined
        if min(height, width) < unit:
            grow = max(unit / height, unit / width)
            height, width = int(height * grow), int(width * grow)
        return super().sized(height, width)

    def load(self, weights: Weights) -> Rows:
        keys, width, hidden, unit = self.vision, self.width, self.config.hidden_size, self.joined**2
        eps, inner, through = keys.number("rms_norm_eps"), keys.integer("out_hidden_size"), keys.integer("intermediate_size")
        if inner != hidden:
            raise keys.fail("out_hidden_size", f"the {hidden} of the text part")
        curve = CURVES[keys.choice("hidden_act", {key: key for key in CURVES}, "silu")]
        embedding, side = self.embedding(weights, bias=True), self.side // self.patch
        table = weights.numbers("visual.embeddings.position_embedding.weight", side * side, width).reshape(side, side, width)

        def block(number: int) -> Block:
            own = f"visual.blocks.{number}."
            queries, keys_, values = weights.matrix(f"{own}attn.qkv", 3 * width, width, keys.flag("attention_bias")).parts(3)
            return Block((weights.rms_norm(f"{own}norm1", width, eps), weights.rms_norm(f"{own}norm2", width, eps)),
                         queries, keys_, values, weights.matrix(f"{own}attn.proj", width, width, bias=False),
                         weights.matrix(f"{own}mlp.up_proj", inner, width, bias=False),
                         weights.matrix(f"{own}mlp.down_proj", width, inner, bias=False), curve, self.heads,
                         gate=weights.matrix(f"{own}mlp.gate_proj", inner, width, bias=False))

        blocks = [block(number) for number in range(keys.integer("depth", high=MOST_LAYERS))]
        before, after = (weights.rms_norm(f"visual.post_{name}layernorm", width, eps) for name in ("conv_", ""))
        joining, project = weights.matrix("visual.downsample", hidden, width * unit), weights.matrix("visual.merger.proj", hidden, hidden)
        norm = weights.layer_norm("visual.merger.post_projection_norm", hidden, NORM_EPS)
        gate, up = (weights.matrix(f"visual.merger.{name}_proj", through, hidden, bias=False) for name in ("gate", "up"))
        down = weights.matrix("visual.merger.down_proj", hidden, through, bias=False)

        def rows(values: tuple[np.ndarray, np.ndarray], crew: Crew) -> np.ndarray:
            patches, places = values
            x = before(product(patches, embedding, crew))
            x += weighed(table, places)
            rope = self.rope(places)
            crew.work.total += len(blocks)
            for block in blocks:
                block.run(x, [(0, len(x))], crew, rope)
            squares = after(x).reshape(-1, unit, width).swapaxes(1, 2).reshape(-1, width * unit)
            y = gelu(norm(product(product(squares, joining, crew), project, crew)))
            return product(curve(product(y, gate, crew)) * product(y, up, crew), down, crew)

        return rows


def weighed(table: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Places learned for a square [side, side, D] -> [n, D] for patches at rows and columns int64 [n, 2] of a picture, whose borders are
    those of the square: by cubic convolution (Keys 1981), beyond a border by what lies on it."""
    side, taps = len(table), []
    for axis in (0, 1):
        count = np.float32(places[:, axis].max() + 1)
        at = ((places[:, axis].astype(np.float32) + np.float32(0.5)) / count) * np.float32(side) - np.float32(0.5)
        low = np.floor(at)
        off = (at - low)[:, None]
        far = [SHARPNESS * (d**3 - 5 * d**2 + 8 * d - 4) for d in (off + 1, 2 - off)]
        near = [(SHARPNESS + 2) * d**3 - (SHARPNESS + 3) * d**2 + 1 for d in (off, 1 - off)]
        taps.append([(np.clip(low.astype(np.int64) + step, 0, side - 1), weight)
                     for step, weight in ((-1, far[0]), (0, near[0]), (1, near[1]), (2, far[1]))])
    return sum(down * sum(across * table[row, column] for column, across in taps[1]) for row, down in taps[0]).astype(np.float32)


def sight(source: TowerSource, config: ModelConfig) -> Glm4v:
    return Glm4v(source, config)
