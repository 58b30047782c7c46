"""Converts messages with tool calls from OpenAI's API to what a model's chat template expects.

Clients send arguments as JSON text and arbitrary ids; templates want objects or text, null or empty content beside a call, and some an id
format of their own. If a template renders no calls they become part of the assistant's text, and without a tool role results become a user
message, in the wording that Hermes models introduced.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from ... import UsageError
from .call_style import CallStyle, told
from .cursor import Mismatch, parsed, written
from .schema import Tools

Message = Mapping[str, Any]
NAME = re.compile(r"[\w./-]{1,128}")
SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_LETTERS = string.ascii_letters + string.digits
SYSTEM = ("system", "developer")
AS_ANSWERED = "send calls as they were answered"
HELD = ("strict", "grammar")
TOLD = """# Tools

You may call the functions that are described here in JSON:
<tools>
{tools}
</tools>

To call one, write its name and its arguments in just this form, here with a function and arguments that are only an example:
{sample}
What it gives back is told to you afterwards. Call nothing where you can answer without."""


def new_id() -> str:
    """A call id where the model gave none; every template accepts it except those that number calls."""
    from secrets import choice  # `show` reads this module too, and makes no ids

    return "".join(choice(_LETTERS) for _ in range(9))


def functions(tools: Sequence[Message]) -> list[dict[str, Any]]:
    """Tools as templates expect them, each with name, description and parameters. Raises UsageError."""
    made = []
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type", "function") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise UsageError(f"tools[{number}] is not a function with a name", 'a tool is {"type": "function", "function": {"name": …}}')
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, Mapping):
            raise UsageError(f"tools[{number}].function.parameters is not a JSON schema", "give an object")
        if not NAME.fullmatch(function["name"]):
            raise UsageError(f"tools[{number}] has a name with other characters than letters, digits, dots, dashes and slashes",
                             "give it another name")
        try:
            written(function)
        except Mismatch:
            raise UsageError(f"tools[{number}] is not JSON: a number in it is NaN or infinite, or it is nested too deeply",
                             "send a schema of finite numbers") from None
        rest = {key: value for key, value in function.items() if key not in ("name", "description", "parameters")}
        made.append({"type": "function", "function": {"name": function["name"], "description": function.get("description") or "",
                                                      "parameters": {"properties": {}, **parameters}, **rest}})
    return made


def shown(tools: Sequence[Message]) -> list[dict[str, Any]]:
    """Tools as the model sees them, without the keys that only concern constraints."""
    return [{**tool, "function": {key: value for key, value in tool["function"].items() if key not in HELD}} for tool in tools]


def parameters_of(tools: Sequence[Message]) -> Tools:
    """Function name -> schema of its arguments."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}


def prepared(messages: Sequence[Message], tools: Sequence[Message], style: CallStyle) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(messages, template variables for the tools). Raises UsageError for malformed calls."""
    calls = _Calls(style)
    made = [calls.message(message, number) for number, message in enumerate(messages)]
    if style.single:
        made = _one_by_one(made)
    if not style.role:
        made = _folded(made)
    if not tools:
        return made, {}
    if style.variable:
        return made, {style.variable: shown(tools)}
    if style.key:
        first = made.pop(0) if made and made[0]["role"] in SYSTEM else {"content": ""}
        return [{**first, "role": "system", style.key: told(shown(tools))}, *made], {}
    return _told(made, TOLD.format(tools="\n".join(map(written, shown(tools))), sample=style.sample)), {}


def text_of(content: Any) -> str:
    """A message's content as text: a string, text parts, or nothing."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text") or "") for part in content or () if isinstance(part, Mapping))


