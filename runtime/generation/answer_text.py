"""The text of an answer, assembled from its tokens and split into content, reasoning and tool calls. Text is emitted once no later token
can change it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..events import Call, TextDelta
from ..sampling.logprobs import LogprobTrail
from ..tokens.stream_filters import IndentStop, StopStrings
from ..tokens.text_stream import TextStream

if TYPE_CHECKING:
    from ..engine import Step
    from ..tokens.reasoning import Part
    from .answer import Answer


class AnswerText:
    """Splits the text of `answer` by its `think` parser, stop strings and indentation, into its `shown`, `thought` and `calls`. Stop
    strings are searched in the content as generated, tool calls included, but not in reasoning. `has_line`: it has a complete line. For
    the last token, `is_thought`: the text it completed is reasoning; `reasons`: so is the token itself. `think`, in the end, is in the
    state after the last token."""

    def __init__(self, answer: Answer, stream: TextStream) -> None:
        self.think, self._stream = answer.think, stream
        self._apart, self._calls = (answer.think, None) if answer.marks is None else (answer.think.think, answer.think)
        self.stops, self.indented = StopStrings(answer.stops, answer.said), IndentStop(answer.indent)
        self.has_line = self.is_thought = self.reasons = False
        self._trail = None if answer.sampler.logprobs is None else LogprobTrail()
        self._made = self._through = self._waiting = 0  # letters: all, those that are through the stop strings, those that these hold
        self._shown = answer.shown
        self._into = {"answer": answer.shown, "thinking": answer.thought, "call": answer.calls}

    def took(self, step: Step) -> Iterator[TextDelta | Call]:
        """Take a token, return what is now certain; the token that ends the text has no text."""
        think, trail, ends = self.think, self._trail, step.finish == "stop"
        text, at_answer = "" if ends else self._stream.push(step.token), think is None or think.at_answer
        may_open = think is not None and think.may_open
        parts = self._noted(self._read(self._told_apart(text)))
        self.is_thought = think is not None and not think.at_answer
        self.reasons = self.is_thought or not at_answer
        self.has_line = self.has_line or "\n" in text
        if trail and not ends:
            was_thought = self.is_thought or not (at_answer or may_open)
            trail.add(step.logprobs, text, None if may_open and think.may_open else "thinking" if was_thought else "answer")
        return self._events(parts)

    @property
    def is_over(self) -> bool:
        """Has it reached a stop string, or the allowed number of tool calls?"""
        return self.stops.hit or self._calls is not None and self._calls.is_full

    def ended(self) -> Iterator[TextDelta | Call]:
        """Flush the text that was held back."""
        parts = self._read(self._told_apart("" if self.stops.hit else self._stream.flush()))
        apart, self.think = self._apart, copy.copy(self.think)
        rest = self._cut(apart.flush()) if apart else []
        if not self.stops.hit:
            rest += [("answer", held)] if (held := self.indented.push(self.stops.flush()) + self.indented.flush()) else []
            self._waiting = 0
        parts += self._read(rest) + (self._calls.rest() if self._calls else [])
        return self._events(self._noted(parts))

    def _told_apart(self, text: str) -> list[Part]:
        """Split text into reasoning and content, the latter as far as stop strings and indentation release it."""
        self._made += len(text)
        return self._cut(self._apart.push(text) if self._apart else [("answer", text)] if text else [])

    def _cut(self, parts: list[Part]) -> list[Part]:
        made = []
        for kind, part in parts:
            if kind == "answer":
                self._waiting += len(part)
                part = self.indented.push(self.stops.push(part))
                self._waiting -= len(part)
            if part and (kind == "answer" or not self.stops.hit):
                made.append((kind, part))
        return made

    def _read(self, parts: list[Part]) -> list[tuple[str, str | Call]]:
        return self._calls.read(parts) if self._calls else parts

    def _noted(self, parts: list[tuple[str, str | Call]]) -> list[tuple[str, str | Call]]:
        """Record parts. The prefill loses half a character that is now complete, and the beginning of a stop string."""
        shown = self._shown
        shown[0] = shown[0].removesuffix(self._stream.taken_back)
        shown[0] = shown[0][: len(shown[0]) - self.stops.overlap]
        self._stream.taken_back, self.stops.overlap = "", 0
        for kind, part in parts:
            self._into[kind].append(part)
        return parts

    def _events(self, parts: list[tuple[str, str | Call]]) -> Iterator[TextDelta | Call]:
        if not self._trail:
            return map(_event, parts)
        behind = self._apart.waiting if self._waiting and self._apart else 0  # what comes behind letters that wait
        more = max(0, self._made - self._waiting - behind - self._through)
        self._through += more
        return self._trail.events(parts, more)


def _event(part: tuple[str, str | Call]) -> TextDelta | Call:
    kind, found = part
    return found if isinstance(found, Call) else TextDelta(found, kind)
