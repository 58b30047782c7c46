"""Whisper: zero-padded windows of 30 s through its encoder; the text decoder cross-attends to the rows.

An answer begins with forced tokens for language, task and no timestamps. If no language is given, the model chooses the first of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ... import UsageError
from ..config_reader import read_json
from ..images import ROW_PLACEHOLDER
from ..images.modality import SAMPLE_RATE
from ..images.mrope import FIRST_MEDIA_ID
from ..images.tower import Rows
from ..images.tower_ops import WorkerPool
from ..images.tower_weights import Weights
from .audio_tower import WhisperTower, Windows
from .qwen3_asr import LANGUAGES
from .whisper_encoder import load_encoder

CONFIG_DEFAULTS = {
    "d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536, "num_mel_bins": 80,
    "max_source_positions": 1500, "activation_function": "gelu"}
BEGIN_TOKEN, TRANSCRIBE, TRANSLATE, NO_TIMESTAMPS = "<|startoftranscript|>", "<|transcribe|>", "<|translate|>", "<|notimestamps|>"
MULTILINGUAL_VOCAB_SIZE = 51_865  # English-only models have smaller vocabularies
GENERATION_CONFIG = "generation_config.json"


class Whisper(WhisperTower):
    KINDS = {"whisper": CONFIG_DEFAULTS}
    SECTION = ""
    placeholder = BEGIN_TOKEN

    @property
    def max_seconds(self) -> float:
        return self.log_mel.samples / SAMPLE_RATE

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.check_length(samples)
        return (ROW_PLACEHOLDER,)

    def num_frames(self, samples: int) -> int:
        return self.log_mel.frames

    def row_count(self, tokens: tuple[int, ...], samples: np.ndarray) -> int:
        return self.sizes.max_positions

    @cached_property
    def placeholder_id(self) -> int:
        return self.token_id(BEGIN_TOKEN)

    def load(self, weights: Weights) -> Rows:
        encoder = load_encoder(weights, self.sizes, "encoder.")

        def rows(windows: Windows, pool: WorkerPool) -> np.ndarray:
            return encoder.output_norm(encoder.rows(windows, pool)[0])

        return rows

    # -- the answer ------------------------------------------------------------------------------------------------------------------

    @cached_property
    def generation_settings(self) -> dict[str, object]:
        """Settings of generation_config.json, or of config.json in older folders."""
        path = self.source.model / GENERATION_CONFIG
        return {**self.source.config, **(read_json(path) if path.is_file() else {})}

    @property
    def is_multilingual(self) -> bool:
        """Whether the model knows more languages than English."""
        return self.generation_settings.get("is_multilingual", self.config.vocab_size >= MULTILINGUAL_VOCAB_SIZE) is True

    @cached_property
    def languages(self) -> dict[str, str]:
        if not self.is_multilingual:
            return {"en": LANGUAGES["en"]}
        first, last = self.placeholder_id, self.token_id(TRANSLATE)
        matches = (re.fullmatch(r"<\|([a-z]{2,3})\|>", text) for text, token in self.tokenizer.added.items() if first < token < last)
        return {match[1]: LANGUAGES.get(match[1], match[1]) for match in matches if match}

    def answer_prefix(self, translates: bool, language: str | None) -> str:
        """Prefix of an answer in a language; empty if the model detects it. Raises UsageError."""
        if translates and not self.is_multilingual:
            raise UsageError("this model knows only English and cannot translate", "ask for a transcription, or another model")
        return f"<|{language}|>{TRANSLATE if translates else TRANSCRIBE}{NO_TIMESTAMPS}" if language and self.is_multilingual else ""

    def stated_language(self, tokens: Sequence[int]) -> str:
        names = {self.token_id(f"<|{code}|>"): name for code, name in self.languages.items()} if self.is_multilingual else {}
        return names.get(tokens[0], "") if tokens else ""

    def forced_tokens(self, translates: bool) -> list[list[int]]:
        """The allowed token ids at each of the first positions of an answer."""
        tokens = [[NO_TIMESTAMPS]]
        if self.is_multilingual:
            tokens = [[f"<|{code}|>" for code in self.languages], [TRANSLATE if translates else TRANSCRIBE], *tokens]
        return [[self.token_id(text) for text in choices] for choices in tokens]

    @cached_property
    def suppressed_tokens(self) -> tuple[list[int], list[int]]:
        """Tokens that are never generated, and tokens that are not generated first."""
        return self._token_ids("suppress_tokens"), self._token_ids("begin_suppress_tokens")

    def _token_ids(self, key: str) -> list[int]:
        """The valid token ids of a generation setting."""
        tokens = self.generation_settings.get(key)
        if not isinstance(tokens, list):
            return []
        return [token for token in tokens if type(token) is int and 0 <= token < self.config.vocab_size]

    def constrain_logits(self, ids: Sequence[int], translates: bool, logits: np.ndarray) -> None:
        # Position in the answer, which begins after the last media token.
        position = len(ids) - 1 - max((index for index, token in enumerate(ids) if token >= FIRST_MEDIA_ID), default=len(ids))
        if position < 0:
            return
        forced = self.forced_tokens(translates)
        if position < len(forced):
            allowed = logits[forced[position]]
            logits.fill(-np.inf)
            logits[forced[position]] = allowed
            return
        always, at_start = self.suppressed_tokens
        logits[always] = -np.inf
        if position == len(forced):
            logits[at_start] = -np.inf


encoder = Whisper
