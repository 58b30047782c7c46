"""Markdown for a terminal, as it streams: text is only ever appended, nothing that was written is drawn again.

A mark is held back until it is certain what it is, which is until its other half has come or the line ends; plain words pass at once.
What turns out to be no mark is shown as it was written, so no character of an answer is lost. The result does not depend on how the
text was cut into pieces. Lines are not wrapped here: `word_wrap` does that, which knows nothing of marks. Tables wait for
their last row, and are drawn in columns if they fit. Input has passed the terminal filter: the escape codes here are ours alone.
"""

from __future__ import annotations

import re

HELD = 400  # characters that a mark waits for its other half
OFF = "\x1b[0m"
BOLD, DIM, ITALIC, UNDERLINE, CODE = "1", "2", "3", "4", "36"
EMPHASIS = {1: (ITALIC,), 2: (BOLD,), 3: (BOLD, ITALIC)}
PUNCTUATION = set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
LINK = re.compile(r"\[([^\[\]]+)\]\(([^()\s]+)\)")
LINK_BEGUN = re.compile(r"\[[^\[\]]*(?:\](?:\([^()\s]*)?)?\Z")
HEADING = re.compile(r"(#{1,6}) +")
BULLET = re.compile(r"( *)[-*+] +")
RULE = re.compile(r" {0,3}([-*_])(?: *\1){2,} *")
FENCE = re.compile(r" *(`{3,}|~{3,})[^`]*")
UNDECIDED = re.compile(r" *(?:#{0,6}|>|[-*+_](?: *[-*+_])*|`{1,2}|~{1,2}| *) *\Z")  # beginnings that may become a block
DIVIDER = re.compile(r" *\|?(?: *:?-+:? *\|)+(?: *:?-+:? *)?\|? *")


