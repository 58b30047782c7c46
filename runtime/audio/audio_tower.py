"""Base classes of audio towers: one for all, one for those with Whisper's encoder over windows of a log-mel spectrogram.

A family is a class with `tokens` (what a clip of a number of samples becomes in the prompt) and `load` (weights to a function that computes
rows); its module binds it to `encoder`.
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
from .log_mel import WHISPER, log_mel_of
from .whisper_encoder import WhisperSizes

Windows = list[tuple[np.ndarray, int]]  # (spectrogram float32 [frames, bands], how many of its frames are audio, not padding)


class AudioTower(Tower):
    """A `MediaEncoder` for audio.

    `EXTRACTORS`: supported feature extractor types.
    `most_seconds`: the longest clip.
    `needs_adapter`, `placeholder_id`: as in `EncodedMedia`.
    `asks_to_transcribe`: the prompt that the model was trained to transcribe with.
    `transcribes`: a token at the start of the answer that requests transcription.
    `heads_text`: in ASR-only models, the token after which the transcript begins, with the language before it.
    `languages`: codes -> names of the supported languages.
    """

    EXTRACTORS: tuple[str, ...] = WHISPER
    SECTION = "audio_config"
    modality = AUDIO_INPUT
    needs_adapter = False
    placeholder_id: int | None = None
    asks_to_transcribe, transcribes, heads_text = "Transcribe the speech.", "", ""
    languages: Mapping[str, str] = {}
    most_seconds: float

    def language_of(self, tokens: Sequence[int]) -> str:
        """The language that an answer's first tokens state, where its text does not."""
        return ""

    def read_preprocessor(self) -> Keys:
        return self.source.extractor(self.EXTRACTORS)

    def encode(self, picture: np.ndarray, job: EncodingJob) -> EncodedMedia:
        """Encode audio float32 [samples]. Raises CheckpointError where weights are damaged, UsageError for a clip that is too long,
        EncodingCancelled."""
        rows, tokens, _ = self.run_tower(picture, job)
        return EncodedMedia(rows, tokens, needs_adapter=self.needs_adapter, placeholder_id=self.placeholder_id)

    def unlike(self, produced: str, expected: str) -> ConfigError:
        """The error for a spectrogram whose shape is not what the tower takes."""
        return ConfigError(f"{self.source.model}: the audio preprocessor makes {produced}, but the tower takes {expected}")

    def demand_length(self, samples: int) -> None:
        """Raises UsageError for a clip that is too long."""
        if samples > self.most_seconds * SAMPLE_RATE:
            raise UsageError(f"{samples / SAMPLE_RATE:.1f} s of audio are too long for this model, which takes {self.most_seconds:g} s",
                             "split it into shorter clips; `effllm transcribe` handles longer ones")


class WhisperTower(AudioTower):
    """An audio tower with Whisper's encoder, which takes windows of fixed length."""

    def configure(self, keys: Keys) -> None:
        self.sizes, self.log_mel = WhisperSizes.read(self.tower_config), log_mel_of(keys)
        if self.log_mel.bands != self.sizes.bands or self.log_mel.frames != 2 * self.sizes.places:
            raise self.unlike(f"{self.log_mel.frames} frames of {self.log_mel.bands} bands",
                              f"{2 * self.sizes.places} of {self.sizes.bands}")

    def values(self, samples: np.ndarray) -> Windows:
        """Spectrogram of each window, each normalized by its own maximum."""
        length, windows = self.log_mel.samples, []
        for start in range(0, len(samples), length):
            window = samples[start : start + length]
            windows.append((self.log_mel(np.pad(window, (0, length - len(window)))), self.frames_of(len(window))))
        return windows

    def frames_of(self, samples: int) -> int:
        """Number of spectrogram frames of a number of samples."""
        return -(-samples // self.log_mel.hop)

    def workspace_floats(self) -> int:
        """The largest matrices, the activations of a layer, its row blocks, and what the convolutions read."""
        width = self.sizes.width
        matrices, layer = 12 * width**2, 6 * self.sizes.places * width
        row_blocks = 16 * width * ROWS * self.workers
        conv_inputs = 4 * self.log_mel.frames * (self.sizes.bands + width)
        spectrograms = 2 * int(self.most_seconds * SAMPLE_RATE) // self.log_mel.hop * (self.sizes.bands + width)
        return matrices + layer + row_blocks + conv_inputs + spectrograms
