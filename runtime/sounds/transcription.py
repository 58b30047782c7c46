"""What a model is asked that is to write down what is said in a sound: in the words that its family was trained with, or where it has a
token for it by that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .tower_hearing import Hearing

if TYPE_CHECKING:
    from collections.abc import Container

TRANSLATES = "Translate the speech into English. Write the translation alone."
IN_LANGUAGE, HINTED = " It is in {}.", " Words that may be in it, or what came before it: {}"


def conversation(hearing: Hearing, words: Container[str], mark: str, language: str | None = None, hint: str | None = None,
                 translates: bool = False) -> list[dict[str, str]]:
    """The messages for a sound that is in the album by its `mark`, to a model whose vocabulary has the added `words`. `language` is a code
    or a name; `hint` is told where there is a place for it."""
    if hearing.transcribes in words and not translates:
        code = f"lang:{language}" if language else ""
        return [{"role": "user", "content": mark}, {"role": "assistant", "content": f"{code}{hearing.transcribes}"}]
    asks = TRANSLATES if translates else hearing.asks_to_transcribe
    asks += IN_LANGUAGE.format(language) if language and not translates else ""
    return [{"role": "user", "content": mark + asks + (HINTED.format(hint) if hint else "")}]
