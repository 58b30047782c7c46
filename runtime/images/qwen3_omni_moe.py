"""Qwen 3 Omni: the tower of Qwen 3 VL, whose parts that join patches have other names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .qwen3_vl import DEEP, Qwen3Vl

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource


class Qwen3Omni(Qwen3Vl):
    VISION = {"qwen3_omni_moe_vision_encoder": DEEP}
    DEEPER, JOINING = "visual.merger_list", ("ln_q", "mlp.0", "mlp.2")


def sight(source: TowerSource, config: ModelConfig) -> Qwen3Omni:
    return Qwen3Omni(source, config)
