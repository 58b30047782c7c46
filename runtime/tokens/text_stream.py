"""Streaming detokenization: a character may span several tokens, and is shown when it is complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from os.path import commonprefix

import tokenizers

UNFINISHED = "\ufffd"  # what decoding makes of the bytes of half a character, and of bytes that are none
LETTER = "A"


class Decoder:
    """Token ids -> text. Byte tokens (`<0x0A>` in SentencePiece vocabularies) are decoded here: the library decodes a run of them as a
    whole, in which one invalid byte spoils valid characters, also those shown before. So are added tokens with non-ASCII text in byte-level
    vocabularies, which the library takes for incomplete bytes."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    @cached_property
    def _bytes(self) -> dict[int, int]:
        """Token -> byte, where the vocabulary has byte tokens that its decoder knows."""
        numbers = {self._backend.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
        return numbers if None not in numbers and self._backend.decode([self._letter]) == LETTER else {}

    @cached_property
    def _letter(self) -> int:
        return self._backend.token_to_id(f"<0x{ord(LETTER):02X}>")

    @cached_property
    def _added(self) -> dict[int, str]:
        """Added token -> text, where the library would decode it wrongly: DeepSeek Coder's for ü and the like."""
        added = {number: token.content for number, token in self._backend.get_added_tokens_decoder().items() if not token.special}
        return {number: text for number, text in added.items()
                if not text.isascii() and UNFINISHED not in text and UNFINISHED in self._backend.decode([number])}

    def __call__(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if not self._added.keys().isdisjoint(ids):
            return "".join("".join(map(self._added.get, run)) if are_added else self(list(run), skip_special_tokens)
                           for are_added, run in groupby(ids, self._added.__contains__))
        if not self._bytes or self._bytes.keys().isdisjoint(ids):
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        made: list[str] = []
        for are_bytes, run in groupby(ids, self._bytes.__contains__):
            if are_bytes:
                made.append(bytes(self._bytes[token] for token in run).decode("utf-8", "replace"))
            elif not made:
                made.append(self._backend.decode(list(run), skip_special_tokens=skip_special_tokens))
            else:  # behind a letter, so that a leading space is not taken for that of a text's first word
                made.append(self._backend.decode([self._letter, *run], skip_special_tokens=skip_special_tokens)[1:])
        return "".join(made)


class TextStream:
    """Token ids in, text out, as soon as whole characters are known. The pieces add up to `Tokenizer.decode` of all ids.

    `context`: preceding tokens whose text is known. If it ends in an incomplete character, shown as U+FFFD, `taken_back` holds that once
    the rest arrives: the character is then part of the next piece.
    """

    def __init__(self, decoder: Decoder, context: Sequence[int], visible: Mapping[int, str]) -> None:
        self._decode, self._visible = decoder, visible
        self.taken_back, text = "", decoder(context)
        self._ids, self._begin = list(context), 0
        # Of a text that ends in half a character nothing counts as shown, until it is known what that is.
        self._shown, self._before, self._unsure = (0, "", text) if text.endswith(UNFINISHED) else (len(context), text, "")

    def push(self, token: int) -> str:
        """The text that this token completes; empty inside a character and for special tokens."""
        if token in self._visible:
            return self.flush() + self._visible[token]
        self._ids.append(token)
        text = self._decode(self._ids[self._begin :])
        return "" if len(text) <= len(self._before) or text.endswith(UNFINISHED) else self._show(text)

    def flush(self) -> str:
        """The rest at the end: bytes of an incomplete character become U+FFFD."""
        text = self._decode(self._ids[self._begin :])
        if len(text) <= len(self._before):
            return ""
        rest = self._show(text)
        self._ids, self._begin, self._shown, self._before = [], 0, 0, ""  # bytes that come now complete nothing of before
        return rest

    def _show(self, text: str) -> str:
        """The part of `text`, decoded from all tokens since `begin`, that was not shown."""
        known = self._before
        if self._unsure:  # what ended it is a character now, or was none
            known = commonprefix([self._unsure, text])
            self.taken_back, self._unsure = self._unsure[len(known) :], ""
        del self._ids[: self._begin]
        self._begin, self._shown = self._shown - self._begin, len(self._ids)
        self._before = self._decode(self._ids[self._begin :])
        return text[len(known) :]
