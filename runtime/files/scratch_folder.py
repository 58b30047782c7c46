"""Private scratch folders that live as long as the process: weights quantized for one run, prompts cached by a server.

The folder is locked by the process that created it and removed at exit; leftovers of killed processes are removed by the next process
that creates one.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LOCK = "lock"


@contextmanager
def scratch_folder(parent: Path, prefix: str = "") -> Iterator[Path]:
    """Create a folder in `parent` that is removed at exit, after removing leftovers with this prefix from killed processes. Raises
    OSError where none can be created."""
    for left in parent.glob(f"{prefix}*"):
        _remove_unlocked(left)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with suppress(OSError):  # without locks others leave it alone
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_unlocked(folder: Path) -> None:
    """Remove a scratch folder of ours that no living process holds."""
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return  # another user's, or another process is making or removing it at this moment
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:  # it is held, or that cannot be told
        return
    finally:
        os.close(lock)
