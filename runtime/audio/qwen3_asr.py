"""Qwen3-ASR: Qwen 3 Omni's encoder in a model that transcribes 30 languages and states the language.

A chunk is always padded to a second, a clip to at least half a second.
"""

from __future__ import annotations

import numpy as np

from ..config_reader import Keys
from ..images.modality import SAMPLE_RATE
from ..images.tower_weights import Weights
from .qwen3_omni_moe import Qwen3Omni
from .whisper_encoder import LARGE_DEFAULTS

CONFIG_DEFAULTS = {
    **LARGE_DEFAULTS, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096, "n_window": 50,
    "n_window_infer": 800, "downsample_hidden_size": 480}
MIN_SAMPLES = SAMPLE_RATE // 2  # shorter clips are padded
# Language code -> name in the model's prompt.
LANGUAGES = {
    "ar": "Arabic", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek", "en": "English", "es": "Spanish", "fa": "Persian",
    "fi": "Finnish", "fil": "Filipino", "fr": "French", "hi": "Hindi", "hu": "Hungarian", "id": "Indonesian", "it": "Italian",
    "ja": "Japanese", "ko": "Korean", "mk": "Macedonian", "ms": "Malay", "nl": "Dutch", "pl": "Polish", "pt": "Portuguese",
    "ro": "Romanian", "ru": "Russian", "sv": "Swedish", "th": "Thai", "tr": "Turkish", "vi": "Vietnamese", "yue": "Cantonese",
    "zh": "Chinese"}


class Qwen3Asr(Qwen3Omni):
    """The tower, in both published layouts: they differ in the tensor names of encoder and projector."""

    KINDS = {"qwen3_asr_encoder": CONFIG_DEFAULTS, "qwen3_asr_audio_encoder": CONFIG_DEFAULTS}
    EXTRACTORS, PADS_CHUNKS = ("Qwen3ASRFeatureExtractor", "WhisperFeatureExtractor"), True
    transcript_start_token, languages = "<asr_text>", LANGUAGES
    max_seconds = 1200.0

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        self.min_samples = keys.integer("min_length", MIN_SAMPLES, low=0, high=SAMPLE_RATE * int(self.max_seconds))
        if 2 * keys.integer("n_window", self.chunk_frames // 2, high=1 << 12) != self.chunk_frames:
            raise keys.fail("n_window", f"{self.chunk_frames // 2}, as in config.json")

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.check_length(samples)
        return super().tokens(max(samples, self.min_samples))

    def values(self, samples: np.ndarray) -> np.ndarray:
        return super().values(np.pad(samples, (0, max(0, self.min_samples - len(samples)))))

    def projector(self, weights: Weights) -> tuple[str, str]:
        names = "multi_modal_projector.linear_1", "multi_modal_projector.linear_2"
        return names if weights.has(f"{names[0]}.weight") else super().projector(weights)


encoder = Qwen3Asr
