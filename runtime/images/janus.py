"""Janus Pro, understanding only: SigLIP on an image padded to a square with the mean colour, an MLP projector, one row per patch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..config_reader import Keys
from . import ROW_PLACEHOLDER
from .preprocessor import resized
from .tower_layers import SEPARATE_QKV, LayerShape, load_blocks, run_blocks
from .tower_ops import ACTIVATIONS, WorkerPool, matmul, patches_of
from .tower_weights import Weights
from .vision_tower import MAX_LAYERS, Rows, VisionTower, check_aspect_ratio

USUAL = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "image_size": 384, "patch_size": 16, "hidden_act": "gelu",
         "layer_norm_eps": 1e-6, "mlp_ratio": 4.0, "depth": 2}
LAYER = replace(SEPARATE_QKV, out="self_attn.projection_layer")


class Janus(VisionTower):
    KINDS = {"janus_vision_model": USUAL}
    PROCESSORS = ("JanusImageProcessor",)
    placeholder, placeholder_text = "<image_placeholder>", "<begin_of_image><image_placeholder><end_of_image>\n"

    FIXED: tuple[tuple[str, object], ...] = (("use_qk_norm", False), ("attention_bias", True), ("depth", 2))  # what a tower says of itself

    def configure(self, keys: Keys) -> None:
        self.demand_side(keys, 384)
        if not keys.flag("do_pad", True):
            raise keys.fail("do_pad", "true")
        for name, value in self.FIXED:
            if self.tower_config.raw.get(name, value) != value:
                raise self.tower_config.fail(name, str(value).lower())
        self.shortest, self.around = keys.integer("min_size", 14, high=self.side), [int(255 * each) for each in self.scale.mean]
        self.most_patches = (self.side // self.patch) ** 2

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        check_aspect_ratio(height, width)
        return (ROW_PLACEHOLDER,) * self.most_patches

    def values(self, picture: np.ndarray) -> np.ndarray:
        share = self.side / max(picture.shape[:2])
        high, wide = (max(round(each * share), self.shortest) for each in picture.shape[:2])
        canvas = np.empty((self.side, self.side, 3), np.uint8)
        canvas[:] = self.around
        down, across = (self.side - high) // 2, (self.side - wide) // 2
        canvas[down : down + high, across : across + wide] = resized(picture, high, wide, self.resample)
        return self.scale(canvas)

    def load(self, weights: Weights) -> Rows:
        keys, width, hidden, name = self.tower_config, self.width, self.config.hidden_size, "vision_model."
        eps, curve = keys.number("layer_norm_eps"), keys.choice("hidden_act", ACTIVATIONS, "gelu")
        patches = weights.matrix(f"{name}embeddings.patch_embedding", width, 3 * self.patch**2)
        places = weights.numbers(f"{name}embeddings.position_embedding.weight", self.most_patches, width)
        blocks = load_blocks(weights, f"{name}encoder.layers.", keys.integer("num_hidden_layers", high=MAX_LAYERS), LAYER,
                             LayerShape(width, int(width * keys.number("mlp_ratio")), self.heads, curve, eps))
        after = weights.layer_norm(f"{name}post_layernorm", width, eps)
        project = weights.two_layers("aligner.", (width, hidden, hidden), curve, True, ("fc1", "hidden_layers.0"))

        def rows(values: np.ndarray, pool: WorkerPool) -> np.ndarray:
            pool.job.total += len(blocks)
            return project(after(run_blocks(blocks, matmul(patches_of(values, self.patch), patches, pool) + places, pool)), pool)

        return rows


encoder = Janus
