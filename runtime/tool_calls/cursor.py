"""A cursor over streamed text, with the tokens that call parsers share.

The text may be cut anywhere: `Incomplete` means that it is a prefix of what is expected, `Mismatch` that it is something else. Once the
text has `ended`, a prefix is a mismatch.
"""

from __future__ import annotations

import json
import re
from typing import Any

_NAME = re.compile(r"[\w.:/-]+")
_BLANKS = re.compile(r"\s*")
_JSON_PARTS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|["{}\[\]]', re.DOTALL)  # a lone quote begins a string that is cut
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class Incomplete(Exception):
    """The text ends within what was expected."""


class Mismatch(Exception):
    """The text is not what was expected."""


class Cursor:
    """`at` is an index into `text`; every method advances it, or raises Incomplete or Mismatch."""

    def __init__(self, text: str, at: int = 0, ended: bool = False) -> None:
        self.text, self.at, self.ended = text, at, ended

    def short(self) -> Exception:
        """The exception at the end of the text."""
        return Mismatch() if self.ended else Incomplete()

    def take(self, mark: str) -> None:
        if self.text.startswith(mark, self.at):
            self.at += len(mark)
        elif len(self.text) - self.at < len(mark) and mark.startswith(self.text[self.at :]):
            raise self.short()
        else:
            raise Mismatch

    def takes(self, *marks: str) -> bool:
        """Consume one of the markers if present; an empty one is ignored."""
        short = None
        for mark in filter(None, marks):
            try:
                self.take(mark)
                return True
            except Incomplete as error:
                short = error
            except Mismatch:
                continue
        if short:
            raise short
        return False

    def blanks(self) -> None:
        self.at = _BLANKS.match(self.text, self.at).end()

    def name(self) -> str:
        """A function or argument name."""
        found = _NAME.match(self.text, self.at)
        if found and (self.ended or found.end() < len(self.text)):
            self.at = found.end()
            return found.group()
        raise self.short() if found or self.at == len(self.text) else Mismatch

    def until(self, mark: str) -> str:
        """The text before a marker, which is consumed too."""
        end = self.text.find(mark, self.at)
        if end < 0:
            raise self.short()
        text, self.at = self.text[self.at : end], end + len(mark)
        return text

    def at_end(self) -> bool:
        """Is this the end of the text? Raises Incomplete if not known."""
        if self.at < len(self.text):
            return False
        if not self.ended:
            raise Incomplete
        return True

    def json(self) -> Any:
        """A JSON object, array or string."""
        if self.at == len(self.text):
            raise self.short()
        if self.text[self.at] not in '{["':
            raise Mismatch
        depth = 0
        for part in _JSON_PARTS.finditer(self.text, self.at):
            if (mark := part.group()) == '"':
                raise self.short()
            depth += mark in "{["
            depth -= mark in "}]"
            if not depth:
                value, self.at = parsed(self.text[self.at : part.end()]), part.end()
                return value
        raise self.short()


def _no_json(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def parsed(text: str) -> Any:
    """JSON as models write it: line feeds within strings are allowed. Raises Mismatch."""
    try:
        return json.loads(text, strict=False, parse_constant=_no_json)
    except (ValueError, RecursionError):
        raise Mismatch from None


def written(value: Any) -> str:
    """A value as JSON, non-ASCII kept where it is valid UTF-8. Raises Mismatch for NaN and infinity."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise Mismatch from None
    return json.dumps(value) if _SURROGATE.search(text) else text


def arguments_of(value: Any) -> str:
    """Call arguments as JSON text: from an object, nothing, or an object encoded as text. Raises Mismatch."""
    if isinstance(value, str):
        value = parsed(value) if value.strip() else {}
    if value is not None and not isinstance(value, dict):
        raise Mismatch
    return written(value or {})
