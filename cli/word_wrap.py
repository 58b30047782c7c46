"""Wraps a text that streams onto a terminal: a line ends before a word that does not fit, so no word is cut.

Text is only ever appended, so a word is held back until it is certain where it goes: far from the edge it passes at once, near it when its
end has come. What is meant line by line stays as it is, and the terminal breaks it where it must: code between fences, rows of tables, and
JSON, whose texts hold no line breaks.
The result does not depend on how the text was cut into pieces. Input has passed the terminal filter, and may have been styled by
`markdown`: codes of colour take no room, and a line that is broken inside a style goes on in it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache

from .markdown import FENCE, OFF

LONG = 32  # columns of a word that is broken where it stands, such as a URL
HEAD = 200  # characters of a line that say what kind of line it is
TAB = 8
PARTS = re.compile(r"\x1b\[[0-9;]*m|.", re.DOTALL)
# What the lines behind a broken one are indented by: its own blanks, the mark of a list or of a quotation.
HANG = re.compile(r" *(?:(?:[-*+•>│]|\d{1,3}[.)]) +)*")
JOINER, WIDE = "\u200d", "\ufe0f"  # of several pictures to one, of a letter to a picture
CLOSING = frozenset("、。，．・：；！？…‥ー々〜）」』】〕〉》｝］’”ぁぃぅぇぉっゃゅょァィゥェォッャュョ")  # begin no line
OPENING = frozenset("（「『【〔〈《｛［‘“")  # end none


class WordWrap:
    """`push` returns what can be shown now, `flush` the rest; `width` is called each time, as a window may be resized. `is_for_programs`:
    no wrapping, as for any text that begins with a brace."""

    def __init__(self, width: Callable[[], int]) -> None:
        self._asked, self.is_for_programs = width, False
        self._begin()

    def _begin(self) -> None:
        self._fence, self._first = "", ""  # its first letter
        self._column, self._style = 0, ""  # of the terminal, behind what was shown
        self._out: list[str] = []
        self._is_first_line = True
        self._new_line()

    def _new_line(self) -> None:
        self._head = ""  # of the line as it was written, without codes
        self._is_kept = False  # shown as it is
        self._blank, self._word, self._last = "", "", ""  # held back: blanks, then the beginning of a word; its last character
        self._flags = 0  # consecutive regional indicators: two are a flag
        self._has_begun = False  # the beginning of the word was shown

    def push(self, text: str) -> str:
        self._width = max(1, self._asked())
        for part in PARTS.findall(text):
            if part == "\n":
                self._end_line()
            elif part[0] == "\x1b":
                self._word += part
            elif part in " \t" and not self._is_kept:
                self._place()
                self._blank += part
                self._head += part
            else:
                self._letter(part)
        if self._word and (self._is_kept or self._has_begun or self._room() >= min(LONG, self._width) or display_width(self._word) >= LONG):
            self._place(is_whole=False)
        return self._shown()

    def pause(self) -> str:
        """Returns what is held back, before other output; the text continues at the left edge."""
        self._width = max(1, self._asked())
        self._place()
        self._blank, self._column = "", 0
        return self._shown()

    def flush(self) -> str:
        """End the text; the next one starts anew."""
        rest = self.push("")
        self._place()
        rest += self._shown() + (self._blank if len(self._blank) <= self._width - self._column else "")
        self._begin()
        return rest

    def _shown(self) -> str:
        shown, self._out = "".join(self._out), []
        return shown

    def _letter(self, letter: str) -> None:
        self._first = self._first or letter
        if not self._head.strip(" \t"):
            self._is_kept = bool(self._fence) or letter == "|" or self.is_for_programs or self._first == "{"
        if self._last and may_break(self._last, letter) and not (is_flag(letter) and self._flags % 2):
            self._place()
        self._word += letter
        self._last, self._flags = letter, self._flags + 1 if is_flag(letter) else 0
        if len(self._head) < HEAD:
            self._head += letter

    def _end_line(self) -> None:
        self._place()
        if self._is_kept or len(self._blank) <= self._width - self._column:
            self._out.append(self._blank)
        self._out.append("\n")
        line = self._head.rstrip()
        if self._fence:
            bare = line.strip()
            if set(bare) == {self._fence[0]} and len(bare) >= len(self._fence):
                self._fence = ""
        elif len(line) < HEAD and (fence := FENCE.fullmatch(line)):
            self._fence = fence[1]
        self._column, self._is_first_line = 0, False
        self._new_line()

    def _room(self) -> int:
        return self._width - column_after(self._column, self._blank)

    def _place(self, is_whole: bool = True) -> None:
        """Show the word, on the next line if it does not fit; more of it may come unless it `is_whole`."""
        width = display_width(self._word)
        if width and not self._has_begun:
            indent = self._indent()
            if not self._is_kept and min(width, LONG) > self._room() and self._column > indent:
                self._out.append(f"{OFF if self._style else ''}\n{' ' * indent}{self._style}")
                self._column = indent
            else:
                self._out.append(self._blank)
                self._column = column_after(self._column, self._blank)
            self._blank = ""
        for part in PARTS.findall(self._word):
            if part[0] == "\x1b":
                self._style = "" if part == OFF else part
            elif (columns := display_width(part)) and self._column + columns > self._width:
                self._column = columns  # the terminal broke the line
            else:
                self._column += columns
        self._out.append(self._word)
        self._word = ""
        self._has_begun = not is_whole and (self._has_begun or bool(width))
        if is_whole:
            self._last = ""

    def _indent(self) -> int:
        """The indent in columns. A continuation (`/continue`, `--raw`) begins with a blank, which is none."""
        hang = HANG.match(self._head)[0]
        indent = 0 if self._is_first_line and hang == " " else display_width(hang)
        return indent if indent <= self._width // 2 else 0


def may_break(before: str, letter: str) -> bool:
    """Whether a line may be broken between two characters without a space: next to CJK characters and emoji."""
    if before == JOINER or letter in CLOSING or before in OPENING or letter == WIDE or not display_width(letter) or is_modifier(letter):
        return False
    return stands_alone(before) or stands_alone(letter)


def stands_alone(letter: str) -> bool:
    """Not Korean, whose words are separated by spaces."""
    return not letter.isascii() and display_width(letter) == 2 and not unicodedata.name(letter, "").startswith("HANGUL")


def is_flag(letter: str) -> bool:
    """One of the two regional indicators of a flag."""
    return "\U0001f1e6" <= letter <= "\U0001f1ff"


def is_modifier(letter: str) -> bool:
    """A skin tone, which belongs to the emoji before it."""
    return "\U0001f3fb" <= letter <= "\U0001f3ff"


def column_after(column: int, blanks: str) -> int:
    """The column after blanks."""
    for blank in blanks:
        column += TAB - column % TAB if blank == "\t" else 1
    return column


def display_width(text: str) -> int:
    """The most columns that a text takes in a terminal, without escape codes."""
    return len(text) if text.isascii() and "\x1b" not in text else sum(character_width(part) for part in PARTS.findall(text))


@lru_cache(1024)
def character_width(part: str) -> int:
    """Columns of a character or an escape code. Terminals differ on joined emoji: the wider way is counted."""
    from .screen import cell_width

    return 0 if part[0] == "\x1b" else 2 if is_flag(part) else 1 if part == WIDE else cell_width(part)
