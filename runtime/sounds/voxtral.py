"""Voxtral: windows of 30 s through Whisper's encoder, silence behind a sound with them, four rows side by side, and two layers to the
model's width. What is loudest is so in the whole sound, not in a window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..config_reader import ConfigError
from ..images import PLACE
from ..images.tower import Rows
from ..images.tower_parts import CURVES, Crew, two_layers
from ..images.tower_weights import Weights
from .tower_hearing import TowerHearing, Windows
from .whisper_encoder import LARGE, load_encoder

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..images.tower_source import TowerSource


class Voxtral(TowerHearing):
    AUDIO = {"voxtral_encoder": LARGE}
    placeholder, written = "[AUDIO]", "[BEGIN_AUDIO][AUDIO]"
    transcribes = "[TRANSCRIBE]"
    most_seconds = 2400.0  # as many as its context of 32,768 tokens was made for

    def __init__(self, source: TowerSource, config: ModelConfig) -> None:
        super().__init__(source, config)
        self.beside, rest = divmod(self.sizes.inner, self.sizes.width)
        if rest or self.sizes.places % self.beside:
            raise ConfigError(f"{self.said.where}: intermediate_size {self.sizes.inner} is not that of whole rows of {self.sizes.width}")

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.demand_length(samples)
        return (PLACE,) * (-(-samples // self.log_mel.samples) * self.sizes.places // self.beside)

    def values(self, taken: np.ndarray) -> Windows:
        length, frames = self.log_mel.samples, self.log_mel.frames
        whole = self.log_mel(np.pad(taken, (0, -len(taken) % length)))
        return [(whole[begin : begin + frames], frames) for begin in range(0, len(whole), frames)]

    def load(self, weights: Weights) -> Rows:
        encoder, width = load_encoder(weights, self.sizes, "audio_tower."), self.config.hidden_size
        first = weights.matrix("multi_modal_projector.linear_1", width, self.sizes.inner)
        second = weights.matrix("multi_modal_projector.linear_2", width, width)
        curve = CURVES[self.outer.choice("projector_hidden_act", {key: key for key in CURVES}, "gelu")]

        def rows(windows: Windows, crew: Crew) -> np.ndarray:
            made = encoder.after(np.concatenate(encoder.rows(windows, crew)))
            return two_layers(made.reshape(-1, self.sizes.inner), first, second, curve, crew)

        return rows


def sight(source: TowerSource, config: ModelConfig) -> TowerHearing:
    return Voxtral(source, config)
