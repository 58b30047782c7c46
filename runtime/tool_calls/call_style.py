"""Detects a model's tool-call format, and the message layout its chat template expects, by rendering test messages.

It renders a conversation with a known call. The format that parses exactly that call from the output is the model's, and the message layout
that produced it is the one to use; there is no list of models. If a template describes tools but renders no calls, the format is the one
whose marker is in the template or in the vocabulary.
"""

from __future__ import annotations

import json
import os.path
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ..events import Call
from ..templates.template import TemplateError
from .formats import FORMATS, HERMES, Format
from .reader import CallReader

Render = Callable[..., str]  # messages, add_generation_prompt, variables
NAME, RESULT = "look_up_weather", "sunny-7315"
ID, LONG_ID = "a1b2c3d4e", "call_a1b2c3d4e5f6a7b8c9d0e1f2"
ARGUMENTS = {"place": "Oslo", "days": 3}
PROPERTIES = {"place": {"type": "string", "description": "where"}, "days": {"type": "integer", "description": "how many"}}
TOOL = {"type": "function", "function": {"name": NAME, "description": "Look up the weather.", "parameters": {
    "type": "object", "properties": PROPERTIES, "required": ["place", "days"]}}}
TOOL_SCHEMAS = {NAME: TOOL["function"]["parameters"]}
TOOL_VARIABLES = ("tools", "xml_tools")  # template variables for the tools
SYSTEM_MESSAGE_KEYS = ("tools", "functions")  # keys of the system message for the tools, as JSON text
TOOL_ROLES = ("tool", "environment", "function")  # of tool results
USER = {"role": "user", "content": "What is the weather?"}
MAX_PROBE_S = 5.0  # CPU time of all test renderings of a template


@dataclass(frozen=True)
class CallStyle:
    """How a model calls tools, and the message layout its template expects."""

    format: Format  # of a call in the model's text
    # Template variable that takes the tools. If it and `key` are empty, the template knows no tools, and the system prompt has to describe
    # them.
    variable: str = ""
    key: str = ""  # key of the system message that takes the tools
    renders_calls: bool = False  # the template renders tool calls; otherwise `format` writes them as text
    arguments_as_text: bool = False  # the template wants arguments as JSON text, not as an object
    content: str | None = ""  # the content beside a call without text
    numbered_ids: bool = False  # call ids are functions.NAME:0, functions.NAME:1, ...
    short_ids: bool = False  # call ids have nine alphanumeric characters
    one_call_per_message: bool = False
    role: str = ""  # of tool results, empty if the template has none
    sample: str = ""  # a call as the model writes it

    @property
    def knows_tools(self) -> bool:
        return bool(self.variable or self.key)


