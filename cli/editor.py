"""The input line of a chat: history, multi-line input, completion of slash commands. The only file that loads prompt_toolkit.

Enter sends. Alt-Enter, a backslash at the end of a line, or a block in triple quotes continue on the next line, and pasted text keeps its
line breaks. History is a private file; if it cannot be written (a full disk), that is noted once and the chat goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TextIO

from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.history import FileHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import create_output
from prompt_toolkit.output.plain_text import PlainTextOutput
from prompt_toolkit.styles import Style

QUOTES = '"""'
MAX_HISTORY = 4 << 20  # bytes: a larger file is not read
STYLE = Style.from_dict({"prompt": "bold", "bottom-toolbar": "noreverse #888888", "more": "#888888"})


class Editor:
    """Reads lines from the terminal. `left`: the unfinished text at the last Ctrl-C."""

    def __init__(self, output: TextIO, plain: bool, history: Path, status: Callable[[], list[str]],
                 complete: Callable[[str], Iterable[tuple[str, str]]], remark: Callable[[str], None]) -> None:
        """
        output: the stream of the terminal.
        plain: use the library's plain prompt, for terminals without cursor movement.
        history: the history file.
        status: returns the parts of the status line, called before each line.
        complete: returns (word, meaning) of the completions of a line.
        remark: shows a note.
        """
        self._status, self._remark = status, remark
        self._history = History(history)
        self._has_warned = False  # that history is not saved
        self.left = ""
        self.quoted = False  # the last input was a quoted block: a message, even if it begins with a slash
        self._status_parts: list[str] = []
        screen = PlainTextOutput(output) if plain else create_output(stdout=output)
        with create_app_session(output=screen):  # the plain prompt is used if no output is given
            self._session: PromptSession[str] = PromptSession(
                multiline=True, key_bindings=key_bindings(), history=self._history, completer=SlashCompleter(complete),
                complete_while_typing=False,
                prompt_continuation=lambda width, line, wrapped: [("class:more", "… ")], style=STYLE, output=None if plain else screen)
        # A terminal that does not report its cursor gets no status line; the library's warning is suppressed, as there is no next step.
        self._session.app.renderer.cpr_not_supported_callback = None

    def read(self) -> str | None:
        """The next input; None at Ctrl-D. Raises KeyboardInterrupt at Ctrl-C."""
        try:
            self._status_parts = self._status()
            text = self._session.prompt([("class:prompt", "> ")], bottom_toolbar=self._toolbar)
        except EOFError:
            return None
        except KeyboardInterrupt:
            self.left = self._session.default_buffer.text
            raise
        finally:
            if self._history.failure and not self._has_warned:
                self._has_warned = True
                self._remark(self._history.failure)
        self.quoted = is_quoted(text)
        return unquoted(text)

    def _toolbar(self) -> StyleAndTextTuples:
        return [("class:bottom-toolbar", join_fitting(self._status_parts, self._session.output.get_size().columns))]


def join_fitting(parts: list[str], columns: int) -> str:
    """The first parts, as many as fit in one line."""
    line = ""
    for part in parts:
        extended = f"{line} · {part}" if line else part
        if len(extended) >= columns:
            break
        line = extended
    return line


def key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor(1)
            buffer.insert_text("\n")
        elif is_open(buffer.text):
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def next_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @bindings.add("c-z")
    def to_the_shell(event: KeyPressEvent) -> None:
        event.app.suspend_to_background()

    @bindings.add(Keys.Vt100MouseEvent)
    def colour(event: KeyPressEvent) -> None:
        """Ignore mouse events, which are never turned on: a colour code in text pasted without brackets looks like one, and the library's
        handler fails over it."""

    return bindings


def is_open(text: str) -> bool:
    """Whether a triple-quoted block is still open."""
    text = text.strip()
    return text.startswith(QUOTES) and not (len(text) >= 2 * len(QUOTES) and text.endswith(QUOTES))


def is_quoted(text: str) -> bool:
    return text.strip().startswith(QUOTES) and not is_open(text)


def unquoted(text: str) -> str:
    return text.strip()[len(QUOTES) : -len(QUOTES)].strip("\n") if is_quoted(text) else text


class SlashCompleter(Completer):
    """Completes slash commands."""

    def __init__(self, complete: Callable[[str], Iterable[tuple[str, str]]]) -> None:
        self._complete = complete

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        line = document.text_before_cursor
        if line.startswith("/") and "\n" not in line:
            typed = line.rpartition(" ")[2]
            for word, meaning in self._complete(line):
                yield Completion(word, start_position=-len(typed), display_meta=meaning)


class History(FileHistory):
    """The input history, a file that only its owner can read. `failure`: why it cannot be used, empty if it can."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path
        self.failure = ""

    def load_history_strings(self) -> Iterable[str]:
        try:
            if self._path.is_file() and self._path.stat().st_size <= MAX_HISTORY:  # a regular file: a device has no end
                return list(super().load_history_strings())
        except OSError as error:
            self._give_up(error)
        return []

    def store_string(self, string: str) -> None:
        if self.failure:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self._path.exists():
                self._path.touch(mode=0o600)
            super().store_string(string)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self.failure = f"input history is not saved: {self._path}: {error.strerror or error}"
