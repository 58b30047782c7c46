"""Parsers for the body of a tool call, after its opening marker: one function or class per syntax, shared by formats.

Each takes the cursor after the marker and the tools, consumes the call including its closing marker, and returns the calls. After complete
JSON at the end of the text the closing marker may be missing: an end-of-turn token often takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..events import Call
from .cursor import Cursor, Mismatch, arguments_of, written
from .schema import Tools, parse_literal, typed_argument

NAMES = ("name", "tool_name", "function", "tool")
ARGUMENTS = ("arguments", "parameters", "args", "input")
IDS = ("id", "tool_call_id")
QUOTED = ("<![CDATA[", "]]>")  # around values, as XML has it


def _wrong() -> Any:
    raise Mismatch


def _close(cursor: Cursor, close: Sequence[str]) -> None:
    """Consume a closing marker, or the end of the text; an empty marker makes it optional."""
    cursor.blanks()
    if close and not cursor.at_end() and not cursor.takes(*close) and "" not in close:
        raise Mismatch


def call_of(value: Any) -> Call:
    """The call in a JSON object, by the key names that models use. Raises Mismatch."""
    if not isinstance(value, dict):
        raise Mismatch
    inner = value.get("function")
    known = inner if isinstance(inner, dict) else value
    name = next((known[key] for key in NAMES if isinstance(known.get(key), str)), "")
    if not name:
        raise Mismatch
    arguments = next((known[key] for key in ARGUMENTS if key in known), None)
    return Call(name, arguments_of(arguments), next((value[key] for key in IDS if isinstance(value.get(key), str)), ""))


@dataclass(frozen=True)
class JsonObjects:
    """JSON objects with name and arguments, or lists of them. `keyed`: an object is {name: arguments}. An empty string in `close` makes
    the closing marker optional."""

    close: tuple[str, ...] = ()
    keyed: bool = False

    def __call__(self, cursor: Cursor, tools: Tools) -> list[Call]:
        calls: list[Call] = []
        while True:
            cursor.blanks()
            value = cursor.json()
            for each in value if isinstance(value, list) else [value]:
                calls.append(self._keyed(each) if self.keyed else call_of(each))
            if not self.close:
                break
            cursor.blanks()
            if cursor.at_end() or cursor.text[cursor.at] not in "{[,;":
                break
            cursor.takes(",", ";")
        _close(cursor, self.close)
        return calls or _wrong()

    @staticmethod
    def _keyed(value: Any) -> Call:
        if not isinstance(value, dict) or len(value) != 1:
            raise Mismatch
        (name, arguments), = value.items()
        return Call(name, arguments_of(arguments))


@dataclass(frozen=True)
class BareJson:
    """A JSON object without markers, which is a call if it names one of the tools. Its text is released as soon as it cannot be a call."""

    def __call__(self, cursor: Cursor, tools: Tools) -> list[Call]:
        cursor.at -= 1  # the brace is the mark
        begin = cursor.text[cursor.at : cursor.at + 64]
        key = begin[1:].lstrip()
        key, quote = key[1:].partition('"')[::2] if key[:1] == '"' else ("", "x" * bool(key))
        if quote and not key or not any(known.startswith(key) for known in ("type", *NAMES, *ARGUMENTS)):
            raise Mismatch
        call = call_of(cursor.json())
        if call.name not in tools:
            raise Mismatch
        end = cursor.at
        cursor.blanks()
        if cursor.at == len(cursor.text) or not cursor.takes(";", ","):
            cursor.at = end
        return [call]


@dataclass(frozen=True)
class NamedJson:
    """A name, a separator, and JSON arguments.

    `between`: markers of which one follows the name, an empty one if optional. `lead` may come before the name. `id` follows the name and
    precedes the call's id; `named` follows the id where that comes first, before the name; with `numbered` the name is part of the id:
    functions.NAME:0. `fence` may surround the arguments.
    """

    between: tuple[str, ...] = ("",)
    close: tuple[str, ...] = ()
    lead: tuple[str, ...] = ()
    fence: tuple[str, str] = ("", "")
    id: str = ""
    named: str = ""
    numbered: bool = False

    def __call__(self, cursor: Cursor, tools: Tools) -> list[Call]:
        cursor.blanks()
        cursor.takes(*self.lead)
        name, called = cursor.name(), ""
        if self.named:
            cursor.take(self.named)
            name, called = cursor.name(), name
        if self.numbered:
            name, called = name.rpartition(":")[0].removeprefix("functions.") or name, name
        cursor.blanks()
        if cursor.takes(self.id):
            called = cursor.name()
            cursor.blanks()
        if not cursor.takes(*self.between) and "" not in self.between:
            raise Mismatch
        cursor.blanks()
        fenced = cursor.takes(self.fence[0])
        cursor.blanks()
        if cursor.takes(*self.close):  # no arguments at all
            return [Call(name, written({}), called)]
        call = Call(name, arguments_of(cursor.json()), called)
        cursor.blanks()
        if fenced and not cursor.at_end() and not cursor.takes(self.fence[1]):
            raise Mismatch
        _close(cursor, self.close)
        return [call]


@dataclass(frozen=True)
class TaggedArguments:
    """A name, then each argument between tags, its value as text. `key` opens an argument, `behind_key` follows its name, `value`
    precedes its value if there is more, `end` closes the argument, `close` the call."""

    behind_name: tuple[str, ...]
    key: str
    behind_key: str
    end: str
    close: tuple[str, ...]
    value: str = ""
    texts: tuple[str, str] = ("", "")  # how `behind_key` says that the value is text, and that it is JSON
    line_feeds: bool = True  # one before and one behind a value are no part of it

    def __call__(self, cursor: Cursor, tools: Tools) -> list[Call]:
        cursor.blanks()
        name = cursor.name()
        if not cursor.takes(*self.behind_name) and "" not in self.behind_name:
            raise Mismatch
        arguments: dict[str, Any] = {}
        while True:
            cursor.blanks()
            if cursor.takes(*self.close):
                return [Call(name, written(arguments))]
            cursor.take(self.key)
            key, bare = self._key(cursor)
            value = self._value(cursor)
            arguments[key] = value if bare else parse_literal(value) if bare is False else typed_argument(value, tools, name, key)

    def _key(self, cursor: Cursor) -> tuple[str, bool | None]:
        """The name of an argument, and whether its value is a string, if stated."""
        head = cursor.until(self.behind_key)
        bare = None
        for said, is_text in zip(self.texts, (True, False)):
            if said and head.endswith(said):
                head, bare = head.removesuffix(said), is_text
        if not head or "\n" in head.strip():
            raise Mismatch
        if self.value:
            cursor.blanks()
            cursor.take(self.value)
        return head.strip(), bare

    def _value(self, cursor: Cursor) -> str:
        """The text up to the closing tag that is followed by another argument or the end of the call; other tags belong to the value."""
        begin, at = cursor.at, cursor.at
        while True:
            end = cursor.text.find(self.end, at)
            if end < 0:
                raise cursor.short()
            rest = Cursor(cursor.text, end + len(self.end), cursor.ended)
            rest.blanks()
            if rest.at_end() or rest.takes(self.key, *self.close):
                break
            at = end + len(self.end)
        cursor.at = end + len(self.end)
        text = cursor.text[begin:end]
        if text.startswith(QUOTED[0]) and text.endswith(QUOTED[1]):
            return text[len(QUOTED[0]) : -len(QUOTED[1])]
        return text.removeprefix("\n").removesuffix("\n") if self.line_feeds else text
