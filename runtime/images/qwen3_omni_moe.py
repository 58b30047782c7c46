"""Qwen 3 Omni: Qwen 3 VL's tower with other names for the patch mergers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .qwen3_vl import DEEP, Qwen3Vl
from .qwen_patches import QwenPatches

if TYPE_CHECKING:
    from ..config import ModelConfig
    from .tower_source import TowerSource
    from .video_file import Frame


class Qwen3Omni(Qwen3Vl):
    KINDS = {"qwen3_omni_moe_vision_encoder": DEEP}
    DEEPER, JOINING = "visual.merger_list", ("ln_q", "mlp.0", "mlp.2")

    def video_inputs(self, frames: Sequence[Frame]) -> list[tuple[str, np.ndarray, float]]:
        return QwenPatches.video_inputs(self, frames)

    def film_sized(self, count: int, height: int, width: int) -> tuple[int, int]:
        return QwenPatches.film_sized(self, count, height, width)

    @property
    def positions_per_second(self) -> float:
        return self.root_config.number("position_id_per_seconds", 25)


class Qwen3OmniOfFile(Qwen3Omni):
    """Of a GGUF file, where its parts are called as in Qwen 3 VL's."""

    KINDS = {"qwen3_vl": DEEP}
    DEEPER, JOINING = Qwen3Vl.DEEPER, Qwen3Vl.JOINING


def encoder(source: TowerSource, config: ModelConfig) -> Qwen3Omni:
    seen = source.config.get("vision_config")
    of_file = isinstance(seen, dict) and seen.get("model_type") in Qwen3OmniOfFile.KINDS
    return (Qwen3OmniOfFile if of_file else Qwen3Omni)(source, config)
