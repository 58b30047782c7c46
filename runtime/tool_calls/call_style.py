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
KNOWN = {NAME: TOOL["function"]["parameters"]}
VARIABLES = ("tools", "xml_tools")  # under which templates look for tools
KEYS = ("tools", "functions")  # and under which in the system's message, as JSON text
ROLES = ("tool", "environment", "function")  # of what tools give back
USER = {"role": "user", "content": "What is the weather?"}
PATIENCE_S = 5.0  # of the processor, for all that a template is asked


@dataclass(frozen=True)
class CallStyle:
    """How a model calls tools.

    `variable`: the template variable that takes the tools, or `key`: the key of the system message that does; both are empty if the
    template knows no tools and the system prompt must describe them. `writes`: it renders tool calls itself, with arguments as JSON text if
    `as_text`, else as an object, and with `content` beside a call without text; otherwise the format renders them as text. Call ids are
    functions.NAME:0 etc. if `numbered`, nine alphanumeric characters if `short`, else anything. `single`: one call per message. `role`: the
    role of tool results, if any. `sample`: a call as the model reads one.
    """

    format: Format
    variable: str = ""
    key: str = ""
    writes: bool = False
    as_text: bool = False
    content: str | None = ""
    numbered: bool = False
    short: bool = False
    single: bool = False
    role: str = ""
    sample: str = ""

    @property
    def knows_tools(self) -> bool:
        return bool(self.variable or self.key)


def told(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tools as text for a key of the system message."""
    return json.dumps([tool["function"] for tool in tools], ensure_ascii=False)


@dataclass(frozen=True)
class _Template:
    """A template with one tool, passed in a variable or in a key of the system message. Not rendered after `latest` (CPU time of the
    thread)."""

    render: Render
    latest: float
    variable: str = ""
    key: str = ""

    def text(self, messages: Sequence[Mapping[str, Any]], reply: bool = True) -> str:
        """The rendered messages, empty if the template rejects them."""
        if time.thread_time() > self.latest:
            return ""
        given = {self.variable: [TOOL]} if self.variable else {}
        if self.key:
            messages = [{"role": "system", "content": "Be kind.", self.key: told([TOOL])}, *messages]
        try:
            return self.render(messages, add_generation_prompt=reply, **given)
        except TemplateError:
            return ""

    def written(self, message: Mapping[str, Any], answer: Mapping[str, Any]) -> Iterator[str]:
        """What it renders for a message: after the question, and after the generation prompt. Markers may begin alike there, but a call
        without marker is only recognised at the beginning of an answer."""
        for messages in ([USER, message], [USER, message, answer]):  # some want what the tool gave back
            if whole := self.text(messages, False):
                yield whole[whole.rfind(USER["content"]) + len(USER["content"]) :]
                yield whole[len(os.path.commonprefix([self.text([USER]), whole])) :]
                return

    def role_of(self, *messages: Mapping[str, Any], name: str) -> str:
        """The role with which a tool result reaches the prompt."""
        answer = {"content": RESULT, "name": NAME, "tool_call_id": name}
        return next((role for role in ROLES if RESULT in self.text([USER, *messages, {"role": role, **answer}])), "")


def detect_style(render: Render, words: Collection[str] = ()) -> CallStyle:
    """The style of a model; `words` are the added tokens of its vocabulary."""
    plain = _Template(render, time.thread_time() + PATIENCE_S)
    ways = [*(replace(plain, variable=name) for name in VARIABLES), *(replace(plain, key=name) for name in KEYS)]
    template = next((way for way in ways if NAME in way.text([USER])), plain)
    for as_text, content, called in product((False, True), ("", None), (LONG_ID, ID, f"functions.{NAME}:0")):
        call = {"id": called, "type": "function", "function": {"name": NAME, "arguments": json.dumps(ARGUMENTS) if as_text else ARGUMENTS}}
        message = {"role": "assistant", "content": content, "tool_calls": [call]}
        answer = {"role": ROLES[0], "content": RESULT, "name": NAME, "tool_call_id": called}
        for text in template.written(message, answer):
            if (format := _reading(text)) is not None:
                both = {**message, "tool_calls": [call, {**call, "id": called.replace("a1", "b2").replace(":0", ":1")}]}
                single = not any(_reading(text, 2) for text in template.written(both, answer))
                return CallStyle(format, template.variable, template.key, True, as_text, content, called not in (ID, LONG_ID), called == ID,
                                 single, template.role_of(message, name=called), _sample(format, text))
    told_of = template.text([USER]) if template.variable or template.key else ""
    format = _marked(told_of, words)
    if format is None or not told_of:  # if it tells of calls, then in a form that is not known here
        format = format or HERMES
        return CallStyle(format, sample=format.write([(NAME, ARGUMENTS)]))
    role = template.role_of({"role": "assistant", "content": "Yes."}, name=ID)
    return CallStyle(format, template.variable, template.key, role=role, sample=format.write([(NAME, ARGUMENTS)]))


def _reading(text: str, times: int = 1) -> Format | None:
    """The format that parses the call from a text, `times` times, and leaves the least text."""
    found = []
    for format in FORMATS:
        reader = CallReader(format, KNOWN)
        parts = [*reader.push(text), *reader.flush()]
        calls = [part for part in parts if isinstance(part, Call)]
        if [(call.name, json.loads(call.arguments)) for call in calls] == [(NAME, ARGUMENTS)] * times:
            found.append((sum(len(part) for part in parts if isinstance(part, str)), format))
    return min(found, key=lambda each: each[0])[1] if found else None


def _sample(format: Format, text: str) -> str:
    """The call within a text, from its marker on."""
    reader = CallReader(format, KNOWN)
    begin = min(at for mark in format.opens if (at := text.find(mark)) >= 0)
    behind = "".join(part for part in [*reader.push(text[begin:]), *reader.flush()] if isinstance(part, str))
    return text[begin:].removesuffix(behind).rstrip()


def _marked(prompt: str, words: Collection[str]) -> Format | None:
    """The format whose marker is in a prompt with tools, or in the vocabulary."""
    return next((format for known in (prompt, words) for format in FORMATS
                 if format.write and any(mark in known for mark in format.open)), None)
