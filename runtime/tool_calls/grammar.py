"""Grammars for answers that must call a tool, or whose calls must match the tools' schemas.

The syntax around name and arguments is taken from a sample call rendered by the template. Arguments that are JSON, or stand between tags
(`tag_grammar`), are constrained to the function's schema; in other formats only the beginning of the call and the function's name are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .call_style import ARGUMENTS, ID, LONG_ID, NAME, CallStyle
from .free_text import arguments_grammar, json_escaped_grammar
from .messages import SHORT_ID
from .tag_grammar import Lark, escape_regex, tag_rules

# What a schema says beyond what can be held to is for the client. A call stands on one line, as templates write it when they tell of it.
GUIDANCE = {"whitespace_pattern": " ?", "lenient": True}
ANY_TEXT = r"/(?s:.)+/"


class CallGrammar:
    """Lark rules for calls of one style. `words`: added tokens and their ids. `apart`: blank lines may precede a call, as after
    reasoning; otherwise not, because templates render none."""

    def __init__(self, style: CallStyle, words: Mapping[str, int], apart: bool = False) -> None:
        self._lead = "/\\n{0,2}/ " if apart else ""
        self.words, self._opens = words, style.format.opens
        sample = style.sample
        at = sample.index(NAME)
        self._before, rest = sample[:at], sample[at + len(NAME) :]
        begin, end = _json_arguments(rest)
        self._tags = None if end else tag_rules(rest)
        self.constrains_arguments = end > 0 or self._tags is not None  # whether arguments can be constrained to their schema
        self._between, self._behind = (rest[:begin], rest[end:]) if end else (rest[:1], "")
        self._marks = [number for word, number in words.items() if word in rest]

    @property
    def _lark(self) -> Lark:
        return Lark(self._literal, lambda text: next((word for word in self.words if word in text), None), GUIDANCE)

    def can_constrain_text(self, grammar: str) -> bool:
        """Whether free text can be constrained to its grammar. Raises UsageError for unsupported syntax."""
        if self._tags is not None:
            return self._tags.can_constrain_text(grammar, self._lark)
        return self.constrains_arguments and json_escaped_grammar(grammar) is not None

    @property
    def mark(self) -> str:
        """The opening marker of a call."""
        begun = [word for word in (*self.words, *self._opens) if self._before.startswith(word)]
        return begun[0] if begun else self._before

    def must_call(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The grammar of an answer that is a call of one of the tools."""
        return f"start: {self._lead}call\n{self._calls(tools, '')}"

    def may_call(self, tools: Sequence[Mapping[str, Any]], schema: Mapping[str, Any] | None = None) -> str:
        """The grammar of text with calls, or of either a call or JSON of a schema."""
        if schema is not None:
            return f"start: {self._lead}call | answer\nanswer: %json {json.dumps(schema)}\n{self._calls(tools, '')}"
        mark = self.mark
        if mark in self.words:
            return f"start: letters? (call letters?)*\n{self._calls(tools, '')}"
        return f"start: (lead call)* letters?\nlead[lazy]: /(?s:.*){escape_regex(mark)}/\n{self._calls(tools, mark)}"

    def _calls(self, tools: Sequence[Mapping[str, Any]], said: str) -> str:
        """The rule `call` without the text `said` so far, and the rules it refers to."""
        names = [f"call_{number}" for number in range(len(tools))]
        lines = [f"call: {' | '.join(names)}"]
        for rule, tool in zip(names, tools):
            function = tool["function"]
            parts = [self._literal(self._before.removeprefix(said)), self._literal(function["name"])]
            if self._tags:
                lines += self._tags.rules(f"{rule}_args", function["parameters"], self._lark, grammar=function.get("grammar"))
                parts.append(f"{rule}_args")
            elif self.constrains_arguments:
                lines.append(f"{rule}_args: {arguments_grammar(function, GUIDANCE)}")
                parts += [self._literal(self._between), f"{rule}_args", self._literal(self._behind)]
            else:
                parts += [self._literal(self._between), "rest"]
            lines.append(f"{rule}: {' '.join(filter(None, parts))}")
        if not self.constrains_arguments:
            lines.append(f"rest: ({' | '.join(['letters', *(f'<[{number}]>' for number in self._marks)])})*")
        return "\n".join([*lines, f"letters: {ANY_TEXT}"])

    def _literal(self, text: str) -> str:
        """A text in Lark notation: special tokens by id, characters in quotes; function names as characters."""
        made = []
        for part in re.split(f"({'|'.join(map(re.escape, sorted([*self.words, ID, LONG_ID], key=len, reverse=True)))})", text):
            if part in (ID, LONG_ID):
                made.append(f"/{SHORT_ID.pattern}/")
            elif part in self.words:
                made.append(f"<[{self.words[part]}]>")
            elif part:
                made.append(json.dumps(part, ensure_ascii=False))
        return " ".join(made)


def _json_arguments(text: str) -> tuple[int, int]:
    """Position of the sample's JSON arguments, (0, 0) if they are not JSON."""
    for found in re.finditer(r"\{", text):
        try:
            value, end = json.JSONDecoder().raw_decode(text, found.start())
        except ValueError:
            continue
        if value == ARGUMENTS:
            return found.start(), end
    return 0, 0
