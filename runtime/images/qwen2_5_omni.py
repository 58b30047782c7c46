"""Qwen 2.5 Omni: Qwen 2.5 VL's tower with separate query, key and value projections, and other special tokens."""

from __future__ import annotations

from .qwen2_5_vl import USUAL, Qwen25Vl
from .tower_ops import Matrix
from .tower_weights import Weights


class Qwen25Omni(Qwen25Vl):
    KINDS = {"qwen2_5_omni_vision_encoder": USUAL}
    placeholder, placeholder_text = "<|IMAGE|>", "<|vision_bos|><|IMAGE|><|vision_eos|>"

    @property
    def positions_per_second(self) -> float:
        return self.root_config.number("position_id_per_seconds", 25)

    def looked(self, weights: Weights, name: str) -> list[Matrix]:
        return [weights.matrix(f"{name}.{each}", self.width, self.width) for each in "qkv"]


encoder = Qwen25Omni
