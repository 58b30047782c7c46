"""The streaming parser of tool calls: text chunks in, content and complete calls out.

The result does not depend on how the text is chunked. Only a possible call is held back, from its opening marker on, and the white space
before it. What turns out to be none is emitted as content unchanged; so is a truncated call.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..events import Call
from ..tokens.stream_filters import partial_suffix
from .cursor import Cursor, Incomplete, Mismatch
from .formats import Format
from .schema import Tools

SHORT = 512  # characters; a longer call is looked at anew only where a piece has a letter with which one may end
ENDS = frozenset("}])>|]")
TRIES = 64  # marks behind which no call came; a text of so many is no call at all


class CallReader:
    """Parses calls of `tools` in one format."""

    def __init__(self, format: Format, tools: Tools) -> None:
        self.format, self.tools = format, tools
        self.count = 0  # calls so far
        self._held = ""
        self._said = False  # has content come that is no white space?
        self._behind = False  # was a call the last that came?

    @property
    def at_call(self) -> bool:
        """Has a call begun that is not complete?"""
        return bool(self._held) and self._mark() >= 0

    def push(self, text: str) -> list[str | Call]:
        """Add text; returns what is certain, in order."""
        waits = len(self._held) > SHORT and self.at_call and ENDS.isdisjoint(text)
        self._held += text
        return [] if waits else [*self._read(ended=False)]

    def flush(self) -> list[str | Call]:
        """The end of the text."""
        return [*self._read(ended=True)]

    def _mark(self) -> int:
        """Where a call may begin in the held text, -1 if nowhere."""
        opens = self.format.opens
        if self.format.bare:
            blanks = len(self._held) - len(self._held.lstrip())
            return blanks if not self._said and self._held.startswith(opens, blanks) else -1
        return min((at for mark in opens if (at := self._held.find(mark)) >= 0), default=-1)

    def _read(self, ended: bool) -> Iterator[str | Call]:
        tries = 0
        while self._is_open(ended):
            at = self._mark()
            if at < 0 or tries == TRIES:
                yield from self._content(len(self._held) if ended or at >= 0 else self._certain())
                return
            cursor = Cursor(self._held, at, ended)
            try:
                calls = self.format.read(cursor, self.tools)
            except Incomplete:
                yield from self._content(len(self._held[:at].rstrip()))
                return
            except Mismatch:
                tries += 1
                yield from self._content(at + 1)
                continue
            yield from self._content(len(self._held[:at].rstrip()))
            self._held = self._held[len(self._held) - len(cursor.text) + cursor.at :]
            self._behind = True
            self.count += len(calls)
            yield from calls

    def _is_open(self, ended: bool) -> bool:
        """Is there text to parse? White space after a call is dropped, and section closers."""
        while self._behind:
            self._held = self._held.lstrip()
            closer = next((mark for mark in self.format.closers if self._held.startswith(mark)), None)
            if closer is None and any(mark.startswith(self._held) for mark in self.format.closers):
                self._held = "" if ended else self._held
                return False
            if closer is None:
                break
            self._held = self._held[len(closer) :]
        return bool(self._held)

    def _certain(self) -> int:
        """How much of a text without marker cannot be the beginning of one, or white space before one."""
        opens, text = self.format.opens, self._held
        if self.format.bare:
            body = text.lstrip()
            return 0 if not self._said and any(mark.startswith(body) for mark in opens) else len(text)
        return len(text[: len(text) - partial_suffix(text, opens)].rstrip())

    def _content(self, length: int) -> Iterator[str]:
        """Release this much of the held text as content."""
        text, self._held = self._held[:length], self._held[length:]
        if text:
            self._said, self._behind = self._said or bool(text.strip()), False
            yield text
