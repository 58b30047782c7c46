"""Audio input: audio files to samples, samples to log-mel spectrograms, and audio towers that encode them.

Rows of an audio clip go through prompt and cache like an image's (`images/media.py`): a clip is a `MediaItem` whose values are float32
[samples] at 16 kHz, and a family with audio has a `MediaEncoder` with modality AUDIO_INPUT. To add one: a file here that binds `encoder`,
and its `model_type` in AUDIO_ENCODERS.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..families import NEMOTRON_OMNI

# model_type -> module here; its `encoder(source, config)` returns a MediaEncoder.
AUDIO_ENCODERS: dict[str, str] = {
    "audioflamingo3": "audioflamingo3", "gemma3n": "gemma3n", "gemma4": "gemma4", "gemma4_unified": "gemma4_unified", "glmasr": "glmasr",
    "granite_speech": "granite_speech", "qwen2_5_omni": "qwen2_5_omni", "qwen2_audio": "qwen2_audio", "qwen3_asr": "qwen3_asr",
    "qwen3_omni_moe": "qwen3_omni_moe", "voxtral": "voxtral", "whisper": "whisper", **dict.fromkeys(NEMOTRON_OMNI, "nemotron_h_omni")}
# Config sections of audio towers, and the model types that have a tower only where such a section is present.
AUDIO_SECTIONS = ("audio_config", "sound_config")
OPTIONAL_AUDIO = ("gemma4", "gemma4_unified", *NEMOTRON_OMNI)


def takes_audio(raw: Mapping[str, object]) -> bool:
    """Whether the model of a config.json takes audio."""
    model_type = raw.get("model_type")
    if model_type in OPTIONAL_AUDIO:
        return any(isinstance(raw.get(key), dict) for key in AUDIO_SECTIONS)
    return model_type in AUDIO_ENCODERS
