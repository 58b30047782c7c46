"""PaddleOCR-VL: Qwen's preprocessing and SigLIP's layers, with interpolated position embeddings and 2D rotary embeddings; patches are
merged."""

from __future__ import annotations

import numpy as np

from .position_embeddings import bilinear
from .qwen_patches import QwenPatches
from .tower_layers import run_blocks
from .tower_ops import WorkerPool, gelu, matmul
from .tower_weights import Weights
from .vision_tower import Rows, check_aspect_ratio
from .vision_transformer import SIGLIP, load_transformer

NORM_EPS = 1e-5
USUAL = {**SIGLIP, "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 384,
         "patch_size": 14, "spatial_merge_size": 2}


class PaddleOcrVl(QwenPatches):
    KINDS = {"paddleocr_vl_vision": USUAL, "paddleocr_vl": USUAL}
    PROCESSORS = ("PaddleOCRVLImageProcessor",)
    SIZE = (384 * 384, 1536 * 1536)
    HEADS = "num_attention_heads"
    placeholder = "<|IMAGE_PLACEHOLDER|>"
    placeholder_text = "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"

    def sized(self, height: int, width: int) -> tuple[int, int]:
        unit = self.patch * self.joined
        check_aspect_ratio(height, width)
        if height < unit:
            height, width = unit, round(width * unit / height)
        if width < unit:
            height, width = round(height * unit / width), unit
        return super().sized(height, width)

    def load(self, weights: Weights) -> Rows:
        tower = load_transformer(weights, self, "visual.vision_model.", finished=True)
        side, together, hidden = self.side // self.patch, self.width * self.joined**2, self.config.hidden_size
        table = tower.places.reshape(side, side, self.width)
        norm = weights.layer_norm("projector.pre_norm", self.width, NORM_EPS)
        project = weights.two_layers("projector.", (together, together, hidden), gelu)

        def rows(values: tuple[np.ndarray, np.ndarray], pool: WorkerPool) -> np.ndarray:
            patches, places = values
            x = matmul(patches, tower.patches, pool)
            x += bilinear(table, places)
            pool.job.total += len(tower.blocks)
            x = run_blocks(tower.blocks, x, pool, self.rope(places))
            return project(norm(tower.after(x)).reshape(-1, together), pool)

        return rows


encoder = PaddleOcrVl
