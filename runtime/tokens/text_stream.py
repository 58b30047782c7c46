"""Streaming detokenization: a character may span several tokens, and is shown when it is complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from os.path import commonprefix

import tokenizers

REPLACEMENT_CHAR = "\ufffd"  # decoded from incomplete characters and invalid bytes
PROBE_CHAR = "A"


class Decoder:
    """Token ids -> text.

    Byte tokens (`<0x0A>` in SentencePiece vocabularies) are decoded here: the library decodes a run of them as a whole, in which one
    invalid byte spoils valid characters, also those shown before. So are added tokens with non-ASCII text in byte-level vocabularies, which
    the library takes for incomplete bytes.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    @cached_property
    def _byte_tokens(self) -> dict[int, int]:
        """Token -> byte, if the vocabulary has byte tokens and its decoder knows them."""
        bytes_by_token = {self._backend.token_to_id(f"<0x{byte:02X}>"): byte for byte in range(256)}
        return bytes_by_token if None not in bytes_by_token and self._backend.decode([self._probe_token]) == PROBE_CHAR else {}

    @cached_property
    def _probe_token(self) -> int:
        return self._backend.token_to_id(f"<0x{ord(PROBE_CHAR):02X}>")

    @cached_property
    def _misdecoded_tokens(self) -> dict[int, str]:
        """Added token -> text, where the library would decode it wrongly: ü in DeepSeek Coder's vocabulary, for example."""
        added = {token_id: token.content for token_id, token in self._backend.get_added_tokens_decoder().items() if not token.special}
        return {token_id: text for token_id, text in added.items()
                if not text.isascii() and REPLACEMENT_CHAR not in text and REPLACEMENT_CHAR in self._backend.decode([token_id])}

    def __call__(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if not self._misdecoded_tokens.keys().isdisjoint(ids):
            return "".join("".join(map(self._misdecoded_tokens.get, run)) if are_added else self(list(run), skip_special_tokens)
                           for are_added, run in groupby(ids, self._misdecoded_tokens.__contains__))
        if not self._byte_tokens or self._byte_tokens.keys().isdisjoint(ids):
            return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        parts: list[str] = []
        for are_bytes, run in groupby(ids, self._byte_tokens.__contains__):
            if are_bytes:
                parts.append(bytes(self._byte_tokens[token] for token in run).decode("utf-8", "replace"))
            elif not parts:
                parts.append(self._backend.decode(list(run), skip_special_tokens=skip_special_tokens))
            else:  # after a letter, so that a leading space is not dropped as that of a text's first word
                parts.append(self._backend.decode([self._probe_token, *run], skip_special_tokens=skip_special_tokens)[1:])
        return "".join(parts)


class TextStream:
    """Token ids in, text out, as soon as whole characters are known. The pieces add up to `Tokenizer.decode` of all ids.

    `context`: preceding tokens whose text was shown. If it ends in an incomplete character, shown as U+FFFD, `retracted` holds that once
    the rest arrives: the character is then part of the next piece.
    `visible`: special tokens to be emitted as text.
    """

    def __init__(self, decoder: Decoder, context: Sequence[int], visible: Mapping[int, str]) -> None:
        self._decode, self._visible = decoder, visible
        self.retracted, text = "", decoder(context)
        self._ids, self._window_start = list(context), 0
        # A context that ends in an incomplete character does not count as shown until that is known.
        self._shown_tokens, self._shown_text, self._incomplete_text = (0, "", text) if text.endswith(REPLACEMENT_CHAR) else (len(context),
                                                                                                                             text, "")

    def push(self, token: int) -> str:
        """The text that this token completes; empty inside a character and for special tokens."""
        if token in self._visible:
            return self.flush() + self._visible[token]
        self._ids.append(token)
        text = self._decode(self._ids[self._window_start :])
        return "" if len(text) <= len(self._shown_text) or text.endswith(REPLACEMENT_CHAR) else self._show(text)

    def flush(self) -> str:
        """The rest at the end: bytes of an incomplete character become U+FFFD."""
        text = self._decode(self._ids[self._window_start :])
        if len(text) <= len(self._shown_text):
            return ""
        rest = self._show(text)
        self._ids, self._window_start, self._shown_tokens, self._shown_text = [], 0, 0, ""  # later bytes do not complete earlier characters
        return rest

    def _show(self, text: str) -> str:
        """The part of `text`, decoded from all tokens since `_window_start`, that was not shown."""
        shown_text = self._shown_text
        if self._incomplete_text:  # its last character is complete now, or known to be invalid
            shown_text = commonprefix([self._incomplete_text, text])
            self.retracted, self._incomplete_text = self._incomplete_text[len(shown_text) :], ""
        del self._ids[: self._window_start]
        self._window_start, self._shown_tokens = self._shown_tokens - self._window_start, len(self._ids)
        self._shown_text = self._decode(self._ids[self._window_start :])
        return text[len(shown_text) :]