class _Calls:
    """The calls of a conversation in order, with the ids that the template sees."""

    def __init__(self, style: CallStyle) -> None:
        self.style, self.count = style, 0
        self.known: dict[str, tuple[str, str]] = {}  # what a client calls it -> what the template is told, name
        self.open: list[str] = []  # calls that no message has answered

    def message(self, message: Message, number: int) -> dict[str, Any]:
        if message.get("role") == "assistant" and message.get("tool_calls"):
            return self._calling(message, number)
        if message.get("role") == "tool":
            return self._answering(message)
        return {key: value for key, value in message.items() if key != "tool_calls"}

    def _calling(self, message: Message, number: int) -> dict[str, Any]:
        style, said, made = self.style, message.get("content"), []
        if not isinstance(message["tool_calls"], list):
            raise UsageError(f"messages[{number}].tool_calls is not a list", AS_ANSWERED)
        for at, call in enumerate(message["tool_calls"]):
            function = call.get("function") if isinstance(call, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(name, str) or not name:
                raise UsageError(f"messages[{number}].tool_calls[{at}] has no function with a name", AS_ANSWERED)
            arguments = _arguments(function.get("arguments"), f"messages[{number}].tool_calls[{at}].function.arguments")
            made.append({"id": self._named(call.get("id"), name), "type": "function",
                         "function": {"name": name, "arguments": written(arguments) if style.as_text else arguments}})
            self.count += 1
        rest = {key: value for key, value in message.items() if key not in ("tool_calls", "content")}
        if isinstance(thought := message.get("reasoning_content"), str) and not text_of(said):
            rest["thinking"] = thought  # as gpt-oss calls what came before a call
        if style.writes:
            return {**rest, "content": said if text_of(said) else style.content, "tool_calls": made}
        text = style.format.write([(call["function"]["name"], call["function"]["arguments"]) for call in made])
        return {**rest, "content": f"{text_of(said)}\n{text}".lstrip("\n")}

    def _named(self, called: Any, name: str) -> str:
        """The id for the template."""
        called = called if isinstance(called, str) and called else f"call {self.count}"
        if self.style.numbered:
            fit = f"functions.{name}:{self.count}"
        elif self.style.short and not SHORT_ID.fullmatch(called):
            fit = hashlib.sha256(called.encode("utf-8", "replace")).hexdigest()[:9]
        else:
            fit = called
        self.known[called] = fit, name
        self.open.append(called)
        return fit

    def _answering(self, message: Message) -> dict[str, Any]:
        called = message.get("tool_call_id")
        called = called if isinstance(called, str) else None
        if called not in self.known and self.open:
            called = self.open[0]
        if called in self.open:
            self.open.remove(called)
        fit, name = self.known.get(called, (called, message.get("name")))
        about = {"tool_call_id": fit} | ({"name": message.get("name") or name} if message.get("name") or name else {})
        return {**message, **about, "role": self.style.role or "tool", "content": text_of(message.get("content"))}


def _arguments(given: Any, where: str) -> dict[str, Any]:
    try:
        value = parsed(given) if isinstance(given, str) and given.strip() else given or {}
        text = written(value)
    except Mismatch:
        value = None
    if not isinstance(value, Mapping):
        raise UsageError(f"{where} is not a JSON object", AS_ANSWERED)
    return json.loads(text)


def _one_by_one(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each call in a message of its own, followed by its result."""
    made: list[dict[str, Any]] = []
    rest = [*messages]
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            made.append(message)
            continue
        answers = []
        while rest and rest[0].get("tool_call_id"):
            answers.append(rest.pop(0))
        for number, call in enumerate(calls):
            made.append({**message, "content": message["content"] if not number else "", "tool_calls": [call]})
            made += [answer for answer in answers if answer.get("tool_call_id") == call["id"]]
        made += [answer for answer in answers if all(answer.get("tool_call_id") != call["id"] for call in calls)]
    return made


def _folded(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool results as a user message, joined with the user's next message, because templates want alternating roles."""
    made: list[dict[str, Any]] = []
    told = False
    for message in messages:
        is_tool = message["role"] == "tool"
        if is_tool:
            message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        if told and message["role"] == "user":
            made[-1] = {"role": "user", "content": f"{made[-1]['content']}\n{text_of(message['content'])}"}
        else:
            made.append(message)
        told = is_tool or told and message["role"] == "user"
    return made


def _told(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Append the description of the tools to the system prompt."""
    if messages and messages[0]["role"] in SYSTEM:
        first, *rest = messages
        return [{**first, "content": f"{text_of(first.get('content'))}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *messages]
