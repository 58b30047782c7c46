"""Streaming text filters: stop strings and indentation here; `reasoning.py` and `terminal_text.py` have others.

`push` takes pieces of any size and gives the same result however the text was split; `flush` ends it. A filter holds back only what could
still become a tag, stop string or escape sequence, so text appears as early as possible. A stop string counts from the moment it is
complete: of two, the one completed first wins, so generation can end at once.
"""

from collections.abc import Sequence

from ... import UsageError


def partial_suffix(text: str, marks: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is the beginning, but not the whole, of one of `marks`."""
    longest = min(len(text), max(map(len, marks), default=0))
    for length in range(longest, 0, -1):
        if any(len(mark) > length and mark.startswith(text[-length:]) for mark in marks):
            return length
    return 0


class StopStrings:
    """Ends the text at the first complete stop string, which is never shown. `said`: preceding text that was shown already; a stop string
    may begin in it, and `overlap` is then how much of it has to be taken back."""

    def __init__(self, stops: Sequence[str], said: str = "") -> None:
        if any(not stop for stop in stops):
            raise UsageError("a stop string is empty", "give --stop at least one character")
        self.stops = tuple(dict.fromkeys(stops))
        self.matched: str | None = None
        self.overlap = 0
        self._said = said[len(said) - partial_suffix(said, self.stops) :]
        self._held = ""

    @property
    def hit(self) -> bool:
        return self.matched is not None

    def push(self, text: str) -> str:
        """The text that is safe to show now; empty after a match."""
        if self.hit:
            return ""
        known, text = len(self._said), self._said + self._held + text
        found = [(at + len(stop), at, stop) for stop in self.stops if (at := text.find(stop, max(0, known - len(stop) + 1))) >= 0]
        if found:
            _, begin, self.matched = min(found)
            self._held, self.overlap = "", max(0, known - begin)
            return text[known:begin]
        cut = len(text) - partial_suffix(text, self.stops)
        self._said, self._held = text[cut:known], text[max(cut, known) :]
        return text[known : max(cut, known)]

    def flush(self) -> str:
        """End of the text: what was held back belongs to the answer."""
        text, self._held = self._held, ""
        return text


class IndentStop:
    """Ends the text before a line, other than the first, that is indented by fewer than `least` spaces: it is outside the block being
    completed. Blank lines do not count."""

    def __init__(self, least: int) -> None:
        self._least, self._held, self._at_line, self.hit = least, "", False, False

    def push(self, text: str) -> str:
        """The text inside the block; empty after its end."""
        if not self._least:
            return text
        done, text, self._held = "", self._held + text, ""
        while text and not self.hit:
            if self._at_line:
                inside = text.lstrip(" \t\n")
                if not inside:  # it may be the end
                    self._held = text
                    break
                margin = text[: len(text) - len(inside)]
                self.hit, self._at_line = len(margin.rpartition("\n")[2]) < self._least, False
                done, text = (done, "") if self.hit else (done + margin, inside)
            line, end, text = text.partition("\n")
            done, self._at_line = done + line + end, bool(end)
        return done

    def flush(self) -> str:
        """End of the text: held-back whitespace belongs to it."""
        text, self._held = "" if self.hit else self._held, ""
        return text
