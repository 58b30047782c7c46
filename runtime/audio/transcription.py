"""What a model is asked that is to write down what is said in a sound: in the words that its family was trained with, or where it has a
token for it by that; and what of its answer is what was said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ... import UsageError
from .audio_tower import AudioTower

if TYPE_CHECKING:
    from collections.abc import Container

TRANSLATES = "Translate the speech into English. Write the translation alone."
IN_LANGUAGE, HINTED = " It is in {}.", " Words that may be in it, or what came before it: {}"
NAMED, NOBODY = "language ", "None"  # before what is said, by models that name its language; of a sound in which nothing is


def transcription_messages(hearing: AudioTower, words: Container[str], mark: str, language: str | None = None, hint: str | None = None,
                 translates: bool = False) -> list[dict[str, str]]:
    """The messages for a sound that is in the album by its `mark`, to a model whose vocabulary has the added `words`. `language` is a code
    or a name; `hint` is told where there is a place for it. Raises UsageError for what a model cannot, which does nothing else."""
    if hearing.heads_text:
        return _to_one_that_does_nothing_else(hearing, mark, language, hint, translates)
    if hearing.constrain_logits is not None:
        said = hearing.begun(translates, language and language_code(hearing, language))
        return [{"role": "user", "content": mark}, *([{"role": "assistant", "content": said}] if said else [])]
    if hearing.transcribes in words and not translates:
        code = f"lang:{language}" if language else ""
        return [{"role": "user", "content": mark}, {"role": "assistant", "content": f"{code}{hearing.transcribes}"}]
    asks = TRANSLATES if translates else hearing.asks_to_transcribe
    asks += IN_LANGUAGE.format(language) if language and not translates else ""
    return [{"role": "user", "content": mark + asks + (HINTED.format(hint) if hint else "")}]


def _to_one_that_does_nothing_else(hearing: AudioTower, mark: str, language: str | None, hint: str | None,
                                   translates: bool) -> list[dict[str, str]]:
    """It is not asked: the hint is its system prompt, and a language the beginning of its answer."""
    if translates:
        raise UsageError("this model transcribes and does not translate", "ask for a transcription, or another model")
    messages = [{"role": "system", "content": hint}] if hint else []
    messages.append({"role": "user", "content": mark})
    if language:
        messages.append({"role": "assistant", "content": f"{NAMED}{language_name(hearing, language)}{hearing.heads_text}"})
    return messages


def language_name(hearing: AudioTower, language: str) -> str:
    """The name of a language, as of `code_of`."""
    return hearing.languages[language_code(hearing, language)]


def language_code(hearing: AudioTower, language: str) -> str:
    """The code of a language that is given by its name or by that, which may name a region too. Raises UsageError."""
    wanted = language.strip().lower()
    for code, name in hearing.languages.items():
        if wanted in (code, name.lower()) or wanted.replace("_", "-").startswith(f"{code}-"):
            return code
    raise UsageError(f"this model was not trained to write {language!r:.40} down",
                     f"known: {', '.join(hearing.languages)}; or leave it out")


class AnswerParser:
    """An answer while it comes, of which `heads` (a word, or nothing) ends what is before the words that were said. `language`: as the
    model names it there."""

    def __init__(self, heads: str = "") -> None:
        self._heads, self._held, self.language = heads, "", ""

    def add(self, text: str) -> str:
        """What of it was said, as far as that is known."""
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
        """All that was held back, of an answer that ended without the word."""
        held, self._heads, self._held = self._held, "", ""
        return held
