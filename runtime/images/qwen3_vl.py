"""Qwen 3 VL and Qwen 3.5: patches with places learned for a square, read between them where a picture has another number, and turned by
row and column. Of Qwen 3 VL what early layers of the tower made goes to early layers of the text part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .qwen_patches import QwenPatches, frames_at
from .tower_parts import CURVES, Block, Crew, gelu, two_layers
from .tower_sight import MOST_LAYERS, Rows
from .tower_weights import Weights

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource
    from .video_file import Frame

EPS = 1e-6
Taps = tuple[np.ndarray, np.ndarray, np.ndarray]  # of n places along a side the two that lie next, int64 [n], and the second's share [n, 1]
USUAL = {"depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304, "num_heads": 16,
         "patch_size": 16, "num_position_embeddings": 2304}
FILM = 4096, 25_165_824  # points of all frames, where nothing says it
DEEP = {**USUAL, "deepstack_visual_indexes": [8, 16, 24]}


class Qwen3Vl(QwenPatches):
    VISION = {"qwen3_vl_vision": DEEP, "qwen3_vl": DEEP, "qwen3_vl_moe_vision": DEEP, "qwen3_vl_moe": DEEP, "qwen3_5_vision": USUAL,
              "qwen3_5": USUAL, "qwen3_5_moe_vision": USUAL, "qwen3_5_moe": USUAL}
    DEEPER, JOINING = "visual.deepstack_merger_list", ("norm", "linear_fc1", "linear_fc2")  # what joins patches early, and its parts
    FILMS = True

    def filmed(self, frames: Sequence[Frame]) -> list[tuple[str, np.ndarray, float]]:
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
        keys, width, hidden = self.vision, self.width, self.config.hidden_size
        inner, together = keys.integer("intermediate_size"), width * self.joined**2
        curve = CURVES[keys.choice("hidden_act", {key: key for key in CURVES}, "gelu_pytorch_tanh")]
        depth = keys.integer("depth", high=MOST_LAYERS)
        numbers = sorted(keys.layers("deepstack_visual_indexes", depth))
        side = int(keys.integer("num_position_embeddings", high=1 << 20) ** 0.5)
        embedded = self.embedded(weights, bias=True)
        table = weights.numbers("visual.pos_embed.weight", side * side, width)

        def block(number: int) -> Block:
            own = f"visual.blocks.{number}."
            queries, keys_, values = weights.matrix(f"{own}attn.qkv", 3 * width, width).parts(3)
            return Block((weights.layer_norm(f"{own}norm1", width, EPS), weights.layer_norm(f"{own}norm2", width, EPS)),
                         queries, keys_, values, weights.matrix(f"{own}attn.proj", width, width),
                         weights.matrix(f"{own}mlp.linear_fc1", inner, width), weights.matrix(f"{own}mlp.linear_fc2", width, inner),
                         curve, self.heads)

        def merger(name: str, after: bool) -> Rows:
            own, one, two = (f"{name}.{part}" for part in self.JOINING)
            norm = weights.layer_norm(own, together if after else width, EPS)
            first, second = weights.matrix(one, together, together), weights.matrix(two, hidden, together)

            def merged(x: np.ndarray, crew: Crew) -> np.ndarray:
                normed = norm(x.reshape(-1, together)) if after else norm(x).reshape(-1, together)
                return two_layers(normed, first, second, gelu, crew)

            return merged

        blocks, last = [block(number) for number in range(depth)], merger("visual.merger", False)
        deep = {number: merger(f"{self.DEEPER}.{index}", True) for index, number in enumerate(numbers)}

        def rows(values: tuple[np.ndarray, np.ndarray], crew: Crew) -> np.ndarray:
            patches, places = values
            x = embedded(patches, crew)
            x += between(table.reshape(side, side, width), places)
            rope, spans, found = self.rope(places), frames_at(places), []
            crew.work.total += len(blocks)
            for number, block in enumerate(blocks):
                block.run(x, spans, crew, rope)
                if number in deep:
                    found.append(deep[number](x, crew))
            made = last(x, crew)
            return np.stack([made, *found]) if found else made

        return rows


def between(table: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Places learned for a square [side, side, D] -> [n, D] for patches at rows and columns int64 [n, 2] of a picture: its corners are
    those of the square, and what lies between is read in proportion."""
    side, taps = len(table), []
    for axis in (0, 1):
        at = np.linspace(0, side - 1, int(places[:, axis].max()) + 1, dtype=np.float32)[places[:, axis]]
        low = at.astype(np.int64)
        taps.append((low, np.minimum(low + 1, side - 1), (at - low.astype(np.float32))[:, None]))
    return mixed(table, *taps)


def mixed(table: np.ndarray, rows: Taps, columns: Taps) -> np.ndarray:
    """Of [side, side, D] -> [n, D], each of four."""
    (top, bottom, down), (left, right, across) = rows, columns
    return (1 - down) * ((1 - across) * table[top, left] + across * table[top, right]) \
        + down * ((1 - across) * table[bottom, left] + across * table[bottom, right])


def sight(source: TowerSource, config: ModelConfig) -> Qwen3Vl:
    return Qwen3Vl(source, config)
