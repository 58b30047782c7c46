"""Qwen 2.5 VL: 2D rotary embeddings and window attention, with full attention in some layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .qwen_patches import QwenPatches, frames_at
from .tower_layers import FUSED_QKV, LayerShape, load_blocks, qkv_names
from .tower_ops import ACTIVATIONS, Matrix, Span, WorkerPool, gelu
from .tower_weights import Weights
from .vision_tower import MAX_LAYERS, Rows

EPS = 1e-6
USUAL = {"depth": 32, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
         "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]}
LAYER = replace(FUSED_QKV, ffn=qkv_names("mlp.{}_proj", ("up", "down", "gate")))


class Qwen25Vl(QwenPatches):
    KINDS = {"qwen2_5_vl_vision": USUAL, "qwen2_5_vl": USUAL}
    FILMS = True

    @property
    def positions_per_second(self) -> float:
        return self.tower_config.number("tokens_per_second", 4)

    def looked(self, weights: Weights, name: str) -> list[Matrix]:
        """What makes a layer's queries, keys and values."""
        return weights.matrix(f"{name}.qkv", 3 * self.width, self.width).parts(3)

    def load(self, weights: Weights) -> Rows:
        keys, width, hidden = self.tower_config, self.width, self.config.hidden_size
        inner, together = keys.integer("intermediate_size"), width * self.joined**2
        curve = keys.choice("hidden_act", ACTIVATIONS, "silu")
        depth = keys.integer("depth", high=MAX_LAYERS)
        whole = keys.layers("fullatt_block_indexes", depth)
        side = keys.integer("window_size", high=1 << 14) // self.joined // self.patch
        if side < 1:
            raise keys.fail("window_size", f"at least {self.joined * self.patch}")
        embedded = self.embedded(weights, bias=False)

        blocks = load_blocks(weights, "visual.blocks.", depth, LAYER, LayerShape(width, inner, self.heads, curve, EPS, centered=False),
                             lambda own: self.looked(weights, f"{own}attn"))
        norm = weights.rms_norm("visual.merger.ln_q", width, EPS)
        project = weights.two_layers("visual.merger.mlp.", (together, together, hidden), gelu, parts=("0", "2"))

        def rows(values: tuple[np.ndarray, np.ndarray], pool: WorkerPool) -> np.ndarray:
            patches, places = values
            unit = self.joined**2
            apart = frames_at(places)
            frames = np.repeat(np.arange(len(apart)), len(places) // unit // len(apart))
            order, windows = window_order(places[::unit] // self.joined, side, unit, frames)
            by_window = (order[:, None] * unit + np.arange(unit)).reshape(-1)
            x = embedded(patches[by_window], pool)
            rope = self.rope(places[by_window])
            pool.job.total += len(blocks)
            for number, block in enumerate(blocks):
                block.run(x, apart if number in whole else windows, pool, rope)
            made = project(norm(x).reshape(-1, together), pool)
            out = np.empty_like(made)
            out[order] = made
            return out

        return rows


def window_order(places: np.ndarray, side: int, unit: int, frames: np.ndarray) -> tuple[np.ndarray, list[Span]]:
    """Of squares of patches at rows and columns int64 [n, 2], in these frames [n]: their order window by window, and which patches, `unit`
    to a square, are in one."""
    rows, columns = (int(places[:, axis].max()) // side + 1 for axis in (0, 1))
    window = (frames * rows + places[:, 0] // side) * columns + places[:, 1] // side
    ends = (np.flatnonzero(np.diff(np.sort(window))) + 1) * unit
    borders = [0, *ends.tolist(), len(places) * unit]
    return np.argsort(window, kind="stable"), list(zip(borders, borders[1:], strict=False))


encoder = Qwen25Vl
