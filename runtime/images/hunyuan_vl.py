"""HunyuanVL and HunyuanOCR: native resolution, interpolated position embeddings, merged patches. A learned row ends each line, and two more
surround the image."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..config_reader import Keys
from . import ROW_PLACEHOLDER
from .position_embeddings import bilinear, row_major
from .preprocessor import BICUBIC, resized
from .qwen_patches import QwenPatches
from .tower_layers import SEPARATE_QKV, LayerShape, load_blocks, run_blocks
from .tower_ops import ACTIVATIONS, WorkerPool, matmul, patches_of
from .tower_weights import Weights
from .vision_tower import MAX_LAYERS, Rows

USUAL = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "patch_size": 16,
         "max_image_size": 2048, "spatial_merge_size": 2, "temporal_patch_size": 1, "rms_norm_eps": 1e-5, "hidden_act": "gelu",
         "interpolate_mode": "bilinear"}
LAYER = replace(SEPARATE_QKV, out="self_attn.o_proj")


class HunyuanVl(QwenPatches):
    KINDS = {"hunyuan_vl_vision": USUAL, "hunyuan_vl": USUAL}
    PROCESSORS = ("HunYuanVLImageProcessor",)
    SIZE = (512 * 512, 2048 * 2048)
    placeholder = "<｜hy_place▁holder▁no▁102｜>"
    placeholder_text = "<｜hy_place▁holder▁no▁100｜><｜hy_place▁holder▁no▁102｜><｜hy_place▁holder▁no▁101｜>"
    HEADS, TURNED = "num_attention_heads", 1
    num_border_rows = 1

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        self.resample = BICUBIC  # whatever the files say, which no processor heeded
        self.tower_config.choice("interpolate_mode", {"bilinear": "bilinear"}, "bilinear")
        if self.frames != 1:
            raise self.tower_config.fail("temporal_patch_size", "1")

    def squares(self, height: int, width: int) -> tuple[int, int]:
        """Lines, and places of one with its end."""
        lines, columns = super().squares(height, width)
        return lines, columns + 1

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        return super().tokens(height, width) + 2 * self.num_border_rows * (ROW_PLACEHOLDER,)

    def values(self, picture: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
        """Patches float32 [n, 3 * patch * patch] line by line, and how many lines and columns there are of them."""
        high, wide = self.sized(*picture.shape[:2])
        read_preprocessor = self.scale(resized(picture, high, wide, self.resample))
        return patches_of(read_preprocessor, self.patch), (high // self.patch, wide // self.patch)

    def load(self, weights: Weights) -> Rows:
        keys, width, hidden, side = self.tower_config, self.width, self.config.hidden_size, self.joined
        inner, eps = keys.integer("intermediate_size"), keys.number("rms_norm_eps")
        curve = keys.choice("hidden_act", ACTIVATIONS, "gelu")
        edge, name = keys.integer("max_image_size", high=1 << 14) // self.patch, "vision_tower."
        embedding = weights.matrix(f"{name}embeddings.patch_embedding", width, 3 * self.patch**2, bias=True)
        before = keys.integer("places_before", 1, low=0, high=1)  # of a row that there is no longer, which files leave out
        table = weights.numbers(f"{name}embeddings.position_embedding.weight", edge**2 + before, width)[before:].reshape(edge, edge, width)

        blocks = load_blocks(weights, f"{name}layers.", keys.integer("num_hidden_layers", high=MAX_LAYERS), LAYER,
                             LayerShape(width, inner, self.heads, curve, eps, bias=(True, True)))
        own = f"{name}patch_merger."
        before, after = weights.rms_norm(f"{own}before_rms", width, eps), weights.rms_norm(f"{own}after_rms", hidden, eps)
        joining = weights.two_layers(own, (width * side**2, 2 * width, 4 * width), curve, True, ("proj_conv", "proj_out"))
        project = weights.matrix(f"{own}mlp", hidden, 4 * width, bias=True)
        line_end = weights.numbers(f"{own}image_newline", 4 * width)
        begin, end = (weights.numbers(f"{own}image_{which}", hidden)[None] for which in ("begin", "end"))

        def rows(values: tuple[np.ndarray, tuple[int, int]], pool: WorkerPool) -> np.ndarray:
            patches, (lines, columns) = values
            x = matmul(patches, embedding, pool)
            x += bilinear(table, row_major(lines, columns))
            pool.job.total += len(blocks)
            squares = before(run_blocks(blocks, x, pool)).reshape(lines // side, side, columns // side, side, width)
            squares = squares.transpose(0, 2, 4, 1, 3)
            made = joining(squares.reshape(len(x) // side**2, -1), pool).reshape(lines // side, -1, 4 * width)
            ended = np.concatenate([made, np.broadcast_to(line_end, (len(made), 1, 4 * width))], axis=1)
            return after(np.concatenate([begin, matmul(ended.reshape(-1, 4 * width), project, pool), end]))

        return rows


encoder = HunyuanVl
