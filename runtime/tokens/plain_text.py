"""Tokenizes text without special tokens: what looks like one (`<|im_end|>` in a program that builds prompts, `<s>` in HTML) becomes
ordinary text. API prompts may be meant either way; a user's file is not."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property

from ..tokenizer import Tokenizer

ANY = "\u263a"  # a letter that merges with none, as those who trained CodeLlama have it
SPACED = "\u2581"
CUT = "\ue7a2"  # in a text that becomes tokens as a whole: on both sides are letters, whatever they would be together


class PlainText:
    """Tokenizes plain text. `marks`: further ids to treat as special, though decoding shows them."""

    def __init__(self, tokenizer: Tokenizer, marks: Iterable[int] = ()) -> None:
        self._tokenizer, self._more = tokenizer, frozenset(marks)

    def first(self, text: str) -> list[int]:
        """Token ids of a text at its beginning, with the space that some vocabularies prepend."""
        begin, *rest = self._apart(text)
        return self._tokenizer.encode(begin, False) + [token for part in rest for token in self.behind(part)] if text else []

    def going_on(self, text: str) -> list[int]:
        """Token ids of a text that continues another."""
        return [token for part in self._apart(text) for token in self.behind(part)] if text else []

    def behind(self, text: str) -> list[int]:
        """Token ids of a continuation in which special tokens are recognized."""
        if not self._spaces:
            return self._tokenizer.encode(text, False)
        ids = self._tokenizer.encode(ANY + text, False)
        return ids[len(self._any) :] if ids[: len(self._any)] == self._any else self._tokenizer.encode(text, False)

    def cut(self, text: str) -> str:
        """The text with a CUT inside each special token, to be placed in a prompt (`PromptBuilder`)."""
        return CUT.join(self._apart(text))

    @cached_property
    def _any(self) -> list[int]:
        return self._tokenizer.encode(ANY, False)

    @cached_property
    def _spaces(self) -> bool:
        """Whether the vocabulary prepends a space to every text."""
        first = self._tokenizer.encode("a", False)[:1]
        return any(text.startswith(SPACED) for text, number in self._tokenizer.vocabulary().items() if number in first)

    @cached_property
    def _mark(self) -> re.Pattern[str] | None:
        """Pattern of special tokens in a text, longest first."""
        decode, added = self._tokenizer.decode, self._tokenizer.added
        marks = [text for text, number in added.items() if len(text) > 1 and (number in self._more or not decode([number]))]
        return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True)))) if marks else None

    def _apart(self, text: str) -> list[str]:
        """The text split after the first character of each special token."""
        parts, begin, found = [], 0, self._mark and self._mark.search(text)
        while found:
            parts.append(text[begin : found.start() + 1])
            begin = found.start() + 1
            found = self._mark.search(text, begin)  # what is left of a mark may be another
        return [*parts, text[begin:]]
