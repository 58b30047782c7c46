"""Tools of a request, and calls of them in its answer, in the words of OpenAI's API."""

from __future__ import annotations

import re

from ... import UsageError
from ...runtime.calls.calling import AUTO, REQUIRED, Tools, tools_of
from ...runtime.calls.messages import new_id
from ...runtime.events import Call
from .fields import ChatAsked
from .problems import Problem, problem_of

NONE = "none"
KEPT_ID = re.compile(r"[A-Za-z0-9]{9,40}")  # what a model calls its call itself, where nothing else is likely to have that name


def tools_asked(asked: ChatAsked) -> Tools | None:
    """The tools that an answer may call; None where it may call none. Raises Problem that names the field."""
    choice = _choice(asked)
    if not asked.tools:
        if choice not in (AUTO, NONE):
            raise Problem(400, "tool_choice asks for a call, and there are no tools", param="tool_choice",
                          hint="send them, or leave tool_choice out")
        return None
    try:
        tools = tools_of(asked.tools, AUTO if choice == NONE else choice, asked.parallel_tool_calls is not False)
    except UsageError as error:
        raise problem_of(error, "tools") from error
    if choice == NONE:
        return None
    try:
        return tools if tools.called else None
    except UsageError as error:
        raise problem_of(error, "tool_choice") from error


def _choice(asked: ChatAsked) -> str:
    """auto, none, required, or the name of a function."""
    choice = asked.tool_choice
    if choice is None or choice in (AUTO, NONE, REQUIRED):
        return choice or AUTO
    function = choice.get("function", choice) if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or name in (AUTO, NONE, REQUIRED):
        raise Problem(400, 'tool_choice is none, auto, required or {"type": "function", "function": {"name": ...}}', param="tool_choice")
    return name


class CallList:
    """The calls of one answer, as they come."""

    def __init__(self) -> None:
        self.made: list[dict[str, object]] = []

    def add(self, call: Call) -> dict[str, object]:
        """One more, as a part of a message."""
        taken = {each["id"] for each in self.made}
        called = call.id if KEPT_ID.fullmatch(call.id) and call.id not in taken else new_id()
        self.made.append({"id": called, "type": "function", "function": {"name": call.name, "arguments": call.arguments}})
        return self.made[-1]
