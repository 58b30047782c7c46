"""Qwen 2.5 Omni: the tower of Qwen 2.5 VL with its queries, keys and values apart, and other words around a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .qwen2_5_vl import USUAL, Qwen25Vl
from .tower_parts import Matrix
from .tower_weights import Weights

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource


class Qwen25Omni(Qwen25Vl):
    VISION = {"qwen2_5_omni_vision_encoder": USUAL}
    placeholder, written = "<|IMAGE|>", "<|vision_bos|><|IMAGE|><|vision_eos|>"

    @property
    def pace(self) -> float:
        return self.outer.number("position_id_per_seconds", 25)

    def looked(self, weights: Weights, name: str) -> list[Matrix]:
        return [weights.matrix(f"{name}.{each}", self.width, self.width) for each in "qkv"]


def sight(source: TowerSource, config: ModelConfig) -> Qwen25Omni:
    return Qwen25Omni(source, config)
