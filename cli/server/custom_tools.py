"""Custom tools of OpenAI's chats and Responses, which take free text instead of JSON arguments. The model sees a function with one string
argument; a tool's grammar constrains that string."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ... import EffllmError
from ...runtime.constraints.constraint import lark_constraint
from ...runtime.tool_calls.cursor import Mismatch, parse_json
from ...runtime.tool_calls.free_text import FREE, within_json
from .problems import Problem, problem_of

CUSTOM = "custom"
FREE_TEXT = {"type": "object", "properties": {FREE: {"type": "string"}}, "required": [FREE], "additionalProperties": False}
SYNTAXES = ("lark", "regex")
TOLD = "{}Its input has to follow this {}:\n{}"
WORDS = {"lark": "grammar in Lark's notation", "regex": "regular expression"}


def function_of(name: str, description: object, format: object, where: str) -> dict[str, Any]:
    """A custom tool as a function. `format`: as in Responses, or as in chats, where the grammar is a nested object. Raises Problem."""
    function = {"name": name, "description": description, "parameters": FREE_TEXT, "strict": False}
    if format is None or isinstance(format, dict) and format.get("type") == "text":
        return function
    inner = format.get("grammar", format) if isinstance(format, dict) and format.get("type") == "grammar" else None
    syntax, text = (inner.get("syntax"), inner.get("definition")) if isinstance(inner, dict) else (None, None)
    if syntax not in SYNTAXES or not isinstance(text, str) or not text.strip():
        raise Problem(400, f'{where} has to be {{"type": "text"}}, or of type grammar with a syntax, lark or regex, and a definition',
                      param=where)
    grammar = text if syntax == "lark" else regex_grammar(text)
    try:
        lark_constraint(grammar, where, WORDS[syntax])
        within_json(grammar)
    except EffllmError as error:
        raise problem_of(error, where) from error
    head = f"{description}\n\n" if description else ""
    return {**function, "description": TOLD.format(head, WORDS[syntax], text), "strict": True, "grammar": grammar}


def regex_grammar(pattern: str) -> str:
    """A regular expression that has to match the whole text, as a Lark grammar."""
    kept = pattern.removeprefix("^")
    kept = kept[:-1] if re.search(r"(?<!\\)(?:\\\\)*\$$", kept) else kept
    return "start: /" + re.sub(r"\\.|[/\n]", lambda found: {"/": r"\/", "\n": r"\n"}.get(found[0], found[0]), kept, flags=re.DOTALL) + "/"


def in_chat(tools: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The tools of a chat, custom ones as functions. Raises Problem."""
    return [_as_function(tool, f"tools[{at}].{CUSTOM}") if is_custom(tool) else tool for at, tool in enumerate(tools)]


def is_custom(tool: object) -> bool:
    return isinstance(tool, Mapping) and tool.get("type") == CUSTOM


def _as_function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    own = tool.get(CUSTOM)
    if not isinstance(own, dict) or not isinstance(own.get("name"), str):
        raise Problem(400, f"{where}.name is missing", param=f"{where}.name")
    if not isinstance(own.get("description"), str | None):
        raise Problem(400, f"{where}.description has to be a string", param=f"{where}.description")
    return {"type": "function", "function": function_of(own["name"], own.get("description"), own.get("format"), f"{where}.format")}


def names_of(tools: Iterable[object] | None) -> frozenset[str]:
    """The names of a chat's custom tools."""
    return frozenset(tool[CUSTOM]["name"] for tool in tools or () if is_custom(tool))


def call_of(call: object, where: str) -> object:
    """A tool call sent back in a chat, that of a custom tool as a function call. Raises Problem."""
    if not is_custom(call):
        return call
    custom = call.get(CUSTOM)
    if not isinstance(custom, dict) or not isinstance(custom.get("name"), str) or not isinstance(custom.get(FREE), str):
        raise Problem(400, f"{where}.{CUSTOM} has a name and an {FREE}", param=f"{where}.{CUSTOM}")
    return {"id": call.get("id"), "type": "function", "function": {"name": custom["name"], "arguments": {FREE: custom[FREE]}}}


def input_of(arguments: str) -> str:
    """The free text in a call's arguments, or the arguments themselves where the model did not wrap it."""
    try:
        value = parse_json(arguments)
    except Mismatch:
        return arguments
    text = value.get(FREE) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
