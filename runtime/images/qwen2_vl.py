"""Qwen 2 VL: patches turned by row and column that all see each other, by layers of CLIP's kind."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from .qwen_patches import QwenPatches, frames_at
from .tower_parts import CURVES, Block, Crew, gelu, two_layers
from .tower_sight import MOST_LAYERS, MOST_WIDTH, Rows
from .tower_weights import Weights

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

EPS = 1e-6
USUAL = {"depth": 32, "embed_dim": 1280, "hidden_act": "quick_gelu", "mlp_ratio": 4, "num_heads": 16, "patch_size": 14}


class Qwen2Vl(QwenPatches):
    """Its config calls the text part's width `hidden_size`, its own `embed_dim`."""

    VISION = {"qwen2_vl_vision": USUAL, "qwen2_vl": USUAL}
    FILMS = True

    @cached_property
    def width(self) -> int:
        return self.vision.integer("embed_dim", high=MOST_WIDTH)

    def load(self, weights: Weights) -> Rows:
        keys, width, hidden = self.vision, self.width, self.config.hidden_size
        inner, together = keys.integer("mlp_ratio", high=64) * width, width * self.joined**2
        curve = CURVES[keys.choice("hidden_act", {key: key for key in CURVES}, "quick_gelu")]
        embedded = self.embedded(weights, bias=False)

        def block(number: int) -> Block:
            own = f"visual.blocks.{number}."
            queries, keys_, values = weights.matrix(f"{own}attn.qkv", 3 * width, width).parts(3)
            return Block((weights.layer_norm(f"{own}norm1", width, EPS), weights.layer_norm(f"{own}norm2", width, EPS)),
                         queries, keys_, values, weights.matrix(f"{own}attn.proj", width, width),
                         weights.matrix(f"{own}mlp.fc1", inner, width), weights.matrix(f"{own}mlp.fc2", width, inner), curve, self.heads)

        blocks = [block(number) for number in range(keys.integer("depth", high=MOST_LAYERS))]
        norm = weights.layer_norm("visual.merger.ln_q", width, EPS)
        first, second = weights.matrix("visual.merger.mlp.0", together, together), weights.matrix("visual.merger.mlp.2", hidden, together)

        def rows(values: tuple[np.ndarray, np.ndarray], crew: Crew) -> np.ndarray:
            patches, places = values
            x, rope, spans = embedded(patches, crew), self.rope(places), frames_at(places)
            crew.work.total += len(blocks)
            for block in blocks:
                block.run(x, spans, crew, rope)
            return two_layers(norm(x).reshape(-1, together), first, second, gelu, crew)

        return rows


def sight(source: TowerSource, config: ModelConfig) -> Qwen2Vl:
    return Qwen2Vl(source, config)
