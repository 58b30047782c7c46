"""Reasoning, content and calls told apart in one stream: calls are read from what is no reasoning."""

from __future__ import annotations

from ..events import Call
from ..tokens.reasoning import ChannelFilter, Part, ThinkFilter
from .reader import CallReader

CALL = "call"  # the kind of a part that is one


class CallFilter:
    """`think` tells reasoning from the answer, None where the model does not reason; `reader` reads the calls of the answer, which
    `is_full` after `most` of them."""

    def __init__(self, think: ThinkFilter | ChannelFilter | None, reader: CallReader, most: int | None = None) -> None:
        self.think, self.reader, self.most = think, reader, most

    @property
    def is_full(self) -> bool:
        return self.most is not None and self.reader.count >= self.most

    @property
    def at_answer(self) -> bool:
        """Would what comes next be the answer, calls included?"""
        return self.think is None or self.think.at_answer

    @property
    def may_open(self) -> bool:
        """May reasoning begin yet?"""
        return self.think is not None and self.think.may_open

    @property
    def is_thinking(self) -> bool:
        return self.think is not None and self.think.is_thinking

    def push(self, text: str) -> list[Part | tuple[str, Call]]:
        """Parts that are certain now, in order: (kind, text), or ("call", the call)."""
        return self._read(self.think.push(text) if self.think else [("answer", text)] if text else [])

    def flush(self) -> list[Part | tuple[str, Call]]:
        """The text ended."""
        parts = self._read(self.think.flush() if self.think else [])
        return [*parts, *map(_part, self.reader.flush())]

    def _read(self, parts: list[Part]) -> list[Part | tuple[str, Call]]:
        made: list[Part | tuple[str, Call]] = []
        for kind, text in parts:
            made += map(_part, self.reader.push(text)) if kind == "answer" else [(kind, text)]
        return made


def _part(found: str | Call) -> Part | tuple[str, Call]:
    return (CALL, found) if isinstance(found, Call) else ("answer", found)
