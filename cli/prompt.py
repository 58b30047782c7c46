"""Where the prompt of a one-shot answer comes from: the argument, `-f`, and standard input.

Piped text comes before the argument, as in `cat letter.txt | effllm run fable "Answer this letter."`. If there is an argument too, and
nothing arrives on the pipe, a note says that the program waits for it. With `-f` standard input is not read, since it may be the input of a
script's loop; a note says so if there is any.
"""

from __future__ import annotations

import os
import select
import stat
from pathlib import Path
from typing import TextIO

from .. import UsageError
from .environment import Environment
from .screen import Screen

WAIT_S = 1.0
MAX_TEXT_BYTES = 256 << 20  # also ends reading from devices
SEPARATOR = "\n\n"


def read_prompt(argument: str | None, file: str | None, screen: Screen, has_media: bool = False) -> str | None:
    """The whole prompt; None if there is none and stdin is a terminal. With `has_media` it may be empty: transcription needs no text."""
    environment = screen.environment
    parts = []
    if file == "-" or (file is None and argument is None):
        if environment.is_terminal(environment.stdin) and file is None:
            return None
        parts.append(read_stream(environment.stdin))
    elif file is not None:
        if has_pending_input(environment.stdin):
            screen.note("standard input is not read beside -f FILE; -f - reads it")
        parts.append(read_file(Path(file)))
    elif is_piped(environment.stdin):
        parts.append(read_with_notice(environment, screen))
    if argument is not None:
        parts.append(check_encoding(argument, "the prompt"))
    text = SEPARATOR.join(part for part in (without_last_newline(part) for part in parts) if part)
    if not text.strip() and not has_media:
        raise UsageError("the prompt is empty", 'effllm run MODEL "your prompt"')
    return text


def is_piped(stream: TextIO) -> bool:
    """Whether a stream may contain text: a pipe, a socket or a file, not a terminal, /dev/null or a closed stream."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISREG(mode)


def has_pending_input(stream: TextIO) -> bool:
    """Whether a pipe has data already; none is consumed."""
    import fcntl
    import termios

    try:
        return stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode) and fcntl.ioctl(stream.fileno(), termios.FIONREAD, bytes(4)) != bytes(4)
    except (OSError, ValueError):
        return False


def read_with_notice(environment: Environment, screen: Screen) -> str:
    if not select.select([environment.stdin], [], [], WAIT_S)[0]:
        screen.note("waiting for more of the prompt on standard input (add `< /dev/null` to leave it out)")
    return read_stream(environment.stdin)


def read_stream(stream: TextIO) -> str:
    try:
        binary = getattr(stream, "buffer", None)  # None for text streams of tests
        return decode_text(binary.read(MAX_TEXT_BYTES + 1), "standard input") if binary is not None else stream.read()
    except OSError as error:
        raise UsageError(f"standard input cannot be read: {error.strerror}") from error


def read_file(path: Path, flag: str = "-f") -> str:
    try:
        with path.open("rb") as file:  # a pipe too
            return decode_text(file.read(MAX_TEXT_BYTES + 1), str(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", f"{flag} takes the path of a text file, or - for standard input") from error


# (first bytes of a media file, the flag for it)
MEDIA_SIGNATURES = ((b"\x89PNG", "--image"), (b"\xff\xd8\xff", "--image"), (b"GIF8", "--image"), (b"ID3", "--audio"), (b"fLaC", "--audio"),
         (b"OggS", "--audio"))


def decode_text(data: bytes, source: str) -> str:
    if len(data) > MAX_TEXT_BYTES:
        raise UsageError(f"{source} is larger than {MAX_TEXT_BYTES >> 20} MiB", "give a part of it")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        flag = next((flag for start, flag in MEDIA_SIGNATURES if data.startswith(start)), None)
        raise UsageError(f"{source} is not UTF-8 text (byte {error.start})", f"send it with {flag} FILE, beside the prompt" if flag else
                         "convert it, for example with `iconv -t utf-8`") from error


def check_encoding(text: str, description: str, alternative: str = "give it in a file with -f") -> str:
    """Return an argument unchanged. Raises UsageError for bytes that were not UTF-8, which Python passes as lone surrogates."""
    if any("\udc80" <= character <= "\udcff" for character in text):
        raise UsageError(f"{description} is not UTF-8 text", f"check the terminal's encoding (`locale`), or {alternative}")
    return text


def without_last_newline(text: str) -> str:
    """Without the final newline that editors and `echo` add."""
    return text.removesuffix("\n").removesuffix("\r")
