"""Atomic file writes, for saved sessions, profiles and aliases: a file appears complete or not at all."""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ... import EffllmError, not_written, typed

LOCK_TIMEOUT_S = 10.0
MAX_NAME_NBYTES = 200  # bytes, of the 255 that a name may have
UNFINISHED = ".{}.*.partial"  # what a process that was killed leaves of `atomic_file`


@contextmanager
def atomic_file(path: Path, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Context manager yielding a file that takes the name `path` when the block ends, replacing what was there; on an error the old file
    stays and nothing else is left behind. The data goes to a new hidden file, because a folder may be shared and an existing entry may
    be a symlink to one of the user's own files. Leftovers of killed processes are removed first. Raises OSError, also for a device,
    which no file could replace."""
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "it is no file", str(path))
    short_name = os.fsdecode(os.fsencode(path.name)[:MAX_NAME_NBYTES])
    for leftover in path.parent.glob(UNFINISHED.format(glob.escape(short_name))):
        if leftover.name[len(short_name) + 2 :].partition(".")[0].isdigit():
            _remove_unlocked(leftover)
    partial = path.with_name(f".{short_name}.{os.getpid()}.partial")
    descriptor = _create_locked(partial, mode)
    lock = os.dup(descriptor)  # until it has its name
    try:
        with open(descriptor, "wb") as file:
            yield file
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(lock)


def _create_locked(partial: Path, mode: int) -> int:
    """Create and lock a temporary file, so that no other process mistakes it for a leftover."""
    while True:
        partial.unlink(missing_ok=True)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
        with suppress(OSError):  # without locks others leave it alone
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # it was taken for one before it was locked


def _remove_unlocked(leftover: Path) -> None:
    """Remove a temporary file of ours that no living process is writing."""
    try:
        descriptor = os.open(leftover, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return  # another user's, or no file
    try:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            leftover.unlink()
    except OSError:  # it is held, or that cannot be told
        return
    finally:
        os.close(descriptor)


class _TrialDone(Exception):
    """The trial file could be created; it is removed again."""


def check_writable(path: Path) -> None:
    """Raise the OSError that `atomic_file` would raise: called before long work whose result the file will hold."""
    with suppress(_TrialDone), atomic_file(path):
        raise _TrialDone


@contextmanager
def file_lock(lock: Path, mode: int = 0o666) -> Iterator[None]:
    """Context manager serializing read-modify-write of a file across processes. Does not block on file systems without locks, nor for
    longer than LOCK_TIMEOUT_S for a process that is suspended. Raises OSError where `lock` cannot be created."""
    descriptor = os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with suppress(OSError):
            deadline = time.monotonic() + LOCK_TIMEOUT_S
            while not _try_lock(descriptor) and time.monotonic() < deadline:
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Try to take the lock without blocking; True when it was acquired. Raises OSError where locks are not supported."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_text_atomic(path: Path, text: str, hint: str) -> None:
    """Atomically write `text` as UTF-8; the previous content stays until then.

    Raises EffllmError with `hint` as the next step (no permission, a folder of that name), DiskFull with the space needed or `hint`: in
    a chat nothing is run again. Missing parent folders are not created: most such paths are typos.
    """
    if not os.path.exists(parent := path.parent):
        raise EffllmError(f"cannot write {path}: there is no folder {parent}", f"make it: mkdir -p {typed(parent)}, or {hint}")
    try:
        with atomic_file(path, 0o600) as file:
            file.write(text.encode("utf-8", "replace"))
    except OSError as error:
        raise not_written(error, f"cannot write {path}", hint, f"make room there, or {hint}") from None
