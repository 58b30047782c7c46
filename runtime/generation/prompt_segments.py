"""Encoding prompts whose untrusted segments must not produce special tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ..tokenizer import Tokenizer
from ..tokens.plain_text import PlainText

Segment = tuple[str, bool]  # a text, and whether it is a person's


def encode_segments(parts: Sequence[Segment], tokenizer: Tokenizer) -> list[int]:
    """Token ids of the whole prompt; special tokens written in an untrusted segment are encoded as plain text."""
    if not any(mark in text for text, is_own in parts if is_own for mark in tokenizer.added):
        return tokenizer.encode("".join(text for text, _ in parts), False)
    plain = PlainText(tokenizer)
    return [token for text, is_own in parts for token in (plain.going_on(text) if is_own else tokenizer.encode(text, False))]
