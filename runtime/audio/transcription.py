"""Transcription prompts, in the wording or with the special token that a family was trained with, and parsing of answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ... import UsageError
from .audio_tower import AudioTower

if TYPE_CHECKING:
    from collections.abc import Container

TRANSLATION_PROMPT = "Translate the speech into English. Write the translation alone."
LANGUAGE_SENTENCE, HINT_SENTENCE = " It is in {}.", " Words that may be in it, or what came before it: {}"
LANGUAGE_PREFIX, NO_LANGUAGE = "language ", "None"  # preamble of ASR-only models, and its value for silence


def transcription_messages(tower: AudioTower, added_tokens: Container[str], marker: str, language: str | None = None,
                           hint: str | None = None, translates: bool = False) -> list[dict[str, str]]:
    """Messages that request a transcript. Raises UsageError if an ASR-only model cannot do this.

    added_tokens: the tokenizer's added tokens
    marker: stands for the clip in the prompt
    language: code or name, None if unknown
    hint: words that may occur; ignored if the family has no place for it in the prompt
    """
    if tower.transcript_start_token:
        return _asr_only_messages(tower, marker, language, hint, translates)
    if tower.constrain_logits is not None:
        answer_prefix = tower.answer_prefix(translates, language and language_code(tower, language))
        return [{"role": "user", "content": marker}, *([{"role": "assistant", "content": answer_prefix}] if answer_prefix else [])]
    if tower.transcribe_token in added_tokens and not translates:
        code = f"lang:{language}" if language else ""
        return [{"role": "user", "content": marker}, {"role": "assistant", "content": f"{code}{tower.transcribe_token}"}]
    request = TRANSLATION_PROMPT if translates else tower.transcription_prompt
    request += LANGUAGE_SENTENCE.format(language) if language and not translates else ""
    return [{"role": "user", "content": marker + request + (HINT_SENTENCE.format(hint) if hint else "")}]


def _asr_only_messages(tower: AudioTower, marker: str, language: str | None, hint: str | None,
                       translates: bool) -> list[dict[str, str]]:
    """Messages for ASR-only models: the hint is the system prompt, the language a prefix of the answer. Raises UsageError."""
    if translates:
        raise UsageError("this model transcribes and does not translate", "ask for a transcription, or another model")
    messages = [{"role": "system", "content": hint}] if hint else []
    messages.append({"role": "user", "content": marker})
    if language:
        preamble = f"{LANGUAGE_PREFIX}{language_name(tower, language)}{tower.transcript_start_token}"
        messages.append({"role": "assistant", "content": preamble})
    return messages


def language_name(tower: AudioTower, language: str) -> str:
    """The name of a language, from its name or code. Raises UsageError."""
    return tower.languages[language_code(tower, language)]


def language_code(tower: AudioTower, language: str) -> str:
    """The code of a language, from its name or code, which may include a region. Raises UsageError for an unsupported one."""
    requested = language.strip().lower()
    for code, name in tower.languages.items():
        if requested in (code, name.lower()) or requested.replace("_", "-").startswith(f"{code}-"):
            return code
    raise UsageError(f"this model was not trained to transcribe {language!r:.40}",
                     f"known: {', '.join(tower.languages)}; or leave it out")


class AnswerParser:
    """Extracts the transcript from a streamed answer.

    start_token: the token that ends the preamble, empty if there is no preamble
    language: as stated in the preamble, empty if unknown
    """

    def __init__(self, start_token: str = "") -> None:
        self._start_token, self._buffer, self.language = start_token, "", ""

    def add(self, text: str) -> str:
        """Add streamed text; returns the part of it that belongs to the transcript."""
        if not self._start_token:
            return text
        self._buffer += text
        before, separator, after = self._buffer.partition(self._start_token)
        if not separator:
            return ""
        self._start_token, self._buffer = "", ""
        preamble_line = before.strip().partition("\n")[0]
        language = preamble_line[len(LANGUAGE_PREFIX) :].strip() if preamble_line.lower().startswith(LANGUAGE_PREFIX) else ""
        self.language = "" if language == NO_LANGUAGE else language
        return after

    def rest(self) -> str:
        """The held-back text, after the end of an answer without `start_token`."""
        remaining, self._start_token, self._buffer = self._buffer, "", ""
        return remaining
