"""Renders streamed Markdown for a terminal. Text is only ever appended; nothing is redrawn.

A marker (`**`, a backtick, `[`) is held back until its other half arrives or the line ends; plain words pass at once. One that turns out to
be literal is shown as it was written, so no character of an answer is lost. Tables wait for their last row, and are drawn in columns if
they fit. The result does not depend on how the text was split into chunks. Lines are wrapped by `word_wrap`, which knows no Markdown. Input
has passed the terminal filter, so all escape codes in the output are from here.
"""

from __future__ import annotations

import re

MAX_SPAN = 400  # characters between the two halves of a marker
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
    """`push` takes a chunk and returns the text that can be shown now, `flush` returns the rest; each begins and ends in the terminal's
    default style."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._reset()

    def _reset(self) -> None:
        self._held = ""  # the end of the current line, not shown yet
        self._new_line()
        self._fence = ""  # the open code fence, empty outside of code
        self._table: list[str] = []  # its rows so far

    def _new_line(self) -> None:
        self._at_start, self._in_code = True, False  # nothing of the line was shown; it is a line of code
        self._base: tuple[str, ...] = ()  # styles of the whole line
        self._before = " "  # the character before the held text

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
        """Return the rest of the text, and start a new one."""
        held, self._held = self._held, ""
        shown = (self._line(held, True).removesuffix("\n") if held else "") + self._finished_table()
        self._reset()
        return shown

    # -- lines -----------------------------------------------------------------------------------------------------------------

    def _line(self, text: str, whole: bool) -> str:
        """The part of a line that can be shown, with a line break if it is `whole`; the rest is held back."""
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
        """A line in a code block, or the fence that closes it."""
        stripped = text.strip()
        closes = set(stripped) == {self._fence[0]} and len(stripped) >= len(self._fence)
        if not whole and (not stripped or set(stripped) == {self._fence[0]}):
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
        return format_table(rows, self._width) if rows else ""

    # -- inside a line ---------------------------------------------------------------------------------------------------------

    def _inline(self, text: str, whole: bool) -> str:
        if self._in_code:  # the rest of a line between fences
            return styled(text, CODE)
        shown, held = inline(text, self._base, self._before, whole)
        self._held = held
        if consumed := text[: len(text) - len(held)]:
            self._before = consumed[-1]
        return shown


def inline(text: str, base: tuple[str, ...], before: str, whole: bool) -> tuple[str, str]:
    """Text inside a line -> (rendered text, source text that has to wait). `base`: styles of the line; `before`: the character before."""
    shown: list[str] = []
    plain_start = at = 0

    def show(end: int) -> None:
        if text[plain_start:end]:
            shown.append(styled(text[plain_start:end], *base))

    while at < len(text):
        c = text[at]
        if c not in "\\`*_[":
            at += 1
            continue
        left = text[at - 1] if at else before
        marker = parse_marker(text, at, left, whole)
        if marker is None:  # not certain yet
            show(at)
            return "".join(shown), text[at:]
        length, inner, styles = marker
        if inner is not None:
            show(at)
            if CODE in styles or c in "\\[":
                shown.append(styled(inner, *base, *styles))
            else:
                shown.append(inline(inner, (*base, *styles), left, True)[0])
            plain_start = at + length
        at += length
    show(at)
    return "".join(shown), ""


def parse_marker(text: str, at: int, left: str, whole: bool) -> tuple[int, str | None, tuple[str, ...]] | None:
    """The marker at position `at`: (length in the source, text inside, styles), with None inside for literal characters. Returns None if
    more text is needed to tell. `left`: the character before it."""
    c, rest = text[at], text[at:]
    ended = whole or len(rest) > MAX_SPAN
    if c == "\\":
        if len(rest) == 1:
            return (1, None, ()) if whole else None
        return (2, rest[1], ()) if rest[1] in PUNCTUATION else (1, None, ())
    if c == "[":
        if link := LINK.match(rest[:MAX_SPAN]):
            label, address = link.groups()
            return link.end(), label if label == address else f"{label} ({address})", (UNDERLINE,)
        return None if not ended and LINK_BEGUN.match(rest) else (1, None, ())
    run = len(rest) - len(rest.lstrip(c))
    if run == len(rest) and not whole:
        return None
    if c == "`":
        close = closing_ticks(rest[:MAX_SPAN], run, not ended)
        if close is not None:
            return close + run, rest[run:close].strip() or rest[run:close], (CODE,)
        return (run, None, ()) if ended else None
    opens = run in EMPHASIS and run < len(rest) and not rest[run].isspace() and not (c == "_" and left.isalnum())
    if not opens:
        return run, None, ()
    window = rest[:MAX_SPAN]
    close = closing_run(window, c, run, not ended)
    if close is not None:
        return close + run, rest[run:close], EMPHASIS[run]
    return (run, None, ()) if ended else None


def closing_ticks(text: str, run: int, may_continue: bool) -> int | None:
    """The position of the run of exactly `run` backticks that closes the one at the start of `text`; None if there is none, or none yet."""
    for match in re.finditer("`+", text[run:]):
        if match.end() + run == len(text) and may_continue:
            return None
        if len(match[0]) == run:
            return match.start() + run
    return None


def closing_run(text: str, marker: str, run: int, may_continue: bool) -> int | None:
    """The position of the run of exactly `run` markers that closes the one at the start of `text`; None if there is none, or none yet."""
    for match in re.finditer(re.escape(marker) + "+", text[run:]):
        start, end = match.start() + run, match.end() + run
        if end == len(text) and may_continue:
            return None  # the run, or the word after it, may continue
        if len(match[0]) == run and not text[start - 1].isspace() and not (marker == "_" and text[end : end + 1].isalnum()):
            return start
    return None


def styled(text: str, *codes: str) -> str:
    return f"\x1b[{';'.join(codes)}m{text}{OFF}" if codes and text else text


# -- tables --------------------------------------------------------------------------------------------------------------------


def format_table(lines: list[str], width: int) -> str:
    """The rows of a Markdown table as columns, or unchanged if it is not a valid table or does not fit."""
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
    output = []
    for number, row in enumerate(rows):
        base = (BOLD,) if number == 0 else ()
        shown = [inline(cell, base, " ", True)[0] + " " * (widths[i] - get_cwidth(plain[number][i])) for i, cell in enumerate(row)]
        output.append(styled(" │ ", DIM).join(shown).rstrip() + "\n")
        if number == 0:
            output.append(styled("─┼─".join("─" * each for each in widths), DIM) + "\n")
    return "".join(output)


def cells(line: str) -> list[str]:
    inside = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", inside)]
