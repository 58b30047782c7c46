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
    """Splits the text of `answer` by its parser, stop strings and indentation, into its `content_parts`, `reasoning_parts` and `calls`.

    Stop strings are searched in the content as generated, tool calls included, but not in reasoning.
    `has_complete_line`: the content has a complete line.
    `is_reasoning_text`: the text that the last token completed is reasoning; `is_reasoning_token`: so is the token itself.
    `think`: after `flush`, in the state after the last token.
    """

    def __init__(self, answer: Answer, stream: TextStream) -> None:
        self.think, self._stream = answer.think, stream
        self._reasoning_filter, self._call_filter = (answer.think, None) if answer.visible_tokens is None else (answer.think.think,
                                                                                                                answer.think)
        self.stop_filter, self.indent_stop = StopStrings(answer.stops, answer.answer_prefix), IndentStop(answer.indent)
        self.has_complete_line = self.is_reasoning_text = self.is_reasoning_token = False
        self._logprob_trail = None if answer.sampler.logprobs is None else LogprobTrail()
        # Characters: generated, reported to the logprob trail, and held back by the stop filters.
        self._received = self._released = self._held_back = 0
        self._content = answer.content_parts
        self._lists = {"answer": answer.content_parts, "thinking": answer.reasoning_parts, "call": answer.calls}

    def push(self, step: Step) -> Iterator[TextDelta | Call]:
        """Add a token; returns the events that are now certain. The token that ends the answer has no text."""
        think, logprob_trail, is_stop_token = self.think, self._logprob_trail, step.finish == "stop"
        text, was_content = "" if is_stop_token else self._stream.push(step.token), think is None or think.at_answer
        could_open = think is not None and think.may_open
        parts = self._record(self._parse_calls(self._split(text)))
        self.is_reasoning_text = think is not None and not think.at_answer
        self.is_reasoning_token = self.is_reasoning_text or not was_content
        self.has_complete_line = self.has_complete_line or "\n" in text
        if logprob_trail and not is_stop_token:
            is_reasoning = self.is_reasoning_text or not (was_content or could_open)
            logprob_trail.add(step.logprobs, text, None if could_open and think.may_open else "thinking" if is_reasoning else "answer")
        return self._events(parts)

    @property
    def is_over(self) -> bool:
        """Has it reached a stop string, or the allowed number of tool calls?"""
        return self.stop_filter.hit or self._call_filter is not None and self._call_filter.is_full

    def flush(self) -> Iterator[TextDelta | Call]:
        """Flush the text that was held back."""
        parts = self._parse_calls(self._split("" if self.stop_filter.hit else self._stream.flush()))
        reasoning_filter, self.think = self._reasoning_filter, copy.copy(self.think)
        last_parts = self._apply_stops(reasoning_filter.flush()) if reasoning_filter else []
        if not self.stop_filter.hit:
            last_parts += [("answer", text)] if (text := self.indent_stop.push(self.stop_filter.flush()) + self.indent_stop.flush()) else []
            self._held_back = 0
        parts += self._parse_calls(last_parts) + (self._call_filter.flush_calls() if self._call_filter else [])
        return self._events(self._record(parts))

    def _split(self, text: str) -> list[Part]:
        """Split text into reasoning and content, the latter as far as stop strings and indentation release it."""
        self._received += len(text)
        return self._apply_stops(self._reasoning_filter.push(text) if self._reasoning_filter else [("answer", text)] if text else [])

    def _apply_stops(self, parts: list[Part]) -> list[Part]:
        released = []
        for kind, part in parts:
            if kind == "answer":
                self._held_back += len(part)
                part = self.indent_stop.push(self.stop_filter.push(part))
                self._held_back -= len(part)
            if part and (kind == "answer" or not self.stop_filter.hit):
                released.append((kind, part))
        return released

    def _parse_calls(self, parts: list[Part]) -> list[tuple[str, str | Call]]:
        return self._call_filter.read(parts) if self._call_filter else parts

    def _record(self, parts: list[tuple[str, str | Call]]) -> list[tuple[str, str | Call]]:
        """Append parts to the answer's lists. The answer's prefix loses an incomplete character that is now complete, and the beginning of
        a stop string.
        """
        content = self._content
        content[0] = content[0].removesuffix(self._stream.retracted)
        content[0] = content[0][: len(content[0]) - self.stop_filter.overlap]
        self._stream.retracted, self.stop_filter.overlap = "", 0
        for kind, part in parts:
            self._lists[kind].append(part)
        return parts

    def _events(self, parts: list[tuple[str, str | Call]]) -> Iterator[TextDelta | Call]:
        if not self._logprob_trail:
            return map(_event, parts)
        filtered = self._reasoning_filter.held_back_count if self._held_back and self._reasoning_filter else 0
        newly_released = max(0, self._received - self._held_back - filtered - self._released)
        self._released += newly_released
        return self._logprob_trail.events(parts, newly_released)


def _event(part: tuple[str, str | Call]) -> TextDelta | Call:
    kind, content = part
    return content if isinstance(content, Call) else TextDelta(content, kind)
