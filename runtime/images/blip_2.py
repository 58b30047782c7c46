"""BLIP-2: EVA ViT on a square image, then a Q-Former whose query outputs are the image's rows, before the BOS token."""

from __future__ import annotations

import numpy as np

from ..audio.q_former import QFormerSizes, load_q_former
from ..config_reader import Keys
from . import ROW_PLACEHOLDER
from .preprocessor import resized
from .tower_layers import LayerNames, LayerShape, load_blocks
from .tower_ops import ACTIVATIONS, WorkerPool, matmul
from .tower_weights import Weights
from .vision_tower import Rows, VisionTower
from .vision_transformer import VisionTransformer, layer_count

NAME = "vision_model."
USUAL = {"hidden_size": 1408, "intermediate_size": 6144, "num_hidden_layers": 39, "num_attention_heads": 16, "image_size": 224,
         "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6, "qkv_bias": True}
LAYER = LayerNames(("layer_norm1", "layer_norm2"), ("self_attn.qkv",), "self_attn.projection", ("mlp.fc1", "mlp.fc2"))


class Blip2(VisionTower):
    KINDS = {"blip_2_vision_model": USUAL}
    PROCESSORS = ("BlipImageProcessor",)

    def configure(self, keys: Keys) -> None:
        self.demand_side(keys, 384)
        self.count = self.root_config.integer("num_query_tokens", 32, high=1 << 12)
        asks = {**(self.root_config.section("qformer_config") or {}), "encoder_hidden_size": self.width}
        self.asks = QFormerSizes.read(Keys(asks, "config.json: qformer_config"))
        self.most_patches = (self.side // self.patch) ** 2 + 1

    def tokens(self, height: int, width: int) -> tuple[int, ...]:
        return (ROW_PLACEHOLDER,) * self.count

    def values(self, picture: np.ndarray) -> np.ndarray:
        return self.scale(resized(picture, self.side, self.side, self.resample))

    def load(self, weights: Weights) -> Rows:
        keys, width, last = self.tower_config, self.width, layer_count(self)
        eps, shape = keys.number("layer_norm_eps"), (1, self.most_patches, width)
        tower = VisionTransformer(
            patches=weights.matrix(f"{NAME}embeddings.patch_embedding", width, 3 * self.patch**2, bias=True),
            places=weights.numbers(f"{NAME}embeddings.position_embedding", *shape)[0],
            first=weights.numbers(f"{NAME}embeddings.class_embedding", 1, 1, width)[0, 0], before=None,
            blocks=load_blocks(weights, f"{NAME}encoder.layers.", last, LAYER, LayerShape(
                width, keys.integer("intermediate_size"), self.heads, keys.choice("hidden_act", ACTIVATIONS, "gelu"), eps)),
            after=weights.layer_norm(f"{NAME}post_layernorm", width, eps), patch=self.patch)
        former = load_q_former(weights, self.asks, "", self.count, "query_tokens")
        project = weights.matrix("language_projection", self.config.hidden_size, self.asks.width, bias=True)

        def rows(values: np.ndarray, pool: WorkerPool) -> np.ndarray:
            return matmul(former(tower.layers([values], [last], pool), pool)[0], project, pool)

        return rows


encoder = Blip2
