"""Tool calls in a session: rendering prompts with tools, and the messages of calls and results.

Tool results, and what MCP servers say about their tools, are untrusted: special tokens in them are encoded as plain text
(`tokens/plain_text.py`).
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
    """For the session of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.calling = ToolCalling(tokenizer)
        self._tokenizer = tokenizer

    @cached_property
    def _plain(self) -> PlainText:
        """Treats every added token except blanks as special: call markers often are not flagged as special."""
        return PlainText(self._tokenizer, (number for text, number in self._tokenizer.added.items() if text.strip()))

    def rendered(self, prompts: PromptBuilder, messages: Sequence[Message], system: str | None, think: str, options: Mapping[str, Any],
                 tools: Tools | None) -> str:
        """The prompt text with `tools` and earlier calls. Raises EffllmError."""
        try:
            return self._rendered(prompts, messages, system, think, options, tools)
        except UsageError:
            if not has_tool_images(messages):
                raise
        return self._rendered(prompts, with_images_in_user_message(messages), system, think, options, tools)

    def _rendered(self, prompts: PromptBuilder, messages: Sequence[Message], system: str | None, think: str, options: Mapping[str, Any],
                  tools: Tools | None) -> str:
        cut = [{**each, "content": self._plain.break_tokens(each["content"])} if each["role"] == TOOL else each for each in messages]
        said = [{"role": SYSTEM[0], "content": system}] if system else []
        told_of = Tools(tuple(map(self._cut, tools.functions))) if tools else None
        made, variables = self.calling.prepare([*said, *cut], told_of)
        beside: dict[str, Any] = {}
        if made and made[0]["role"] in SYSTEM:
            first = made.pop(0)
            system = text_of(first.get("content")) or None
            beside = {key: value for key, value in first.items() if key not in ("role", "content")}
        made = [{**each, "content": each.get("content")} for each in made]
        return prompts.render(made, system, think, {**options, **variables}, beside)

    def _cut(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._plain.break_tokens(value)
        if isinstance(value, Mapping):
            return {self._plain.break_tokens(key): self._cut(each) for key, each in value.items()}
        return [self._cut(each) for each in value] if isinstance(value, list) else value

    @staticmethod
    def calling_message(text: str, thought: str, calls: Sequence[Call]) -> tuple[dict[str, Any], list[Call]]:
        """(assistant message with tool calls, the calls with their ids there, the model's own if it gave one). Its reasoning is kept
        until the turn is answered."""
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
        """The message of a tool result."""
        return {"role": TOOL, "content": text, "tool_call_id": call.id, "name": call.name}


def has_tool_images(messages: Sequence[Message]) -> bool:
    """Are there images in tool results?"""
    return any(each["role"] == TOOL and MARKER.search(text_of(each.get("content"))) for each in messages)


def with_images_in_user_message(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Images of tool results moved to a user message after them, for templates without another place for them."""
    made: list[dict[str, Any]] = []
    waiting: list[str] = []
    for message in [*messages, {"role": ""}]:
        if message["role"] != TOOL and waiting:
            made.append({"role": "user", "content": "\n".join([*waiting, "What the tool showed."])})
            waiting = []
        said = text_of(message.get("content"))
        if message["role"] == TOOL and (found := [each.group() for each in MARKER.finditer(said)]):
            waiting += found
            message = {**message, "content": MARKER.sub("", said).strip() or "An image, which follows."}
        made.append(dict(message))
    return made[:-1]
