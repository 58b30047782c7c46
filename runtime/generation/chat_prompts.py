"""Rendering a client's messages as a prompt: the chat template's input, and notices about what it has no place for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ... import UsageError
from ..templates.prompt_builder import NO_SYSTEM_ROLE, NO_TEMPLATE, PromptBuilder, whole_text
from ..tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..tool_calls.tool_calling import ToolCalling, Tools

Message = Mapping[str, Any]
SYSTEM, DEVELOPER = "system", "developer"  # newer clients' name for the system role


class ChatPrompts:
    """Mixin of `ServedModel`: prompts from messages."""

    tokenizer: Tokenizer
    _prompts: PromptBuilder
    _other_prompts: Callable[[], PromptBuilder]
    _demand_near: Callable[[str], None]

    def count(self, messages: Sequence[Message], think: str = "auto", tools: Tools | None = None,
              variables: Mapping[str, Any] | None = None) -> int:
        """How many tokens the prompt of these messages has, see `rendered`."""
        prompt = self.rendered(messages, think, tools, variables)
        self._demand_near(prompt)
        return self._other_prompts().count(prompt)

    def rendered(self, messages: Sequence[Message], think: str = "auto", tools: Tools | None = None,
                 variables: Mapping[str, Any] | None = None) -> str:
        """The prompt text of these messages; safe from any thread while others are answered. Raises EffllmError as `reply` does."""
        prompts = self._other_prompts()
        return prompts.going_on(*self._asking(prompts, messages, think, tools, variables))

    @cached_property
    def _calling(self) -> ToolCalling:
        from ..tool_calls.tool_calling import ToolCalling

        return ToolCalling(self.tokenizer)

    def _asking(self, prompts: PromptBuilder, messages: Sequence[Message], think: str, tools: Tools | None,
                variables: Mapping[str, Any] | None) -> tuple[str, str]:
        """(prompt, the prefill of the answer). Raises EffllmError if there is no prompt."""
        try:
            return self._asked(prompts, messages, think, tools, variables or {})
        except UsageError:
            from ..tool_calls.tool_messages import has_tool_images, with_images_in_user_message

            if not has_tool_images(messages):
                raise
        return self._asked(prompts, with_images_in_user_message(messages), think, tools, variables or {})

    def _asked(self, prompts: PromptBuilder, messages: Sequence[Message], think: str, tools: Tools | None,
               variables: Mapping[str, Any]) -> tuple[str, str]:
        if tools or any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
            messages, told = self._calling.prepared(messages, tools)
            variables = {**told, **variables}
        system, beside, rest = self._apart(messages)
        said = ""
        if rest and rest[-1]["role"] == "assistant" and not rest[-1].get("tool_calls"):
            said = rest.pop()["content"] or ""
        if not rest and not system:
            raise UsageError("there are no messages", "send at least one that has text")
        return prompts.rendered(rest, system, think, variables, beside), said

    def _apart(self, messages: Sequence[Message]) -> tuple[str | None, dict[str, Any], list[dict[str, Any]]]:
        """Split into the system prompt, other keys of its message, and the remaining messages with their content as plain text."""
        template = "" if self.tokenizer.template is None else self.tokenizer.template.source
        rest = [{key: value for key, value in message.items() if value is not None} | {"content": whole_text(message.get("content"))}
                for message in messages]
        for message in rest:
            if message["content"] is None and not message.get("tool_calls"):  # an empty answer, as some clients send it back
                message["content"] = ""
            if message["role"] == DEVELOPER and DEVELOPER not in template:
                message["role"] = SYSTEM
        said, beside = [], {}
        while rest and rest[0]["role"] == SYSTEM:
            first = rest.pop(0)
            said.append(first.pop("content") or "")
            beside |= {key: value for key, value in first.items() if key not in ("role", "name")}
        return "\n\n".join(filter(None, said)) or None, beside, rest

    def _fallbacks(self, think: str) -> Iterator[str]:
        if self._prompts.raw:
            yield NO_TEMPLATE
        if why := self.tokenizer.unmoved(think):
            yield f"--think {think} has no effect: {why}"
        if self._prompts.folds:
            yield NO_SYSTEM_ROLE
