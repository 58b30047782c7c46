"""Audio Flamingo 3: Qwen2-Audio's encoder, window after window of 30 s, and two layers to the model's width."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..images.tower import Rows
from ..images.tower_parts import CURVES, two_layers
from ..images.tower_weights import Weights
from .qwen2_audio import Qwen2Audio
from .tower_hearing import TowerHearing
from .whisper_encoder import LARGE

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..images.tower_source import TowerSource


class AudioFlamingo3(Qwen2Audio):
    AUDIO = {"audioflamingo3_encoder": LARGE}
    placeholder = written = "<sound>"
    asks_to_transcribe = "Transcribe the input speech."
    most_seconds = 600.0

    def projector(self, weights: Weights) -> Rows:
        width = self.config.hidden_size
        first = weights.matrix("multi_modal_projector.linear_1", width, self.sizes.width)
        second = weights.matrix("multi_modal_projector.linear_2", width, width)
        curve = CURVES[self.outer.choice("projector_hidden_act", {key: key for key in CURVES}, "gelu")]
        return lambda x, crew: two_layers(x, first, second, curve, crew)


def sight(source: TowerSource, config: ModelConfig) -> TowerHearing:
    return AudioFlamingo3(source, config)
