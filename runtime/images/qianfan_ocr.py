"""Qianfan-OCR: InternVL under its original tensor names, with a fused QKV matrix in the tower."""

from __future__ import annotations

from ..config_reader import Keys
from .internvl import USUAL, InternVl
from .tower_layers import FUSED_QKV


class QianfanOcr(InternVl):
    KINDS = {"qianfan_ocr_vision": USUAL}
    NAMES = ("vision_model.", "embeddings.patch_embedding", "embeddings.position_embedding", "embeddings.class_embedding",
             "encoder.layers.", "ls")
    LAYER, PROJECTOR = FUSED_QKV, ("mlp1.0", "mlp1.", ("1", "3"))

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        self.tower_config.choice("norm_type", {"layer_norm": "layer_norm"}, "layer_norm")
        for name, value in (("use_qk_norm", False), ("use_absolute_position_embeddings", True), ("attention_bias", True)):
            if self.tower_config.flag(name, value) is not value:
                raise self.tower_config.fail(name, str(value).lower())
        self.placeholder = self.around.text("image_placeholder_token", "<image>")


encoder = QianfanOcr
