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
from .call_style import CallStyle, tools_as_json
from .cursor import Mismatch, parse_json, to_json
from .schema import Tools

Message = Mapping[str, Any]
NAME = re.compile(r"[\w./-]{1,128}")
SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_LETTERS = string.ascii_letters + string.digits
SYSTEM = ("system", "developer")
CALLS_HINT = "send calls as they were answered"
CONSTRAINT_KEYS = ("strict", "grammar")
TOOLS_PROMPT = """# Tools

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


def validate_tools(tools: Sequence[Message]) -> list[dict[str, Any]]:
    """Tools as templates expect them, each with name, description and parameters. Raises UsageError."""
    validated = []
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type", "function") == "function" else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise UsageError(f"tools[{index}] is not a function with a name", 'a tool is {"type": "function", "function": {"name": …}}')
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, Mapping):
            raise UsageError(f"tools[{index}].function.parameters is not a JSON schema", "give an object")
        if not NAME.fullmatch(function["name"]):
            raise UsageError(f"tools[{index}] has a name with other characters than letters, digits, dots, dashes and slashes",
                             "give it another name")
        try:
            to_json(function)
        except Mismatch:
            raise UsageError(f"tools[{index}] is not JSON: a number in it is NaN or infinite, or it is nested too deeply",
                             "send a schema of finite numbers") from None
        other_keys = {key: value for key, value in function.items() if key not in ("name", "description", "parameters")}
        validated.append({"type": "function", "function": {"name": function["name"], "description": function.get("description") or "",
                                                      "parameters": {"properties": {}, **parameters}, **other_keys}})
    return validated


def visible_tools(tools: Sequence[Message]) -> list[dict[str, Any]]:
    """Tools without the keys that only concern constraints."""
    return [{**tool, "function": {key: value for key, value in tool["function"].items() if key not in CONSTRAINT_KEYS}} for tool in tools]


def parameters_of(tools: Sequence[Message]) -> Tools:
    """Function name -> schema of its arguments."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}


def prepare_messages(messages: Sequence[Message], tools: Sequence[Message],
                     style: CallStyle) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(messages, template variables for the tools). Raises UsageError for malformed calls."""
    calls = _Calls(style)
    prepared_messages = [calls.message(message, index) for index, message in enumerate(messages)]
    if style.one_call_per_message:
        prepared_messages = _one_by_one(prepared_messages)
    if not style.role:
        prepared_messages = _folded(prepared_messages)
    if not tools:
        return prepared_messages, {}
    if style.variable:
        return prepared_messages, {style.variable: visible_tools(tools)}
    if style.key:
        first = prepared_messages.pop(0) if prepared_messages and prepared_messages[0]["role"] in SYSTEM else {"content": ""}
        return [{**first, "role": "system", style.key: tools_as_json(visible_tools(tools))}, *prepared_messages], {}
    return _with_tools_prompt(prepared_messages,
                              TOOLS_PROMPT.format(tools="\n".join(map(to_json, visible_tools(tools))), sample=style.sample)), {}


def text_of(content: Any) -> str:
    """A message's content as text: a string, text parts, or nothing."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text") or "") for part in content or () if isinstance(part, Mapping))


