"""Tool calling with one model: template input, constraint of the answer, and parsing of its calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ... import UsageError
from ..constraints.constraint import Constraint, lark_constraint
from ..constraints.schema_cost import without_slow_keywords
from ..constraints.schema_rewrites import rewritten
from ..templates.template import TemplateError
from ..tokenizer import Tokenizer
from .call_style import CallStyle, detect_style
from .filter import CallFilter
from .grammar import GUIDANCE, CallGrammar
from .harmony import HarmonyCall
from .harmony_grammar import HarmonyGrammar
from .messages import Message, parameters_of, prepare_messages, validate_tools
from .reader import CallReader
from .schema import closed_schema

if TYPE_CHECKING:
    from ..generation.answer import Reasoning

AUTO, REQUIRED = "auto", "required"
NO_TOOLS = "this model's chat template has no tool support: a system prompt describes the tools"
UNCONSTRAINED_ARGUMENTS = "tool arguments are not constrained, since this model does not write them as JSON"
UNCONSTRAINED_TEXT = "the text of {} is left to the model: its grammar cannot be held to within a call of this model"
THE_FUNCTIONS = "the functions"
LEAVE_OUT_HINT = "leave one of them out"
TOOL_RESPONSE_TAG = "<tool_response>"  # a model that knows tools only from its system prompt may invent their results


@dataclass(frozen=True)
class Tools:
    """The tools of a request."""

    functions: tuple[Message, ...] = ()
    choice: str = AUTO  # auto, required, or the name of the function that must be called
    parallel: bool = True  # several calls at once are allowed

    @property
    def callable_functions(self) -> list[Message]:
        """The functions that may be called. Raises UsageError if the required one does not exist."""
        if self.choice in (AUTO, REQUIRED):
            return [*self.functions]
        required = [tool for tool in self.functions if tool["function"]["name"] == self.choice]
        if not required:
            raise UsageError(f"tool_choice names {self.choice}, which is not one of the tools", "name one of them")
        return required


def tools_of(tools: Sequence[Message], choice: str = AUTO, parallel: bool = True) -> Tools:
    """Validate the tools of a request. Raises UsageError."""
    return Tools(tuple(validate_tools(tools)), choice, parallel)


class ToolCalling:
    """How one model is given tools and calls them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def style(self) -> CallStyle:
        return detect_style(self.tokenizer.render_chat, self.tokenizer.added)

    @cached_property
    def visible_tokens(self) -> dict[int, str]:
        """Special tokens that occur in calls; detokenizing must not drop them."""
        texts = self.style.sample, *self.style.format.opens, *self.style.format.closers
        return {token_id: word for word, token_id in self._added_tokens.items() if any(word in text for text in texts)}

    @property
    def _added_tokens(self) -> dict[str, int]:
        """Added tokens that do not end a turn."""
        return {word: number for word, number in self.tokenizer.added.items() if number not in self.tokenizer.stop_ids}

    def prepare(self, messages: Sequence[Message], tools: Tools | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Messages and variables for the template. Raises UsageError and TemplateError."""
        if self.tokenizer.template is None:
            raise TemplateError("this is a base model without a chat template: it does not support tools", "ask without them")
        return prepare_messages(messages, tools.functions if tools else (), self.style)

    def fallbacks(self, tools: Tools) -> list[str]:
        """Notices about parts of a request that are not supported."""
        notices = [] if self.style.knows_tools else [NO_TOOLS]
        notices += [UNCONSTRAINED_TEXT.format(name) for name in self._unconstrained_tools(tools)]
        return notices + [UNCONSTRAINED_ARGUMENTS] if tools.choice != AUTO and not self._grammar.constrains_arguments else notices

    def _unconstrained_tools(self, tools: Tools) -> list[str]:
        """Tools whose text grammar cannot be enforced."""
        text_functions = [tool["function"] for tool in tools.functions if tool["function"].get("grammar")]
        return [each["name"] for each in text_functions if not self._grammar.can_constrain_text(each["grammar"])]

    def stops(self) -> tuple[str, ...]:
        """Stop strings of answers with tools."""
        return () if self.style.knows_tools else (TOOL_RESPONSE_TAG,)

    def call_filter(self, think: Reasoning | None, tools: Tools) -> CallFilter:
        """The filter that separates calls from content."""
        max_calls = None if tools.parallel and not self.style.one_call_per_message else 1
        return CallFilter(think, CallReader(self.style.format, parameters_of(tools.functions)), max_calls)

    @cached_property
    def _uses_channels(self) -> bool:
        """Whether calls are messages of a turn, so that a constraint covers the whole turn."""
        return self.tokenizer.channels and isinstance(self.style.format.body, HarmonyCall)

    @cached_property
    def _grammar(self) -> CallGrammar | HarmonyGrammar:
        if self._uses_channels:
            return HarmonyGrammar(self.tokenizer.added, GUIDANCE)
        return CallGrammar(self.style, self._added_tokens, self.tokenizer.thinks)

    def constraint(self, tools: Tools, constraint: Constraint | None) -> Constraint | None:
        """The constraint of an answer that may call tools, or else matches the given one. Raises UsageError."""
        grammar, functions = self._grammar, [_closed(tool) for tool in tools.callable_functions]
        if tools.choice != AUTO:
            return lark_constraint(grammar.must_call(functions), "tool_choice", THE_FUNCTIONS, self._uses_channels)
        if constraint is not None:
            given_grammar = json.loads(constraint.grammar)["grammars"][0] if constraint.grammar.lstrip().startswith("{") else {}
            if "json_schema" not in given_grammar:
                raise UsageError(f"{constraint.flag}: an answer with tools can be constrained by a schema, not by a grammar",
                                 LEAVE_OUT_HINT)
            return lark_constraint(grammar.may_call(functions, given_grammar["json_schema"]), constraint.flag, constraint.name,
                                   self._uses_channels)
        if any(tool["function"].get("strict") for tool in tools.functions) and grammar.constrains_arguments and not self.style.format.bare:
            return lark_constraint(grammar.may_call(functions), "strict", THE_FUNCTIONS, self._uses_channels)
        return None


def _closed(tool: Message) -> Message:
    """A tool with a closed parameter schema."""
    parameters = closed_schema(without_slow_keywords(rewritten(tool["function"]["parameters"])))
    return {**tool, "function": {**tool["function"], "parameters": parameters}}
