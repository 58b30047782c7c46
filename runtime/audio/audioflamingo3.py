"""Audio Flamingo 3: Qwen2-Audio's encoder over windows of 30 s, and an MLP projector."""

from __future__ import annotations

from ..images.tower import Rows
from ..images.tower_weights import Weights
from .qwen2_audio import Qwen2Audio
from .whisper_encoder import LARGE_DEFAULTS


class AudioFlamingo3(Qwen2Audio):
    KINDS = {"audioflamingo3_encoder": LARGE_DEFAULTS}
    placeholder = written = "<sound>"
    transcription_prompt = "Transcribe the input speech."
    max_seconds = 600.0

    def projector(self, weights: Weights) -> Rows:
        return self.to_text(weights, self.sizes.width)


encoder = AudioFlamingo3
