"""Builds the messages of a chat from an API's smaller parts: consecutive parts of one role become one message, as do an assistant's
reasoning, text and calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...runtime.tool_calls.cursor import Mismatch, parse_json
from .problems import Problem

SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"


class MessageBuilder:
    """Builds `messages` from parts that are added in order."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add_text(self, role: str, texts: Iterable[str]) -> None:
        """Add texts of a role. After the first message, those of the system become the user's: most templates only allow a system message
        at the beginning."""
        if role == SYSTEM and any(message["role"] != SYSTEM for message in self.messages):
            role = USER
        self._message(role)["content"] += [{"type": "text", "text": text} for text in texts]

    def add_reasoning(self, text: str) -> None:
        """Add reasoning of the assistant."""
        message = self._message(ASSISTANT)
        previous = message.get("reasoning_content")
        message["reasoning_content"] = f"{previous}\n{text}" if previous else text

    def add_call(self, call_id: str, name: str, arguments: dict[str, Any]) -> None:
        """Add a function call of the assistant."""
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._message(ASSISTANT).setdefault("tool_calls", []).append(call)

    def add_result(self, call_id: str, texts: Iterable[str]) -> None:
        """Add the result of a call."""
        self.messages.append({"role": TOOL, "tool_call_id": call_id, "content": "\n".join(texts)})

    def _message(self, role: str) -> dict[str, Any]:
        """The message to which the next part of this role is added."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "content": []})
        return self.messages[-1]


def text_at(item: dict[str, Any], name: str, where: str) -> str:
    """A required string of an item. Raises Problem that names it."""
    value, place = item.get(name), f"{where}.{name}"
    if not isinstance(value, str):
        raise Problem(400, f"{place} is missing" if value is None else f"{place} has to be a string", param=place)
    return value


def parse_object(text: str, where: str) -> dict[str, Any]:
    """A JSON object from its text. Raises Problem that names it."""
    try:
        value = parse_json(text) if text.strip() else {}
    except Mismatch:
        value = None
    if not isinstance(value, dict):
        raise Problem(400, f"{where} is not a JSON object", param=where)
    return value
