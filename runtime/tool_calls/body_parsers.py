"""Parsers for the body of a tool call, after its opening marker: one function or class per syntax, shared by formats.

Each takes the cursor after the marker and the tools, consumes the call including its closing marker, and returns the calls. After complete
JSON at the end of the text the closing marker may be missing: an end-of-turn token often takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..events import Call
from .cursor import Cursor, Mismatch, arguments_as_json, to_json
from .schema import Tools, parse_literal, typed_argument

NAME_KEYS = ("name", "tool_name", "function", "tool")
ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
ID_KEYS = ("id", "tool_call_id")
CDATA = ("<![CDATA[", "]]>")  # around values, as XML has it


def _mismatch() -> Any:
    raise Mismatch


def _close(cursor: Cursor, close: Sequence[str]) -> None:
    """Consume a closing marker, or the end of the text; an empty marker makes it optional."""
    cursor.skip_whitespace()
    if close and not cursor.at_end() and not cursor.take_any(*close) and "" not in close:
        raise Mismatch


def call_of(value: Any) -> Call:
    """The call in a JSON object, by the key names that models use. Raises Mismatch."""
    if not isinstance(value, dict):
        raise Mismatch
    inner = value.get("function")
    function = inner if isinstance(inner, dict) else value
    name = next((function[key] for key in NAME_KEYS if isinstance(function.get(key), str)), "")
    if not name:
        raise Mismatch
    arguments = next((function[key] for key in ARGUMENT_KEYS if key in function), None)
    return Call(name, arguments_as_json(arguments), next((value[key] for key in ID_KEYS if isinstance(value.get(key), str)), ""))


@dataclass(frozen=True)
class JsonObjects:
    """JSON objects with name and arguments, or lists of them."""

    close: tuple[str, ...] = ()  # closing markers; an empty one makes them optional
    name_as_key: bool = False  # an object is {name: arguments}

    def __call__(self, cursor: Cursor, tools: Tools) -> list[Call]:
        calls: list[Call] = []
        while True:
            cursor.skip_whitespace()
            value = cursor.json()
            for each in value if isinstance(value, list) else [value]:
                calls.append(self._keyed(each) if self.name_as_key else call_of(each))
            if not self.close:
                break
            cursor.skip_whitespace()
            if cursor.at_end() or cursor.text[cursor.at] not in "{[,;":
                break
            cursor.take_any(",", ";")
        _close(cursor, self.close)
        return calls or _mismatch()

    @staticmethod
    def _keyed(value: Any) -> Call:
        if not isinstance(value, dict) or len(value) != 1:
            raise Mismatch
        (name, arguments), = value.items()
        return Call(name, arguments_as_json(arguments))


@dataclass(frozen=True)
class BareJson:
    """A JSON object without markers, which is a call if it names one of the tools. Its text is released as soon as it cannot be a call."""

    def __call__(self, cursor: Cursor, tools: Tools) -> list[Call]:
        cursor.at -= 1  # the brace is the mark
        head = cursor.text[cursor.at : cursor.at + 64]
        key = head[1:].lstrip()
        key, quote = key[1:].partition('"')[::2] if key[:1] == '"' else ("", "x" * bool(key))
        if quote and not key or not any(name.startswith(key) for name in ("type", *NAME_KEYS, *ARGUMENT_KEYS)):
            raise Mismatch
        call = call_of(cursor.json())
        if call.name not in tools:
            raise Mismatch
        end = cursor.at
        cursor.skip_whitespace()
        if cursor.at == len(cursor.text) or not cursor.take_any(";", ","):
            cursor.at = end
        return [call]


@dataclass(frozen=True)
class NamedJson:
    """A name, a separator, and JSON arguments."""

    between: tuple[str, ...] = ("",)  # markers of which one follows the name, an empty one if optional
    close: tuple[str, ...] = ()
    lead: tuple[str, ...] = ()  # may precede the name
    fence: tuple[str, str] = ("", "")  # may surround the arguments
    id: str = ""  # follows the name and precedes the call's id
    named: str = ""  # follows the id, where that comes before the name
    numbered: bool = False  # the name is part of the id: functions.NAME:0

    def __call__(self, cursor: Cursor, tools: Tools) -> list[Call]:
        cursor.skip_whitespace()
        cursor.take_any(*self.lead)
        name, call_id = cursor.name(), ""
        if self.named:
            cursor.take(self.named)
            name, call_id = cursor.name(), name
        if self.numbered:
            name, call_id = name.rpartition(":")[0].removeprefix("functions.") or name, name
        cursor.skip_whitespace()
        if cursor.take_any(self.id):
            call_id = cursor.name()
            cursor.skip_whitespace()
        if not cursor.take_any(*self.between) and "" not in self.between:
            raise Mismatch
        cursor.skip_whitespace()
        is_fenced = cursor.take_any(self.fence[0])
        cursor.skip_whitespace()
        if cursor.take_any(*self.close):  # no arguments at all
            return [Call(name, to_json({}), call_id)]
        call = Call(name, arguments_as_json(cursor.json()), call_id)
        cursor.skip_whitespace()
        if is_fenced and not cursor.at_end() and not cursor.take_any(self.fence[1]):
            raise Mismatch
        _close(cursor, self.close)
        return [call]


@dataclass(frozen=True)
class TaggedArguments:
    """A name, then each argument between tags, its value as text."""

    after_name: tuple[str, ...]
    key: str  # opens an argument
    after_key: str  # follows the argument's name
    end: str  # closes the argument
    close: tuple[str, ...]  # closes the call
    value: str = ""  # precedes the argument's value, if more than `after_key` does
    type_suffixes: tuple[str, str] = ("", "")  # suffixes of the tag: the value is text, the value is JSON
    strip_line_feeds: bool = True  # one before and one after a value are not part of it

    def __call__(self, cursor: Cursor, tools: Tools) -> list[Call]:
        cursor.skip_whitespace()
        name = cursor.name()
        if not cursor.take_any(*self.after_name) and "" not in self.after_name:
            raise Mismatch
        arguments: dict[str, Any] = {}
        while True:
            cursor.skip_whitespace()
            if cursor.take_any(*self.close):
                return [Call(name, to_json(arguments))]
            cursor.take(self.key)
            key, is_text = self._key(cursor)
            value = self._value(cursor)
            arguments[key] = value if is_text else parse_literal(value) if is_text is False else typed_argument(value, tools, name, key)

    def _key(self, cursor: Cursor) -> tuple[str, bool | None]:
        """The name of an argument, and whether its value is a string, if stated."""
        head = cursor.take_until(self.after_key)
        bare = None
        for suffix, means_text in zip(self.type_suffixes, (True, False)):
            if suffix and head.endswith(suffix):
                head, bare = head.removesuffix(suffix), means_text
        if not head or "\n" in head.strip():
            raise Mismatch
        if self.value:
            cursor.skip_whitespace()
            cursor.take(self.value)
        return head.strip(), bare

    def _value(self, cursor: Cursor) -> str:
        """The text up to the closing tag that is followed by another argument or the end of the call; other tags belong to the value."""
        begin, at = cursor.at, cursor.at
        while True:
            end = cursor.text.find(self.end, at)
            if end < 0:
                raise cursor.truncated()
            rest = Cursor(cursor.text, end + len(self.end), cursor.ended)
            rest.skip_whitespace()
            if rest.at_end() or rest.take_any(self.key, *self.close):
                break
            at = end + len(self.end)
        cursor.at = end + len(self.end)
        text = cursor.text[begin:end]
        if text.startswith(CDATA[0]) and text.endswith(CDATA[1]):
            return text[len(CDATA[0]) : -len(CDATA[1])]
        return text.removeprefix("\n").removesuffix("\n") if self.strip_line_feeds else text
