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

LARGEST_TEXT = 16 << 20  # bytes: more than any context holds
NO_EDITOR = "name one: export EDITOR=nano"


@dataclass(frozen=True)
class Attachment:
    """An attachment of the next message: the `text` of a file, or media (`shown`): an image, audio, or the frames of a video, each after
    its time. `tokens`: its length; `part`: the command that adds this kind."""

    name: str
    text: str
    tokens: int
    part: str = "file"
    shown: tuple[MediaItem | str, ...] = ()


def named_path(text: str) -> Path:
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
            data = file.read(LARGEST_TEXT + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path}: {reason}", "give the path of a text file") from error
    if len(data) > LARGEST_TEXT:
        raise UsageError(f"{path} is larger than {LARGEST_TEXT >> 20} MiB", "give a part of it")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text (byte {error.start})", "give a text file (`iconv -t utf-8` converts)") from error
    if "\0" in text:
        raise UsageError(f"{path} is not a text file: it contains null bytes", "give a text file")
    if not text.strip():
        raise UsageError(f"{path} is empty", "give a file with text in it")
    return text


def with_attachments(attached: list[Attachment], message: str) -> str:
    """One message: each text file under its name, then what was typed."""
    attached = [each for each in attached if not each.shown]
    fence = "```"
    while any(fence in each.text for each in attached):
        fence += "`"
    files = [f"{each.name}:\n{fence}\n{each.text.rstrip()}\n{fence}" for each in attached]
    return "\n\n".join([*files, message])


def written_in_editor(text: str, variables: Mapping[str, str], shown_on: TextIO) -> str:
    """`text` as edited in $VISUAL or $EDITOR, which draws on `shown_on`. Raises EffllmError if there is no editor, if it fails, or if the
    text is empty."""
    command = variables.get("VISUAL") or variables.get("EDITOR") or ""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"the editor {command!r} cannot be parsed: {error}", NO_EDITOR) from error
    if not words:
        raise UsageError("no editor is named in VISUAL or EDITOR", NO_EDITOR)
    with tempfile.TemporaryDirectory(prefix="effllm-") as folder:  # private: a message is nobody else's business
        path = Path(folder) / "message.md"
        path.write_text(text, encoding="utf-8", errors="replace")
        code = run_editor([*words, str(path)], shown_on)
        if code:
            raise EffllmError(f"{words[0]} exited with code {code}: nothing was sent", "/edit begins again")
        try:
            return read_text(path).strip("\n")
        except UsageError as error:  # it names a file that is gone by then
            what = error.message.removeprefix(str(path)).strip()
            raise UsageError(f"the message {what}: nothing was sent", "/edit begins again") from None


def run_editor(command: list[str], shown_on: TextIO) -> int:
    """Ctrl-C belongs to the editor while it runs. It is handled rather than ignored, because the editor would inherit an ignored signal."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        return subprocess.run(command, stdout=shown_on, check=False).returncode
    except OSError as error:
        raise EffllmError(f"the editor {command[0]} cannot be started: {error.strerror}", NO_EDITOR) from error
    finally:
        signal.signal(signal.SIGINT, before)


def completed_paths(typed: str) -> list[str]:
    """Completions of a partial path; folders end in a slash."""
    folder, _, begun = typed.rpartition("/")
    try:
        where = named_path(folder + "/") if "/" in typed else Path(".")
        with os.scandir(where) as entries:
            found = [entry.name + "/" * entry.is_dir() for entry in entries
                     if entry.name.startswith(begun) and (begun or not entry.name.startswith("."))]
    except (OSError, ValueError, EffllmError):
        return []
    return sorted(f"{folder}/{name}" if "/" in typed else name for name in found)[:100]
