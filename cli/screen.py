"""The output of all commands: the answer on stdout, everything else on stderr. Each stream is checked separately for being a terminal.

On a terminal, control characters are removed from all text (a model may write escape sequences); a pipe gets the text unchanged.
Progress is one line redrawn in place, or a plain line every few seconds where the cursor cannot be moved. `rich` is loaded only for tables
that have to be wrapped or measured, so that neither the first token nor a short list waits for its import.
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

REDRAW_INTERVAL_S = 0.1
PROGRESS_DELAY_S = 0.4  # shorter phases are not shown: they would only flash
LOG_DELAY_S, LOG_INTERVAL_S = 2.0, 15.0  # the same where progress is written as plain lines


class Screen:
    """Writes answers and reports to stdout, notes, progress and reasoning to stderr. Only a terminal gets styles, redrawn progress and
    wrapped lines; a pipe gets plain text."""

    def __init__(self, environment: Environment, markdown: bool = False) -> None:
        self.environment = environment
        self._sanitizes = environment.is_terminal(environment.stdout)
        self._answer_filter = TerminalFilter() if self._sanitizes else None
        self._thinking_filter = TerminalFilter() if environment.is_terminal(environment.stderr) else None
        self._answer_wrap, self._thinking_wrap = self._wrap(self._answer_filter), self._wrap(self._thinking_filter)
        self._markdown: MarkdownStream | None = None
        self._styled = environment.is_styled(environment.stderr)
        self._redraws = environment.can_redraw(environment.stderr)
        self._answer_open = False  # the last thing written to stdout did not end a line
        self._dim_open = False  # the same for reasoning on stderr
        self._status = ""  # the progress line on the terminal, to be cleared before other output
        self.is_log = False  # notes get a timestamp, as in a server's log
        self._noted: set[str] = set()  # texts that `note_once` has written
        self._rates: dict[str, ProgressRate] = {}  # by phase
        self._rate: ProgressRate | None = None  # of the current phase
        self._phase_start, self._last_drawn = 0.0, -math.inf
        if markdown:
            self.markdown = True

    def _wrap(self, terminal_filter: object) -> WordWrap | None:
        if terminal_filter is None:
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

        drawn = wanted and self._sanitizes and self.environment.is_styled(self.environment.stdout)
        self._markdown = MarkdownStream(self.environment.width) if drawn else None

    def set_preformatted(self, value: bool) -> None:
        """Turn wrapping off for answers that are constrained to a format, such as JSON."""
        if self._answer_wrap:
            self._answer_wrap.is_preformatted = value

    def answer(self, text: str) -> None:
        """Write a chunk of the streamed answer."""
        text = self._answer_filter.push(text) if self._answer_filter else text
        text = self._markdown.push(text) if self._markdown else text
        text = self._answer_wrap.push(text) if self._answer_wrap else text
        if text:
            self.clear()
            self.end_thinking()
            self._answer_open = not text.endswith("\n")
            self.environment.write(text)

    def end_answer(self) -> None:
        """Write what is still held back, and end the last line."""
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
        """Write a line of a report to stdout."""
        self.clear()
        self.environment.write((sanitize(text) if self._sanitizes else text) + "\n")

    def sentence(self, text: str) -> None:
        """Write a line of prose in a report, wrapped on a terminal."""
        for line in wrap_line(text, self.environment.width, 2) if self._sanitizes else [text]:
            self.line(line)

    @property
    def report_width(self) -> int | None:
        """Columns for a report; None in a pipe, where nothing is wrapped."""
        return self.environment.width if self._sanitizes else None

    def json(self, value: object) -> None:
        """Write the JSON document of a command to stdout."""
        self.clear()
        text = json_line(value, self.environment.stdout)
        self.environment.json_pending = False
        self.environment.write(text)

    def table(self, headings: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> None:
        """Write a table to stdout. `right`: indexes of right-aligned columns. Cells are wrapped on a terminal, never in a pipe."""
        clean = sanitize if self._sanitizes else str
        cells = [[clean(cell).replace("\n", " ") for cell in row] for row in rows]
        lines = align_columns([headings, *cells] if any(headings) else cells, right)
        if all(line.isascii() and line.isprintable() and (not self._sanitizes or len(line) <= self.environment.width) for line in lines):
            if any(headings) and self.environment.is_styled(self.environment.stdout):
                lines[0] = f"\x1b[1m{lines[0]}\x1b[0m"
            self.clear()
            self.environment.write("".join(f"{line}\n" for line in lines))
            return
        from .fitted_table import is_cramped

        if self._sanitizes and any(headings) and is_cramped(headings, cells, self.environment.width):
            self._stacked_table(headings, cells)
        else:
            self._rich_table(headings, cells, right)

    def _stacked_table(self, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """A table for narrow terminals: each row as its first cell, then the others, each after its heading, wrapped."""
        for first, *others in rows:
            labelled = " · ".join(f"{heading} {cell}".lstrip() for heading, cell in zip(headings[1:], others) if cell)
            for line in (first, *wrap_line(f"  {labelled}", self.environment.width, 2)):
                self.line(line)

    def _rich_table(self, headings: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int]) -> None:
        """A table drawn by rich, which wraps cells and measures wide characters."""
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(headings), header_style="bold")
        for index, heading in enumerate(headings):
            table.add_column(heading, justify="right" if index in set(right) else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        styled = self.environment.is_styled(self.environment.stdout)
        output = StringIO()  # written through the environment, which handles errors of the stream
        console = Console(file=output, width=self.environment.width if self._sanitizes else 10_000, force_terminal=styled,
                          no_color=not styled, highlight=False, _environ=self.environment.variables)
        console.print(table)
        self.clear()
        self.environment.write("".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines()))

    def pairs(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Write `name  value` lines of a report."""
        self.table(("", ""), pairs)

    # stderr

    def note(self, text: str, hang: int = 2) -> None:
        """Write a note to stderr; on a terminal it is wrapped, its continuation lines indented by `hang`."""
        self.clear()
        self.end_thinking()
        if self._answer_open and (self._sanitizes or self.environment.stdout_is_stderr):
            self.environment.write((self._answer_wrap.pause() if self._answer_wrap else "") + "\n")
            self._answer_open = False
        terminal = self.environment.is_terminal(self.environment.stderr)
        timestamp = "" if not self.is_log else time.strftime("%H:%M:%S " if terminal else "%Y-%m-%d %H:%M:%S ")
        text = timestamp + sanitize(text).replace("\n", " ")
        for line in wrap_line(text, self.environment.width, hang) if terminal else [text]:
            self._stderr(self._dim(line) + "\n")

    def note_once(self, text: str) -> None:
        """Write a note, unless the same one was written before by another step of the command."""
        if text not in self._noted:
            self._noted.add(text)
            self.note(text)

    def thinking(self, text: str) -> None:
        """Write a chunk of the reasoning to stderr, dimmed."""
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
        """Show a progress event, if the phase has taken a while and the last line is old enough."""
        now, rate = self.environment.clock(), self._rates.get(event.phase)
        if rate is None or is_new_operation(event, rate.last):
            rate = self._rates[event.phase] = ProgressRate(event, now)
        if rate is self._rate:
            rate.update(event, now)
        else:
            rate.resume(event, now)
            self._rate, self._phase_start, self._last_drawn = rate, now, -math.inf
        elapsed, finished = now - self._phase_start, event.done >= event.total
        delay, interval = (PROGRESS_DELAY_S, REDRAW_INTERVAL_S) if self._redraws else (LOG_DELAY_S, LOG_INTERVAL_S)
        if elapsed < delay or (now - self._last_drawn < interval and not finished) or (finished and not self._redraws):
            return
        self._last_drawn = now
        if self._redraws:
            width = self.environment.width - 1
            self._status = truncate(format_progress(event, rate.per_s, width), width)
            self._stderr(f"\r\x1b[K{self._dim(self._status)}")
        else:
            self._stderr(format_progress(event, rate.per_s) + "\n")

    @contextmanager
    def waiting(self, message: str) -> Iterator[None]:
        """A context for slow work without progress: on a terminal, a line is shown until it ends."""
        try:  # before the line is written: Ctrl-C may come as soon as it is seen
            if self._redraws:
                self._status = truncate(sanitize(message), self.environment.width - 1)
                self._stderr(self._dim(self._status))
            yield
        finally:
            self.clear()

    def clear(self) -> None:
        """Clear the progress line."""
        if self._status:
            self._stderr("\r\x1b[K")
            self._status = ""

    def confirm(self, question: str, default: bool = True) -> bool:
        """Ask a yes/no question; `default` is the answer of a bare Enter. Requires `environment.is_interactive`."""
        reply = self.prompt(f"{question} {'[Y/n]' if default else '[y/N]'}")
        return reply.strip().lower() in ("y", "yes") or (default and reply == "\n")

    def prompt(self, question: str) -> str:
        """Ask a question and return the line that was typed, with its line break; empty at Ctrl-D. Requires
        `environment.is_interactive`."""
        self.clear()
        reply = ""
        try:  # before the question is shown: Ctrl-C may come at once
            self._stderr("\n".join(wrap_line(sanitize(question), self.environment.width - 1, 2)) + " ")
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
            return  # without stderr, notes are lost, but not the answer