class MarkdownStream:
    """`push` returns what can be shown now, `flush` the rest; each piece begins and ends in the terminal's default style."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._begin()

    def _begin(self) -> None:
        self._held = ""  # of the current line, not shown yet
        self._new_line()
        self._fence = ""
        self._table: list[str] = []

    def _new_line(self) -> None:
        self._at_start, self._in_code = True, False
        self._base: tuple[str, ...] = ()
        self._before = " "  # the character to the left of what is held

    def push(self, text: str) -> str:
        *lines, last = (self._held + text).split("\n")
        self._held = ""
        shown = []
        for line in lines:
            shown.append(self._line(line, True))
            self._new_line()
        if last:
            shown.append(self._line(last, False))
        return "".join(shown)

    def flush(self) -> str:
        """End the text; the next one starts anew."""
        held, self._held = self._held, ""
        shown = (self._line(held, True).removesuffix("\n") if held else "") + self._finished_table()
        self._begin()
        return shown

    # -- lines -----------------------------------------------------------------------------------------------------------------

    def _line(self, text: str, whole: bool) -> str:
        """What is certain of a line, with its end if it is `whole`; the rest is held back."""
        end = "\n" if whole else ""
        if not self._at_start:
            return self._inline(text, whole) + end
        if self._fence:
            return self._code(text, whole) + end
        if text.lstrip().startswith("|"):
            if not whole:
                self._held = text
            else:
                self._table.append(text)
            return ""
        if not whole and UNDECIDED.match(text) or (not whole and FENCE.fullmatch(text)):
            self._held = text
            return ""
        return self._finished_table() + self._block(text, whole) + end

    def _block(self, text: str, whole: bool) -> str:
        self._at_start = False
        if fence := FENCE.fullmatch(text):
            self._fence = fence[1]
            return styled(text, DIM)
        if whole and RULE.fullmatch(text):
            return styled("─" * min(self._width - 1, 40), DIM)
        if heading := HEADING.match(text):
            self._base = (BOLD, UNDERLINE) if len(heading[1]) == 1 else (BOLD,)
            return self._inline(text[heading.end() :], whole)
        if text.startswith(">"):
            return styled("│ ", DIM) + self._inline(text[1:].removeprefix(" "), whole)
        if bullet := BULLET.match(text):
            return f"{bullet[1]}• " + self._inline(text[bullet.end() :], whole)
        return self._inline(text, whole)

    def _code(self, text: str, whole: bool) -> str:
        """A line in a code fence, shown as it is; it may still be the closing fence."""
        bare = text.strip()
        closes = set(bare) == {self._fence[0]} and len(bare) >= len(self._fence)
        if not whole and (not bare or set(bare) == {self._fence[0]}):
            self._held = text
            return ""
        if whole and closes:
            self._fence = ""
            return styled(text, DIM)
        if not whole:
            self._at_start, self._in_code = False, True
        return styled(text, CODE)

    def _finished_table(self) -> str:
        rows, self._table = self._table, []
        return drawn_table(rows, self._width) if rows else ""

    # -- inside a line ---------------------------------------------------------------------------------------------------------

    def _inline(self, text: str, whole: bool) -> str:
        if self._in_code:  # the rest of a line between fences
            return styled(text, CODE)
        shown, held = inline(text, self._base, self._before, whole)
        self._held = held
        if done := text[: len(text) - len(held)]:
            self._before = done[-1]
        return shown


def inline(text: str, base: tuple[str, ...], before: str, whole: bool) -> tuple[str, str]:
    """(what can be shown, what must wait) of text inside a line; `before` is the character to its left."""
    shown: list[str] = []
    plain_from = at = 0

    def put(upto: int) -> None:
        if text[plain_from:upto]:
            shown.append(styled(text[plain_from:upto], *base))

    while at < len(text):
        c = text[at]
        if c not in "\\`*_[":
            at += 1
            continue
        left = text[at - 1] if at else before
        found = mark(text, at, left, whole)
        if found is None:  # not certain yet
            put(at)
            return "".join(shown), text[at:]
        length, inner, styles = found
        if inner is not None:
            put(at)
            if CODE in styles or c in "\\[":
                shown.append(styled(inner, *base, *styles))
            else:
                shown.append(inline(inner, (*base, *styles), left, True)[0])
            plain_from = at + length
        at += length
    put(at)
    return "".join(shown), ""


def mark(text: str, at: int, left: str, whole: bool) -> tuple[int, str | None, tuple[str, ...]] | None:
    """What begins at `at`: (length, text inside, styles), with None inside for characters that stand for themselves; None: wait."""
    c, rest = text[at], text[at:]
    ended = whole or len(rest) > HELD
    if c == "\\":
        if len(rest) == 1:
            return (1, None, ()) if whole else None
        return (2, rest[1], ()) if rest[1] in PUNCTUATION else (1, None, ())
    if c == "[":
        if link := LINK.match(rest[:HELD]):
            name, address = link.groups()
            return link.end(), name if name == address else f"{name} ({address})", (UNDERLINE,)
        return None if not ended and LINK_BEGUN.match(rest) else (1, None, ())
    run = len(rest) - len(rest.lstrip(c))
    if run == len(rest) and not whole:
        return None
    if c == "`":
        close = closing_ticks(rest[:HELD], run, not ended)
        if close is not None:
            return close + run, rest[run:close].strip() or rest[run:close], (CODE,)
        return (run, None, ()) if ended else None
    opens = run in EMPHASIS and run < len(rest) and not rest[run].isspace() and not (c == "_" and left.isalnum())
    if not opens:
        return run, None, ()
    window = rest[:HELD]
    close = closing_run(window, c, run, not ended)
    if close is not None:
        return close + run, rest[run:close], EMPHASIS[run]
    return (run, None, ()) if ended else None


def closing_ticks(text: str, run: int, open_end: bool) -> int | None:
    """Where a run of exactly as many backticks closes the one that `text` begins with; None where there is none, or none yet."""
    for found in re.finditer("`+", text[run:]):
        if found.end() + run == len(text) and open_end:
            return None
        if len(found[0]) == run:
            return found.start() + run
    return None


def closing_run(text: str, c: str, run: int, open_end: bool) -> int | None:
    """Where a run of exactly as many marks closes the one that `text` begins with; None where there is none, or none yet."""
    for found in re.finditer(re.escape(c) + "+", text[run:]):
        start, end = found.start() + run, found.end() + run
        if end == len(text) and open_end:
            return None  # the run, or the word behind it, may go on
        if len(found[0]) == run and not text[start - 1].isspace() and not (c == "_" and text[end : end + 1].isalnum()):
            return start
    return None


def styled(text: str, *codes: str) -> str:
    return f"\x1b[{';'.join(codes)}m{text}{OFF}" if codes and text else text


# -- tables --------------------------------------------------------------------------------------------------------------------


def drawn_table(lines: list[str], width: int) -> str:
    """A table in columns, if it is one and fits; else its source lines."""
    from prompt_toolkit.utils import get_cwidth

    if len(lines) < 2 or not DIVIDER.fullmatch(lines[1]):
        return "".join(f"{inline(line, (), ' ', True)[0]}\n" for line in lines)
    rows = [cells(line) for line in (lines[0], *lines[2:])]
    columns = max(map(len, rows))
    rows = [row + [""] * (columns - len(row)) for row in rows]
    plain = [[re.sub(r"\x1b\[[0-9;]*m", "", inline(cell, (), " ", True)[0]) for cell in row] for row in rows]
    widths = [max(get_cwidth(row[i]) for row in plain) for i in range(columns)]
    if sum(widths) + 3 * (columns - 1) >= width:
        return "".join(f"{line}\n" for line in lines)
    drawn = []
    for number, row in enumerate(rows):
        base = (BOLD,) if number == 0 else ()
        shown = [inline(cell, base, " ", True)[0] + " " * (widths[i] - get_cwidth(plain[number][i])) for i, cell in enumerate(row)]
        drawn.append(styled(" │ ", DIM).join(shown).rstrip() + "\n")
        if number == 0:
            drawn.append(styled("─┼─".join("─" * each for each in widths), DIM) + "\n")
    return "".join(drawn)


def cells(line: str) -> list[str]:
    inside = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", inside)]
