"""Gemma's notation of arguments: {place:<|"|>Köln<|"|>,days:2,near:[true,null]}; names stand bare, texts between marks of their own."""

from __future__ import annotations

import re
from typing import Any

from ..events import Call
from .cursor import Cursor, Wrong, parsed, written
from .schema import Tools

QUOTE = '<|"|>'
CLOSE = "<tool_call|>"
_BARE = re.compile(r"[^,\[\]{}:<]*")
_DEPTH = 64


class Gemma:
    """What follows `<|tool_call>call:`."""

    def __call__(self, cursor: Cursor, tools: Tools) -> list[Call]:
        name = cursor.name().rstrip(":")
        arguments = self._object(cursor, 0)
        cursor.blanks()
        if not cursor.at_end() and not cursor.takes(CLOSE):
            raise Wrong
        return [Call(name, written(arguments))]

    def _object(self, cursor: Cursor, depth: int) -> dict[str, Any]:
        cursor.take("{")
        made: dict[str, Any] = {}
        while True:
            cursor.blanks()
            if cursor.takes("}"):
                return made
            key = cursor.until(QUOTE) if cursor.takes(QUOTE) else self._bare(cursor)
            if not key:
                raise Wrong
            cursor.take(":")
            made[key] = self._value(cursor, depth + 1)
            self._behind(cursor, "}")

    def _list(self, cursor: Cursor, depth: int) -> list[Any]:
        cursor.take("[")
        made: list[Any] = []
        while True:
            cursor.blanks()
            if cursor.takes("]"):
                return made
            made.append(self._value(cursor, depth + 1))
            self._behind(cursor, "]")

    @staticmethod
    def _behind(cursor: Cursor, end: str) -> None:
        """A comma, or what closes is next."""
        cursor.blanks()
        if not cursor.takes(",") and (cursor.at_end() or not cursor.text.startswith(end, cursor.at)):
            raise Wrong

    def _value(self, cursor: Cursor, depth: int) -> Any:
        if depth > _DEPTH:
            raise Wrong
        cursor.blanks()
        if cursor.at == len(cursor.text):
            raise cursor.short()
        letter = cursor.text[cursor.at]
        if letter == "{":
            return self._object(cursor, depth)
        if letter == "[":
            return self._list(cursor, depth)
        if letter == '"':
            return cursor.json()
        if cursor.takes(QUOTE):
            return cursor.until(QUOTE)
        bare = self._bare(cursor)
        try:
            return {"None": None}[bare] if bare in ("None",) else parsed(bare)
        except Wrong:
            if bare:
                return bare  # a word that stands bare is taken as it is
            raise

    @staticmethod
    def _bare(cursor: Cursor) -> str:
        found = _BARE.match(cursor.text, cursor.at)
        if found.end() == len(cursor.text):
            raise cursor.short()
        cursor.at = found.end()
        return found.group().strip()
