"""Reasoning options of a request, whatever a client calls them: OpenAI's and OpenRouter's, llama.cpp's, vLLM's, Qwen's and DeepSeek's,
Ollama's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .problems import Problem

if TYPE_CHECKING:
    from .openai_requests import ChatRequest

SWITCHES = ("enable_thinking", "thinking")  # chat template variables
BUDGETS = ("thinking_budget_tokens", "thinking_token_budget", "thinking_budget")  # llama.cpp's, vLLM's, Qwen's
OFF, ON, NONE = "disabled", "enabled", "none"
NO_LIMIT = -1


@dataclass(frozen=True)
class ReasoningSettings:
    """Reasoning options of a request; None where it states none."""

    switch: bool | None = None  # reason or not
    effort: str | None = None
    budget: int | None = None  # tokens, -1 for no limit


def reasoning_settings(payload: ChatRequest, variables: Mapping[str, Any]) -> ReasoningSettings:
    """The reasoning options of a request. Its template `variables` take precedence. Raises Problem that names the field."""
    budget, reasoning, thinking = _budget(payload), payload.reasoning, payload.thinking
    effort = payload.reasoning_effort or (reasoning and reasoning.effort) or (payload.think if isinstance(payload.think, str) else None)
    switches = [variables.get(name) for name in SWITCHES]
    switches += [payload.enable_thinking, payload.think, reasoning and reasoning.enabled]
    switches += [{OFF: False, ON: True}.get(thinking.type) if thinking else None, None if effort is None else effort != NONE]
    if budget == 0:  # a budget of 0 turns reasoning off, instead of cutting it off at once
        switches.append(False)
    return ReasoningSettings(next((switch for switch in switches if isinstance(switch, bool)), None), effort, budget)


def _budget(payload: ChatRequest) -> int | None:
    """The first token budget that the request states. Raises Problem for one below -1."""
    candidates = [(name, getattr(payload, name)) for name in BUDGETS]
    candidates += [("reasoning.max_tokens", payload.reasoning and payload.reasoning.max_tokens),
                   ("thinking.budget_tokens", payload.thinking and payload.thinking.budget_tokens)]
    field, tokens = next(((field, tokens) for field, tokens in candidates if tokens is not None), ("", None))
    if tokens is not None and tokens < NO_LIMIT:
        raise Problem(400, f"{field} has to be 0 or more, or -1 for no limit, not {tokens}", param=field)
    return tokens