def align_columns(rows: Sequence[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Rows of cells as lines, columns separated by two spaces."""
    widths, right_aligned = [max(map(cell_width, column)) for column in zip(*rows)], set(right)

    def padded(cell: str, width: int, right: bool) -> str:
        padding = " " * (width - cell_width(cell))
        return padding + cell if right else cell + padding

    return ["  ".join(padded(cell, width, index in right_aligned) for index, (cell, width) in enumerate(zip(row, widths))).rstrip()
            for row in rows]


def wrap_line(text: str, width: int, hang: int) -> list[str]:
    """A line wrapped at spaces to `width` columns, continuation lines indented by `hang`. A word longer than that gets a line of its own; a
    command that fits in a line is not broken."""
    first, *words = split_words(text.lstrip(" "), width - hang)
    lines, line = [], " " * (len(text) - len(text.lstrip(" "))) + first
    for word in words:
        extended = f"{line} {word}"
        if word and cell_width(extended) > width:
            lines.append(line.rstrip())
            extended = " " * hang + word
        line = extended
    return [*lines, line]


COMMAND_PATTERN = re.compile(r"(?<!\S)(?:`[^`]+`\S*|effllm(?: [^ ]*[^ ,;:()])+[,;:)]?)(?!\S)")


def split_words(text: str, width: int) -> Iterator[str]:
    """The words of a text, with commands of at most `width` columns kept whole."""
    position = 0
    for command in COMMAND_PATTERN.finditer(text):
        if cell_width(command[0]) <= width:
            yield from text[position : command.start() - 1].split(" ") if command.start() > position else ()
            yield command[0]
            position = command.end() + 1
    if position <= len(text):
        yield from text[position:].split(" ")


def truncate(text: str, width: int) -> str:
    """The beginning of a line that fits in `width` columns."""
    text = text[:width]
    while cell_width(text) > width:
        text = text[:-1]
    return text


def cell_width(text: str) -> int:
    """Columns of a text in a terminal: two for wide characters."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # imports a tenth of a second faster than prompt_toolkit's

    return cell_len(text)


def format_progress(event: Progress, per_s: float, width: int | None = None) -> str:
    """A progress line: `loading weights  1.20 GiB of 4.50 GiB  27%  1.1 GiB/s`.

    per_s: the rate, unless the event has its own; width: columns, None for any. Parts that do not fit are left out whole, since a truncated
    number would be a wrong one; the percentage stays longest.
    """
    from ..offload.size import format_size

    share = f"{100 * event.done // event.total}%" if event.total else ""
    remaining = ""
    per_s = per_s if event.rate is None else event.rate
    if event.unit == "bytes":
        amount, rate = f"{format_size(event.done)} of {format_size(event.total)}", f"{format_size(int(per_s))}/s"
        if event.rate is not None:
            remaining = f"{duration((event.total - event.done) / per_s)} left" if per_s and event.done < event.total else ""
    else:
        amount = f"{event.done}/{event.total}" + (f" {event.unit}" if event.unit not in event.phase else "")
        rate = f"{per_s:.0f} {event.unit}/s" if event.unit == "tokens" else ""
    parts = [event.phase, amount.strip(), share, rate, remaining, event.detail]
    for index in (5, 1, 3, 4):  # dropped in this order: detail, amount, rate, time left
        if width is None or cell_width(join_nonempty(parts)) <= width:
            break
        parts[index] = ""
    return join_nonempty(parts)


def join_nonempty(parts: Iterable[str]) -> str:
    return "  ".join(part for part in parts if part)