class _Calls:
    """The calls of a conversation in order, with the ids that the template gets."""

    def __init__(self, style: CallStyle) -> None:
        self.style, self.count = style, 0
        self.template_ids: dict[str, tuple[str, str]] = {}  # the client's id -> (id for the template, function name)
        self.unanswered: list[str] = []  # ids of calls without a result so far

    def message(self, message: Message, number: int) -> dict[str, Any]:
        if message.get("role") == "assistant" and message.get("tool_calls"):
            return self._calls_message(message, number)
        if message.get("role") == "tool":
            return self._result_message(message)
        return {key: value for key, value in message.items() if key != "tool_calls"}

    def _calls_message(self, message: Message, number: int) -> dict[str, Any]:
        style, content, calls = self.style, message.get("content"), []
        if not isinstance(message["tool_calls"], list):
            raise UsageError(f"messages[{number}].tool_calls is not a list", CALLS_HINT)
        for index, call in enumerate(message["tool_calls"]):
            function = call.get("function") if isinstance(call, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(name, str) or not name:
                raise UsageError(f"messages[{number}].tool_calls[{index}] has no function with a name", CALLS_HINT)
            arguments = _arguments(function.get("arguments"), f"messages[{number}].tool_calls[{index}].function.arguments")
            calls.append({"id": self._template_id(call.get("id"), name), "type": "function",
                         "function": {"name": name, "arguments": to_json(arguments) if style.arguments_as_text else arguments}})
            self.count += 1
        other_keys = {key: value for key, value in message.items() if key not in ("tool_calls", "content")}
        if isinstance(reasoning := message.get("reasoning_content"), str) and not text_of(content):
            other_keys["thinking"] = reasoning  # gpt-oss's key for the reasoning before a call
        if style.renders_calls:
            return {**other_keys, "content": content if text_of(content) else style.content, "tool_calls": calls}
        text = style.format.write([(call["function"]["name"], call["function"]["arguments"]) for call in calls])
        return {**other_keys, "content": f"{text_of(content)}\n{text}".lstrip("\n")}

    def _template_id(self, client_id: Any, name: str) -> str:
        """The id for the template."""
        client_id = client_id if isinstance(client_id, str) and client_id else f"call {self.count}"
        if self.style.numbered_ids:
            template_id = f"functions.{name}:{self.count}"
        elif self.style.short_ids and not SHORT_ID.fullmatch(client_id):
            template_id = hashlib.sha256(client_id.encode("utf-8", "replace")).hexdigest()[:9]
        else:
            template_id = client_id
        self.template_ids[client_id] = template_id, name
        self.unanswered.append(client_id)
        return template_id

    def _result_message(self, message: Message) -> dict[str, Any]:
        client_id = message.get("tool_call_id")
        client_id = client_id if isinstance(client_id, str) else None
        if client_id not in self.template_ids and self.unanswered:
            client_id = self.unanswered[0]
        if client_id in self.unanswered:
            self.unanswered.remove(client_id)
        template_id, name = self.template_ids.get(client_id, (client_id, message.get("name")))
        fields = {"tool_call_id": template_id} | ({"name": message.get("name") or name} if message.get("name") or name else {})
        return {**message, **fields, "role": self.style.role or "tool", "content": text_of(message.get("content"))}


def _arguments(arguments: Any, path: str) -> dict[str, Any]:
    try:
        value = parse_json(arguments) if isinstance(arguments, str) and arguments.strip() else arguments or {}
        text = to_json(value)
    except Mismatch:
        value = None
    if not isinstance(value, Mapping):
        raise UsageError(f"{path} is not a JSON object", CALLS_HINT)
    return json.loads(text)


def _one_by_one(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each call in a message of its own, followed by its result."""
    split: list[dict[str, Any]] = []
    rest = [*messages]
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            split.append(message)
            continue
        answers = []
        while rest and rest[0].get("tool_call_id"):
            answers.append(rest.pop(0))
        for number, call in enumerate(calls):
            split.append({**message, "content": message["content"] if not number else "", "tool_calls": [call]})
            split += [answer for answer in answers if answer.get("tool_call_id") == call["id"]]
        split += [answer for answer in answers if all(answer.get("tool_call_id") != call["id"] for call in calls)]
    return split


def _folded(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool results as a user message, joined with the user's next message, because templates want alternating roles."""
    folded: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        is_tool = message["role"] == "tool"
        if is_tool:
            message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        if after_result and message["role"] == "user":
            folded[-1] = {"role": "user", "content": f"{folded[-1]['content']}\n{text_of(message['content'])}"}
        else:
            folded.append(message)
        after_result = is_tool or after_result and message["role"] == "user"
    return folded


def _with_tools_prompt(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Append the description of the tools to the system prompt."""
    if messages and messages[0]["role"] in SYSTEM:
        first, *rest = messages
        return [{**first, "content": f"{text_of(first.get('content'))}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *messages]
