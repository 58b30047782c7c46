"""Wraps streamed text on a terminal at word boundaries.

Text is only ever appended, so a word is held back until its place is certain: far from the right edge it passes at once, near it when its
end has arrived. Preformatted text (fenced code, table rows, JSON) is not wrapped here; the terminal breaks its long lines.
The result does not depend on how the text was split into chunks. Input has passed the terminal filter and may have been styled by
`markdown`: colour codes have no width, and a style continues after a line break.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache

from .markdown import FENCE, OFF

LONG = 32  # columns: longer words, such as URLs, are broken instead of moved to the next line
HEAD = 200  # characters at the start of a line by which its kind (code fence, list item) is recognized
TAB = 8
PARTS = re.compile(r"\x1b\[[0-9;]*m|.", re.DOTALL)  # a colour code, or a character
HANG = re.compile(r" *(?:(?:[-*+•>│]|\d{1,3}[.)]) +)*")  # indent and list markers of a line, which indent its continuation lines
JOINER, WIDE = "\u200d", "\ufe0f"  # zero-width joiner, variation selector 16 (emoji style)
CLOSING = frozenset("、。，．・：；！？…‥ー々〜）」』】〕〉》｝］’”ぁぃぅぇぉっゃゅょァィゥェォッャュョ")  # never at the start of a line
OPENING = frozenset("（「『【〔〈《｛［‘“")  # never at the end of a line


class WordWrap:
    """`push` takes a chunk and returns the text that can be shown now, `flush` returns the rest.

    width: returns the columns of the terminal, which may be resized.
    is_preformatted: no wrapping, as for any text that begins with a brace.
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._terminal_width, self.is_preformatted = width, False
        self._reset()

    def _reset(self) -> None:
        self._fence = ""  # the open code fence, empty outside of code
        self._first_character = ""  # of the text
        self._column, self._style = 0, ""  # at the cursor: column of the terminal, active colour code
        self._out: list[str] = []  # shown by the next return
        self._is_first_line = True
        self._new_line()

    def _new_line(self) -> None:
        self._head = ""  # the first HEAD characters of the source line, without colour codes
        self._is_verbatim = False  # this line is not wrapped
        self._blank, self._word = "", ""  # held back: blanks, and the beginning of the word after them
        self._last_character = ""  # of the word
        self._flags = 0  # consecutive regional indicators: two are a flag
        self._has_begun = False  # the beginning of the word was shown

    def push(self, text: str) -> str:
        self._width = max(1, self._terminal_width())
        for part in PARTS.findall(text):
            if part == "\n":
                self._end_line()
            elif part[0] == "\x1b":
                self._word += part
            elif part in " \t" and not self._is_verbatim:
                self._place()
                self._blank += part
                self._head += part
            else:
                self._letter(part)
        if self._word and (self._is_verbatim or self._has_begun or self._room() >= min(LONG, self._width)
                           or display_width(self._word) >= LONG):
            self._place(is_whole=False)
        return self._shown()

    def pause(self) -> str:
        """Return the text held back, before other output; what follows starts at the left edge."""
        self._width = max(1, self._terminal_width())
        self._place()
        self._blank, self._column = "", 0
        return self._shown()

    def flush(self) -> str:
        """Return the rest of the text, and start a new one."""
        rest = self.push("")
        self._place()
        rest += self._shown() + (self._blank if len(self._blank) <= self._width - self._column else "")
        self._reset()
        return rest

    def _shown(self) -> str:
        shown, self._out = "".join(self._out), []
        return shown

    def _letter(self, letter: str) -> None:
        self._first_character = self._first_character or letter
        if not self._head.strip(" \t"):
            self._is_verbatim = bool(self._fence) or letter == "|" or self.is_preformatted or self._first_character == "{"
        if self._last_character and may_break(self._last_character, letter) and not (is_flag(letter) and self._flags % 2):
            self._place()
        self._word += letter
        self._last_character, self._flags = letter, self._flags + 1 if is_flag(letter) else 0
        if len(self._head) < HEAD:
            self._head += letter

    def _end_line(self) -> None:
        self._place()
        if self._is_verbatim or len(self._blank) <= self._width - self._column:
            self._out.append(self._blank)
        self._out.append("\n")
        line = self._head.rstrip()
        if self._fence:
            stripped = line.strip()
            if set(stripped) == {self._fence[0]} and len(stripped) >= len(self._fence):
                self._fence = ""
        elif len(line) < HEAD and (fence := FENCE.fullmatch(line)):
            self._fence = fence[1]
        self._column, self._is_first_line = 0, False
        self._new_line()

    def _room(self) -> int:
        return self._width - column_after(self._column, self._blank)

    def _place(self, is_whole: bool = True) -> None:
        """Show the word held back, on the next line if it does not fit. `is_whole`: False if more of the word may follow."""
        width = display_width(self._word)
        if width and not self._has_begun:
            indent = self._indent()
            if not self._is_verbatim and min(width, LONG) > self._room() and self._column > indent:
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
            self._last_character = ""

    def _indent(self) -> int:
        """The indent of continuation lines in columns. The blank at the start of a continued text (`/continue`, `--raw`) is no indent."""
        hang = HANG.match(self._head)[0]
        indent = 0 if self._is_first_line and hang == " " else display_width(hang)
        return indent if indent <= self._width // 2 else 0


def may_break(before: str, letter: str) -> bool:
    """Whether a line may be broken between two characters without a space: next to CJK characters and emoji."""
    if before == JOINER or letter in CLOSING or before in OPENING or letter == WIDE or not display_width(letter) or is_modifier(letter):
        return False
    return stands_alone(before) or stands_alone(letter)


def stands_alone(letter: str) -> bool:
    """Whether lines may be broken around a wide character. Not for Korean, whose words are separated by spaces."""
    return not letter.isascii() and display_width(letter) == 2 and not unicodedata.name(letter, "").startswith("HANGUL")


def is_flag(letter: str) -> bool:
    """Whether a character is a regional indicator, two of which are a flag."""
    return "\U0001f1e6" <= letter <= "\U0001f1ff"


def is_modifier(letter: str) -> bool:
    """Whether a character is a skin tone, which modifies the emoji before it."""
    return "\U0001f3fb" <= letter <= "\U0001f3ff"


def column_after(column: int, blanks: str) -> int:
    """The column after blanks."""
    for blank in blanks:
        column += TAB - column % TAB if blank == "\t" else 1
    return column


def display_width(text: str) -> int:
    """The maximum width of a text in a terminal, without colour codes."""
    return len(text) if text.isascii() and "\x1b" not in text else sum(character_width(part) for part in PARTS.findall(text))


@lru_cache(1024)
def character_width(part: str) -> int:
    """Columns of a character or a colour code (0). Terminals differ on joined emoji: the wider rendering is counted."""
    from .screen import cell_width

    return 0 if part[0] == "\x1b" else 2 if is_flag(part) else 1 if part == WIDE else cell_width(part)
