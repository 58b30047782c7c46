"""Which format a model's calls have, and how its template wants messages with calls, found by asking the template.

It renders a conversation in which a tool is called whose name and arguments are known. The format that reads that very call from what it
wrote is the model's, and the way in which the messages were given is the way that it wants them. So no list of models is kept, and a
template is its own proof. Of a template that describes tools but writes no calls, the format is the one whose mark its text or its
vocabulary has.
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from ..events import Call
from ..template import TemplateError
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
USER = {"role": "user", "content": "What is the weather?"}


@dataclass(frozen=True)
class CallStyle:
    """How a model calls tools.

    `variable`: under which the template takes tools, empty where it knows none and the system prompt has to tell of them. `writes`: it
    writes calls of messages itself, their arguments as JSON text with `as_text`, as an object without, beside `content` where nothing is
    said; where it does not, the format writes them into the text. What calls are called is functions.NAME:0 and so on where they are
    `numbered`, of nine letters and digits where they are `short`, else anything. `single`: it writes one call a message. `answers`: it
    has a role for what tools gave back. `sample`: a call as the model reads one."""

    format: Format
    variable: str = ""
    writes: bool = False
    as_text: bool = False
    content: str | None = ""
    numbered: bool = False
    short: bool = False
    single: bool = False
    answers: bool = False
    sample: str = ""


def find_style(render: Render, words: Collection[str] = ()) -> CallStyle:
    """The style of a model; `words` are the tokens that were added to its vocabulary."""
    variable, prompt = _described(render)
    given = {variable: [TOOL]} if variable else {}
    for as_text, content, called in product((False, True), ("", None), (LONG_ID, ID, f"functions.{NAME}:0")):
        call = {"id": called, "type": "function", "function": {"name": NAME, "arguments": json.dumps(ARGUMENTS) if as_text else ARGUMENTS}}
        message = {"role": "assistant", "content": content, "tool_calls": [call]}
        answer = {"role": "tool", "content": RESULT, "name": NAME, "tool_call_id": called}
        for text in _written(render, message, answer, given):
            if (format := _reading(text)) is not None:
                answers = RESULT in _rendered(render, [USER, message, answer], True, given)
                both = {**message, "tool_calls": [call, {**call, "id": called.replace("a1", "b2").replace(":0", ":1")}]}
                single = not any(_reading(text, 2) for text in _written(render, both, answer, given))
                return CallStyle(format, variable, True, as_text, content, called not in (ID, LONG_ID), called == ID, single, answers,
                                 _sample(format, text))
    if (format := variable and _marked(prompt, words)) is None:
        variable, given = "", {}  # it tells of calls in a form that is not known here
    said = [USER, {"role": "assistant", "content": "Yes."}, {"role": "tool", "content": RESULT, "name": NAME, "tool_call_id": ID}]
    answers = bool(variable) and RESULT in _rendered(render, said, True, given)
    return CallStyle(format or HERMES, variable, answers=answers, sample=(format or HERMES).write([(NAME, ARGUMENTS)]))


def _described(render: Render) -> tuple[str, str]:
    """Under which name the template takes tools, and a prompt with one; both empty where it takes none."""
    for variable in VARIABLES:
        text = _rendered(render, [USER], True, {variable: [TOOL]})
        if NAME in text:
            return variable, text
    return "", ""


def _rendered(render: Render, messages: Sequence[Mapping[str, Any]], reply: bool, given: Mapping[str, Any]) -> str:
    """What a template makes of messages, nothing where it refuses them."""
    try:
        return render(messages, add_generation_prompt=reply, **given)
    except TemplateError:
        return ""


def _written(render: Render, message: Mapping[str, Any], answer: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """What the template writes for a message, from the end of the question on, and from where a prompt ends: marks may begin alike there,
    but a call without marks is only known where an answer begins with it."""
    for messages in ([USER, message], [USER, message, answer]):  # some want what the tool gave back
        if whole := _rendered(render, messages, False, given):
            yield whole[whole.rfind(USER["content"]) + len(USER["content"]) :]
            yield whole[len(os.path.commonprefix([_rendered(render, [USER], True, given), whole])) :]
            return


def _reading(text: str, times: int = 1) -> Format | None:
    """The format that reads the call from a text, so many times, and leaves the least of it."""
    found = []
    for format in FORMATS:
        reader = CallReader(format, KNOWN)
        parts = [*reader.push(text), *reader.flush()]
        calls = [part for part in parts if isinstance(part, Call)]
        if [(call.name, json.loads(call.arguments)) for call in calls] == [(NAME, ARGUMENTS)] * times:
            found.append((sum(len(part) for part in parts if isinstance(part, str)), format))
    return min(found, key=lambda each: each[0])[1] if found else None


def _sample(format: Format, text: str) -> str:
    """The call within a text, from its mark on, without what comes behind it."""
    reader = CallReader(format, KNOWN)
    begin = min(at for mark in format.opens if (at := text.find(mark)) >= 0)
    behind = "".join(part for part in [*reader.push(text[begin:]), *reader.flush()] if isinstance(part, str))
    return text[begin:].removesuffix(behind).rstrip()


def _marked(prompt: str, words: Collection[str]) -> Format | None:
    """The format with a mark in a prompt that tells of tools, or in the vocabulary."""
    return next((format for known in (prompt, words) for format in FORMATS
                 if format.write and any(mark in known for mark in format.open)), None)
