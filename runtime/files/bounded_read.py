"""Size-limited reads of small files from untrusted folders: a pipe under a file's name would block, and a device never ends."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MAX_JSON_NBYTES = 32 << 20  # of what describes a tokenizer; the largest published ones have 3 MB
MAX_TOKENIZER_NBYTES = 256 << 20  # of a tokenizer; the largest published ones have 35 MB


class IrregularFile(OSError):
    """The path is not a regular file, or exceeds the size limit; `strerror` says which."""


def read_bounded(path: Path, max_nbytes: int) -> bytes:
    """Content of a regular file of at most `most` bytes. Raises IrregularFile for anything else, OSError where it is absent or
    unreadable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise IrregularFile(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > max_nbytes:
            raise IrregularFile(errno.EINVAL, f"{status.st_size:,} bytes, at most {max_nbytes:,} are read of such a file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(max_nbytes + 1)  # what a system makes up states no size, and may have nothing to give yet
        if data is None or len(data) > max_nbytes:
            reason = "nothing to be read yet" if data is None else f"more than the {max_nbytes:,} bytes that are read of such a file"
            raise IrregularFile(errno.EINVAL, reason, str(path))
        return data
    finally:
        os.close(descriptor)


def read_text(path: Path, max_nbytes: int) -> str:
    """`read_bounded` decoded as UTF-8 with newlines normalized. Raises UnicodeDecodeError too."""
    return read_bounded(path, max_nbytes).decode().replace("\r\n", "\n").replace("\r", "\n")
