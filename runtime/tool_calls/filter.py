"""Separates reasoning, content and tool calls in one stream: calls are only parsed outside of reasoning."""

from __future__ import annotations

from ..events import Call
from ..tokens.reasoning import ChannelFilter, Part, ThinkFilter
from .reader import CallReader

CALL = "call"  # the kind of a part that is one


class CallFilter:
    """`think` separates reasoning, None for models that do not reason; `reader` parses calls. `is_full` after `most` calls: text after
    them is dropped, and further calls that ended with the same token."""

    def __init__(self, think: ThinkFilter | ChannelFilter | None, reader: CallReader, most: int | None = None) -> None:
        self.think, self.reader, self.most = think, reader, most
        self._told = 0  # calls

    @property
    def is_full(self) -> bool:
        return self.most is not None and self._told >= self.most

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
        return [*self.read(self.think.flush() if self.think else []), *self.rest()]

    def read(self, parts: list[Part]) -> list[Part | tuple[str, Call]]:
        """Parts from `think`, with tool calls parsed."""
        made: list[Part | tuple[str, Call]] = []
        for kind, text in parts:
            made += self._parts(self.reader.push(text)) if kind == "answer" else [] if self.is_full else [(kind, text)]
        return made

    def rest(self) -> list[Part | tuple[str, Call]]:
        """What is left at the end of the answer."""
        return self._parts(self.reader.flush())

    def _parts(self, found: list[str | Call]) -> list[Part | tuple[str, Call]]:
        made: list[Part | tuple[str, Call]] = []
        for each in found:
            if self.is_full:
                break
            self._told += isinstance(each, Call)
            made.append((CALL, each) if isinstance(each, Call) else ("answer", each))
        return made
