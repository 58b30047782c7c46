"""Encoding prompts whose untrusted segments must not produce special tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ..tokenizer import Tokenizer
from ..tokens.plain_text import PlainText

Segment = tuple[str, bool]  # (text, whether it is untrusted: a query or a document)


def encode_segments(segments: Sequence[Segment], tokenizer: Tokenizer) -> list[int]:
    """Token ids of the whole prompt; special tokens written in an untrusted segment are encoded as plain text."""
    if not any(special in text for text, is_untrusted in segments if is_untrusted for special in tokenizer.added):
        return tokenizer.encode("".join(text for text, _ in segments), False)
    plain_text = PlainText(tokenizer)
    return [token for text, is_untrusted in segments
            for token in (plain_text.encode_continuation(text) if is_untrusted else tokenizer.encode(text, False))]
