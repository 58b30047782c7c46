"""Qwen3-ASR: Qwen 3 Omni's encoder in a model that transcribes 30 languages and names the one it hears. Chunks of a second are always
padded, and a clip to half a second."""

from __future__ import annotations

import numpy as np

from ..config_reader import Keys
from ..images.modality import SAMPLE_RATE
from ..images.tower_weights import Weights
from .qwen3_omni_moe import Qwen3Omni
from .whisper_encoder import LARGE

USUAL = {**LARGE, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096, "n_window": 50,
         "n_window_infer": 800, "downsample_hidden_size": 480}
SHORTEST = SAMPLE_RATE // 2  # samples
# Language codes -> names used in its prompt.
LANGUAGES = {
    "ar": "Arabic", "cs": "Czech", "da": "Danish", "de": "German", "el": "Greek", "en": "English", "es": "Spanish", "fa": "Persian",
    "fi": "Finnish", "fil": "Filipino", "fr": "French", "hi": "Hindi", "hu": "Hungarian", "id": "Indonesian", "it": "Italian",
    "ja": "Japanese", "ko": "Korean", "mk": "Macedonian", "ms": "Malay", "nl": "Dutch", "pl": "Polish", "pt": "Portuguese",
    "ro": "Romanian", "ru": "Russian", "sv": "Swedish", "th": "Thai", "tr": "Turkish", "vi": "Vietnamese", "yue": "Cantonese",
    "zh": "Chinese"}


class Qwen3Asr(Qwen3Omni):
    """Published in two layouts, with different names for the encoder and the projector."""

    KINDS = {"qwen3_asr_encoder": USUAL, "qwen3_asr_audio_encoder": USUAL}
    EXTRACTORS, FILLED = ("Qwen3ASRFeatureExtractor", "WhisperFeatureExtractor"), True
    transcript_start_token, languages = "<asr_text>", LANGUAGES
    max_seconds = 1200.0

    def configure(self, keys: Keys) -> None:
        super().configure(keys)
        self.shortest = keys.integer("min_length", SHORTEST, low=0, high=SAMPLE_RATE * int(self.max_seconds))
        if 2 * keys.integer("n_window", self.piece // 2, high=1 << 12) != self.piece:
            raise keys.fail("n_window", f"{self.piece // 2}, as in config.json")

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.check_length(samples)
        return super().tokens(max(samples, self.shortest))

    def values(self, taken: np.ndarray) -> np.ndarray:
        return super().values(np.pad(taken, (0, max(0, self.shortest - len(taken)))))

    def projector(self, weights: Weights) -> tuple[str, str]:
        later = "multi_modal_projector.linear_1", "multi_modal_projector.linear_2"
        return later if weights.has(f"{later[0]}.weight") else super().projector(weights)


encoder = Qwen3Asr
