"""Tool calls in Python syntax, parsed from the syntax tree; nothing is executed."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..events import Call
from .cursor import Cursor, Mismatch, to_json
from .schema import Tools

LONGEST_SOURCE = 1 << 20  # characters
STRING = re.compile(r"""('(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""", re.DOTALL)


@dataclass(frozen=True)
class PythonCalls:
    """Python calls in a list or in sequence: [look(place="Köln", days=2)]. JSON's true, false and null are accepted."""

    close: tuple[str, ...] = ()
    bracket: str = ""  # the mark is a bracket itself

    def __call__(self, cursor: Cursor, tools: Tools) -> list[Call]:
        cursor.skip_whitespace()
        begin = cursor.at - len(self.bracket)
        if self.close:
            text = self._until_close(cursor, tools)
        else:
            end = _end_of_python(cursor, begin)
            text, cursor.at = cursor.text[begin:end], end
        calls = _calls(text, tools)
        if not calls or self.bracket and any(call.name not in tools for call in calls):
            raise Mismatch
        return calls

    def _until_close(self, cursor: Cursor, tools: Tools) -> str:
        """The parseable text before the closing marker, which may also occur within a string argument."""
        begin = at = cursor.at
        while True:
            found = [(place, mark) for mark in self.close if (place := cursor.text.find(mark, at)) >= 0]
            if not found:
                if not cursor.ended:
                    raise cursor.truncated()
                text, cursor.at = cursor.text[begin:], len(cursor.text)
                return text
            end, mark = min(found)
            at = end + len(mark)
            try:
                _calls(cursor.text[begin:end], tools)
            except Mismatch:
                continue
            cursor.at = at
            return cursor.text[begin:end]


def _calls(text: str, tools: Tools) -> list[Call]:
    """Parse calls. Raises Mismatch."""
    odd = {name: f"_odd_name_{number}" for number, name in enumerate(tools) if not all(part.isidentifier() for part in name.split("."))}
    if len(text) > LONGEST_SOURCE:
        raise Mismatch
    try:
        tree = ast.parse(_mended(text.strip(), odd))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Mismatch from None
    names = {python: name for name, python in odd.items()}
    calls = [call for each in tree.body for call in (_python_calls(each.value) if isinstance(each, ast.Expr) else _wrong())]
    return [replace(call, name=names.get(call.name, call.name)) for call in calls]


def _mended(text: str, odd: Mapping[str, str]) -> str:
    """Valid Python from what models write: multi-line strings, and function names that are not identifiers."""
    name = re.compile("|".join(rf"(?<![\w.-]){re.escape(each)}(?=\s*\()" for each in odd)) if odd else None
    parts = STRING.split(text)
    for at, part in enumerate(parts):
        if at % 2:
            parts[at] = part.replace("\n", "\\n")
        elif name:
            parts[at] = name.sub(lambda found: odd[found.group()], part)
    return "".join(parts)


def _wrong() -> Any:
    raise Mismatch


def _end_of_python(cursor: Cursor, begin: int) -> int:
    """Position after the bracket that closes the one at `begin`, ignoring strings."""
    depth, quote, at, text = 0, "", begin, cursor.text
    while at < len(text):
        letter = text[at]
        if quote:
            if letter == "\\":
                at += 1
            elif letter == quote:
                quote = ""
        elif letter in "\"'":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
            if not depth:
                return at + 1
        at += 1
    raise cursor.truncated()


def _python_calls(node: ast.expr) -> list[Call]:
    if isinstance(node, (ast.List, ast.Tuple)):
        return [call for each in node.elts for call in _python_calls(each)]
    if not isinstance(node, ast.Call) or node.args:
        raise Mismatch
    arguments: dict[str, Any] = {}
    for each in node.keywords:
        value = _python_value(each.value)
        arguments |= {each.arg: value} if each.arg is not None else value if isinstance(value, dict) else _wrong()
    return [Call(_dotted(node.func), to_json(arguments))]


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else _wrong()


_WORDS = {"true": True, "false": False, "null": None}


def _python_value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, (str, int, float, bool))):
        return node.value
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_python_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {_python_value(key) if isinstance(key, ast.Constant) and isinstance(key.value, str) else _wrong(): _python_value(value)
                for key, value in zip(node.keys, node.values)}
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _python_value(node.operand)
        return -value if isinstance(value, (int, float)) and not isinstance(value, bool) else _wrong()
    raise Mismatch
