"""Files named in a chat: attachments of a message, paths for saving, and the external editor.

A bad path is a one-line error; no file is read before its size and type are known, and none is overwritten without asking."""

from __future__ import annotations

import os
import shlex
import signal
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from .. import EffllmError, UsageError

if TYPE_CHECKING:
    from ..runtime.images.media import MediaItem

MAX_TEXT_BYTES = 16 << 20  # more than any context holds
EDITOR_HINT = "name one: export EDITOR=nano"


@dataclass(frozen=True)
class Attachment:
    """An attachment of the next message: a text file, or media."""

    name: str
    text: str  # of a text file, empty for media
    tokens: int  # its length
    part: str = "file"  # the command that adds this kind: file, image, video or audio
    media: tuple[MediaItem | str, ...] = ()  # an image, a clip, or the frames of a video, each after its time


def expand_path(text: str) -> Path:
    """The path that was typed, with quotes removed and ~ expanded."""
    name = text.strip()
    if len(name) > 1 and name[0] == name[-1] and name[0] in "\"'":
        name = name[1:-1]
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{name}: no such user", "give the path without ~") from error


def read_text(path: Path) -> str:
    """The text of a regular file. Raises UsageError for one that is missing, binary, empty or too large, and for devices."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{path} is not a file", "give the path of a text file")
        with path.open("rb") as file:
            data = file.read(MAX_TEXT_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path}: {reason}", "give the path of a text file") from error
    if len(data) > MAX_TEXT_BYTES:
        raise UsageError(f"{path} is larger than {MAX_TEXT_BYTES >> 20} MiB", "give a part of it")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text (byte {error.start})", "give a text file (`iconv -t utf-8` converts)") from error
    if "\0" in text:
        raise UsageError(f"{path} is not a text file: it contains null bytes", "give a text file")
    if not text.strip():
        raise UsageError(f"{path} is empty", "give a file with text in it")
    return text


def with_attachments(attachments: list[Attachment], message: str) -> str:
    """One message: each text file under its name, then the typed text."""
    attachments = [attachment for attachment in attachments if not attachment.media]
    fence = "```"
    while any(fence in attachment.text for attachment in attachments):
        fence += "`"
    files = [f"{attachment.name}:\n{fence}\n{attachment.text.rstrip()}\n{fence}" for attachment in attachments]
    return "\n\n".join([*files, message])


def edit_text(text: str, variables: Mapping[str, str], output: TextIO) -> str:
    """Edit a text in $VISUAL or $EDITOR, which draws on `output`. Raises EffllmError if there is no editor, if it fails, or if the text is
    empty."""
    command = variables.get("VISUAL") or variables.get("EDITOR") or ""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"the editor {command!r} cannot be parsed: {error}", EDITOR_HINT) from error
    if not words:
        raise UsageError("no editor is named in VISUAL or EDITOR", EDITOR_HINT)
    with tempfile.TemporaryDirectory(prefix="effllm-") as folder:  # private: a message is nobody else's business
        path = Path(folder) / "message.md"
        path.write_text(text, encoding="utf-8", errors="replace")
        code = run_editor([*words, str(path)], output)
        if code:
            raise EffllmError(f"{words[0]} exited with code {code}: nothing was sent", "/edit begins again")
        try:
            return read_text(path).strip("\n")
        except UsageError as error:  # its message names the temporary file
            problem = error.message.removeprefix(str(path)).strip()
            raise UsageError(f"the message {problem}: nothing was sent", "/edit begins again") from None


def run_editor(command: list[str], output: TextIO) -> int:
    """Run the editor; returns its exit code. Meanwhile Ctrl-C is left to it: the signal is handled rather than ignored, because the editor
    would inherit an ignored signal."""
    previous_handler = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        return subprocess.run(command, stdout=output, check=False).returncode
    except OSError as error:
        raise EffllmError(f"the editor {command[0]} cannot be started: {error.strerror}", EDITOR_HINT) from error
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def complete_path(typed: str) -> list[str]:
    """Completions of a partial path; folders end in a slash."""
    folder, _, prefix = typed.rpartition("/")
    try:
        directory = expand_path(folder + "/") if "/" in typed else Path(".")
        with os.scandir(directory) as entries:
            names = [entry.name + "/" * entry.is_dir() for entry in entries
                     if entry.name.startswith(prefix) and (prefix or not entry.name.startswith("."))]
    except (OSError, ValueError, EffllmError):
        return []
    return sorted(f"{folder}/{name}" if "/" in typed else name for name in names)[:100]
