"""Grammars for turns of gpt-oss. A call begins in a message header, so they cover the whole turn, reasoning included."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..tokens.reasoning import ChannelFilter
from .free_text import arguments_grammar, json_escaped_grammar

CONSTRAIN = "<|constrain|>"


class HarmonyGrammar:
    """Like CallGrammar. `words` contains the channel tokens."""

    constrains_arguments = True

    def __init__(self, words: Mapping[str, int], guidance: Mapping[str, Any]) -> None:
        self._guidance = guidance
        self._start, self._channel, self._message, self._end = (f"<[{words[mark]}]>" for mark in ChannelFilter.MARKERS)
        self._json = f'(" json" | " " <[{words[CONSTRAIN]}]> "json")?' if CONSTRAIN in words else '" json"?'

    def can_constrain_text(self, grammar: str) -> bool:
        return json_escaped_grammar(grammar) is not None

    def must_call(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The grammar of a turn that is a call of one of the tools."""
        return f"start: thought* call\n{self._calls(tools)}"

    def may_call(self, tools: Sequence[Mapping[str, Any]], schema: Mapping[str, Any] | None = None) -> str:
        """The grammar of a turn that is a call, or else any text, or JSON of a schema."""
        said = "letters?" if schema is None else "answer"
        lines = [] if schema is None else [f"answer: %json {json.dumps(schema)}"]
        return "\n".join(["start: thought* (call | final)", f'final: {self._channel} "final" {self._json} {self._message} {said}', *lines,
                          self._calls(tools)])

    def _calls(self, tools: Sequence[Mapping[str, Any]]) -> str:
        names = [f"call_{number}" for number in range(len(tools))]
        lines = [f'thought: {self._channel} ("analysis" | "commentary") {self._message} letters? {self._end} {self._start} "assistant"',
                 f"call: {' | '.join(names)}", "letters: /(?s:.)+/"]
        for rule, tool in zip(names, tools):
            function = tool["function"]
            to = json.dumps(f"to=functions.{function['name']}")
            header = f'(" " {to} {self._channel} "commentary" | {self._channel} "commentary " {to})'
            lines += [f"{rule}: {header} {self._json} {self._message} {rule}_args",
                      f"{rule}_args: {arguments_grammar(function, self._guidance)}"]
        return "\n".join(lines)
