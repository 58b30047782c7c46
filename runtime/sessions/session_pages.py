"""Page files of saved sessions, and the lock that protects them while a session is written or read.

A file's name contains a hash of its bytes and the file never changes, so once verified it is recognised by its size.
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
        """`lasting`: fsync what is saved; not needed in a folder that lives only as long as the process."""
        self.folder, self.pages, self.lasting = folder, folder / PAGES, lasting
        self._verified: set[str] = set()  # files that this process has written or verified, and not removed

    def store_page(self, key: str, parts: Sequence[bytes | memoryview]) -> PageFile:
        """Write a page file, unless a valid one exists. Call while `writing`. Raises OSError."""
        file = describe(key, parts)
        if not self._is_whole(file):
            write_page_file(self.pages, file, parts, self.lasting)
        self._verified.add(file.name)
        return file

    def has_page(self, key: str) -> bool:
        """Whether a page file with that key exists, judging by names."""
        try:
            return any(name.startswith(key) for name in os.listdir(self.pages / key[:2]))
        except OSError:
            return False

    def _is_whole(self, file: PageFile) -> bool:
        """Whether it exists and is valid. Its bytes are read once; later its size is enough, since other processes remove files but never
        change them."""
        try:
            if file.name in self._verified:
                return (self.pages / file.name).stat().st_size == file.stored_nbytes
            read_page_file(self.pages, file)
        except (DamagedPage, FileNotFoundError):
            return False
        return True

    def read_page(self, file: PageFile) -> memoryview:
        """Raises DamagedPage."""
        data = read_page_file(self.pages, file)
        self._verified.add(file.name)
        return data

    def nbytes(self) -> int:
        """Bytes of all page files."""
        return sum(self._sizes().values())

    def _sizes(self) -> Mapping[str, int]:
        """Bytes of every page file, by name. Skips folders, which are not ours, and files that another process removes meanwhile."""
        sizes = {}
        for path in self.pages.glob("*/*"):
            with suppress(FileNotFoundError):
                status = path.lstat()
                if not stat.S_ISDIR(status.st_mode):
                    sizes[f"{path.parent.name}/{path.name}"] = status.st_size
        return sizes

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A shared lock for restoring a session: its pages are not removed meanwhile."""
        with self._locked(fcntl.LOCK_SH):
            yield

    @contextmanager
    def _locked(self, operation: int) -> Iterator[bool]:
        """False if the file system has no locks, or there is no folder."""
        try:
            descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield False
            return
        try:
            try:
                fcntl.flock(descriptor, operation)
                is_locked = True
            except OSError:
                is_locked = False
            yield is_locked
        finally:
            os.close(descriptor)

    @staticmethod
    def _unlink(path: Path) -> int:
        """The bytes of disk space freed; 0 if the file is already gone."""
        try:
            size = path.lstat().st_size
            path.unlink()
        except FileNotFoundError:
            return 0
        return size
