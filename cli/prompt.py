"""Where the prompt of a one-shot answer comes from: the argument, `-f`, and standard input.

Piped text comes before the argument, so that `cat letter.txt | effllm run fable "Answer this letter."` reads as it is
meant. With an argument at hand, input that nobody writes to must not look like a hang: it is waited for, and said. With `-f` it is not
read at all, since a loop of a script may live on it; that text lies there is said.
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
LARGEST = 256 << 20  # bytes of a text; what has no end ends here
PARTS = "\n\n"


def read_prompt(argument: str | None, file: str | None, screen: Screen, shown: bool = False) -> str | None:
    """The whole prompt; None if there is none and stdin is a terminal. It may be empty with media (`shown`): a transcription model needs no
    text."""
    environment = screen.environment
    parts = []
    if file == "-" or (file is None and argument is None):
        if environment.is_terminal(environment.stdin) and file is None:
            return None
        parts.append(read_stream(environment.stdin))
    elif file is not None:
        if has_text(environment.stdin):
            screen.note("standard input is not read beside -f FILE; -f - reads it")
        parts.append(read_file(Path(file)))
    elif is_piped(environment.stdin):
        parts.append(read_with_notice(environment, screen))
    if argument is not None:
        parts.append(typed_text(argument, "the prompt"))
    text = PARTS.join(part for part in (without_last_newline(part) for part in parts) if part)
    if not text.strip() and not shown:
        raise UsageError("the prompt is empty", 'effllm run MODEL "your prompt"')
    return text


def is_piped(stream: TextIO) -> bool:
    """Whether text may come from there: a pipe, a socket or a file, not a terminal, /dev/null or a closed stream."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISREG(mode)


def has_text(stream: TextIO) -> bool:
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
        binary = getattr(stream, "buffer", None)  # a stream of a test may hold text alone
        return decoded(binary.read(LARGEST + 1), "standard input") if binary is not None else stream.read()
    except OSError as error:
        raise UsageError(f"standard input cannot be read: {error.strerror}") from error


def read_file(path: Path, flag: str = "-f") -> str:
    try:
        with path.open("rb") as file:  # a pipe too
            return decoded(file.read(LARGEST + 1), str(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", f"{flag} takes the path of a text file, or - for standard input") from error


# How files begin that are no text -> the flag that they go with.
MEDIA = ((b"\x89PNG", "--image"), (b"\xff\xd8\xff", "--image"), (b"GIF8", "--image"), (b"ID3", "--audio"), (b"fLaC", "--audio"),
         (b"OggS", "--audio"))


def decoded(data: bytes, source: str) -> str:
    if len(data) > LARGEST:
        raise UsageError(f"{source} is larger than {LARGEST >> 20} MiB", "give a part of it")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        flag = next((flag for start, flag in MEDIA if data.startswith(start)), None)
        raise UsageError(f"{source} is not UTF-8 text (byte {error.start})", f"send it with {flag} FILE, beside the prompt" if flag else
                         "convert it, for example with `iconv -t utf-8`") from error


def typed_text(text: str, what: str, instead: str = "give it in a file with -f") -> str:
    """The argument. Raises UsageError for bytes that are not UTF-8, or were not decoded as such, which Python passes as lone surrogates."""
    if any("\udc80" <= letter <= "\udcff" for letter in text):
        raise UsageError(f"{what} is not UTF-8 text", f"check the terminal's encoding (`locale`), or {instead}")
    return text


def without_last_newline(text: str) -> str:
    """Without the final newline that editors and `echo` add."""
    return text.removesuffix("\n").removesuffix("\r")
