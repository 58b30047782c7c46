"""The environment of one invocation: streams, variables, clock and folders.

Everything a command reads or writes goes through this object, so that a test is a plain call of `main(argv, environment)`. Each stream is
checked separately for being a terminal: `effllm run fable > story.txt` still shows progress on stderr."""

from __future__ import annotations

import codecs
import contextlib
import io
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from .. import DiskFull, EffllmError, lacks_room

if TYPE_CHECKING:
    from ..runtime.library.ollama import OllamaModel
    from .server.worker import RouterLink
    from .settings import Setting


MIN_WIDTH = 20  # columns: a layout for fewer would be no easier to read


class OutputClosed(Exception):
    """The reader of stdout is gone. Not an OSError, which the command-line library would report as its own failure."""


# Characters that a terminal's encoding may lack -> ASCII substitutes.
ASCII_REPLACEMENTS = str.maketrans({"█": "#", "▓": "=", "▒": "-", "·": ".", "±": "+-", "…": "...", "–": "-", "—": "--", "‘": "'", "’": "'",
                               "“": '"', "”": '"', "→": "->", "×": "x"})
ASCII_FALLBACK = "effllm.plain"


def ascii_fallback(error: UnicodeError) -> tuple[str, int]:
    """Codec error handler that writes ASCII substitutes for bars and typographic characters, `?` for all others."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    replaced = error.object[error.start : error.end].translate(ASCII_REPLACEMENTS)
    return "".join(character if character.isascii() else "?" for character in replaced), error.end


codecs.register_error(ASCII_FALLBACK, ascii_fallback)


def json_line(value: object, stream: TextIO) -> str:
    """A JSON document on one line; ASCII-escaped if the stream's encoding is not UTF-8, which would replace characters, quotation marks
    among them."""
    ensure_ascii = codecs.lookup(getattr(stream, "encoding", None) or "utf-8").name != "utf-8"
    return json.dumps(value, ensure_ascii=ensure_ascii, allow_nan=False) + "\n"


class OutputFailed(EffllmError):
    """stdout cannot be written."""


class OutputFull(OutputFailed, DiskFull):
    """The disk that stdout is written to is full."""


@dataclass
class Environment:
    """The streams, variables, clock and folders of one command, and the flags that affect them."""

    stdin: TextIO
    stdout: TextIO
    stderr: TextIO
    variables: Mapping[str, str]
    clock: Callable[[], float] = time.monotonic
    debug: bool = False  # set by --debug, read by the error boundary
    has_stdout: bool = True  # False if the caller closed it
    no_color: bool = False  # set by --no-color
    json_pending: bool = False  # --json was given, and no document has been written yet
    router_link: RouterLink | None = None  # the pipes to the router that started this process, None without one

    @classmethod
    def of_process(cls) -> Environment:
        """The environment of this process. A stream that the caller closed is replaced by the null device."""
        null_device = "/dev/null" if os.name == "posix" else "nul"
        streams = [stream if stream is not None else open(null_device, mode,
                                                          encoding="utf-8")  # noqa: SIM115 (lives as long as the process)
                   for stream, mode in ((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w"))]
        for stream in streams[1:]:
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors=ASCII_FALLBACK)  # a Latin-1 terminal loses a character, not the run
        return cls(*streams, variables=os.environ, has_stdout=sys.stdout is not None)

    def write(self, text: str = "") -> None:
        """Write to stdout and flush."""
        try:
            self.stdout.write(text)
            self.stdout.flush()
        except BrokenPipeError as error:
            raise OutputClosed from error
        except OSError as error:
            error_class = OutputFull if lacks_room(error) else OutputFailed
            hint = "free some space, or send the output elsewhere" if error_class is OutputFull else "send the output to a file or a pipe"
            raise error_class(f"the output cannot be written: {error.strerror or error}", hint) from error

    def require_stdout(self) -> None:
        """Check stdout before long work whose result goes nowhere else. Raises OutputFailed if it is closed."""
        if not self.has_stdout:
            raise OutputFailed("standard output is closed: the answer has nowhere to go", "leave it open, or write to a file: > answer.txt")

    def is_terminal(self, stream: TextIO) -> bool:
        return not stream.closed and stream.isatty()

    def is_styled(self, stream: TextIO) -> bool:
        """Whether to write colour: to a terminal that is not `dumb`, or anywhere with FORCE_COLOR; never with NO_COLOR. For cursor movement
        see `can_redraw`."""
        if self.no_color or self.variables.get("NO_COLOR"):
            return False
        forced = self.variables.get("FORCE_COLOR", "0") not in ("", "0")
        return forced or (self.is_terminal(stream) and self.variables.get("TERM") != "dumb")

    def can_redraw(self, stream: TextIO) -> bool:
        """Whether a line may be redrawn in place. NO_COLOR does not turn progress off, and FORCE_COLOR does not turn cursor movement on."""
        return self.is_terminal(stream) and self.variables.get("TERM") != "dumb"

    @cached_property
    def stdout_is_stderr(self) -> bool:
        """Whether stdout and stderr go to the same file or pipe, as with `2>&1`."""
        with contextlib.suppress(OSError, ValueError):  # streams without descriptors, as in tests
            return os.path.sameopenfile(self.stdout.fileno(), self.stderr.fileno())
        return False

    @property
    def is_interactive(self) -> bool:
        """Whether questions can be asked: stdin and stderr are terminals."""
        return self.is_terminal(self.stdin) and self.is_terminal(self.stderr)

    @property
    def width(self) -> int:
        """Columns of the terminal of stdout, else of stderr; COLUMNS overrides both."""
        columns = shutil.get_terminal_size((0, 0)).columns
        for stream in (self.stdout, self.stderr):
            if not columns and self.is_terminal(stream):
                with contextlib.suppress(OSError, ValueError):  # a stream without a descriptor, as in tests
                    columns = os.get_terminal_size(stream.fileno()).columns
        return max(MIN_WIDTH, columns or 80)

    @cached_property
    def settings(self) -> Mapping[str, Setting]:
        """Settings from files, read once. Raises UsageError for an invalid file."""
        from .settings import read_settings

        return read_settings(self.config_folder)

    @property
    def has_model_settings(self) -> bool:
        """Whether settings files have tables for single models."""
        return any(each.models for each in getattr(self.settings, "files", ()))

    def may_have_model_settings(self, words: Iterable[str]) -> bool:
        """Whether one of these arguments may name a model with settings of its own."""
        return self.has_model_settings or any(map(self._may_be_ollama_model, words))

    def select_model(self, model: str) -> None:
        """Use the settings of this model from now on. In order of precedence: those of the model, general ones, the parameters that Ollama
        stores for it. Raises UsageError for an invalid file."""
        if self.has_model_settings:
            self.settings = self.settings.of(model)
        if self._may_be_ollama_model(model):
            from .ollama_parameters import settings_of
            from .screen import Screen

            if (stored := self._find_ollama_model(model)) is not None:
                settings, ignored = settings_of(stored, model)
                self.settings = self.settings.with_defaults(settings)
                for message in ignored:
                    Screen(self).note(message)

    def _may_be_ollama_model(self, word: str) -> bool:
        """Whether a word may name a model in Ollama's library, by itself or as an alias. Does not read that library."""
        return word.lower().startswith("ollama:") or word.lower() in self._library_aliases

    @cached_property
    def _library_aliases(self) -> Mapping[str, str]:
        """The user's aliases of models in other programs' libraries. A file without any is not parsed."""
        from ..runtime.library.aliases import library_aliases

        return library_aliases(self.variables)

    def _find_ollama_model(self, model: str) -> OllamaModel | None:
        from ..runtime.library.external_models import find
        from ..runtime.library.model_name import parse_reference

        try:
            reference = parse_reference(model, self.variables)
            alias = self._library_aliases.get(reference.name.lower())
            reference = reference if alias is None else parse_reference(alias, self.variables)
            return find(reference, self.variables).stored if reference.program else None
        except EffllmError:  # reported when the model is used
            return None

    @property
    def config_folder(self) -> Path:
        """The folder of the user's settings file. Not created here."""
        from platformdirs import user_config_path

        return user_config_path("effllm", appauthor=False)

    @property
    def state_folder(self) -> Path:
        """The folder of history and saved chats. Not created here."""
        from platformdirs import user_state_path

        return user_state_path("effllm", appauthor=False)

    @property
    def sessions_folder(self) -> Path:
        """The folder of saved sessions. Not created here."""
        from ..runtime.library.storage import sessions_folder

        return sessions_folder(self.variables)

    @property
    def models_folder(self) -> Path:
        """The folder of models that this program made. Not created here."""
        from ..runtime.library.storage import models_folder

        return models_folder(self.variables)
