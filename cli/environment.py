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


NARROWEST = 20  # columns: what is laid out for fewer is no easier to read


class OutputClosed(Exception):
    """The reader of stdout is gone. Not an OSError, which the command-line library would report as its own failure."""


# What a terminal's encoding may lack -> what stands for it.
PLAIN_LETTERS = str.maketrans({"█": "#", "▓": "=", "▒": "-", "·": ".", "±": "+-", "…": "...", "–": "-", "—": "--", "‘": "'", "’": "'",
                               "“": '"', "”": '"', "→": "->", "×": "x"})
PLAIN = "effllm.plain"


def ascii_fallback(error: UnicodeError) -> tuple[str, int]:
    """An error handler for streams: bar characters are replaced by ASCII ones instead of question marks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    plain = error.object[error.start : error.end].translate(PLAIN_LETTERS)
    return "".join(letter if letter.isascii() else "?" for letter in plain), error.end


codecs.register_error(PLAIN, ascii_fallback)


def json_line(value: object, stream: TextIO) -> str:
    """A JSON document on one line; ASCII-escaped if the stream's encoding is not UTF-8, which would replace characters, quotation marks
    among them."""
    plain = codecs.lookup(getattr(stream, "encoding", None) or "utf-8").name != "utf-8"
    return json.dumps(value, ensure_ascii=plain, allow_nan=False) + "\n"


class OutputFailed(EffllmError):
    """stdout cannot be written."""


class OutputFull(OutputFailed, DiskFull):
    """The disk that stdout is written to is full."""


@dataclass
class Environment:
    """The streams, variables, clock and folders of one command, and what its flags say about them."""

    stdin: TextIO
    stdout: TextIO
    stderr: TextIO
    variables: Mapping[str, str]
    clock: Callable[[], float] = time.monotonic
    debug: bool = False  # set by --debug, read by the error boundary
    has_stdout: bool = True  # the caller did not close it
    no_color: bool = False  # set by --no-color
    owes_json: bool = False  # --json was asked for, and no document has been written
    router_link: RouterLink | None = None  # the pipes to the router that started this process, if one did

    @classmethod
    def of_process(cls) -> Environment:
        """That of this process. A stream that the caller closed is replaced by an empty one."""
        void = "/dev/null" if os.name == "posix" else "nul"
        streams = [stream if stream is not None else open(void, mode, encoding="utf-8")  # noqa: SIM115 (lives as long as the process)
                   for stream, mode in ((sys.stdin, "r"), (sys.stdout, "w"), (sys.stderr, "w"))]
        for stream in streams[1:]:
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors=PLAIN)  # a Latin-1 terminal loses a character, not the run
        return cls(*streams, variables=os.environ, has_stdout=sys.stdout is not None)

    def write(self, text: str = "") -> None:
        """Write to stdout and flush."""
        try:
            self.stdout.write(text)
            self.stdout.flush()
        except BrokenPipeError as error:
            raise OutputClosed from error
        except OSError as error:
            kind = OutputFull if lacks_room(error) else OutputFailed
            hint = "free some space, or send the output elsewhere" if kind is OutputFull else "send the output to a file or a pipe"
            raise kind(f"the output cannot be written: {error.strerror or error}", hint) from error

    def demand_stdout(self) -> None:
        """Check stdout before work whose result only goes there."""
        if not self.has_stdout:
            raise OutputFailed("standard output is closed: the answer has nowhere to go", "leave it open, or write to a file: > answer.txt")

    def is_terminal(self, stream: TextIO) -> bool:
        return not stream.closed and stream.isatty()

    def is_styled(self, stream: TextIO) -> bool:
        """Whether to write colour: to a terminal that is not `dumb`, or anywhere with FORCE_COLOR; never with NO_COLOR. Cursor movement is
        `can_redraw`."""
        if self.no_color or self.variables.get("NO_COLOR"):
            return False
        forced = self.variables.get("FORCE_COLOR", "0") not in ("", "0")
        return forced or (self.is_terminal(stream) and self.variables.get("TERM") != "dumb")

    def can_redraw(self, stream: TextIO) -> bool:
        """Whether a line may be redrawn in place. NO_COLOR does not turn progress off, and FORCE_COLOR does not turn cursor movement on."""
        return self.is_terminal(stream) and self.variables.get("TERM") != "dumb"

    @cached_property
    def streams_are_one(self) -> bool:
        """Whether stdout and stderr go to the same file or pipe, as with `2>&1`."""
        with contextlib.suppress(OSError, ValueError):  # such as streams of a test, which have no descriptors
            return os.path.sameopenfile(self.stdout.fileno(), self.stderr.fileno())
        return False

    @property
    def can_ask(self) -> bool:
        """Whether there is a terminal to ask a question and read the answer."""
        return self.is_terminal(self.stdin) and self.is_terminal(self.stderr)

    @property
    def width(self) -> int:
        """Columns of the terminal of stdout, else of stderr; COLUMNS overrides both."""
        columns = shutil.get_terminal_size((0, 0)).columns
        for stream in (self.stdout, self.stderr):
            if not columns and self.is_terminal(stream):
                with contextlib.suppress(OSError, ValueError):  # such as a stream of a test, which has no descriptor
                    columns = os.get_terminal_size(stream.fileno()).columns
        return max(NARROWEST, columns or 80)

    @cached_property
    def settings(self) -> Mapping[str, Setting]:
        """Settings from files, read once. Raises UsageError for an invalid file."""
        from .settings import read_settings

        return read_settings(self.config_folder)

    @property
    def names_models(self) -> bool:
        """Whether settings files have tables of single models; not where none are read, as in a trial."""
        return any(each.models for each in getattr(self.settings, "files", ()))

    def may_tell_of(self, words: Iterable[str]) -> bool:
        """Whether settings could exist for a single model named in these arguments."""
        return self.names_models or any(map(self._is_kept_elsewhere, words))

    def ask_for(self, model: str) -> None:
        """From now on settings of this model take precedence over general ones, with the parameters that another program stores for it
        below both. Raises UsageError for an invalid file."""
        if self.names_models:
            self.settings = self.settings.of(model)
        if self._is_kept_elsewhere(model):
            from .ollama_parameters import settings_of
            from .screen import Screen

            if (stored := self._stored_elsewhere(model)) is not None:
                told, left = settings_of(stored, model)
                self.settings = self.settings.above(told)
                for each in left:
                    Screen(self).note(each)

    def _is_kept_elsewhere(self, word: str) -> bool:
        """Whether a word may name a model in Ollama's library, by itself or as an alias. Does not read that library."""
        return word.lower().startswith("ollama:") or word.lower() in self._library_aliases

    @cached_property
    def _library_aliases(self) -> Mapping[str, str]:
        """The user's aliases of other programs' models. A file without such is not parsed."""
        from ..runtime.library.aliases import library_aliases

        return library_aliases(self.variables)

    def _stored_elsewhere(self, model: str) -> OllamaModel | None:
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
