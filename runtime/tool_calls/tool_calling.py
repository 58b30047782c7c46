"""Tool calling with one model: template input, constraint of the answer, and parsing of its calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ... import UsageError
from ..constraints.constraint import Constraint, lark_constraint
from ..constraints.schema_cost import without_slow
from ..constraints.schema_rewrites import rewritten
from ..templates.template import TemplateError
from ..tokenizer import Tokenizer
from .call_style import CallStyle, detect_style
from .filter import CallFilter
from .grammar import GUIDANCE, CallGrammar
from .harmony import HarmonyCall
from .harmony_grammar import HarmonyGrammar
from .messages import Message, functions, parameters_of, prepared
from .reader import CallReader
from .schema import closed_schema

if TYPE_CHECKING:
    from ..generation.answer import Reasoning

AUTO, REQUIRED = "auto", "required"
NO_TOOLS = "this model's chat template has no tool support: a system prompt describes the tools"
UNHELD = "tool arguments are not constrained, since this model does not write them as JSON"
FREE_UNHELD = "the text of {} is left to the model: its grammar cannot be held to within a call of this model"
THE_FUNCTIONS = "the functions"
LEAVE_OUT = "leave one of them out"
GIVES_BACK = "<tool_response>"  # a model that was told of tools in a system prompt may go on to invent what they give back


@dataclass(frozen=True)
class Tools:
    """The tools of a request. `choice`: auto, required, or the name of the function that must be called; `several`: parallel calls are
    allowed."""

    functions: tuple[Message, ...] = ()
    choice: str = AUTO
    several: bool = True

    @property
    def called(self) -> list[Message]:
        """The functions that may be called. Raises UsageError if the required one does not exist."""
        if self.choice in (AUTO, REQUIRED):
            return [*self.functions]
        found = [tool for tool in self.functions if tool["function"]["name"] == self.choice]
        if not found:
            raise UsageError(f"tool_choice names {self.choice}, which is not one of the tools", "name one of them")
        return found


def tools_of(tools: Sequence[Message], choice: str = AUTO, several: bool = True) -> Tools:
    """Validate the tools of a request. Raises UsageError."""
    return Tools(tuple(functions(tools)), choice, several)


class ToolCalling:
    """How one model is given tools and calls them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def style(self) -> CallStyle:
        return detect_style(self.tokenizer.render_chat, self.tokenizer.added)

    @cached_property
    def marks(self) -> dict[int, str]:
        """Special tokens that occur in calls."""
        made = self.style.sample, *self.style.format.opens, *self.style.format.closers
        return {number: word for word, number in self._words.items() if any(word in text for text in made)}

    @property
    def _words(self) -> dict[str, int]:
        return {word: number for word, number in self.tokenizer.added.items() if number not in self.tokenizer.stop_ids}

    def prepared(self, messages: Sequence[Message], tools: Tools | None) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Messages and variables for the template. Raises UsageError and TemplateError."""
        if self.tokenizer.template is None:
            raise TemplateError("this is a base model without a chat template: it does not support tools", "ask without them")
        return prepared(messages, tools.functions if tools else (), self.style)

    def fallbacks(self, tools: Tools) -> list[str]:
        """Notices about what of a request cannot be done."""
        told = [] if self.style.knows_tools else [NO_TOOLS]
        told += [FREE_UNHELD.format(name) for name in self._loose(tools)]
        return told + [UNHELD] if tools.choice != AUTO and not self._grammar.holds else told

    def _loose(self, tools: Tools) -> list[str]:
        """Tools whose text grammar cannot be enforced."""
        free = [tool["function"] for tool in tools.functions if tool["function"].get("grammar")]
        return [each["name"] for each in free if not self._grammar.holds_text(each["grammar"])]

    def stops(self) -> tuple[str, ...]:
        """Stop strings of answers with tools."""
        return () if self.style.knows_tools else (GIVES_BACK,)

    def reading(self, think: Reasoning | None, tools: Tools) -> CallFilter:
        """The filter that separates calls from content."""
        most = None if tools.several and not self.style.single else 1
        return CallFilter(think, CallReader(self.style.format, parameters_of(tools.functions)), most)

    @cached_property
    def _of_channels(self) -> bool:
        """Are calls messages of a turn, so that a constraint covers the whole turn?"""
        return self.tokenizer.channels and isinstance(self.style.format.body, HarmonyCall)

    @cached_property
    def _grammar(self) -> CallGrammar | HarmonyGrammar:
        if self._of_channels:
            return HarmonyGrammar(self.tokenizer.added, GUIDANCE)
        return CallGrammar(self.style, self._words, self.tokenizer.thinks)

    def constraint(self, tools: Tools, constraint: Constraint | None) -> Constraint | None:
        """The constraint of an answer that may call tools, or else matches the given one. Raises UsageError."""
        grammar, called = self._grammar, [_closed(tool) for tool in tools.called]
        if tools.choice != AUTO:
            return lark_constraint(grammar.must_call(called), "tool_choice", THE_FUNCTIONS, self._of_channels)
        if constraint is not None:
            said = json.loads(constraint.grammar)["grammars"][0] if constraint.grammar.lstrip().startswith("{") else {}
            if "json_schema" not in said:
                raise UsageError(f"{constraint.flag}: an answer with tools can be constrained by a schema, not by a grammar", LEAVE_OUT)
            return lark_constraint(grammar.may_call(called, said["json_schema"]), constraint.flag, constraint.name, self._of_channels)
        if any(tool["function"].get("strict") for tool in tools.functions) and grammar.holds and not self.style.format.bare:
            return lark_constraint(grammar.may_call(called), "strict", THE_FUNCTIONS, self._of_channels)
        return None


def _closed(tool: Message) -> Message:
    """A tool with a closed parameter schema."""
    return {**tool, "function": {**tool["function"], "parameters": closed_schema(without_slow(rewritten(tool["function"]["parameters"])))}}
