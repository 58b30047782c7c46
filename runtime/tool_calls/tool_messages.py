"""Calls of tools in a conversation: what its prompt tells of them, the messages of an answer that calls some and of what they gave back.

What tools give back, and what their servers say of them, are data: a mark of the model in it is letters (`tokens/plain_text.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from ... import UsageError
from ..events import Call
from ..images.media_markers import MARKER
from ..templates.prompt_builder import PromptBuilder
from ..tokenizer import Tokenizer
from ..tokens.plain_text import PlainText
from .messages import SYSTEM, Message, new_id, text_of
from .tool_calling import ToolCalling, Tools

TOOL = "tool"  # the role of what a tool gave back


class ToolMessages:
    """Of one model's conversation."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.calling = ToolCalling(tokenizer)
        self._tokenizer = tokenizer

    @cached_property
    def _plain(self) -> PlainText:
        """For which every token that was added is a mark, but blanks: what begins a call is often not a special one."""
        return PlainText(self._tokenizer, (number for text, number in self._tokenizer.added.items() if text.strip()))

    def rendered(self, prompts: PromptBuilder, messages: Sequence[Message], system: str | None, think: str, options: Mapping[str, Any],
                 tools: Tools | None) -> str:
        """The text of a prompt that tells of `tools` and of what was called. Raises EffllmError."""
        try:
            return self._rendered(prompts, messages, system, think, options, tools)
        except UsageError:
            if not has_tool_images(messages):
                raise
        return self._rendered(prompts, with_images_in_user_message(messages), system, think, options, tools)

    def _rendered(self, prompts: PromptBuilder, messages: Sequence[Message], system: str | None, think: str, options: Mapping[str, Any],
                  tools: Tools | None) -> str:
        cut = [{**each, "content": self._plain.cut(each["content"])} if each["role"] == TOOL else each for each in messages]
        said = [{"role": SYSTEM[0], "content": system}] if system else []
        told_of = Tools(tuple(map(self._cut, tools.functions))) if tools else None
        made, variables = self.calling.prepared([*said, *cut], told_of)
        beside: dict[str, Any] = {}
        if made and made[0]["role"] in SYSTEM:
            first = made.pop(0)
            system = text_of(first.get("content")) or None
            beside = {key: value for key, value in first.items() if key not in ("role", "content")}
        made = [{**each, "content": each.get("content")} for each in made]
        return prompts.rendered(made, system, think, {**options, **variables}, beside)

    def _cut(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._plain.cut(value)
        if isinstance(value, Mapping):
            return {self._plain.cut(key): self._cut(each) for key, each in value.items()}
        return [self._cut(each) for each in value] if isinstance(value, list) else value

    @staticmethod
    def calling_message(text: str, thought: str, calls: Sequence[Call]) -> tuple[dict[str, Any], list[Call]]:
        """The message of an answer that calls tools, and the calls with the names that they have there, the model's where it gave one. Its
        reasoning stays with it until it is answered."""
        named: dict[str, Call] = {}
        for call in calls:
            own = call.id if call.id and call.id not in named else new_id()
            named[own] = replace(call, id=own)
        made = [{"id": own, "type": "function", "function": {"name": each.name, "arguments": each.arguments}}
                for own, each in named.items()]
        message = {"role": "assistant", "content": text, "tool_calls": made}
        return message | ({"reasoning_content": thought} if thought else {}), [*named.values()]

    @staticmethod
    def result(call: Call, text: str) -> dict[str, Any]:
        """The message of what a call gave back."""
        return {"role": TOOL, "content": text, "tool_call_id": call.id, "name": call.name}


def has_tool_images(messages: Sequence[Message]) -> bool:
    """Is a picture among what tools gave back?"""
    return any(each["role"] == TOOL and MARKER.search(text_of(each.get("content"))) for each in messages)


def with_images_in_user_message(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The pictures that tools gave back in a user's message behind what they said, for templates that have no other place for them."""
    made: list[dict[str, Any]] = []
    waiting: list[str] = []
    for message in [*messages, {"role": ""}]:
        if message["role"] != TOOL and waiting:
            made.append({"role": "user", "content": "\n".join([*waiting, "What the tool showed."])})
            waiting = []
        said = text_of(message.get("content"))
        if message["role"] == TOOL and (found := [each.group() for each in MARKER.finditer(said)]):
            waiting += found
            message = {**message, "content": MARKER.sub("", said).strip() or "A picture, which follows."}
        made.append(dict(message))
    return made[:-1]
