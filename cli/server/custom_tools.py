"""Custom tools of OpenAI's chats and Responses, which take free text instead of JSON arguments. The model sees a function with one string
argument; a tool's grammar constrains that string."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ... import EffllmError
from ...runtime.constraints.constraint import lark_constraint
from ...runtime.tool_calls.cursor import Mismatch, parse_json
from ...runtime.tool_calls.free_text import TEXT_ARGUMENT, json_escaped_grammar
from .problems import Problem, problem_of

CUSTOM = "custom"
FREE_TEXT_SCHEMA = {"type": "object", "properties": {TEXT_ARGUMENT: {"type": "string"}}, "required": [TEXT_ARGUMENT],
                    "additionalProperties": False}
SYNTAXES = ("lark", "regex")
GRAMMAR_DESCRIPTION = "{}Its input has to follow this {}:\n{}"
SYNTAX_NAMES = {"lark": "grammar in Lark's notation", "regex": "regular expression"}


def function_of(name: str, description: object, format: object, where: str) -> dict[str, Any]:
    """A custom tool as a function. `format`: as in Responses, or as in chats, where the grammar is a nested object. Raises Problem."""
    function = {"name": name, "description": description, "parameters": FREE_TEXT_SCHEMA, "strict": False}
    if format is None or isinstance(format, dict) and format.get("type") == "text":
        return function
    definition = format.get("grammar", format) if isinstance(format, dict) and format.get("type") == "grammar" else None
    syntax, text = (definition.get("syntax"), definition.get("definition")) if isinstance(definition, dict) else (None, None)
    if syntax not in SYNTAXES or not isinstance(text, str) or not text.strip():
        raise Problem(400, f'{where} has to be {{"type": "text"}}, or of type grammar with a syntax, lark or regex, and a definition',
                      param=where)
    grammar = text if syntax == "lark" else regex_grammar(text)
    try:
        lark_constraint(grammar, where, SYNTAX_NAMES[syntax])
        json_escaped_grammar(grammar)
    except EffllmError as error:
        raise problem_of(error, where) from error
    prefix = f"{description}\n\n" if description else ""
    return {**function, "description": GRAMMAR_DESCRIPTION.format(prefix, SYNTAX_NAMES[syntax], text), "strict": True, "grammar": grammar}


def regex_grammar(pattern: str) -> str:
    """A regular expression that has to match the whole text, as a Lark grammar."""
    body = pattern.removeprefix("^")
    body = body[:-1] if re.search(r"(?<!\\)(?:\\\\)*\$$", body) else body  # an unescaped $ at the end
    return "start: /" + re.sub(r"\\.|[/\n]", lambda match: {"/": r"\/", "\n": r"\n"}.get(match[0], match[0]), body, flags=re.DOTALL) + "/"


def in_chat(tools: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The tools of a chat, custom ones as functions. Raises Problem."""
    return [_as_function(tool, f"tools[{index}].{CUSTOM}") if is_custom(tool) else tool for index, tool in enumerate(tools)]


def is_custom(tool: object) -> bool:
    return isinstance(tool, Mapping) and tool.get("type") == CUSTOM


def _as_function(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    custom = tool.get(CUSTOM)
    if not isinstance(custom, dict) or not isinstance(custom.get("name"), str):
        raise Problem(400, f"{where}.name is missing", param=f"{where}.name")
    if not isinstance(custom.get("description"), str | None):
        raise Problem(400, f"{where}.description has to be a string", param=f"{where}.description")
    return {"type": "function", "function": function_of(custom["name"], custom.get("description"), custom.get("format"),
                                                        f"{where}.format")}


def names_of(tools: Iterable[object] | None) -> frozenset[str]:
    """The names of a chat's custom tools."""
    return frozenset(tool[CUSTOM]["name"] for tool in tools or () if is_custom(tool))


def call_of(call: object, where: str) -> object:
    """A tool call sent back in a chat, that of a custom tool as a function call. Raises Problem."""
    if not is_custom(call):
        return call
    custom = call.get(CUSTOM)
    if not isinstance(custom, dict) or not isinstance(custom.get("name"), str) or not isinstance(custom.get(TEXT_ARGUMENT), str):
        raise Problem(400, f"{where}.{CUSTOM} has a name and an {TEXT_ARGUMENT}", param=f"{where}.{CUSTOM}")
    arguments = {TEXT_ARGUMENT: custom[TEXT_ARGUMENT]}
    return {"id": call.get("id"), "type": "function", "function": {"name": custom["name"], "arguments": arguments}}


def input_of(arguments: str) -> str:
    """The free text in a call's arguments, or the arguments themselves where the model did not wrap it."""
    try:
        value = parse_json(arguments)
    except Mismatch:
        return arguments
    text = value.get(TEXT_ARGUMENT) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments
