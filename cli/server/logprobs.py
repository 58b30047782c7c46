"""Log-probabilities in OpenAI's formats: objects with bytes in chats and Responses, four lists in completions."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from ...runtime.sampling.logprobs import TokenLogprobs
from ...runtime.tokenizer import Tokenizer
from ...runtime.tokens.token_bytes import token_bytes_of


class LogprobList:
    """Tokens with log-probabilities, as objects."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = token_bytes_of(tokenizer)

    def to_json(self, tokens: Sequence[TokenLogprobs]) -> list[dict[str, object]]:
        return [{**self._one(each.token, each.logprob), "top_logprobs": [self._one(*other) for other in each.top]} for each in tokens]

    def _one(self, token: int, logprob: float | None) -> dict[str, object]:
        token_bytes = self._bytes(token)
        return {"token": spelled(token_bytes), "logprob": logprob, "bytes": [*token_bytes]}


class LogprobColumns:
    """Tokens with log-probabilities, as the four lists of completions. `text_offset` counts characters of the answer before a token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes, self._letters, self._decoder = token_bytes_of(tokenizer), 0, codecs.getincrementaldecoder("utf-8")("replace")
        self._begun, self._tokenizer, self._marks = False, tokenizer, frozenset(tokenizer.added.values())

    def to_json(self, tokens: Sequence[TokenLogprobs], text: str) -> dict[str, object]:
        """The lists of the next chunk of text."""
        offsets = []
        for each in tokens:
            token_bytes = self._bytes(each.token)
            if not self._begun and token_bytes[:1] == b" " and text[:1] != " ":  # the leading blank of a text is not shown
                token_bytes = token_bytes[1:]
            self._begun = True
            offsets.append(self._letters)
            if not self._is_hidden(each.token, text):
                self._letters += len(self._decoder.decode(token_bytes))
        return {"tokens": [self._named(each.token) for each in tokens], "token_logprobs": [each.logprob for each in tokens],
                "top_logprobs": [self._likeliest(each) for each in tokens], "text_offset": offsets}

    def _is_hidden(self, token: int, text: str) -> bool:
        """Whether it is a special token that is not in the answer's text; an echoed prompt may contain it."""
        return token in self._marks and not self._tokenizer.decode([token]) and spelled(self._bytes(token)) not in text

    def _named(self, token: int) -> str:
        token_bytes = self._bytes(token)
        return spelled(token_bytes) if is_text(token_bytes) else f"bytes:{spelled(token_bytes)}"

    def _likeliest(self, position: TokenLogprobs) -> dict[str, float] | None:
        """The most likely tokens and the token itself. Of two with the same spelling the more likely one counts."""
        if position.logprob is None:
            return None
        likeliest: dict[str, float] = {}
        for token, logprob in (*position.top, (position.token, position.logprob)):
            likeliest.setdefault(self._named(token), logprob)
        return likeliest


def join_columns(columns: Sequence[dict[str, list]]) -> dict[str, object]:
    """The lists of several chunks, concatenated."""
    return {name: [each for part in columns for each in part[name]] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}


def is_text(token_bytes: bytes) -> bool:
    try:
        token_bytes.decode()
    except UnicodeDecodeError:
        return False
    return True


def spelled(token_bytes: bytes) -> str:
    """A token as text; a partial character as escaped bytes, such as `\\xf0\\x9f`."""
    return token_bytes.decode() if is_text(token_bytes) else "".join(f"\\x{byte:02x}" for byte in token_bytes)
