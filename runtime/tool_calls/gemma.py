"""Gemma's call arguments: {place:<|"|>Köln<|"|>,days:2,near:[true,null]}; names are bare, strings between special tokens."""

from __future__ import annotations

import re
from typing import Any

from ..events import Call
from .cursor import Cursor, Mismatch, parse_json, to_json
from .schema import Tools

QUOTE = '<|"|>'
CLOSE = "<tool_call|>"
_BARE = re.compile(r"[^,\[\]{}:<]*")
_DEPTH = 64


def _wrong() -> Any:
    raise Mismatch


class GemmaCall:
    """Parses what follows `<|tool_call>call:`."""

    def __call__(self, cursor: Cursor, tools: Tools) -> list[Call]:
        name = cursor.name().rstrip(":")
        arguments = self._object(cursor, 0)
        cursor.skip_whitespace()
        if not cursor.at_end() and not cursor.take_any(CLOSE):
            raise Mismatch
        return [Call(name, to_json(arguments))]

    def _object(self, cursor: Cursor, depth: int) -> dict[str, Any]:
        cursor.take("{")
        made: dict[str, Any] = {}
        while True:
            cursor.skip_whitespace()
            if cursor.take_any("}"):
                return made
            key = self._key(cursor)
            cursor.skip_whitespace()
            cursor.take(":")
            made[key] = self._value(cursor, depth + 1)
            self._behind(cursor, "}")

    def _list(self, cursor: Cursor, depth: int) -> list[Any]:
        cursor.take("[")
        made: list[Any] = []
        while True:
            cursor.skip_whitespace()
            if cursor.take_any("]"):
                return made
            made.append(self._value(cursor, depth + 1))
            self._behind(cursor, "]")

    @staticmethod
    def _behind(cursor: Cursor, end: str) -> None:
        """A comma, unless the closing bracket is next."""
        cursor.skip_whitespace()
        if not cursor.take_any(",") and (cursor.at_end() or not cursor.text.startswith(end, cursor.at)):
            raise Mismatch

    def _value(self, cursor: Cursor, depth: int) -> Any:
        if depth > _DEPTH:
            raise Mismatch
        cursor.skip_whitespace()
        if cursor.at == len(cursor.text):
            raise cursor.truncated()
        letter = cursor.text[cursor.at]
        if letter == "{":
            return self._object(cursor, depth)
        if letter == "[":
            return self._list(cursor, depth)
        if letter == '"':
            return cursor.json()
        if cursor.take_any(QUOTE):
            return cursor.take_until(QUOTE)
        bare = self._bare(cursor)
        try:
            return None if bare == "None" else parse_json(bare)
        except Mismatch:
            return bare or _wrong()  # a word that stands bare is taken as it is

    def _key(self, cursor: Cursor) -> str:
        if cursor.take_any(QUOTE):
            return cursor.take_until(QUOTE)
        key = cursor.json() if cursor.text.startswith('"', cursor.at) else self._bare(cursor)
        return key or _wrong()

    @staticmethod
    def _bare(cursor: Cursor) -> str:
        found = _BARE.match(cursor.text, cursor.at)
        if found.end() == len(cursor.text):
            raise cursor.truncated()
        cursor.at = found.end()
        return found.group().strip()
