"""Separates reasoning, content and tool calls in one stream: calls are only parsed outside of reasoning."""

from __future__ import annotations

from ..events import Call
from ..tokens.reasoning import ChannelFilter, Part, ThinkFilter
from .reader import CallReader

CALL = "call"  # kind of a part that is a tool call


class CallFilter:
    """`think` separates reasoning, None for models that do not reason; `reader` parses calls.

    `is_full`: `max_calls` calls were emitted; later text is dropped, and so are further calls that ended with the same token.
    """

    def __init__(self, think: ThinkFilter | ChannelFilter | None, reader: CallReader, max_calls: int | None = None) -> None:
        self.think, self.reader, self.max_calls = think, reader, max_calls
        self._call_count = 0  # calls

    @property
    def is_full(self) -> bool:
        return self.max_calls is not None and self._call_count >= self.max_calls

    @property
    def at_answer(self) -> bool:
        """Would the next token be content or a call?"""
        return self.think is None or self.think.at_answer

    @property
    def may_open(self) -> bool:
        """May reasoning still begin?"""
        return self.think is not None and self.think.may_open

    @property
    def is_thinking(self) -> bool:
        return self.think is not None and self.think.is_thinking

    def push(self, text: str) -> list[Part | tuple[str, Call]]:
        """Add text; returns what is certain, in order: (kind, text), or ("call", the call)."""
        return self.read(self.think.push(text) if self.think else [("answer", text)] if text else [])

    def flush(self) -> list[Part | tuple[str, Call]]:
        """The end of the text."""
        return [*self.read(self.think.flush() if self.think else []), *self.flush_calls()]

    def read(self, parts: list[Part]) -> list[Part | tuple[str, Call]]:
        """Parts from `think`, with tool calls parsed."""
        parsed: list[Part | tuple[str, Call]] = []
        for kind, text in parts:
            parsed += self._emit(self.reader.push(text)) if kind == "answer" else [] if self.is_full else [(kind, text)]
        return parsed

    def flush_calls(self) -> list[Part | tuple[str, Call]]:
        """What is left at the end of the answer."""
        return self._emit(self.reader.flush())

    def _emit(self, parsed: list[str | Call]) -> list[Part | tuple[str, Call]]:
        parts: list[Part | tuple[str, Call]] = []
        for each in parsed:
            if self.is_full:
                break
            self._call_count += isinstance(each, Call)
            parts.append((CALL, each) if isinstance(each, Call) else ("answer", each))
        return parts
