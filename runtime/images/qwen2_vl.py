"""Qwen 2 VL: 2D rotary embeddings and full attention, with CLIP-like layers."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from .qwen_patches import QwenPatches, frames_at
from .tower_layers import FUSED_QKV, LayerShape, load_blocks, run_blocks
from .tower_ops import ACTIVATIONS, WorkerPool, gelu
from .tower_weights import Weights
from .vision_tower import MAX_LAYERS, MAX_WIDTH, Rows

EPS = 1e-6
USUAL = {"depth": 32, "embed_dim": 1280, "hidden_act": "quick_gelu", "mlp_ratio": 4, "num_heads": 16, "patch_size": 14}


class Qwen2Vl(QwenPatches):
    """Its config calls the text part's width `hidden_size`, its own `embed_dim`."""

    KINDS = {"qwen2_vl_vision": USUAL, "qwen2_vl": USUAL}
    FILMS = True

    @cached_property
    def width(self) -> int:
        return self.tower_config.integer("embed_dim", high=MAX_WIDTH)

    def load(self, weights: Weights) -> Rows:
        keys, width, hidden = self.tower_config, self.width, self.config.hidden_size
        inner, together = keys.integer("mlp_ratio", high=64) * width, width * self.joined**2
        curve = keys.choice("hidden_act", ACTIVATIONS, "quick_gelu")
        embedded = self.embedded(weights, bias=False)

        blocks = load_blocks(weights, "visual.blocks.", keys.integer("depth", high=MAX_LAYERS), FUSED_QKV,
                             LayerShape(width, inner, self.heads, curve, EPS))
        norm = weights.layer_norm("visual.merger.ln_q", width, EPS)
        project = weights.two_layers("visual.merger.mlp.", (together, together, hidden), gelu, parts=("0", "2"))

        def rows(values: tuple[np.ndarray, np.ndarray], pool: WorkerPool) -> np.ndarray:
            patches, places = values
            pool.job.total += len(blocks)
            x = run_blocks(blocks, embedded(patches, pool), pool, self.rope(places), frames_at(places))
            return project(norm(x).reshape(-1, together), pool)

        return rows


encoder = Qwen2Vl
