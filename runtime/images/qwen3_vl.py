"""Qwen 3 VL and Qwen 3.5: interpolated position embeddings and 2D rotary embeddings. In Qwen 3 VL, outputs of early tower layers are added
to early text layers (DeepStack)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from .position_embeddings import bilinear_aligned
from .qwen_patches import QwenPatches, frames_at
from .tower_layers import FUSED_QKV, LayerShape, load_blocks
from .tower_ops import ACTIVATIONS, WorkerPool, gelu
from .tower_weights import Weights
from .vision_tower import MAX_LAYERS, Rows

if TYPE_CHECKING:
    from .video_file import Frame

EPS = 1e-6
USUAL = {"depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304, "num_heads": 16,
         "patch_size": 16, "num_position_embeddings": 2304}
LAYER = replace(FUSED_QKV, ffn=("mlp.linear_fc1", "mlp.linear_fc2"))
FILM = 4096, 25_165_824  # points of all frames, where nothing says it
DEEP = {**USUAL, "deepstack_visual_indexes": [8, 16, 24]}


class Qwen3Vl(QwenPatches):
    KINDS = {"qwen3_vl_vision": DEEP, "qwen3_vl": DEEP, "qwen3_vl_moe_vision": DEEP, "qwen3_vl_moe": DEEP, "qwen3_5_vision": USUAL,
              "qwen3_5": USUAL, "qwen3_5_moe_vision": USUAL, "qwen3_5_moe": USUAL}
    DEEPER, JOINING = "visual.deepstack_merger_list", ("norm", "linear_fc1", "linear_fc2")  # what joins patches early, and its parts
    FILMS = True

    def video_inputs(self, frames: Sequence[Frame]) -> list[tuple[str, np.ndarray, float]]:
        """What is seen as one is a film of its own behind the second in its middle."""
        whole, found = self.film_of(frames), []
        for begin in range(0, len(whole), self.frames):
            ends = frames[begin], frames[min(begin + self.frames, len(frames)) - 1]
            middle = sum(each.second for each in ends) / 2
            found.append((f"<{middle:.1f} seconds>", whole[begin : begin + self.frames], 0.0))
        return found

    def film_sized(self, count: int, height: int, width: int) -> tuple[int, int]:
        """All frames together are bounded."""
        least, most = self.film_bounds(*FILM)
        unit = self.patch * self.joined
        if min(height, width) < unit:
            grow = max(unit / height, unit / width)
            height, width = int(height * grow), int(width * grow)
        return self.fitted(height, width, least, most, count)

    def load(self, weights: Weights) -> Rows:
        keys, width, hidden = self.tower_config, self.width, self.config.hidden_size
        inner, together = keys.integer("intermediate_size"), width * self.joined**2
        curve = keys.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh")
        depth = keys.integer("depth", high=MAX_LAYERS)
        numbers = sorted(keys.layers("deepstack_visual_indexes", depth))
        side = int(keys.integer("num_position_embeddings", high=1 << 20) ** 0.5)
        embedded = self.embedded(weights, bias=True)
        table = weights.numbers("visual.pos_embed.weight", side * side, width)

        def merger(name: str, after: bool) -> Rows:
            own, *parts = self.JOINING
            norm = weights.layer_norm(f"{name}.{own}", together if after else width, EPS)
            project = weights.two_layers(f"{name}.", (together, together, hidden), gelu, parts=tuple(parts))
            return lambda x, pool: project(norm(x.reshape(-1, together) if after else x).reshape(-1, together), pool)

        blocks = load_blocks(weights, "visual.blocks.", depth, LAYER, LayerShape(width, inner, self.heads, curve, EPS))
        last = merger("visual.merger", False)
        deep = {number: merger(f"{self.DEEPER}.{index}", True) for index, number in enumerate(numbers)}

        def rows(values: tuple[np.ndarray, np.ndarray], pool: WorkerPool) -> np.ndarray:
            patches, places = values
            x = embedded(patches, pool)
            x += bilinear_aligned(table.reshape(side, side, width), places)
            rope, spans, found = self.rope(places), frames_at(places), []
            pool.job.total += len(blocks)
            for number, block in enumerate(blocks):
                block.run(x, spans, pool, rope)
                if number in deep:
                    found.append(deep[number](x, pool))
            made = last(x, pool)
            return np.stack([made, *found]) if found else made

        return rows


encoder = Qwen3Vl