def tools_as_json(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tools as text for a key of the system message."""
    return json.dumps([tool["function"] for tool in tools], ensure_ascii=False)


@dataclass(frozen=True)
class _Template:
    """A template with one tool, passed in a variable or in a key of the system message. `deadline`: CPU time of the thread, after which it
    is not rendered.
    """

    render: Render
    deadline: float
    variable: str = ""
    key: str = ""

    def text(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The rendered messages, empty if the template rejects them."""
        if time.thread_time() > self.deadline:
            return ""
        variables = {self.variable: [TOOL]} if self.variable else {}
        if self.key:
            messages = [{"role": "system", "content": "Be kind.", self.key: tools_as_json([TOOL])}, *messages]
        try:
            return self.render(messages, add_generation_prompt=add_generation_prompt, **variables)
        except TemplateError:
            return ""

    def renderings(self, message: Mapping[str, Any], answer: Mapping[str, Any]) -> Iterator[str]:
        """What the template renders for a message: the text after the question, and the text after the generation prompt.

        Markers may begin alike in both, but a call without marker is only recognised at the beginning of an answer.
        """
        for messages in ([USER, message], [USER, message, answer]):  # some templates require the tool result
            if rendered := self.text(messages, False):
                yield rendered[rendered.rfind(USER["content"]) + len(USER["content"]) :]
                yield rendered[len(os.path.commonprefix([self.text([USER]), rendered])) :]
                return

    def role_of(self, *messages: Mapping[str, Any], name: str) -> str:
        """The role with which a tool result reaches the prompt."""
        answer = {"content": RESULT, "name": NAME, "tool_call_id": name}
        return next((role for role in TOOL_ROLES if RESULT in self.text([USER, *messages, {"role": role, **answer}])), "")


def detect_style(render: Render, added_tokens: Collection[str] = ()) -> CallStyle:
    """The style of a model; `added_tokens` are the added tokens of its vocabulary."""
    without_tools = _Template(render, time.thread_time() + MAX_PROBE_S)
    candidates = [*(replace(without_tools, variable=name) for name in TOOL_VARIABLES),
                  *(replace(without_tools, key=name) for name in SYSTEM_MESSAGE_KEYS)]
    template = next((candidate for candidate in candidates if NAME in candidate.text([USER])), without_tools)
    for arguments_as_text, content, call_id in product((False, True), ("", None), (LONG_ID, ID, f"functions.{NAME}:0")):
        call = {"id": call_id, "type": "function",
                "function": {"name": NAME, "arguments": json.dumps(ARGUMENTS) if arguments_as_text else ARGUMENTS}}
        message = {"role": "assistant", "content": content, "tool_calls": [call]}
        answer = {"role": TOOL_ROLES[0], "content": RESULT, "name": NAME, "tool_call_id": call_id}
        for text in template.renderings(message, answer):
            if (format := _parsing_format(text)) is not None:
                two_calls = {**message, "tool_calls": [call, {**call, "id": call_id.replace("a1", "b2").replace(":0", ":1")}]}
                one_call_per_message = not any(_parsing_format(text, 2) for text in template.renderings(two_calls, answer))
                return CallStyle(format, template.variable, template.key, True, arguments_as_text, content, call_id not in (ID, LONG_ID),
                                 call_id == ID,
                                 one_call_per_message, template.role_of(message, name=call_id), _sample(format, text))
    tool_prompt = template.text([USER]) if template.variable or template.key else ""
    format = _format_by_marker(tool_prompt, added_tokens)
    if format is None or not tool_prompt:  # if the template describes calls, then in an unknown format
        format = format or HERMES
        return CallStyle(format, sample=format.write([(NAME, ARGUMENTS)]))
    role = template.role_of({"role": "assistant", "content": "Yes."}, name=ID)
    return CallStyle(format, template.variable, template.key, role=role, sample=format.write([(NAME, ARGUMENTS)]))


def _parsing_format(text: str, count: int = 1) -> Format | None:
    """The format that parses the call from a text, `count` times, and leaves the least text; None if none does."""
    matches = []
    for format in FORMATS:
        reader = CallReader(format, TOOL_SCHEMAS)
        parts = [*reader.push(text), *reader.flush()]
        calls = [part for part in parts if isinstance(part, Call)]
        if [(call.name, json.loads(call.arguments)) for call in calls] == [(NAME, ARGUMENTS)] * count:
            matches.append((sum(len(part) for part in parts if isinstance(part, str)), format))
    return min(matches, key=lambda each: each[0])[1] if matches else None


def _sample(format: Format, text: str) -> str:
    """The call within a text, from its marker on."""
    reader = CallReader(format, TOOL_SCHEMAS)
    start = min(at for mark in format.opens if (at := text.find(mark)) >= 0)
    rest = "".join(part for part in [*reader.push(text[start:]), *reader.flush()] if isinstance(part, str))
    return text[start:].removesuffix(rest).rstrip()


def _format_by_marker(prompt: str, added_tokens: Collection[str]) -> Format | None:
    """The format whose marker is in a prompt with tools, or in the vocabulary."""
    return next((format for haystack in (prompt, added_tokens) for format in FORMATS
                 if format.write and any(mark in haystack for mark in format.open)), None)
