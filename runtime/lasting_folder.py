"""A private folder that lasts as long as its process: what a server keeps of prompts, unless it is asked to keep it longer."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .whole_file import one_at_a_time

LOCK = ".lock"


@contextmanager
def lasting_folder(parent: Path) -> Iterator[Path]:
    """A new folder in `parent`, which is removed at the end; those that killed processes left there are removed first. Raises OSError where
    none can be made."""
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with one_at_a_time(parent / LOCK, 0o600):
        for left in parent.iterdir():
            if left.is_dir() and not left.is_symlink():
                _remove_left(left)
        folder = Path(tempfile.mkdtemp(dir=parent))
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # without locks others leave it alone
            fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_left(folder: Path) -> None:
    """Remove a folder whose process has ended."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:  # its process was killed while it was made, or removed it
        shutil.rmtree(folder, ignore_errors=True)
        return
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return
    finally:
        os.close(lock)
