"""Tokenizes text without special tokens: what looks like one (`<|im_end|>` in a program that builds prompts, `<s>` in HTML) becomes
ordinary text. API prompts may be meant either way; a user's file is not."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property

from ..tokenizer import Tokenizer

PROBE_CHAR = "\u263a"  # merges with no other character; CodeLlama's own code uses it for the same purpose
SPACE_MARKER = "\u2581"
TOKEN_BREAK = "\ue7a2"  # placed inside a special token, in a text to be tokenized: what it separates becomes plain text


class PlainText:
    """Tokenizes plain text. `extra_special`: further ids to treat as special, though decoding shows them."""

    def __init__(self, tokenizer: Tokenizer, extra_special: Iterable[int] = ()) -> None:
        self._tokenizer, self._extra_special = tokenizer, frozenset(extra_special)

    def encode_start(self, text: str) -> list[int]:
        """Token ids of a text at its beginning, with the space that some vocabularies prepend."""
        first, *parts = self._split(text)
        return self._tokenizer.encode(first, False) + [token for part in parts for token in self.encode_after(part)] if text else []

    def encode_continuation(self, text: str) -> list[int]:
        """Token ids of a text that continues another."""
        return [token for part in self._split(text) for token in self.encode_after(part)] if text else []

    def encode_after(self, text: str) -> list[int]:
        """Token ids of a continuation in which special tokens are recognized."""
        if not self._prepends_space:
            return self._tokenizer.encode(text, False)
        ids = self._tokenizer.encode(PROBE_CHAR + text, False)
        return ids[len(self._probe_ids) :] if ids[: len(self._probe_ids)] == self._probe_ids else self._tokenizer.encode(text, False)

    def break_tokens(self, text: str) -> str:
        """The text with a TOKEN_BREAK inside each special token, to be placed in a prompt (`PromptBuilder`)."""
        return TOKEN_BREAK.join(self._split(text))

    @cached_property
    def _probe_ids(self) -> list[int]:
        return self._tokenizer.encode(PROBE_CHAR, False)

    @cached_property
    def _prepends_space(self) -> bool:
        """Whether the vocabulary prepends a space to every text."""
        first = self._tokenizer.encode("a", False)[:1]
        return any(text.startswith(SPACE_MARKER) for text, number in self._tokenizer.vocabulary().items() if number in first)

    @cached_property
    def _special_pattern(self) -> re.Pattern[str] | None:
        """Pattern of special tokens in a text, longest first."""
        decode, added = self._tokenizer.decode, self._tokenizer.added
        special = [text for text, number in added.items() if len(text) > 1 and (number in self._extra_special or not decode([number]))]
        return re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))) if special else None

    def _split(self, text: str) -> list[str]:
        """The text split after the first character of each special token."""
        parts, start, match = [], 0, self._special_pattern and self._special_pattern.search(text)
        while match:
            parts.append(text[start : match.start() + 1])
            start = match.start() + 1
            match = self._special_pattern.search(text, start)  # the rest of one may contain another
        return [*parts, text[start:]]
