"""Bytes of single tokens, whatever their context: a token may be part of a character."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from ..sampling.dry import Breakers
    from ..tokenizer import Tokenizer

SPACE, WORD = "\u0120", "\u2581"  # a space in byte-level vocabularies, and in SentencePiece's
_KNOWN: WeakKeyDictionary[Tokenizer, TokenBytes] = WeakKeyDictionary()


def byte_to_unicode() -> dict[int, int]:
    """GPT-2's byte-to-unicode table: byte -> code point by which byte-level vocabularies write it."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {byte: byte if byte in prints else next(others) for byte in range(256)}


class TokenBytes:
    """Bytes of the tokens of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._texts = {number: text for text, number in tokenizer.vocabulary().items()}
        self._added = frozenset(tokenizer.added.values())
        space = tokenizer.vocabulary().get(SPACE)
        self.breakers: dict[tuple[str, ...], Breakers] = {}  # by the breakers' texts
        is_byte_level = space is not None and tokenizer.decode([space], False) == " "
        self._byte_of_char = {letter: byte for byte, letter in byte_to_unicode().items()} if is_byte_level else None

    def __call__(self, token: int) -> bytes:
        """The bytes of a token; empty for an id without text, such as padding of the embedding table."""
        text = self._texts.get(token, "")
        if token in self._added:
            return text.encode()
        if self._byte_of_char is not None:
            token_bytes = [self._byte_of_char.get(ord(letter)) for letter in text]
            return text.encode("utf-8", "replace") if None in token_bytes else bytes(token_bytes)
        if len(text) == 6 and text[:3] == "<0x" and text[5] == ">":
            return bytes.fromhex(text[3:5])
        return text.replace(WORD, " ").encode("utf-8", "replace")

    @cached_property
    def all(self) -> dict[int, bytes]:
        """Bytes of every token."""
        return {token: self(token) for token in self._texts}


def token_bytes_of(tokenizer: Tokenizer) -> TokenBytes:
    """The `TokenBytes` of a tokenizer, cached."""
    if tokenizer not in _KNOWN:
        _KNOWN[tokenizer] = TokenBytes(tokenizer)
    return _KNOWN[tokenizer]
