"""Cohere Compass (North Micro Vision): the tower of Qwen 3 VL with words of its own around a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .qwen3_vl import DEEP, Qwen3Vl

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource


class CohereCompass(Qwen3Vl):
    VISION = {"cohere_compass_vision": DEEP, "cohere_compass": DEEP}
    PROCESSORS = ("CohereCompassImageProcessor", *Qwen3Vl.PROCESSORS)
    placeholder, written = "<|IMAGE_PAD|>", "<|VISION_START|><|IMAGE_PAD|><|VISION_END|>"


def sight(source: TowerSource, config: ModelConfig) -> CohereCompass:
    return CohereCompass(source, config)
