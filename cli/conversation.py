"""The chat loop: read a line, answer it, until the user leaves.

An error in one turn (a full context, a file that cannot be saved) is shown and the chat goes on; only a model that cannot be loaded or a
lost terminal ends it. Ctrl-C clears the input line; a second one in a row quits, as Ctrl-D does. So does a second one during an answer, or
right after the one that stopped it, which the note about the stop says."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from .. import ContextOverflow, EffllmError
from . import slash
from .answer import print_finish_reason, print_stats, show_answer
from .attachment import Attachment, with_attachments
from .editor import Editor
from .environment import OutputClosed, OutputFailed
from .errors import INTERRUPTED, write_error
from .interrupt import SecondInterrupt, exit_if_terminated, termination_signal, without_echo
from .media_files import dropped_file
from .prompt import check_encoding
from .screen import Screen
from .slash_attach import attach_media, list_attachments

if TYPE_CHECKING:
    from ..runtime.events import Stats
    from ..runtime.session import Session
    from .saving import SessionSaver
    from .tools import ToolSession


QUIT_HINT = "; Ctrl-C again quits"
PAGES_LOST_HINT = "your next message reprocesses that part of the conversation; if this recurs, check the disk or use --spill-dir DIR"


def next_step(error: EffllmError, has_messages: bool) -> str:
    """The hint for an error in a chat. `has_messages`: whether there is anything to undo."""
    from ..runtime.engine import PagesLost

    if isinstance(error, ContextOverflow):
        remedy = "/undo or /clear makes room here" if has_messages else "send a shorter message"
        new_chat = error.hint.removeprefix("shorten it,").removeprefix(" or ").lstrip()  # the rest of the hint for one-shot prompts
        return f"{remedy}; or quit, and for another chat: {new_chat}"
    return PAGES_LOST_HINT if isinstance(error, PagesLost) else error.hint


def current_rss() -> int:
    """The resident set size of this process in bytes."""
    import psutil

    return psutil.Process().memory_info().rss


class Conversation:
    """A chat at a terminal, until the user leaves or a signal ends it."""

    def __init__(self, name: str, session: Session, screen: Screen, output: TextIO, always_stats: bool, saver: SessionSaver,
                 attached: Iterable[Attachment] = (), tools: ToolSession | None = None) -> None:
        self.name, self.session, self.screen, self.saver, self.tools = name, session, screen, saver, tools
        self._always_stats = always_stats
        self._last_stats: Stats | None = None
        self.output = output
        self.attached = list(attached)
        self.saved_as: set[str | Path] = {saver.name} if saver.name else set()  # sessions and files that this chat has saved or loaded
        self.was_cleared = False  # by /clear
        self._stopped = False  # the last answer was stopped by Ctrl-C
        state_folder = screen.environment.state_folder
        plain = not screen.environment.can_redraw(output)
        self._editor = Editor(output, plain, state_folder / "history", self._status, lambda line: slash.complete(self, line), screen.note)

    def run(self) -> int:
        """Run until the user leaves; returns the exit code. An error in one turn is shown, and the chat continues."""
        self.screen.note(f"{self.name}, context {self.session.n_ctx} tokens. /help lists commands, Ctrl-D quits.")
        if self.attached:
            list_attachments(self)
        interrupted = terminal_closed = False
        while True:
            if termination_signal() or terminal_closed:
                self.saver.keep(self.session)
                exit_if_terminated()
            gc.collect()  # each prompt of the library leaves reference cycles, which Python would collect late
            try:
                line = self._editor.read()
            except KeyboardInterrupt:
                if interrupted and not self._editor.left:
                    return INTERRUPTED
                interrupted = True
                self.screen.note("Ctrl-D or /exit quits (or Ctrl-C again)")
                continue
            interrupted = self._stopped = False
            if line is None:
                return 0
            try:
                self._take(line)
                interrupted = self._stopped
            except slash.LeaveChat:
                return 0
            except SecondInterrupt:
                return INTERRUPTED
            except KeyboardInterrupt:  # while a session is saved or loaded; answers handle interrupts themselves
                interrupted = True
                self.screen.note(f"stopped by Ctrl-C{QUIT_HINT}")
            except OutputClosed:
                if not termination_signal():
                    raise
            except EffllmError as error:
                terminal_closed = isinstance(error, OutputFailed)  # the signal that ends the program comes later
                write_error(self.screen.environment, error.message, next_step(error, bool(self.session.messages)))
            except OSError as error:
                write_error(self.screen.environment, f"{error.filename or 'file'}: {error.strerror}", "")

    def answer(self, events: Iterable[object]) -> None:
        """Show an answer, with a note if it was stopped or cut off."""
        self._last_stats = self.tools.answer(events, self.session, self._show) if self.tools else self._show(events)
        self._stopped = self._last_stats.finish_reason == "cancelled" or self.tools is not None and self.tools.was_stopped
        print_finish_reason(self._last_stats, self.session, self.screen, QUIT_HINT)
        if self._always_stats:
            print_stats(self._last_stats, self.session, self.screen)

    def _show(self, events: Iterable[object]) -> Stats:
        with without_echo(self.screen.environment.stdin):
            return show_answer(events, self.session, self.screen)

    def show_stats(self) -> None:
        if self._last_stats is None:
            self.screen.note("no answer yet")
        else:
            print_stats(self._last_stats, self.session, self.screen)

    @property
    def ended_by_itself(self) -> bool:
        return self._last_stats is not None and self._last_stats.finish_reason == "stop"

    def _take(self, line: str) -> None:
        line = check_encoding(line, "this message", "put it into a file and attach that: /file PATH")
        media = self.session.engine.media
        modalities = () if self._editor.quoted or media is None else (*media.encoders, *media.refused)
        if (dropped := dropped_file(line, modalities)) is not None:
            attach_media(self, *dropped)
        elif line.startswith("/") and not self._editor.quoted:
            slash.run(self, line.strip())
        elif line.strip():
            self.send(line)
        self.saver.keep(self.session)

    def send(self, message: str) -> None:
        """Send a message with its attachments, which are kept for the next one if it fails."""
        before = list(self.session.messages)
        media = [item for attachment in self.attached for item in attachment.media]
        self.answer(self.session.ask(with_attachments(self.attached, message), media))
        if self.session.messages != before:  # unchanged if it was stopped during prefill
            self.attached.clear()

    def _status(self) -> list[str]:
        """The status line below the input, most important parts first."""
        from ..offload.size import format_size

        parts = [f"{self.session.used} of {self.session.n_ctx} tokens"]
        if self.attached:
            parts.append(f"{sum(each.tokens for each in self.attached)} more from files")
        if self._last_stats is not None and self._last_stats.decode_tps:
            parts.append(f"{self._last_stats.decode_tps:.0f} tokens/s")
        return [*parts, f"memory {format_size(current_rss())}"]
