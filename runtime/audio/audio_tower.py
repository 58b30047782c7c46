"""What all families that hear have in common, and what those by Whisper's encoder: a log-mel spectrogram in windows, and rows of those.

A family has a class with `tokens` (what stands for a sound of so many samples) and `load` (weights to a function that computes rows), and a
function `sight` that makes it.
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

Windows = list[tuple[np.ndarray, int]]  # spectrograms float32 [frames, bands], and how many of the frames are of the sound


class AudioTower(Tower):
    """A `MediaEncoder` that hears. `EXTRACTORS`: kinds of those that make spectrograms, which the family has. `most_seconds`: of a sound
    that it takes; `by_adapter` as of `EncodedMedia`, `stands_for` as its `word`. `asks_to_transcribe`: the words by which it is asked to
    write one down; `transcribes`: a token that asks for it by itself, at the beginning of the answer. `heads_text`: of one that does
    nothing else, the word behind which its answer says what was said, and before that in which language; `languages`: codes -> names of
    those that it knows."""

    EXTRACTORS: tuple[str, ...] = WHISPER
    SECTION = "audio_config"
    modality = AUDIO_INPUT
    needs_adapter = False
    placeholder_id: int | None = None
    asks_to_transcribe, transcribes, heads_text = "Transcribe the speech.", "", ""
    languages: Mapping[str, str] = {}
    most_seconds: float

    def language_of(self, tokens: Sequence[int]) -> str:
        """That which an answer of these tokens begins with, where its text does not name it."""
        return ""

    def read_preprocessor(self) -> Keys:
        return self.source.extractor(self.EXTRACTORS)

    def encode(self, picture: np.ndarray, work: EncodingJob) -> EncodedMedia:
        """Of a sound float32 [samples]. Raises CheckpointError where the weights are damaged, UsageError for one that is too long, Left."""
        rows, tokens, _ = self.run_tower(picture, work)
        return EncodedMedia(rows, tokens, needs_adapter=self.needs_adapter, placeholder_id=self.placeholder_id)

    def unlike(self, made: str, taken: str) -> ConfigError:
        """Of a spectrogram of another shape than the tower takes."""
        return ConfigError(f"{self.source.model}: sounds become {made}, but the tower takes {taken}")

    def demand_length(self, samples: int) -> None:
        """Raises UsageError for a sound that the model does not take."""
        if samples > self.most_seconds * SAMPLE_RATE:
            raise UsageError(f"a sound of {samples / SAMPLE_RATE:.1f} s is too long for this model, which takes {self.most_seconds:g} s",
                             "cut it into shorter ones; `effllm transcribe` writes down what is said in longer ones")


class WhisperTower(AudioTower):
    """By Whisper's encoder, which takes a sound in windows."""

    def configure(self, keys: Keys) -> None:
        self.sizes, self.log_mel = WhisperSizes.read(self.tower_config), log_mel_of(keys)
        if self.log_mel.bands != self.sizes.bands or self.log_mel.frames != 2 * self.sizes.places:
            raise self.unlike(f"{self.log_mel.frames} frames of {self.log_mel.bands} bands",
                              f"{2 * self.sizes.places} of {self.sizes.bands}")

    def values(self, taken: np.ndarray) -> Windows:
        """Each window by itself: what is loudest in it is its own."""
        length, found = self.log_mel.samples, []
        for begin in range(0, len(taken), length):
            part = taken[begin : begin + length]
            found.append((self.log_mel(np.pad(part, (0, length - len(part)))), self.frames_of(len(part))))
        return found

    def frames_of(self, samples: int) -> int:
        """How many of a window's frames have a part of so many samples in them."""
        return -(-samples // self.log_mel.hop)

    def workspace_floats(self) -> int:
        """The largest matrices, what goes through a layer, pieces of it, and what the convolutions read."""
        width = self.sizes.width
        matrices, layer = 12 * width**2, 6 * self.sizes.places * width
        pieces = 16 * width * ROWS * self.workers
        read = 4 * self.log_mel.frames * (self.sizes.bands + width)
        whole = 2 * int(self.most_seconds * SAMPLE_RATE) // self.log_mel.hop * (self.sizes.bands + width)
        return matrices + layer + pieces + read + whole
