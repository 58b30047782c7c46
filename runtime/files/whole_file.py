"""Files that appear whole or not at all: a conversation that is saved, a profile, a list of aliases."""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ... import EffllmError, not_written, typed

PATIENCE_S = 10.0
UNFINISHED = ".{}.*.partial"  # what a process that was killed leaves of `whole`


@contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file that has the name `path` when the block ends, whatever had it before; an error leaves that, and nothing else. It is made anew
    under a hidden name: a folder may come from anybody, and what lies there may be a link to a file of this person's. Raises OSError."""
    part = path.with_name(f".{path.name[:200]}.{os.getpid()}.partial")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "wb") as file:
            yield file
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


class _Tried(Exception):
    """A file could be made; it is taken away again."""


def try_whole(path: Path) -> None:
    """Nothing, or the OSError that `whole` would raise: for what is asked before the work whose result the file will hold."""
    with suppress(_Tried), whole(path):
        raise _Tried


@contextmanager
def one_at_a_time(lock: Path, mode: int = 0o666) -> Iterator[None]:
    """Around looking at a file and changing it by that: no other process does so meanwhile. Nobody waits where a file system has no locks,
    nor for longer than PATIENCE_S for a process that was stopped meanwhile. Raises OSError where `lock` cannot be made."""
    descriptor = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with suppress(OSError):
            until = time.monotonic() + PATIENCE_S
            while not _is_held(descriptor) and time.monotonic() < until:
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def _is_held(descriptor: int) -> bool:
    """Is the lock this process's now? Raises OSError where there are none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_whole(path: Path, text: str, hint: str) -> None:
    """Write `text` as UTF-8 under its name in one step. What was there before stays until then.

    Raises EffllmError with `hint` as the next step (no permission, a folder of that name), DiskFull with room or `hint` as that: in a chat
    nothing is run again. A folder that is missing is not made: most such paths are mistyped.
    """
    part: Path | None = None
    if not os.path.exists(above := path.parent):
        raise EffllmError(f"cannot write {path}: there is no folder {above}", f"make it: mkdir -p {typed(above)}, or {hint}")
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:80]}.", dir=path.parent)
        part = Path(name)
        with open(descriptor, "wb") as file:
            file.write(text.encode("utf-8", "replace"))
        os.replace(part, path)
    except OSError as error:
        raise not_written(error, f"cannot write {path}", hint, f"make room there, or {hint}") from None
    finally:
        if part is not None:
            part.unlink(missing_ok=True)
