"""Qianfan-OCR: InternVL under the names that it had first, in which queries, keys and values of the tower are one matrix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .internvl import PROJECTOR_EPS, USUAL, InternVl
from .tower_parts import CURVES, Block, Matrix, Norm
from .tower_weights import Weights
from .vision_transformer import VisionTransformer, layer_count

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource

TOWER = "vision_model."


class QianfanOcr(InternVl):
    VISION = {"qianfan_ocr_vision": USUAL}

    def __init__(self, source: TowerSource, config: ModelConfig) -> None:
        super().__init__(source, config)
        keys = self.vision
        keys.choice("norm_type", {"layer_norm": "layer_norm"}, "layer_norm")
        for name, value in (("use_qk_norm", False), ("use_absolute_position_embeddings", True), ("attention_bias", True)):
            if keys.flag(name, value) is not value:
                raise keys.fail(name, str(value).lower())
        self.placeholder = self.around.text("image_placeholder_token", "<image>")

    def projector_of(self, weights: Weights, together: int) -> tuple[Norm, Matrix, Matrix]:
        hidden = self.config.hidden_size
        return (weights.layer_norm("mlp1.0", together, PROJECTOR_EPS), weights.matrix("mlp1.1", hidden, together),
                weights.matrix("mlp1.3", hidden, hidden))

    def tower_of(self, weights: Weights) -> VisionTransformer:
        keys, width, patch = self.vision, self.width, self.patch
        inner, eps, count = keys.integer("intermediate_size"), keys.number("layer_norm_eps"), layer_count(self)
        curve = CURVES[keys.choice("hidden_act", {key: key for key in CURVES}, "gelu")]

        def block(number: int) -> Block:
            own = f"{TOWER}encoder.layers.{number}."
            return Block((weights.layer_norm(f"{own}norm1", width, eps), weights.layer_norm(f"{own}norm2", width, eps)),
                         *weights.matrix(f"{own}attn.qkv", 3 * width, width).parts(3), weights.matrix(f"{own}attn.proj", width, width),
                         weights.matrix(f"{own}mlp.fc1", inner, width), weights.matrix(f"{own}mlp.fc2", width, inner), curve, self.heads,
                         scales=(weights.numbers(f"{own}ls1", width), weights.numbers(f"{own}ls2", width)))

        name = f"{TOWER}embeddings."
        finished = not keys.flag("use_mean_pooling", True) and count in self.wanted
        return VisionTransformer(
            patches=weights.matrix(f"{name}patch_embedding", width, 3 * patch * patch),
            places=weights.numbers(f"{name}position_embedding", 1, self.across**2 + 1, width)[0],
            first=weights.numbers(f"{name}class_embedding", 1, 1, width)[0, 0], before=None,
            blocks=[block(number) for number in range(count)],
            after=weights.layer_norm(f"{TOWER}layernorm", width, eps) if finished else None, patch=patch)


def sight(source: TowerSource, config: ModelConfig) -> QianfanOcr:
    return QianfanOcr(source, config)
