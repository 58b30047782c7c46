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
_JSON_PARTS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|["{}\[\]]', re.DOTALL)  # a lone quote begins an unfinished string
_SURROGATE = re.compile(r"[\ud800-\udfff]")


class Incomplete(Exception):
    """The text ends within what was expected."""


class Mismatch(Exception):
    """The text is not what was expected."""


class Cursor:
    """A position `at` in `text`. Every method advances it, or raises Incomplete or Mismatch."""

    def __init__(self, text: str, at: int = 0, ended: bool = False) -> None:
        self.text, self.at, self.ended = text, at, ended

    def truncated(self) -> Exception:
        """The exception at the end of the text."""
        return Mismatch() if self.ended else Incomplete()

    def take(self, marker: str) -> None:
        if self.text.startswith(marker, self.at):
            self.at += len(marker)
        elif len(self.text) - self.at < len(marker) and marker.startswith(self.text[self.at :]):
            raise self.truncated()
        else:
            raise Mismatch

    def take_any(self, *markers: str) -> bool:
        """Consume one of the markers if present; an empty one is ignored."""
        incomplete = None
        for marker in filter(None, markers):
            try:
                self.take(marker)
                return True
            except Incomplete as error:
                incomplete = error
            except Mismatch:
                continue
        if incomplete:
            raise incomplete
        return False

    def skip_whitespace(self) -> None:
        self.at = _BLANKS.match(self.text, self.at).end()

    def name(self) -> str:
        """A function or argument name."""
        match = _NAME.match(self.text, self.at)
        if match and (self.ended or match.end() < len(self.text)):
            self.at = match.end()
            return match.group()
        raise self.truncated() if match or self.at == len(self.text) else Mismatch

    def take_until(self, marker: str) -> str:
        """The text before a marker, which is consumed too."""
        end = self.text.find(marker, self.at)
        if end < 0:
            raise self.truncated()
        text, self.at = self.text[self.at : end], end + len(marker)
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
            raise self.truncated()
        if self.text[self.at] not in '{["':
            raise Mismatch
        depth = 0
        for part in _JSON_PARTS.finditer(self.text, self.at):
            if (token := part.group()) == '"':
                raise self.truncated()
            depth += token in "{["
            depth -= token in "}]"
            if not depth:
                value, self.at = parse_json(self.text[self.at : part.end()]), part.end()
                return value
        raise self.truncated()


def _no_json(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def parse_json(text: str) -> Any:
    """JSON as models write it: line feeds within strings are allowed. Raises Mismatch."""
    try:
        return json.loads(text, strict=False, parse_constant=_no_json)
    except (ValueError, RecursionError):
        raise Mismatch from None


def to_json(value: Any) -> str:
    """A value as JSON, non-ASCII kept where it is valid UTF-8. Raises Mismatch for NaN and infinity."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        raise Mismatch from None
    return json.dumps(value) if _SURROGATE.search(text) else text


def arguments_as_json(value: Any) -> str:
    """Call arguments as JSON text: from an object, nothing, or an object encoded as text. Raises Mismatch."""
    if isinstance(value, str):
        value = parse_json(value) if value.strip() else {}
    if value is not None and not isinstance(value, dict):
        raise Mismatch
    return to_json(value or {})
