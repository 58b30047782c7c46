"""The tools of a request, and the calls in its answer, in OpenAI's format."""

from __future__ import annotations

import re
from typing import Any

from ... import UsageError
from ...runtime.events import Call
from ...runtime.tool_calls.free_text import TEXT_ARGUMENT
from ...runtime.tool_calls.messages import new_id
from ...runtime.tool_calls.tool_calling import AUTO, REQUIRED, Tools, tools_of
from .custom_tools import CUSTOM, in_chat, input_of
from .openai_requests import ChatRequest
from .problems import Problem, problem_of

NONE, ALLOWED = "none", "allowed_tools"
UNIQUE_ID = re.compile(r"[A-Za-z0-9]{9,40}")  # call ids of a model that are likely to be unique, and therefore kept


def requested_tools(payload: ChatRequest) -> Tools | None:
    """The tools that an answer may call; None if it may call none. Raises Problem that names the field."""
    functions, requested = _allowed(payload)
    choice = _choice(requested)
    if not functions:
        if choice not in (AUTO, NONE):
            raise Problem(400, "tool_choice requires a call, but there are no tools", param="tool_choice",
                          hint="send them, or leave tool_choice out")
        return None
    try:
        tools = tools_of(functions, AUTO if choice == NONE else choice, payload.parallel_tool_calls is not False)
    except UsageError as error:
        raise problem_of(error, "tools") from error
    if choice == NONE:
        return None
    try:
        return tools if tools.callable_functions else None
    except UsageError as error:
        raise problem_of(error, "tool_choice") from error


def _allowed(payload: ChatRequest) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None]:
    """(the tools that may be called, the tool choice). Tools excluded by `allowed_tools` are not shown to the model, which would call them
    otherwise. Raises Problem."""
    tools, choice = in_chat(payload.tools or []), payload.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != ALLOWED:
        return tools, choice
    allowed = choice.get(ALLOWED)
    allowed = allowed if isinstance(allowed, dict) else {}
    mode, allowed_tools = allowed.get("mode", AUTO), allowed.get("tools")
    if mode not in (AUTO, REQUIRED) or not isinstance(allowed_tools, list):
        raise Problem(400, f"tool_choice.{ALLOWED} has a mode, auto or required, and a list of tools", param=f"tool_choice.{ALLOWED}")
    names = {_name(each) for each in allowed_tools}
    known = {_name(each) for each in tools}
    if unknown := sorted(str(name) for name in names - known):
        raise Problem(400, f"tool_choice allows {unknown[0]:.40}, which is not one of the tools", param=f"tool_choice.{ALLOWED}")
    return [each for each in tools if _name(each) in names], mode


def _name(tool: Any) -> str | None:
    """A function's name, in the notation of chat completions or Responses; None if there is none."""
    function = tool.get(tool.get("type", "function"), tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _choice(choice: str | dict[str, Any] | None) -> str:
    """auto, none, required, or the name of a function. Raises Problem."""
    if choice is None or choice in (AUTO, NONE, REQUIRED):
        return choice or AUTO
    name = _name(choice) if isinstance(choice, dict) and choice.get("type", "function") in ("function", CUSTOM) else None
    if name is None or name in (AUTO, NONE, REQUIRED):
        raise Problem(400, 'tool_choice has to be none, auto, required or {"type": "function", "function": {"name": ...}}',
                      param="tool_choice")
    return name


class CallList:
    """The calls of one answer. `custom_tools`: the names of those tools whose input is free text."""

    def __init__(self, custom_tools: frozenset[str] = frozenset()) -> None:
        self.custom_tools, self.calls = custom_tools, list[dict[str, object]]()

    def add(self, call: Call) -> dict[str, object]:
        """Add a call; returns it as part of a message."""
        used_ids = {each["id"] for each in self.calls}
        call_id = call.id if UNIQUE_ID.fullmatch(call.id) and call.id not in used_ids else new_id()
        if call.name in self.custom_tools:
            body = {"type": CUSTOM, CUSTOM: {"name": call.name, TEXT_ARGUMENT: input_of(call.arguments)}}
        else:
            body = {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        self.calls.append({"id": call_id, **body})
        return self.calls[-1]
