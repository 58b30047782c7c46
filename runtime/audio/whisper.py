"""Whisper: zero-padded windows of 30 s through its encoder; the text decoder cross-attends to the rows. An answer begins with tokens for
language, task and no timestamps; without a given language the model picks the first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ... import UsageError
from ..config_reader import read_json
from ..images import ROW_PLACEHOLDER
from ..images.mrope import FIRST_MEDIA_ID
from ..images.tower import Rows
from ..images.tower_ops import WorkerPool
from ..images.tower_weights import Weights
from .audio_tower import WhisperTower, Windows
from .qwen3_asr import LANGUAGES
from .whisper_encoder import load_encoder

USUAL = {"d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536, "num_mel_bins": 80,
         "max_source_positions": 1500, "activation_function": "gelu"}
BEGIN, TRANSCRIBE, TRANSLATE, UNTIMED = "<|startoftranscript|>", "<|transcribe|>", "<|translate|>", "<|notimestamps|>"
OF_SEVERAL = 51_865  # words of a vocabulary: models that know English alone have fewer
GENERATION = "generation_config.json"


class Whisper(WhisperTower):
    KINDS = {"whisper": USUAL}
    SECTION = ""
    placeholder = BEGIN

    @property
    def most_seconds(self) -> float:
        return self.log_mel.samples / 16_000

    def tokens(self, samples: int) -> tuple[int, ...]:
        self.demand_length(samples)
        return (ROW_PLACEHOLDER,)

    def frames_of(self, samples: int) -> int:
        return self.log_mel.frames

    def row_count(self, tokens: tuple[int, ...], taken: np.ndarray) -> int:
        return self.sizes.places

    @cached_property
    def placeholder_id(self) -> int:
        return self.token_id(BEGIN)

    def load(self, weights: Weights) -> Rows:
        encoder = load_encoder(weights, self.sizes, "encoder.")

        def rows(windows: Windows, pool: WorkerPool) -> np.ndarray:
            return encoder.after(encoder.rows(windows, pool)[0])

        return rows

    # -- what is written -------------------------------------------------------------------------------------------------------------

    @cached_property
    def stated(self) -> dict[str, object]:
        """Generation settings, from generation_config.json, or config.json in older folders."""
        path = self.source.model / GENERATION
        return {**self.source.config, **(read_json(path) if path.is_file() else {})}

    @property
    def several(self) -> bool:
        """Whether it is multilingual."""
        return self.stated.get("is_multilingual", self.config.vocab_size >= OF_SEVERAL) is True

    @cached_property
    def languages(self) -> dict[str, str]:
        if not self.several:
            return {"en": LANGUAGES["en"]}
        first, last = self.placeholder_id, self.token_id(TRANSLATE)
        codes = (re.fullmatch(r"<\|([a-z]{2,3})\|>", text) for text, number in self.tokenizer.added.items() if first < number < last)
        return {found[1]: LANGUAGES.get(found[1], found[1]) for found in codes if found}

    def begun(self, translates: bool, language: str | None) -> str:
        """Prefix of an answer in a language; empty where the model detects it."""
        if translates and not self.several:
            raise UsageError("this model knows only English and cannot translate", "ask for a transcription, or another model")
        return f"<|{language}|>{TRANSLATE if translates else TRANSCRIBE}{UNTIMED}" if language and self.several else ""

    def language_of(self, tokens: Sequence[int]) -> str:
        numbers = {self.token_id(f"<|{code}|>"): name for code, name in self.languages.items()} if self.several else {}
        return numbers.get(tokens[0], "") if tokens else ""

    def begins(self, translates: bool) -> list[list[int]]:
        """The first tokens of an answer: for each position, the allowed ids."""
        words = [[TRANSLATE if translates else TRANSCRIBE], [UNTIMED]]
        words = [[f"<|{code}|>" for code in self.languages], *words] if self.several else words[1:]
        return [[self.token_id(each) for each in alike] for alike in words]

    @cached_property
    def barred(self) -> tuple[list[int], list[int]]:
        """Tokens that are never generated, and those that are not generated first."""
        each = (self.stated.get(key) for key in ("suppress_tokens", "begin_suppress_tokens"))
        never, first = ([token for token in found if type(token) is int and 0 <= token < self.config.vocab_size]
                        if isinstance(found, list) else [] for found in each)
        return never, first

    def constrain_logits(self, ids: Sequence[int], translates: bool, logits: np.ndarray) -> None:
        place = len(ids) - 1 - max((at for at, token in enumerate(ids) if token >= FIRST_MEDIA_ID), default=len(ids))
        if place < 0:
            return
        begins = self.begins(translates)
        if place < len(begins):
            kept = logits[begins[place]]
            logits.fill(-np.inf)
            logits[begins[place]] = kept
            return
        never, first = self.barred
        logits[never] = -np.inf
        if place == len(begins):
            logits[first] = -np.inf


encoder = Whisper
