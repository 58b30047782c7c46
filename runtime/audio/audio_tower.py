"""Base classes of audio towers: one for all, one for those with Whisper's encoder over windows of a log-mel spectrogram.

A family is a class with `tokens` (the prompt tokens of a clip, by its number of samples) and `load` (returns the function that computes
embedding rows); its module binds the class to `encoder`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ... import UsageError
from ..config_reader import ConfigError, Keys
from ..images import EncodedMedia, EncodingJob
from ..images.modality import AUDIO_INPUT, SAMPLE_RATE
from ..images.tower import Tower
from ..images.tower_ops import ROWS
from .log_mel import WHISPER_EXTRACTORS, log_mel_of
from .whisper_encoder import WhisperSizes

Windows = list[tuple[np.ndarray, int]]  # (spectrogram float32 [frames, bands], number of frames that are audio, not padding)


class AudioTower(Tower):
    """A `MediaEncoder` for audio. Subclasses override the class attributes."""

    EXTRACTORS: tuple[str, ...] = WHISPER_EXTRACTORS  # supported feature extractor types
    SECTION = "audio_config"
    modality = AUDIO_INPUT
    needs_adapter = False  # as in `EncodedMedia`
    placeholder_id: int | None = None  # as in `EncodedMedia`
    max_seconds: float  # longest clip
    transcription_prompt = "Transcribe the speech."  # the wording that the model was trained with
    transcribe_token = ""  # token at the start of an answer that requests a transcription, empty if the family has none
    transcript_start_token = ""  # of ASR-only models: ends the preamble of an answer, which names the language; empty for others
    languages: Mapping[str, str] = {}  # supported languages: code -> name

    def stated_language(self, tokens: Sequence[int]) -> str:
        """The language stated by an answer's first tokens, empty if they state none."""
        return ""

    def read_preprocessor(self) -> Keys:
        return self.source.extractor(self.EXTRACTORS)

    def encode(self, samples: np.ndarray, job: EncodingJob) -> EncodedMedia:
        """Encode a clip, float32 [samples]. Raises CheckpointError for damaged weights, UsageError for a clip that is too long, and
        EncodingCancelled."""
        rows, tokens, _ = self.run_tower(samples, job)
        return EncodedMedia(rows, tokens, needs_adapter=self.needs_adapter, placeholder_id=self.placeholder_id)

    def shape_mismatch_error(self, produced: str, expected: str) -> ConfigError:
        """The error for spectrograms whose shape does not match the tower's input."""
        return ConfigError(f"{self.source.model}: the audio preprocessor makes {produced}, but the tower takes {expected}")

    def check_length(self, samples: int) -> None:
        """Raises UsageError for a clip that is too long."""
        if samples > self.max_seconds * SAMPLE_RATE:
            raise UsageError(f"{samples / SAMPLE_RATE:.1f} s of audio are too long for this model, which takes {self.max_seconds:g} s",
                             "split it into shorter clips; `effllm transcribe` handles longer ones")


class WhisperTower(AudioTower):
    """An audio tower with Whisper's encoder, whose input are windows of fixed length."""

    def configure(self, keys: Keys) -> None:
        self.sizes, self.log_mel = WhisperSizes.read(self.tower_config), log_mel_of(keys)
        produced = self.log_mel.frames, self.log_mel.bands
        expected = 2 * self.sizes.max_positions, self.sizes.bands  # the second convolution has stride 2
        if produced != expected:
            raise self.shape_mismatch_error("{} frames of {} bands".format(*produced), "{} of {}".format(*expected))

    def values(self, samples: np.ndarray) -> Windows:
        """Spectrogram of each window, each normalized by its own maximum."""
        length, windows = self.log_mel.samples, []
        for start in range(0, len(samples), length):
            window = samples[start : start + length]
            windows.append((self.log_mel(np.pad(window, (0, length - len(window)))), self.num_frames(len(window))))
        return windows

    def num_frames(self, samples: int) -> int:
        """Number of spectrogram frames, a partial one included."""
        return -(-samples // self.log_mel.hop)

    def workspace_floats(self) -> int:
        """The largest matrices, a layer's activations and row blocks, and the convolutions' inputs."""
        width = self.sizes.width
        matrices, layer = 12 * width**2, 6 * self.sizes.max_positions * width
        row_blocks = 16 * width * ROWS * self.workers
        conv_inputs = 4 * self.log_mel.frames * (self.sizes.bands + width)
        spectrograms = 2 * int(self.max_seconds * SAMPLE_RATE) // self.log_mel.hop * (self.sizes.bands + width)
        return matrices + layer + row_blocks + conv_inputs + spectrograms
