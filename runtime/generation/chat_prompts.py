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
    _new_prompt_builder: Callable[[], PromptBuilder]
    _check_length: Callable[[str], None]

    def count(self, messages: Sequence[Message], think: str = "auto", tools: Tools | None = None,
              variables: Mapping[str, Any] | None = None) -> int:
        """Number of tokens of the prompt of these messages, see `render_prompt`."""
        prompt = self.render_prompt(messages, think, tools, variables)
        self._check_length(prompt)
        return self._new_prompt_builder().count(prompt)

    def render_prompt(self, messages: Sequence[Message], think: str = "auto", tools: Tools | None = None,
                 variables: Mapping[str, Any] | None = None) -> str:
        """The prompt text of these messages; safe from any thread while other requests are answered. Raises EffllmError as `reply` does."""
        prompts = self._new_prompt_builder()
        return prompts.with_answer_prefix(*self._build_prompt(prompts, messages, think, tools, variables))

    @cached_property
    def _calling(self) -> ToolCalling:
        from ..tool_calls.tool_calling import ToolCalling

        return ToolCalling(self.tokenizer)

    def _build_prompt(self, prompts: PromptBuilder, messages: Sequence[Message], think: str, tools: Tools | None,
                variables: Mapping[str, Any] | None) -> tuple[str, str]:
        """(prompt, beginning of its answer). Raises EffllmError if these messages make no prompt."""
        try:
            return self._render_messages(prompts, messages, think, tools, variables or {})
        except UsageError:
            from ..tool_calls.tool_messages import has_tool_images, with_images_in_user_message

            if not has_tool_images(messages):
                raise
        return self._render_messages(prompts, with_images_in_user_message(messages), think, tools, variables or {})

    def _render_messages(self, prompts: PromptBuilder, messages: Sequence[Message], think: str, tools: Tools | None,
               variables: Mapping[str, Any]) -> tuple[str, str]:
        if tools or any(message.get("tool_calls") or message["role"] == "tool" for message in messages):
            messages, tool_variables = self._calling.prepare(messages, tools)
            variables = {**tool_variables, **variables}
        system, system_extras, others = self._split_system(messages)
        answer_prefix = ""
        if others and others[-1]["role"] == "assistant" and not others[-1].get("tool_calls"):
            answer_prefix = others.pop()["content"] or ""
        if not others and not system:
            raise UsageError("there are no messages", "send at least one that has text")
        return prompts.render(others, system, think, variables, system_extras), answer_prefix

    def _split_system(self, messages: Sequence[Message]) -> tuple[str | None, dict[str, Any], list[dict[str, Any]]]:
        """Split into the system prompt, other keys of its message, and the remaining messages with their content as plain text."""
        template = "" if self.tokenizer.template is None else self.tokenizer.template.source
        rest = [{key: value for key, value in message.items() if value is not None} | {"content": whole_text(message.get("content"))}
                for message in messages]
        for message in rest:
            if message["content"] is None and not message.get("tool_calls"):  # some clients send back an empty answer so
                message["content"] = ""
            if message["role"] == DEVELOPER and DEVELOPER not in template:
                message["role"] = SYSTEM
        system_texts, extras = [], {}
        while rest and rest[0]["role"] == SYSTEM:
            first = rest.pop(0)
            system_texts.append(first.pop("content") or "")
            extras |= {key: value for key, value in first.items() if key not in ("role", "name")}
        return "\n\n".join(filter(None, system_texts)) or None, extras, rest

    def _fallbacks(self, think: str) -> Iterator[str]:
        if self._prompts.raw:
            yield NO_TEMPLATE
        if reason := self.tokenizer.unsupported_think(think):
            yield f"--think {think} has no effect: {reason}"
        if self._prompts.folds_system:
            yield NO_SYSTEM_ROLE
