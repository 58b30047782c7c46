"""The chat loop: read a line, answer it, until the user leaves.

An error in one turn (a full context, a file that cannot be saved) is shown and the chat goes on; only a model that cannot be loaded or a
lost terminal ends it. Ctrl-C at an empty prompt clears the line; a second one in a row leaves, as Ctrl-D does. So does a second one during
an answer, or after the one that stopped it: two in quick succession are often meant as one, so the message about the stop says how to
leave."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from .. import ContextOverflow, EffllmError
from . import slash
from .answer import say_cost, say_ending, show_answer
from .attachment import Attachment, with_attachments
from .editor import Editor
from .environment import OutputClosed, OutputFailed
from .errors import INTERRUPTED, write_error
from .interrupt import SecondInterrupt, exit_if_terminated, termination_signal, without_echo
from .media_files import dropped_file
from .prompt import typed_text
from .screen import Screen
from .slash_attach import attach_taken, say_attached

if TYPE_CHECKING:
    from ..runtime.events import Stats
    from ..runtime.session import Session
    from .saving import SessionSaver
    from .tools import ToolUse


LEAVES = "; Ctrl-C again quits"
READ_AGAIN = "your next message reprocesses that part of the conversation; if this recurs, check the disk or use --spill-dir DIR"


def next_step(error: EffllmError, has_messages: bool) -> str:
    """A hint for an error in a chat. Without `has_messages` the new message alone is too long: there is nothing to undo."""
    from ..runtime.engine import PagesLost

    if isinstance(error, ContextOverflow):
        here = "/undo or /clear makes room here" if has_messages else "send a shorter message"
        another = error.hint.removeprefix("shorten it,").removeprefix(" or ").lstrip()  # what is left of a message's own way out
        return f"{here}; or quit, and for another chat: {another}"
    return READ_AGAIN if isinstance(error, PagesLost) else error.hint


def current_rss() -> int:
    """The resident set size of this process in bytes."""
    import psutil

    return psutil.Process().memory_info().rss


class Conversation:
    """A chat at a terminal, until the user leaves or a signal ends it."""

    def __init__(self, name: str, session: Session, screen: Screen, output: TextIO, always_stats: bool, keeper: SessionSaver,
                 attached: Iterable[Attachment] = (), tools: ToolUse | None = None) -> None:
        self.name, self.session, self.screen, self.keeper, self.tools = name, session, screen, keeper, tools
        self._always_stats = always_stats
        self._last: Stats | None = None
        self.output = output
        self.attached = list(attached)
        self.own: set[str | Path] = {keeper.name} if keeper.name else set()  # sessions and files that this chat has saved or taken up
        self.was_cleared = False
        self._stopped = False  # the last answer, by Ctrl-C
        state = screen.environment.state_folder
        plain = not screen.environment.can_redraw(output)
        self._editor = Editor(output, plain, state / "history", self._status, lambda line: slash.complete(self, line), screen.note)

    def run(self) -> int:
        """Run until it ends; returns the exit code. Errors of single lines are shown."""
        self.screen.note(f"{self.name}, context {self.session.n_ctx} tokens. /help lists commands, Ctrl-D quits.")
        if self.attached:
            say_attached(self)
        pressed = is_lost = False
        while True:
            if termination_signal() or is_lost:
                self.keeper.keep(self.session)
                exit_if_terminated()
            gc.collect()  # each prompt of the library leaves reference cycles, which Python collects late
            try:
                line = self._editor.read()
            except KeyboardInterrupt:
                if pressed and not self._editor.left:
                    return INTERRUPTED
                pressed = True
                self.screen.note("Ctrl-D or /exit quits (or Ctrl-C again)")
                continue
            pressed = self._stopped = False
            if line is None:
                return 0
            try:
                self._take(line)
                pressed = self._stopped
            except slash.Leave:
                return 0
            except SecondInterrupt:
                return INTERRUPTED
            except KeyboardInterrupt:  # while a session is saved or loaded; answers handle interrupts themselves
                pressed = True
                self.screen.note(f"stopped by Ctrl-C{LEAVES}")
            except OutputClosed:
                if not termination_signal():
                    raise
            except EffllmError as error:
                is_lost = isinstance(error, OutputFailed)  # as when a terminal is closed; the signal that ends the program comes later
                write_error(self.screen.environment, error.message, next_step(error, bool(self.session.messages)))
            except OSError as error:
                write_error(self.screen.environment, f"{error.filename or 'file'}: {error.strerror}", "")

    def answer(self, events: Iterable[object]) -> None:
        """Show an answer, and why it ended if it did not end by itself."""
        self._last = self.tools.answer(events, self.session, self._show) if self.tools else self._show(events)
        self._stopped = self._last.finish_reason == "cancelled" or self.tools is not None and self.tools.was_stopped
        say_ending(self._last, self.session, self.screen, LEAVES)
        if self._always_stats:
            say_cost(self._last, self.session, self.screen)

    def _show(self, events: Iterable[object]) -> Stats:
        with without_echo(self.screen.environment.stdin):
            return show_answer(events, self.session, self.screen)

    def show_cost(self) -> None:
        if self._last is None:
            self.screen.note("no answer yet")
        else:
            say_cost(self._last, self.session, self.screen)

    @property
    def ended_by_itself(self) -> bool:
        return self._last is not None and self._last.finish_reason == "stop"

    def _take(self, line: str) -> None:
        line = typed_text(line, "this message", "put it into a file and attach that: /file PATH")
        media = self.session.engine.media
        modalities = () if self._editor.quoted or media is None else (*media.encoders, *media.refused)
        if (dropped := dropped_file(line, modalities)) is not None:
            attach_taken(self, *dropped)
        elif line.startswith("/") and not self._editor.quoted:
            slash.run(self, line.strip())
        elif line.strip():
            self.send(line)
        self.keeper.keep(self.session)

    def send(self, message: str) -> None:
        """Send a message with its attachments, which are kept if it fails."""
        before = list(self.session.messages)
        shown = [piece for each in self.attached for piece in each.shown]
        self.answer(self.session.ask(with_attachments(self.attached, message), shown))
        if self.session.messages != before:  # stopped while it was read: it is in no history
            self.attached.clear()

    def _status(self) -> list[str]:
        """The status line below the input, most important parts first."""
        from ..offload.size import format_size

        parts = [f"{self.session.used} of {self.session.n_ctx} tokens"]
        if self.attached:
            parts.append(f"{sum(each.tokens for each in self.attached)} more from files")
        if self._last is not None and self._last.decode_tps:
            parts.append(f"{self._last.decode_tps:.0f} tokens/s")
        return [*parts, f"memory {format_size(current_rss())}"]
