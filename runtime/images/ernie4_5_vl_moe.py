"""ERNIE 4.5 VL: Qwen's preprocessing, a ViT with CLIP-like layers; patches are merged spatially, then over a pair of frames. A still image
fills both frames."""

from __future__ import annotations

import numpy as np

from .qwen_patches import THETA, QwenPatches
from .tower_layers import FUSED_QKV, LayerShape, load_blocks, run_blocks
from .tower_ops import ACTIVATIONS, Matrix, Norm, WorkerPool, gelu, matmul, mlp
from .tower_weights import Weights
from .vision_tower import MAX_LAYERS, MAX_WIDTH, Rows

PUBLISHED = "DFNRope_vision_transformer"  # what the tower was called first, which states its FFN as so many times its width
NAME, RESAMPLER = "vision_model.", "resampler_model."
USUAL = {"depth": 32, "hidden_act": "quick_gelu", "hidden_size": 1280, "intermediate_size": 5120, "num_heads": 16, "patch_size": 14,
         "rms_norm_eps": 1e-6, "spatial_merge_size": 2, "temporal_merge_size": 2}


class Ernie45Vl(QwenPatches):
    KINDS = {"ernie4_5_vl_moe_vision": USUAL, PUBLISHED: USUAL}
    PROCESSORS = ("Ernie4_5_VLMoeImageProcessor", "Ernie4_5_VL_MoeImageProcessor", "Ernie4_5_VLImageProcessor")
    SIZE = (56 * 56, 28 * 28 * 6177)
    placeholder = "<|IMAGE_PLACEHOLDER|>"
    placeholder_text = "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"

    def load(self, weights: Weights) -> Rows:
        keys, width, hidden = self.tower_config, self.width, self.config.hidden_size
        together = width * self.joined**2
        stated = keys.integer("intermediate_size", high=MAX_WIDTH)
        inner = keys.integer("mlp_ratio", 4, high=64) * width if self.tower == PUBLISHED else stated
        frames, eps = keys.integer("temporal_merge_size", high=16), keys.number("rms_norm_eps")
        curve = keys.choice("hidden_act", ACTIVATIONS, "quick_gelu")
        embedding = weights.matrix(f"{NAME}patch_embed.proj", width, 3 * self.patch**2, bias=False)

        def joining(name: str, depth: int) -> tuple[Matrix, Matrix, Norm]:
            own = f"{RESAMPLER}{name}."
            return (weights.matrix(f"{own}0", together, depth), weights.matrix(f"{own}2", together, together),
                    weights.layer_norm(f"{own}3", together, eps))

        blocks = load_blocks(weights, f"{NAME}blocks.", keys.integer("depth", high=MAX_LAYERS), FUSED_QKV,
                             LayerShape(width, inner, self.heads, curve, eps))
        norm = weights.layer_norm(f"{NAME}ln", width, eps)
        spatial, (first, *behind) = joining("spatial_linear", together), joining("temporal_linear", frames * together)
        # Of frames that are alike, weights add.
        once = Matrix(np.ascontiguousarray(first.to_float32().weight.T.reshape(together, frames, together).sum(1)), first.bias)
        last, after = weights.matrix(f"{RESAMPLER}mlp", hidden, together), weights.rms_norm(f"{RESAMPLER}after_norm", hidden,
                                                                                            self.config.norm_eps)

        def rows(values: tuple[np.ndarray, np.ndarray], pool: WorkerPool) -> np.ndarray:
            patches, places = values
            pool.job.total += len(blocks)
            x = norm(run_blocks(blocks, matmul(patches, embedding, pool), pool, self.rope(places, self.theta(THETA)))).reshape(-1, together)
            for into, out, normed in (spatial, (once, *behind)):
                x = normed(mlp(x, into, out, gelu, pool))
            return after(matmul(x, last, pool))

        return rows


encoder = Ernie45Vl
