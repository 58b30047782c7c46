"""Tool calls of gpt-oss (the harmony format): a message on the commentary channel whose header names the function."""

from __future__ import annotations

from ..events import Call
from .cursor import Cursor, Mismatch, arguments_as_json
from .schema import Tools

MESSAGE = "<|message|>"
ENDS = ("<|call|>", "<|end|>")


class HarmonyCall:
    """Parses what follows `to=functions.`: a name, the rest of the header, JSON."""

    def __call__(self, cursor: Cursor, tools: Tools) -> list[Call]:
        name = cursor.name()
        if "\n" in cursor.take_until(MESSAGE):
            raise Mismatch
        cursor.skip_whitespace()
        empty = cursor.at_end() or cursor.take_any(*ENDS)
        call = Call(name, arguments_as_json({} if empty else cursor.json()))
        cursor.skip_whitespace()
        if not empty and not cursor.at_end() and not cursor.take_any(*ENDS):
            raise Mismatch
        return [call]
