"""The files of pages beside saved sessions (`session_store.py`), and the lock that keeps them while one is written or read.

A file's name holds a hash of its bytes and the file never changes, so once found whole it is known by its size.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ...offload.page_file import DamagedPage, PageFile, describe, read_page_file, write_page_file

PAGES = "pages"


class SessionPages:
    """Pages in a folder of sessions, which need not exist yet."""

    def __init__(self, folder: Path, lasting: bool = True) -> None:
        """`lasting`: what is saved outlives a loss of power; not so in a folder that goes with the process, where nobody waits for the
        disk."""
        self.folder, self.pages, self.lasting = folder, folder / PAGES, lasting
        self._known: set[str] = set()  # files that this process has written, or read and found whole, and did not remove

    def keep_page(self, key: str, parts: Sequence[bytes | memoryview]) -> PageFile:
        """Write a file of pages, unless it is there and whole. Call while `writing`. Raises OSError."""
        file = describe(key, parts)
        if not self._is_whole(file):
            write_page_file(self.pages, file, parts, self.lasting)
        self._known.add(file.name)
        return file

    def has_page(self, key: str) -> bool:
        """Is there a file of pages of that key, as far as names tell?"""
        try:
            return any(name.startswith(key) for name in os.listdir(self.pages / key[:2]))
        except OSError:
            return False

    def _is_whole(self, file: PageFile) -> bool:
        """Is it there? Its bytes are read once; later its size is enough, since others remove files and never change them."""
        try:
            if file.name in self._known:
                return (self.pages / file.name).stat().st_size == file.stored_nbytes
            read_page_file(self.pages, file)
        except (DamagedPage, FileNotFoundError):
            return False
        return True

    def read_page(self, file: PageFile) -> memoryview:
        """Raises DamagedPage."""
        data = read_page_file(self.pages, file)
        self._known.add(file.name)
        return data

    def nbytes(self) -> int:
        """Bytes of all files of pages."""
        return sum(self._sizes().values())

    def _sizes(self) -> Mapping[str, int]:
        """Bytes of every file of pages, by name. One that another process removes meanwhile is none; nor is a folder, which is not ours."""
        found = {}
        for path in self.pages.glob("*/*"):
            with suppress(FileNotFoundError):
                status = path.lstat()
                if not stat.S_ISDIR(status.st_mode):
                    found[f"{path.parent.name}/{path.name}"] = status.st_size
        return found

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around restoring a session: its pages stay meanwhile."""
        with self._locked(fcntl.LOCK_SH):
            yield

    @contextmanager
    def _locked(self, how: int) -> Iterator[bool]:
        """False where this file system has no locks, or there is no folder."""
        try:
            descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield False
            return
        try:
            try:
                fcntl.flock(descriptor, how)
                held = True
            except OSError:
                held = False
            yield held
        finally:
            os.close(descriptor)

    @staticmethod
    def _unlink(path: Path) -> int:
        """The bytes that the disk gets back; 0 for a file that is gone already."""
        try:
            size = path.lstat().st_size
            path.unlink()
        except FileNotFoundError:
            return 0
        return size
