"""Prompts for transcription, in the wording or with the special token that a family was trained with, and parsing of the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ... import UsageError
from .audio_tower import AudioTower

if TYPE_CHECKING:
    from collections.abc import Container

TRANSLATES = "Translate the speech into English. Write the translation alone."
IN_LANGUAGE, HINTED = " It is in {}.", " Words that may be in it, or what came before it: {}"
NAMED, NOBODY = "language ", "None"  # preamble of models that name the language; its value for silence


def transcription_messages(hearing: AudioTower, added_tokens: Container[str], marker: str, language: str | None = None,
                           hint: str | None = None,
                 translates: bool = False) -> list[dict[str, str]]:
    """Messages that ask for a transcript of the clip with marker `marker`. `added_tokens`: the model's added tokens; `language`: code or
    name;
    `hint` is used where the family has a place for it. Raises UsageError for what an ASR-only model cannot do."""
    if hearing.heads_text:
        return _asr_only_messages(hearing, marker, language, hint, translates)
    if hearing.constrain_logits is not None:
        answer_prefix = hearing.begun(translates, language and language_code(hearing, language))
        return [{"role": "user", "content": marker}, *([{"role": "assistant", "content": answer_prefix}] if answer_prefix else [])]
    if hearing.transcribes in added_tokens and not translates:
        code = f"lang:{language}" if language else ""
        return [{"role": "user", "content": marker}, {"role": "assistant", "content": f"{code}{hearing.transcribes}"}]
    request = TRANSLATES if translates else hearing.asks_to_transcribe
    request += IN_LANGUAGE.format(language) if language and not translates else ""
    return [{"role": "user", "content": marker + request + (HINTED.format(hint) if hint else "")}]


def _asr_only_messages(hearing: AudioTower, mark: str, language: str | None, hint: str | None,
                                   translates: bool) -> list[dict[str, str]]:
    """For ASR-only models: the hint is the system prompt, and the language a prefix of the answer."""
    if translates:
        raise UsageError("this model transcribes and does not translate", "ask for a transcription, or another model")
    messages = [{"role": "system", "content": hint}] if hint else []
    messages.append({"role": "user", "content": mark})
    if language:
        messages.append({"role": "assistant", "content": f"{NAMED}{language_name(hearing, language)}{hearing.heads_text}"})
    return messages


def language_name(hearing: AudioTower, language: str) -> str:
    """The name of a language, as `language_code`."""
    return hearing.languages[language_code(hearing, language)]


def language_code(hearing: AudioTower, language: str) -> str:
    """The code of a language, from its name or a code that may have a region. Raises UsageError."""
    wanted = language.strip().lower()
    for code, name in hearing.languages.items():
        if wanted in (code, name.lower()) or wanted.replace("_", "-").startswith(f"{code}-"):
            return code
    raise UsageError(f"this model was not trained to transcribe {language!r:.40}",
                     f"known: {', '.join(hearing.languages)}; or leave it out")


class AnswerParser:
    """Extracts the transcript from a streamed answer. `heads`: token that ends the preamble, or empty; `language`: as the preamble states
    it."""

    def __init__(self, heads: str = "") -> None:
        self._heads, self._held, self.language = heads, "", ""

    def add(self, text: str) -> str:
        """The part of the transcript that is known now."""
        if not self._heads:
            return text
        self._held += text
        before, found, behind = self._held.partition(self._heads)
        if not found:
            return ""
        self._heads, self._held = "", ""
        first = before.strip().partition("\n")[0]
        named = first[len(NAMED) :].strip() if first.lower().startswith(NAMED) else ""
        self.language = "" if named == NOBODY else named
        return behind

    def rest(self) -> str:
        """The held-back text of an answer that ended without `heads`."""
        held, self._heads, self._held = self._held, "", ""
        return held
