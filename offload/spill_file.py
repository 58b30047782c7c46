"""A private temporary file for KV pages that do not fit in memory.

It is nameless where the system supports that (O_TMPFILE), else unlinked as soon as it is open, so a killed process leaves nothing behind.
Where a file system does neither, the name stays and the file is locked, and the next run that opens one in the same folder removes those
without a lock. Its mode is 0600.

Writes are buffered and written back by a thread, so that a hanging disk can be abandoned; it also syncs them and drops their page cache,
since they are read with O_DIRECT (`direct_io.py`). An error is reported to the next caller who waits.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from .. import DiskFull, EffllmError, lacks_room, not_written
from .direct_io import POLL_S, Interrupted
from .size import format_size

PREFIX = "effllm-kv-"
NAMED = re.compile(PREFIX + r"[a-z0-9_]{8}")  # tempfile's pattern
QUIET_S, MOST_BEHIND = 0.02, 32 << 20  # write-back starts after this long without a write, or at this many dirty bytes
HINT = "--spill-dir DIR for another disk, a smaller -c, or fewer bits (--kv 4bit)"
ROOM = f"make room there, or {HINT}"


class SpillFile:
    """`path` is its name in errors and reads; `descriptor` is open for both until `close`."""

    def __init__(self, folder: Path, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Raises EffllmError if the folder cannot take a file."""
        self._folder, self._cancelled = folder, cancelled
        try:
            folder.mkdir(parents=True, exist_ok=True)
            sweep(folder)
            self.descriptor, self._name = _opened(folder)
        except OSError as error:
            raise not_written(error, f"no file for the KV cache in {folder}", HINT, ROOM) from error
        self.path = Path("the KV cache's file")
        self._taken: dict[int, int] = {}  # bytes written by first offset: rewriting a page takes no more space
        self._work = threading.Condition()
        self._queue: deque[list[tuple[int, np.ndarray]]] = deque()
        self._left, self._error, self._closed = 0, None, False
        self._thread = threading.Thread(target=self._serve, name="effllm-spill", daemon=True)
        self._thread.start()

    def write(self, pieces: Sequence[tuple[int, np.ndarray]]) -> None:
        """Write memory at offsets and wait until the system has it; the memory may change afterwards.

        Raises DiskFull or another EffllmError if that failed, or if an earlier write did not reach the disk; Interrupted if
        `cancelled()`."""
        with self._work:
            self._queue.append(list(pieces))
            self._left += 1
            self._work.notify_all()
            while self._left:
                if self._cancelled():
                    raise Interrupted
                self._work.wait(POLL_S)
            error, self._error = self._error, None
        if error is not None:
            raise self._told(error) from error

    @property
    def nbytes(self) -> int:
        """Bytes of disk space that the file takes."""
        return sum(self._taken.values())

    def close(self) -> None:
        with self._work:
            self._closed = True
            self._queue.clear()
            self._work.notify_all()
        self._thread.join(0.5)
        if not self._thread.is_alive():  # one that hangs in a write is abandoned until process exit
            if self._name is not None:
                self._name.unlink(missing_ok=True)
            os.close(self.descriptor)

    def _told(self, error: OSError) -> EffllmError:
        if lacks_room(error):
            full = "the file system does not allow a file of that size" if error.errno == errno.EFBIG else "the disk is full"
            return DiskFull(f"{full}: {format_size(self.nbytes)} of the KV cache are in {self._folder}, and the next page does not "
                            "fit", ROOM)
        return EffllmError(f"the KV cache cannot be written to {self._folder}: {error.strerror}", HINT)

    def _serve(self) -> None:
        behind: list[tuple[int, int]] = []  # dirty or cached (offset, bytes)
        while True:
            with self._work:
                if not self._queue and not self._closed:
                    self._work.wait(QUIET_S if behind else None)
                if self._closed:
                    return
                pieces = self._queue.popleft() if self._queue else None
            error = None
            try:
                for offset, memory in pieces or ():
                    _write_whole(self.descriptor, memory, offset)
                    behind.append((offset, len(memory)))
                if pieces is None or sum(nbytes for _, nbytes in behind) > MOST_BEHIND:
                    sent, behind = behind, []
                    _to_the_disk(self.descriptor, sent)
            except OSError as failed:
                error = failed
            with self._work:
                self._error = self._error or error
                if pieces is not None:
                    self._left -= 1
                    if error is None:
                        self._taken[pieces[0][0]] = sum(len(memory) for _, memory in pieces)
                self._work.notify_all()


def sweep(folder: Path) -> None:
    """Remove files of killed runs that could not be nameless. The folder may be the user's own: only names that `_opened` makes are
    touched."""
    for path in folder.glob(f"{PREFIX}*"):
        if not NAMED.fullmatch(path.name):
            continue
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or already removed
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:
            continue  # its run is alive
        finally:
            os.close(descriptor)


def _opened(folder: Path) -> tuple[int, Path | None]:
    """A descriptor, and the name if it could not be unlinked."""
    if flag := getattr(os, "O_TMPFILE", 0):
        try:
            return os.open(folder, os.O_RDWR | os.O_CLOEXEC | flag, 0o600), None
        except OSError as error:
            # Errors of file systems without O_TMPFILE, and of systems that take the flag for O_DIRECTORY.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                raise
    descriptor, name = tempfile.mkstemp(prefix=PREFIX, dir=folder)
    try:
        os.unlink(name)
    except OSError:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor, Path(name)
    return descriptor, None


def _write_whole(descriptor: int, memory: np.ndarray, offset: int) -> None:
    view = memoryview(memory)
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def _to_the_disk(descriptor: int, places: Sequence[tuple[int, int]]) -> None:
    """Sync (offset, bytes) ranges and drop them from the page cache."""
    (os.fdatasync if sys.platform == "linux" else os.fsync)(descriptor)
    if sys.platform == "linux":
        for offset, nbytes in places:
            os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)
