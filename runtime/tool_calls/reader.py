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

RESCAN_CHARS = 512  # a call longer than this is parsed again only when new text contains a character that may end a call
CALL_END_CHARS = frozenset("}])>|]")
MAX_FALSE_MARKERS = 64  # opening markers without a call in one text; with more, the rest is taken as content


class CallReader:
    """Parses calls of `tools` in one format."""

    def __init__(self, format: Format, tools: Tools) -> None:
        self.format, self.tools = format, tools
        self.call_count = 0  # calls so far
        self._held_back = ""
        self._has_content = False  # content other than whitespace was emitted
        self._after_call = False  # the last part was a call

    @property
    def at_call(self) -> bool:
        """Has a call begun that is not complete?"""
        return bool(self._held_back) and self._call_start() >= 0

    def push(self, text: str) -> list[str | Call]:
        """Add text; returns what is certain, in order."""
        waits = len(self._held_back) > RESCAN_CHARS and self.at_call and CALL_END_CHARS.isdisjoint(text)
        self._held_back += text
        return [] if waits else [*self._read(ended=False)]

    def flush(self) -> list[str | Call]:
        """The end of the text."""
        return [*self._read(ended=True)]

    def _call_start(self) -> int:
        """Position in the held-back text where a call may begin, -1 if there is none."""
        opens = self.format.opens
        if self.format.bare:
            whitespace = len(self._held_back) - len(self._held_back.lstrip())
            return whitespace if not self._has_content and self._held_back.startswith(opens, whitespace) else -1
        return min((start for mark in opens if (start := self._held_back.find(mark)) >= 0), default=-1)

    def _read(self, ended: bool) -> Iterator[str | Call]:
        false_markers = 0
        while self._is_open(ended):
            start = self._call_start()
            if start < 0 or false_markers == MAX_FALSE_MARKERS:
                yield from self._release(len(self._held_back) if ended or start >= 0 else self._content_length())
                return
            cursor = Cursor(self._held_back, start, ended)
            try:
                calls = self.format.read(cursor, self.tools)
            except Incomplete:
                yield from self._release(len(self._held_back[:start].rstrip()))
                return
            except Mismatch:
                false_markers += 1
                yield from self._release(start + 1)
                continue
            yield from self._release(len(self._held_back[:start].rstrip()))
            self._held_back = self._held_back[len(self._held_back) - len(cursor.text) + cursor.at :]
            self._after_call = True
            self.call_count += len(calls)
            yield from calls

    def _is_open(self, ended: bool) -> bool:
        """Is there text to parse? White space after a call is dropped, and section closers."""
        while self._after_call:
            self._held_back = self._held_back.lstrip()
            closer = next((mark for mark in self.format.closers if self._held_back.startswith(mark)), None)
            if closer is None and any(mark.startswith(self._held_back) for mark in self.format.closers):
                self._held_back = "" if ended else self._held_back
                return False
            if closer is None:
                break
            self._held_back = self._held_back[len(closer) :]
        return bool(self._held_back)

    def _content_length(self) -> int:
        """How much of a text without marker is certainly content: neither the beginning of a marker nor whitespace before one."""
        opens, text = self.format.opens, self._held_back
        if self.format.bare:
            body = text.lstrip()
            return 0 if not self._has_content and any(mark.startswith(body) for mark in opens) else len(text)
        return len(text[: len(text) - partial_suffix(text, opens)].rstrip())

    def _release(self, length: int) -> Iterator[str]:
        """Release this much of the held text as content."""
        text, self._held_back = self._held_back[:length], self._held_back[length:]
        if text:
            self._has_content, self._after_call = self._has_content or bool(text.strip()), False
            yield text
