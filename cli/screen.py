"""What a person sees. The answer goes to stdout, everything else to stderr, and each is asked on its own whether it is a terminal.

On a terminal, control characters are removed from all text (a model may write escape sequences); into a pipe the text goes as it is.
Progress is one line redrawn in place, or, where nothing can be redrawn, a plain line now and then. `rich` draws the tables that have to
be wrapped or measured, and is loaded only for them: neither the first token nor a list pays for it.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING

from ..runtime.tokens.terminal_text import TerminalFilter, sanitize
from .environment import Environment, json_line
from .number_format import duration
from .progress_rate import ProgressRate, is_new_operation

if TYPE_CHECKING:
    from ..runtime.events import Progress
    from .markdown import MarkdownStream
    from .word_wrap import WordWrap

REDRAW_S = 0.1
PATIENCE_S = 0.4  # a phase shorter than this flashes by unseen
PLAIN_PATIENCE_S, PLAIN_EVERY_S = 2.0, 15.0  # for logs


class Screen:
    """The output: answers on stdout, everything else on stderr, both without control characters. Styles, redrawn progress and wrapping are
    for terminals only; a pipe gets plain text."""

    def __init__(self, environment: Environment, markdown: bool = False) -> None:
        self.environment = environment
        self._safe = environment.is_terminal(environment.stdout)
        self._answer_filter = TerminalFilter() if self._safe else None
        self._thinking_filter = TerminalFilter() if environment.is_terminal(environment.stderr) else None
        self._answer_wrap, self._thinking_wrap = self._wrap(self._answer_filter), self._wrap(self._thinking_filter)
        self._markdown: MarkdownStream | None = None
        self._styled = environment.is_styled(environment.stderr)
        self._redraws = environment.can_redraw(environment.stderr)
        self._answer_open = False  # the last thing written to stdout did not end a line
        self._dim_open = False  # the same for thinking on stderr
        self._status = ""
        self.is_log = False  # notes are timestamped: a server's log is read hours later
        self._noted: set[str] = set()
        self._paces: dict[str, ProgressRate] = {}  # of each phase
        self._pace: ProgressRate | None = None  # of the phase whose turn it is
        self._turn_began, self._drawn = 0.0, -math.inf
        if markdown:
            self.markdown = True

    def _wrap(self, to_terminal: object) -> WordWrap | None:
        if to_terminal is None:
            return None
        from .word_wrap import WordWrap

        return WordWrap(lambda: self.environment.width)

    # stdout

    @property
    def markdown(self) -> bool:
        """Whether answers are rendered from Markdown; only on a styled terminal."""
        return self._markdown is not None

    @markdown.setter
    def markdown(self, wanted: bool) -> None:
        from .markdown import MarkdownStream

        drawn = wanted and self._safe and self.environment.is_styled(self.environment.stdout)
        self._markdown = MarkdownStream(self.environment.width) if drawn else None

    def is_for_programs(self, is_so: bool) -> None:
        """Whether answers are constrained to a format with its own line breaks."""
        if self._answer_wrap:
            self._answer_wrap.is_for_programs = is_so

    def answer(self, text: str) -> None:
        """A chunk of the answer, as it streams."""
        text = self._answer_filter.push(text) if self._answer_filter else text
        text = self._markdown.push(text) if self._markdown else text
        text = self._answer_wrap.push(text) if self._answer_wrap else text
        if text:
            self.clear()
            self.end_thinking()
            self._answer_open = not text.endswith("\n")
            self.environment.write(text)

    def end_answer(self) -> None:
        """End the last line."""
        self.clear()
        self.end_thinking()
        rest = self._answer_filter.flush() if self._answer_filter else ""
        if self._markdown:
            rest = self._markdown.push(rest) + self._markdown.flush()
        if self._answer_wrap:
            rest = self._answer_wrap.push(rest) + self._answer_wrap.flush()
        if rest or self._answer_open:
            self.environment.write(rest if rest.endswith("\n") else rest + "\n")
            self._answer_open = False

    def line(self, text: str = "") -> None:
        """A line of a report on stdout."""
        self.clear()
        self.environment.write((sanitize(text) if self._safe else text) + "\n")

    def sentence(self, text: str) -> None:
        """A line of prose in a report."""
        for line in broken(text, self.environment.width, 2) if self._safe else [text]:
            self.line(line)

    @property
    def report_width(self) -> int | None:
        """Columns for a report; None in a pipe, where nothing is wrapped."""
        return self.environment.width if self._safe else None

    def json(self, value: object) -> None:
        """The JSON document of a command."""
        self.clear()
        text = json_line(value, self.environment.stdout)
        self.environment.owes_json = False
        self.environment.write(text)

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> None:
        """A table on stdout with columns `right` right-aligned. Wrapped on a terminal, never in a pipe."""
        clean = sanitize if self._safe else str
        cells = [[clean(cell).replace("\n", " ") for cell in row] for row in rows]
        lines = columns([headings, *cells] if any(headings) else cells, right)
        if all(line.isascii() and line.isprintable() and (not self._safe or len(line) <= self.environment.width) for line in lines):
            if any(headings) and self.environment.is_styled(self.environment.stdout):
                lines[0] = f"\x1b[1m{lines[0]}\x1b[0m"
            self.clear()
            self.environment.write("".join(f"{line}\n" for line in lines))
            return
        from .fitted_table import is_cramped

        if self._safe and any(headings) and is_cramped(headings, cells, self.environment.width):
            self._paragraphs(headings, cells)
        else:
            self._drawn_table(headings, cells, right)

    def _paragraphs(self, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """One row at a time: its first cell, then the others after their headings, wrapped."""
        for first, *others in rows:
            named = " · ".join(f"{heading} {cell}".lstrip() for heading, cell in zip(headings[1:], others) if cell)
            for line in (first, *broken(f"  {named}", self.environment.width, 2)):
                self.line(line)

    def _drawn_table(self, headings: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int]) -> None:
        """Drawn by rich, which knows the width of wide characters."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(headings), header_style="bold")
        for index, heading in enumerate(headings):
            table.add_column(heading, justify="right" if index in set(right) else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        styled = self.environment.is_styled(self.environment.stdout)
        drawn = StringIO()  # the library would write to the stream itself, without handling errors
        console = Console(file=drawn, width=self.environment.width if self._safe else 10_000, force_terminal=styled,
                          no_color=not styled, highlight=False, _environ=self.environment.variables)
        console.print(table)
        self.clear()
        self.environment.write("".join(f"{line.rstrip()}\n" for line in drawn.getvalue().splitlines()))

    def pairs(self, pairs: Iterable[tuple[str, str]]) -> None:
        """`name  value` lines of a report."""
        self.table(("", ""), pairs)

    # stderr

    def note(self, text: str, hang: int = 2) -> None:
        """A note on stderr; wrapped in a narrow terminal with an indent of `hang`."""
        self.clear()
        self.end_thinking()
        if self._answer_open and (self._safe or self.environment.streams_are_one):
            self.environment.write((self._answer_wrap.pause() if self._answer_wrap else "") + "\n")
            self._answer_open = False
        terminal = self.environment.is_terminal(self.environment.stderr)
        stamp = "" if not self.is_log else time.strftime("%H:%M:%S " if terminal else "%Y-%m-%d %H:%M:%S ")
        text = stamp + sanitize(text).replace("\n", " ")
        for line in broken(text, self.environment.width, hang) if terminal else [text]:
            self._stderr(self._dim(line) + "\n")

    def note_once(self, text: str) -> None:
        """A note that is written once, whichever steps of a command give it."""
        if text not in self._noted:
            self._noted.add(text)
            self.note(text)

    def thinking(self, text: str) -> None:
        text = self._thinking_filter.push(text) if self._thinking_filter else text
        text = self._thinking_wrap.push(text) if self._thinking_wrap else text
        if text:
            self.clear()
            self._dim_open = not text.endswith("\n")
            self._stderr(self._dim(text))

    def end_thinking(self) -> None:
        rest = self._thinking_wrap.flush() if self._thinking_wrap else ""
        if self._dim_open or rest.strip():
            self._stderr(self._dim(rest) + "\n")
            self._dim_open = False

    def progress(self, event: Progress) -> None:
        now, pace = self.environment.clock(), self._paces.get(event.phase)
        if pace is None or is_new_operation(event, pace.last):
            pace = self._paces[event.phase] = ProgressRate(event, now)
        if pace is self._pace:
            pace.go_on(event, now)
        else:
            pace.take_turn(event, now)
            self._pace, self._turn_began, self._drawn = pace, now, -math.inf
        elapsed, finished = now - self._turn_began, event.done >= event.total
        patience, every = (PATIENCE_S, REDRAW_S) if self._redraws else (PLAIN_PATIENCE_S, PLAIN_EVERY_S)
        if elapsed < patience or (now - self._drawn < every and not finished) or (finished and not self._redraws):
            return
        self._drawn = now
        if self._redraws:
            width = self.environment.width - 1
            self._status = cut(describe(event, pace.per_s, width), width)
            self._stderr(f"\r\x1b[K{self._dim(self._status)}")
        else:
            self._stderr(describe(event, pace.per_s) + "\n")

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A context for slow work without progress: on a terminal, a line is shown until it ends."""
        try:  # from before it is seen: Ctrl-C may come as soon as it is
            if self._redraws:
                self._status = cut(sanitize(what), self.environment.width - 1)
                self._stderr(self._dim(self._status))
            yield
        finally:
            self.clear()

    def clear(self) -> None:
        """Clear the progress line."""
        if self._status:
            self._stderr("\r\x1b[K")
            self._status = ""

    def ask(self, question: str, bare: bool = True) -> bool:
        """A yes/no question; `bare`: the answer of a bare Enter. Requires `environment.can_ask`."""
        reply = self.reply(f"{question} {'[Y/n]' if bare else '[y/N]'}")
        return reply.strip().lower() in ("y", "yes") or (bare and reply == "\n")

    def reply(self, question: str) -> str:
        """A typed reply to a question, empty at Ctrl-D. Requires `environment.can_ask`."""
        self.clear()
        reply = ""
        try:  # set before the question is shown: Ctrl-C may follow at once
            self._stderr("\n".join(broken(sanitize(question), self.environment.width - 1, 2)) + " ")
            reply = self.environment.stdin.readline()
        finally:
            if not reply:  # Ctrl-D, or Ctrl-C
                self._stderr("\n")
        return reply

    def _dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self._styled and text else text

    def _stderr(self, text: str) -> None:
        try:
            self.environment.stderr.write(text)
            self.environment.stderr.flush()
        except OSError:
            return  # a closed stderr loses remarks, never the answer


def columns(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Rows of cells as lines, columns separated by two spaces."""
    widths, flush = [max(map(cell_width, column)) for column in zip(*rows)], set(right)

    def padded(cell: str, width: int, right: bool) -> str:
        blank = " " * (width - cell_width(cell))
        return blank + cell if right else cell + blank

    return ["  ".join(padded(cell, width, index in flush) for index, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows]


def broken(text: str, width: int, hang: int) -> list[str]:
    """A line wrapped to `width` columns at spaces; a longer word stands alone, and a command that fits in a line is not broken.
    Continuation lines are indented by `hang`."""
    first, *words = unbroken(text.lstrip(" "), width - hang)
    lines, line = [], " " * (len(text) - len(text.lstrip(" "))) + first
    for word in words:
        longer = f"{line} {word}"
        if word and cell_width(longer) > width:
            lines.append(line.rstrip())
            longer = " " * hang + word
        line = longer
    return [*lines, line]


COMMAND = re.compile(r"(?<!\S)(?:`[^`]+`\S*|effllm(?: [^ ]*[^ ,;:()])+[,;:)]?)(?!\S)")


def unbroken(text: str, width: int) -> Iterator[str]:
    """The words of a text, with commands of at most `width` columns kept whole."""
    end = 0
    for command in COMMAND.finditer(text):
        if cell_width(command[0]) <= width:
            yield from text[end : command.start() - 1].split(" ") if command.start() > end else ()
            yield command[0]
            end = command.end() + 1
    if end <= len(text):
        yield from text[end:].split(" ")


def cut(text: str, width: int) -> str:
    """As much of a line's beginning as fits in `width` columns."""
    text = text[:width]
    while cell_width(text) > width:
        text = text[:-1]
    return text


def cell_width(text: str) -> int:
    """Columns of a text in a terminal: two for wide characters."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # a tenth of a second less than the library of the input line

    return cell_len(text)


def describe(event: Progress, per_s: float, width: int | None = None) -> str:
    """`loading weights  1.20 GiB of 4.50 GiB  27%  1.1 GiB/s`, at `per_s` where the event knows no rate itself. What `width` columns do not
    show is left out whole, the share last: a number that is cut is another number."""
    from ..offload.size import format_size

    share = f"{100 * event.done // event.total}%" if event.total else ""
    left = ""
    per_s = per_s if event.rate is None else event.rate
    if event.unit == "bytes":
        amount, rate = f"{format_size(event.done)} of {format_size(event.total)}", f"{format_size(int(per_s))}/s"
        if event.rate is not None:
            left = f"{duration((event.total - event.done) / per_s)} left" if per_s and event.done < event.total else ""
    else:
        amount = f"{event.done}/{event.total}" + (f" {event.unit}" if event.unit not in event.phase else "")
        rate = f"{per_s:.0f} {event.unit}/s" if event.unit == "tokens" else ""
    parts = [event.phase, amount.strip(), share, rate, left, event.detail]
    for least in (5, 1, 3, 4):  # the name of a file first
        if width is None or cell_width(joined(parts)) <= width:
            break
        parts[least] = ""
    return joined(parts)


def joined(parts: Iterable[str]) -> str:
    return "  ".join(part for part in parts if part)
