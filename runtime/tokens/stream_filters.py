"""Streaming text filters: stop strings and indentation here; `reasoning.py` and `terminal_text.py` have others.

`push` takes pieces of any size and gives the same result however the text was split; `flush` ends it. A filter holds back only what could
still become a tag, stop string or escape sequence, so text appears as early as possible. A stop string counts from the moment it is
complete: of two, the one completed first wins, so generation can end at once.
"""

from collections.abc import Sequence

from ... import UsageError


def partial_suffix(text: str, markers: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is the beginning, but not the whole, of one of `markers`."""
    longest = min(len(text), max(map(len, markers), default=0))
    for length in range(longest, 0, -1):
        if any(len(marker) > length and marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


class StopStrings:
    """Ends the text at the first complete stop string, which is never shown.

    `shown_text`: preceding text that was shown already. A stop string may begin in it; `overlap` is then how many of its characters have to
    be taken back.
    """

    def __init__(self, stops: Sequence[str], shown_text: str = "") -> None:
        if any(not stop for stop in stops):
            raise UsageError("a stop string is empty", "give --stop at least one character")
        self.stops = tuple(dict.fromkeys(stops))
        self.matched: str | None = None
        self.overlap = 0
        self._shown_tail = shown_text[len(shown_text) - partial_suffix(shown_text, self.stops) :]
        self._held_back = ""

    @property
    def hit(self) -> bool:
        return self.matched is not None

    def push(self, text: str) -> str:
        """The text that is safe to show now; empty after a match."""
        if self.hit:
            return ""
        shown_chars, text = len(self._shown_tail), self._shown_tail + self._held_back + text
        matches = [(start + len(stop), start, stop) for stop in self.stops
                   if (start := text.find(stop, max(0, shown_chars - len(stop) + 1))) >= 0]
        if matches:
            _, match_start, self.matched = min(matches)
            self._held_back, self.overlap = "", max(0, shown_chars - match_start)
            return text[shown_chars:match_start]
        cut = len(text) - partial_suffix(text, self.stops)
        self._shown_tail, self._held_back = text[cut:shown_chars], text[max(cut, shown_chars) :]
        return text[shown_chars : max(cut, shown_chars)]

    def flush(self) -> str:
        """End of the text: what was held back belongs to the answer."""
        text, self._held_back = self._held_back, ""
        return text


class IndentStop:
    """Ends the text before a line, other than the first, that is indented by fewer than `min_indent` spaces: it is outside the block being
    completed. Blank lines do not count.
    """

    def __init__(self, min_indent: int) -> None:
        self._min_indent, self._held_back, self._at_line_start, self.hit = min_indent, "", False, False

    def push(self, text: str) -> str:
        """The text inside the block; empty after its end."""
        if not self._min_indent:
            return text
        released, text, self._held_back = "", self._held_back + text, ""
        while text and not self.hit:
            if self._at_line_start:
                body = text.lstrip(" \t\n")
                if not body:  # it may be the end
                    self._held_back = text
                    break
                whitespace = text[: len(text) - len(body)]
                self.hit, self._at_line_start = len(whitespace.rpartition("\n")[2]) < self._min_indent, False
                released, text = (released, "") if self.hit else (released + whitespace, body)
            line, end, text = text.partition("\n")
            released, self._at_line_start = released + line + end, bool(end)
        return released

    def flush(self) -> str:
        """End of the text: held-back whitespace belongs to it."""
        text, self._held_back = "" if self.hit else self._held_back, ""
        return text
