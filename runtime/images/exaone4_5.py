"""EXAONE 4.5: Qwen 2.5 VL's tower with grouped-query attention. The text model uses plain RoPE, also for image rows."""

from __future__ import annotations

import numpy as np

from .qwen2_5_vl import USUAL, Qwen25Vl
from .tower_ops import Matrix
from .tower_weights import Weights

GROUPED = {**USUAL, "num_key_value_heads": 8}


class Exaone45(Qwen25Vl):
    KINDS = {"exaone4_5_vision": GROUPED, "exaone4_5": GROUPED}
    BY_PLACE = False
    placeholder, placeholder_text = "<|image_pad|>", "<vision><|image_pad|></vision>"

    @property
    def positions_per_second(self) -> None:
        return None

    def looked(self, weights: Weights, name: str) -> list[Matrix]:
        groups = self.tower_config.integer("num_key_value_heads", high=1024)
        if self.heads % groups:
            raise self.tower_config.fail("num_key_value_heads", f"a part of {self.heads} heads")
        apart = groups * (self.width // self.heads)
        joined = weights.matrix(f"{name}.qkv", self.width + 2 * apart, self.width, bias=True)
        ends = [self.width, self.width + apart]
        queries, *others = (Matrix(*each) for each in zip(np.split(joined.stored, ends), np.split(joined.bias, ends), strict=True))
        return [queries, *(each.shared(groups, self.heads) for each in others)]


encoder = Exaone45
