"""Disk bookkeeping of a download: free space, locks, and error messages."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ... import DiskFull, DoesNotFit, EffllmError, lacks_room
from ...offload.folder_writer import partial_nbytes
from ...offload.size import format_size
from ..events import Notice

POLL_S = 0.2
WINDOW_S = 10.0


@contextmanager
def disk_errors(folder: Path, variable: str, missing: Callable[[], int]) -> Iterator[None]:
    """Context manager that turns a failed write into an error with a next step.

    variable: the environment variable that moves `folder`.
    missing: returns the bytes still to be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EFBIG, errno.EDQUOT):  # the disk has free space, but not for this
            why = "a file that large may not be written" if error.errno == errno.EFBIG else "the quota is used up"
            raise DiskFull(f"{why} in {folder}: {format_size(missing())} are still missing",
                           f"set {variable} to a folder of another disk, or raise the limit (ulimit -f, quota)") from error
        if lacks_room(error):
            nbytes, free = missing(), free_nbytes(folder)
            raise DiskFull(f"the disk of {folder} is full: {format_size(nbytes)} are still missing, {format_size(free)} are free",
                           f"make room for {format_size(max(1, nbytes - free))}, then run the same command again: it resumes where it "
                           "stopped") from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise EffllmError(f"{error.filename or folder} cannot be written: {error.strerror.lower()}",
                              f"set {variable} to a writable folder") from error
        if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP):
            raise EffllmError(f"{error.filename or folder} is in the way: it is not what the hub cache should hold there",
                              "move it away, then run the same command again") from error
        raise EffllmError(f"{error.filename or folder}: {error.strerror or error}", f"check the disk of {folder}") from error


def existing_ancestor(folder: Path) -> Path:
    """The nearest ancestor folder that exists."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def free_nbytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(existing_ancestor(folder)).free
    except OSError:
        return 0


def source_folder(folder: Path) -> Path:
    """The folder of source files that `folder` is being built from."""
    return folder.with_name(f".{folder.name}.source")


def lock_path(folder: Path) -> Path:
    """The lock file of whoever builds `folder`."""
    return folder.with_name(f".{folder.name}.lock")


def remove_leftovers(folder: Path, marker: str) -> None:
    """Remove the source files of a complete `folder` that a killed run left. A folder that is locked or read-only is left alone."""
    if not source_folder(folder).is_dir():
        return
    with suppress(OSError):
        fd = os.open(lock_path(folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (folder / marker).is_file():
                shutil.rmtree(source_folder(folder))
        finally:
            os.close(fd)


def allocated_nbytes(folder: Path) -> int:
    """Disk bytes allocated to the files of a folder, holes excluded."""
    try:
        return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in os.scandir(folder))
    except OSError:
        return 0


def occupied_nbytes(folder: Path) -> int:
    """Disk bytes that a result and its source files occupy so far."""
    return partial_nbytes(folder) + allocated_nbytes(source_folder(folder))


def check_space(needs: list[tuple[Path, int, str]]) -> None:
    """Raises DoesNotFit if a disk has too little free space. `needs`: (folder, bytes, environment variable that moves the folder)."""
    disks: dict[int, tuple[Path, int, str]] = {}
    for folder, nbytes, variable in (need for need in needs if need[1]):
        device = existing_ancestor(folder).stat().st_dev
        first_folder, total, first_variable = disks.get(device, (folder, 0, variable))
        disks[device] = first_folder, total + nbytes, first_variable
    for folder, nbytes, variable in disks.values():
        free = free_nbytes(folder)
        if nbytes > free:
            raise DoesNotFit(f"needs {format_size(nbytes)} of the disk of {folder}, which has {format_size(free)} free",
                             f"make room for {format_size(nbytes - free)}, set {variable} to a larger disk, or ask for fewer --bits")


def acquire_lock(path: Path, message: str) -> Generator[Notice, None, int]:
    """Wait for a lock that other programs use too; returns its descriptor. Yields `message` once if that takes time."""
    has_notified = False
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.fstat(fd).st_ino == os.stat(path).st_ino:
                return fd
            os.close(fd)  # the file was removed and created again in between
            continue
        except BlockingIOError:
            os.close(fd)
        except BaseException:
            os.close(fd)
            raise
        if not has_notified:
            has_notified = True
            yield Notice(message)
        time.sleep(POLL_S)


class Rate:
    """Recent throughput, in units per second."""

    def __init__(self, done: int) -> None:
        self._points = deque([(time.monotonic(), done)])

    def update(self, done: int) -> float:
        now = time.monotonic()
        self._points.append((now, done))
        while len(self._points) > 2 and now - self._points[0][0] > WINDOW_S:
            self._points.popleft()
        first, first_done = self._points[0]
        return (done - first_done) / (now - first) if now > first else 0.0
