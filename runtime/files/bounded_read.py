"""Size-limited reads of small files from untrusted folders: a pipe under a file's name would block, and a device never ends."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

JSON_NBYTES = 32 << 20  # of what describes a tokenizer; the largest published ones have 3 MB
TOKENIZER_NBYTES = 256 << 20  # of a tokenizer; the largest published ones have 35 MB


class IrregularFile(OSError):
    """The path is not a regular file, or exceeds the size limit; `strerror` says which."""


def read_bounded(path: Path, most: int) -> bytes:
    """Content of a regular file of at most `most` bytes. Raises IrregularFile for anything else, OSError where it is absent or
    unreadable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise IrregularFile(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > most:
            raise IrregularFile(errno.EINVAL, f"{status.st_size:,} bytes, at most {most:,} are read of such a file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(most + 1)  # what a system makes up states no size, and may have nothing to give yet
        if data is None or len(data) > most:
            what = "nothing to be read yet" if data is None else f"more than the {most:,} bytes that are read of such a file"
            raise IrregularFile(errno.EINVAL, what, str(path))
        return data
    finally:
        os.close(descriptor)


def read_text(path: Path, most: int) -> str:
    """`read_bounded` decoded as UTF-8 with newlines normalized. Raises UnicodeDecodeError too."""
    return read_bounded(path, most).decode().replace("\r\n", "\n").replace("\r", "\n")
